"""What Keras keeps a copy of for each thread. Checked on Keras 3.15.1.

Keras is not imported here: where nobody has, there is nothing to take over or to forget.
"""

from __future__ import annotations

import copy
import sys
from typing import Any

MODULE = "keras.src.backend.common.global_state"
STATE = "GLOBAL_STATE_TRACKER"  # a threading.local with settings, name counters, scopes, a seed generator
GLOBAL_SEED, GENERATOR = "global_random_seed", "global_seed_generator"  # keys of it
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


class seeded:
    """Inside, Keras' random numbers of this thread begin at a seed; afterwards its state is that of before.

    Args:
        seed: the seed, as `keras.utils.set_random_seed` takes it.
    """

    __slots__ = ("_before", "_seed")

    def __init__(self, seed: int):
        self._seed = seed

    def __enter__(self) -> None:
        # Name counters are in dictionaries, which are copied, too.
        state = _state()
        self._before = {name: copy.copy(each) if isinstance(each, dict) else each for name, each in state.items()}
        state[GLOBAL_SEED] = self._seed
        state.pop(GENERATOR, None)  # made again of the seed

    def __exit__(self, *_: object) -> None:
        _state().clear()
        _state().update(self._before)


def _state() -> dict[str, Any]:
    local = getattr(sys.modules.get(MODULE), STATE, None)
    return {} if local is None else local.__dict__
