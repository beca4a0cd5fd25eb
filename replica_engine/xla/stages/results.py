"""The results of a launch as tensors, and how often each stage ran.

On CPU devices a result stays where the program left it until somebody looks at it, since making a tensor takes about as
long as a small program. Then small values become views of the device's memory, which no later program writes: only
values of variables are donated. Large values are copied, as jaxlib may free the memory of a view late. On other devices
the program may still run: who looks at a result waits for it, and gets the error if the program has failed (`Awaited`).
Large results are fetched at once (`Compiled`).
"""

from __future__ import annotations

import dataclasses
import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from replica_engine._tf import eager
from replica_engine.pjrt.group import Array, DeviceGroup
from replica_engine.process import shutdown

Shape = tuple[int, ...]
Column = Sequence[Any] | Callable[[], list[tf.Tensor]]
"""One result: the values of the replicas, or a function that makes a tensor of each."""

_MOST_BYTES = 1 << 14  # of a view
_VIEWED = frozenset(map(np.dtype, "?bBhHiIqQefdFD"))  # dtypes that DLPack and TensorFlow know
_counts_lock = threading.Lock()


def column(shape: tuple[int, ...], dtype: np.dtype) -> Callable[[Array], Column]:
    """How to make a column of an array with this shape and dtype on CPU devices."""
    is_viewed = dtype in _VIEWED and 0 < np.prod(shape, dtype=int) * dtype.itemsize <= _MOST_BYTES
    make, parts = (eager.of_capsule, DeviceGroup.views) if is_viewed else (_as_tensor, DeviceGroup.shards)
    return functools.partial(functools.partial, _tensors, make, parts)


def tensors_of(column: Column) -> list[tf.Tensor]:
    """The tensors of a column, one for each replica."""
    return column() if callable(column) else list(map(_as_tensor, column))


def _tensors(make: Callable[[Any], tf.Tensor], parts: Callable[[Array], list[Any]], array: Array) -> list[tf.Tensor]:
    with shutdown.running():  # who looks at a result late may be a daemon thread
        return list(map(make, parts(array)))


def _as_tensor(value: Any) -> tf.Tensor:
    return eager.tensor(value) if isinstance(value, np.ndarray) and value.dtype != object else tf.constant(value)


@dataclasses.dataclass(frozen=True)
class Counts:
    """How often this process has traced, lowered, compiled and launched, as `counts` returns it.

    Attributes:
        traces: how many times a Python function became a graph; twice for a function that creates variables.
        lowerings: how many times a graph became a program.
        compiles: how many times a program became an executable.
        launches: how many times an executable ran.
        cache_hits: how many executables were read from the cache folder (`set_cache_dir`) instead of compiled.
    """

    traces: int = 0
    lowerings: int = 0
    compiles: int = 0
    launches: int = 0
    cache_hits: int = 0

    def __sub__(self, other: Counts) -> Counts:
        """The counts between two moments."""
        return Counts(*(a - b for a, b in zip(dataclasses.astuple(self), dataclasses.astuple(other), strict=True)))


_now = {field.name: 0 for field in dataclasses.fields(Counts)}


def counts() -> Counts:
    """Returns how often this process has traced, lowered, compiled and launched so far.

    Example:
        >>> from replica_engine import xla
        >>> before = xla.counts()
        >>> program = xla.lower(lambda x: x + 1, [[1.0], [2.0]])
        >>> xla.counts() - before
        Counts(traces=1, lowerings=1, compiles=0, launches=0, cache_hits=0)
    """
    with _counts_lock:
        return Counts(**_now)


def count(what: str) -> None:
    """Adds one to the count with this name."""
    with _counts_lock:
        _now[what] += 1
