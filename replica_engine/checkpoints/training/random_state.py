"""The state of the random numbers of a process, as plain data: Python's, NumPy's, TensorFlow's and the strategy's.

The state of a `tf.random.Generator` and of Keras' seed generators is in variables, which are saved as such. What cannot
be read is the state of stateful random ops of a graph (`tf.random.normal` in a `tf.function`): it is in TensorFlow's
kernels.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np

from replica_engine._tf.graphs import replaced_ops
from replica_engine.backend import backend_of


def captured(strategy: object = None) -> dict[str, Any]:
    """The state of all random numbers now.

    Args:
        strategy: a strategy whose replicas draw from a state of its own, or None.
    """
    own = _of(strategy)
    return {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "tensorflow": replaced_ops.state(),
        "strategy": None if own is None else own.state(),
    }


def restore(state: dict[str, Any], strategy: object = None) -> None:
    """Continues with the random numbers of a state."""
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    replaced_ops.restore(state["tensorflow"])
    own = _of(strategy)
    if own is not None and state["strategy"] is not None:
        own.restore(state["strategy"])


def has_seed() -> bool:
    """Whether TensorFlow draws the same numbers in each process."""
    return replaced_ops.has_seed()


def _of(strategy: object) -> Any:
    """What the replicas of a strategy draw from, if that is not TensorFlow's own state."""
    return getattr(backend_of(strategy), "random_numbers", None)
