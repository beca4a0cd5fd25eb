"""What a program makes and calls before its first strategy, and what that does under the strategy.

This library replaces functions of TensorFlow and Keras when a strategy needs it. By then a program may have names of
its own for them, functions that were traced with them, and objects that hold on to either.

A case makes something, calls it, and returns what uses it under a strategy, which fails where the result is not right.
Nothing here imports `replica_engine` before that.
"""

import importlib
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
import tensorflow as tf

MIRRORED, TPU, REPLICATE = "MirroredStrategy", "TPUStrategy", "replicate_model"
"""What makes a strategy. `replicate_model` makes its own: its cases get None."""
BOTH = (MIRRORED, TPU)
EACH = (MIRRORED, TPU, REPLICATE)

Use = Callable[[Any], None]
"""Takes the strategy."""


class Case(NamedTuple):
    """Something that is made before.

    Attributes:
        make: makes it, calls it once, and returns what uses it.
        on: the strategies under which it is used.
    """

    make: Callable[[], Use]
    on: tuple[str, ...]


CASES: dict[str, Case] = {}
"""By name; the modules of this package fill it."""
_MODULES = ("unscoped", "control_flow", "functions", "state", "inputs", "files", "models", "replicated")


def made_before(*on: str) -> Callable[[Callable[[], Use]], Callable[[], Use]]:
    """Makes a case of a function."""

    def add(make: Callable[[], Use]) -> Callable[[], Use]:
        CASES[make.__name__] = Case(make, on)
        return make

    return add


def not_served(kinds: Sequence[str], imports_first: bool = False) -> dict[str, str]:
    """Makes all cases, and then the strategies, one after the other; the cases that failed, each with its traceback.

    Call it in a process of its own.

    Args:
        kinds: what makes the strategies. With `replicate_model` among them, the cases are its own; else all others.
        imports_first: whether the library is imported before anything is made. No strategy is.
    """
    tf.config.set_logical_device_configuration(
        tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()] * 2
    )
    if imports_first:
        assert _library().MirroredStrategy
    for module in _MODULES:
        importlib.import_module(f"{__name__}.{module}")
    uses = [
        (name, case.make(), case.on)
        for name, case in CASES.items()
        if not set(kinds).isdisjoint(case.on) and (REPLICATE in kinds) is (REPLICATE in case.on)
    ]
    assert imports_first or "replica_engine" not in sys.modules
    failed, had_jax = {}, "jax" in sys.modules
    for index, kind in enumerate(kinds):
        strategy = None if kind == REPLICATE else _made(kind)
        for name, use, on in uses:
            if kind in on:
                try:
                    use(strategy)
                except (Exception, pytest.fail.Exception):
                    failed[f"{name}, {kind}"] = traceback.format_exc()
        if index == 0 and kind == MIRRORED:  # which needs no compiler
            imported = [name for name in ("jax", "replica_engine.pjrt") if name in sys.modules]
            if imported != ["jax"] * had_jax:
                failed["imports"] = f"the replica threads have imported {imported}"
    return failed


def _library() -> Any:
    return importlib.import_module("replica_engine")


def _made(kind: str) -> tf.distribute.Strategy:
    if kind == MIRRORED:
        return _library().MirroredStrategy(["CPU:0", "CPU:1"])
    return _library().TPUStrategy(num_cores=2)


def shares(strategy: tf.distribute.Strategy, values: Sequence[Any]) -> Any:
    """A distributed value: replica i has the i-th of the values."""
    return strategy.experimental_distribute_values_from_function(
        lambda context: tf.convert_to_tensor(values[context.replica_id_in_sync_group])
    )
