"""The state that Keras keeps separately for each thread. Checked on Keras 3.15.1.

This module does not import Keras: in a process without Keras there is no state to inherit or to clear.
"""

from __future__ import annotations

import copy
import sys
from typing import Any

MODULE = "keras.src.backend.common.global_state"
STATE = "GLOBAL_STATE_TRACKER"  # a threading.local with settings, name counters, scopes, a seed generator
SEEDS = "keras.src.random.seed_generator"
GLOBAL_SEED, GENERATOR = "global_random_seed", "global_seed_generator"  # keys in that state
SETTINGS = ("dtype_policy",)  # keys that a user sets once and means for all threads


def settings() -> dict[str, Any]:
    """This thread's settings of Keras."""
    state = _state()
    return {name: state[name] for name in SETTINGS if name in state}


def global_seeds(make: bool = False) -> Any:
    """The seed generator that Keras' random functions draw from on this thread without one of their own.

    None if Keras has not made one yet and `make` does not ask for it.
    """
    if make and _state().get(GENERATOR) is None:
        sys.modules[SEEDS].global_seed_generator()
    return _state().get(GENERATOR)


class entered:
    """Gives this thread the settings of another thread; on leaving, clears all state of Keras on this thread.

    That state includes the default seed generator. It holds variables of a strategy, which would keep the strategy
    alive as long as the thread, and the strategy keeps the thread alive: neither would ever end.
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
    """Inside the block, Keras' random numbers on this thread start from a seed; on leaving, the old state returns.

    Args:
        seed: the seed, as for `keras.utils.set_random_seed`.
    """

    __slots__ = ("_before", "_seed")

    def __init__(self, seed: int):
        self._seed = seed

    def __enter__(self) -> None:
        # Name counters are dictionaries inside the state, and variables that wait for their values a list: both are
        # changed in place, so both are copied. A variable that gets its value inside the block waits no more after it.
        state = _state()
        self._before = {
            name: copy.copy(each) if isinstance(each, (dict, list)) else each for name, each in state.items()
        }
        state[GLOBAL_SEED] = self._seed
        state.pop(GENERATOR, None)  # Keras makes a new one from the seed

    def __exit__(self, *_: object) -> None:
        _state().clear()
        _state().update(self._before)


def _state() -> dict[str, Any]:
    local = getattr(sys.modules.get(MODULE), STATE, None)
    return {} if local is None else local.__dict__
