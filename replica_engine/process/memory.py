"""How much of the memory that a program has freed the process keeps for the next launch."""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
from collections.abc import Callable, Iterator

_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3  # of <malloc.h>

_KEEPING = {
    _M_MMAP_THRESHOLD: 256 << 20,  # bytes of the smallest buffer that is mapped alone, and unmapped when it is freed
    _M_TRIM_THRESHOLD: 512 << 20,  # bytes at the end of the heap above which they go back to the system
    _M_TOP_PAD: 128 << 20,  # bytes that stay there then, and by which a heap grows; they are taken when they are used
}
_RETURNING = {_M_MMAP_THRESHOLD: 1 << 20, _M_TRIM_THRESHOLD: 1 << 20, _M_TOP_PAD: 128 << 10}


def keep_freed_memory() -> None:
    """Raises the limits of glibc's allocator, so that a launch gets the memory that the one before it freed.

    Each launch on CPU devices allocates the temporary memory of each device. By itself glibc maps buffers above 32 MiB
    each time, and the kernel clears them page by page; heaps of threads other than the first go back to the system as
    soon as they are empty. BERT tiny on four devices takes 20 to 40% less time for a step with these limits, and 5 to
    15% more memory. Below 32 MiB glibc raises a limit itself when buffers come and go, until TensorFlow takes the first
    batch of a dataset of Python code (`from_generator`, and what Keras makes of a generator or a `PyDataset`): it then
    fixes that limit at 128 kB, once in a process. So call this after a first batch was taken, as it is when a program
    is compiled.

    Does nothing where the allocator is not glibc's, or where the environment says what its limits are.
    """
    _set(_KEEPING)


@contextlib.contextmanager
def freed_memory_returned() -> Iterator[None]:
    """Large buffers that are freed in the block go back to the system, for what is made once and then kept.

    So does what was free before: a buffer that is taken from the middle of a heap would stay there when it is freed.
    """
    _set(_RETURNING)
    _trim()
    try:
        yield
    finally:
        _trim()
        _set(_KEEPING)


def _set(limits: dict[int, int]) -> None:
    if (mallopt := _glibc("mallopt")) is not None:
        for limit, value in limits.items():
            mallopt(limit, value)


def _trim() -> None:
    """Gives what is free in all heaps back to the system."""
    if (trim := _glibc("malloc_trim")) is not None:
        trim(ctypes.c_size_t(0))


def _glibc(name: str) -> Callable[..., int] | None:
    """A function of glibc's allocator; None where there is another one, or where the user has set its limits."""
    limits = (f"MALLOC_{limit}_" for limit in ("MMAP_THRESHOLD", "TRIM_THRESHOLD", "TOP_PAD", "MMAP_MAX"))
    are_chosen = "glibc.malloc." in os.environ.get("GLIBC_TUNABLES", "") or any(each in os.environ for each in limits)
    if not sys.platform.startswith("linux") or are_chosen:
        return None
    return getattr(ctypes.CDLL(None), name, None)  # musl has none
