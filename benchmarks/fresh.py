"""Measuring in a process of its own: what only the first time costs, and how much memory something takes."""

from __future__ import annotations

import concurrent.futures
import contextlib
import ctypes
import gc
import multiprocessing
import os
import pathlib
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


def in_fresh_process(function: Callable[..., T], *args: Any) -> T:
    """Calls a function of a module in a new process, which ends with it.

    Returns:
        Its result; both it and the arguments can be pickled.

    Raises:
        Exception: what the function raised, or `BrokenProcessPool` if the process died.
    """
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(max_workers=1, mp_context=context) as pool:
        return pool.submit(function, *args).result()


def resident() -> int:
    """Bytes of this process that are in memory, without what it has freed and the C library has kept for later."""
    gc.collect()
    with contextlib.suppress(AttributeError):  # glibc has it
        ctypes.CDLL(None).malloc_trim(0)
    pages = int(pathlib.Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")
