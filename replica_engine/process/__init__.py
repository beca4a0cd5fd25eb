"""Functions that concern the whole process, not one run.

- `interrupts`: exceptions from signals and from other threads, holding them off, ending a wait with one, and values for
  the time of a block, which come back in spite of them.
- `threads`: starting a thread safely.
- `setup`: logical devices, the size of TensorFlow's thread pool, forked child processes, in which no run is possible,
  and the folder that a relative path is in.
- `shutdown`: the exit of the process in the middle of a run.
- `memory`: the limits of glibc's allocator.

Here are the number of cores, and the order of sums over replicas.
"""

import functools
import os
from collections.abc import Callable, Sequence
from typing import TypeVar

from replica_engine.errors import InputsError

T = TypeVar("T")


def cores() -> int:
    """The number of cores that this process may use; TensorFlow makes one thread for each."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


_ORDERED_SUMS = "REPLICA_ENGINE_ORDERED_SUMS"
_ordered: list[bool] = []  # what `set_ordered_sums` was called with last


def set_ordered_sums(enabled: bool = True) -> None:
    """Adds replicas' values in the order of the replicas, however many workers and devices they are spread over.

    Without it the last bits of a sum of floats depend on the layout: four replicas in one process add in another order
    than in two processes of two. With it every replica gets the values of all replicas, and adds them up as
    `ordered_sum` does. That moves and holds the values of N replicas, where otherwise one sum does.

    Call it at the top of the program, on all workers; or set REPLICA_ENGINE_ORDERED_SUMS=1. It holds for what is traced
    and compiled afterwards. Sums that NCCL makes, and those between the devices of one replica, keep their own order.

    Args:
        enabled: whether to add in order.

    Raises:
        InputsError: `enabled` is not True or False.

    Example:
        >>> import replica_engine
        >>> replica_engine.set_ordered_sums(False)
    """
    if not isinstance(enabled, bool):
        raise InputsError(f"set_ordered_sums takes True or False; got {enabled!r}.")
    _ordered[:] = [enabled]


def sums_are_ordered() -> bool:
    """Whether sums over replicas are made in the order of the replicas."""
    if _ordered:
        return _ordered[0]
    value = os.environ.get(_ORDERED_SUMS, "") or "0"
    if value not in ("0", "1"):
        raise InputsError(
            f"{_ORDERED_SUMS} is {value!r}. Write 1 for sums in the order of the replicas, and 0 for any."
        )
    return value == "1"


def ordered_sum(values: Sequence[T], add: Callable[[T, T], T]) -> T:
    """The sum of values, in the order in which TensorFlow's `add_n` adds on CPUs.

    Up to nine one after the other. Of more, those beyond a multiple of eight come first, two at least, and then each
    sum of eight is added.
    """
    first = len(values) % 8
    first = first + 8 if first < 2 else first
    total = functools.reduce(add, values[:first])
    for begin in range(first, len(values), 8):
        total = add(total, functools.reduce(add, values[begin : begin + 8]))
    return total
