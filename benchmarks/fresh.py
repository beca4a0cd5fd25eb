"""Measures in a new process: the cost of doing something for the first time, and memory."""

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
    """The result of a function of a module in a new process, which ends afterwards. Arguments and result are pickled.

    Raises:
        Exception: what the function raised, or `BrokenProcessPool` if the process died.
    """
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(max_workers=1, mp_context=context) as pool:
        return pool.submit(function, *args).result()


def resident() -> int:
    """The resident set of this process in bytes, without freed memory that the C library keeps."""
    gc.collect()
    with contextlib.suppress(AttributeError):  # only glibc has it
        ctypes.CDLL(None).malloc_trim(0)
    pages = int(pathlib.Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def peak() -> int:
    """The largest resident set that this process has had, in bytes."""
    lines = pathlib.Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))
