"""How much of the memory that a program has freed the process keeps for the next launch."""

from __future__ import annotations

import ctypes
import os
import sys

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of <malloc.h>

_MAPPED_FROM = 32 << 20
"""Bytes of the smallest buffer that is mapped alone. glibc never raises its own limit above this (mallopt(3))."""


def keep_freed_memory() -> None:
    """Sets the limits of glibc's allocator to the largest that it sets itself.

    Each launch on CPU devices allocates its buffers. glibc notices that large buffers come and go, and raises its
    limits up to these, so that the next launch gets the same memory. But TensorFlow fixes one of the limits at 128 kB,
    once in a process, when it first takes a batch of a dataset of Python code (`from_generator`, and what Keras makes
    of a generator or a `PyDataset`). glibc then raises none any more, and each launch has its buffers mapped, cleared
    page by page, and unmapped: that takes 10 to 40% of a step. Call this after a first batch was taken, as it is when
    a program is compiled.

    Does nothing where the allocator is not glibc's, or where the environment says what its limits are.
    """
    if not sys.platform.startswith("linux") or _are_chosen():
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # musl has none
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _MAPPED_FROM)
        mallopt(_M_TRIM_THRESHOLD, 2 * _MAPPED_FROM)


def _are_chosen() -> bool:
    """Whether the user has set limits of the allocator."""
    return "glibc.malloc." in os.environ.get("GLIBC_TUNABLES", "") or any(
        f"MALLOC_{name}_" in os.environ for name in ("MMAP_THRESHOLD", "TRIM_THRESHOLD", "TOP_PAD", "MMAP_MAX")
    )
