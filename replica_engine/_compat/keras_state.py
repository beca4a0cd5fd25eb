"""What Keras keeps a copy of for each thread. Checked on Keras 3.15.1.

Keras is not imported here: where nobody has, there is nothing to take over or to forget.
"""

from __future__ import annotations

import sys
from typing import Any

MODULE = "keras.src.backend.common.global_state"
STATE = "GLOBAL_STATE_TRACKER"  # a threading.local with settings, name counters, scopes, a seed generator
SETTINGS = ("dtype_policy",)  # what of it a user sets once and means everywhere


def settings() -> dict[str, Any]:
    """This thread's settings of Keras."""
    state = _state()
    return {name: state[name] for name in SETTINGS if name in state}


class entered:
    """Gives this thread the settings of another, and afterwards forgets all that Keras gathered on it.

    Among that is the default seed generator. It holds variables of a strategy, which would keep the strategy
    alive for as long as the thread, and so both for ever.
    """

    __slots__ = ("_settings",)

    def __init__(self, settings: dict[str, Any]):
        self._settings = settings

    def __enter__(self) -> None:
        if self._settings:
            _state().update(self._settings)

    def __exit__(self, *_: object) -> None:
        _state().clear()


def _state() -> dict[str, Any]:
    local = getattr(sys.modules.get(MODULE), STATE, None)
    return {} if local is None else local.__dict__
