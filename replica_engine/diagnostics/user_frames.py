"""Where in the user's program a sync point is, and which merge function meets there."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import inspect
import os
import sys
import threading
from collections.abc import Callable
from types import FrameType, FunctionType
from typing import Any

from replica_engine._tf import autograph
from replica_engine.engine import Replica, SyncPoint
from replica_engine.telemetry import stacks

# Packages whose frames can stand between the user's line and an op, a sync point or an exception: TensorFlow, Keras,
# and what these call through. tf.summary is tensorboard's, map_structure tree's or optree's, and wrapt and absl call
# what they decorate or run. Any other installed package counts as the user's. So does numpy: its functions may take
# long, and a thread can be interrupted in the user's code only (`telemetry.interrupt`).
_PLUMBING = ("tensorflow", "keras", "tf_keras", "tensorboard", "absl", "jax", "jaxlib", "optree", "tree", "wrapt")
_INSTALLED = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")
_OURS = os.path.dirname(os.path.dirname(__file__)) + os.sep
_DEMO = os.path.join(_OURS, "demo") + os.sep  # a program to read and to copy, so a user's
_STANDARD_LIBRARY = os.path.dirname(functools.__file__) + os.sep
# Frames between the user's line and the function that it calls.
_WRAPPERS = frozenset(("error_handler", "wrapper", "converted_call", "_call_unconverted", "op_dispatch_handler"))
_CONVERTED = "outer_factory.inner_factory.tf__"  # how AutoGraph names what it converted
_SITE_PACKAGES = os.sep + "site-packages" + os.sep


def sync_point(merge_fn: Callable[..., Any], replica: Replica, detail: tuple, values: tuple, eager: bool) -> SyncPoint:
    """The record of a merge call that `replica` is making.

    It goes by the name of the merge function, if that is the user's, or else of what the user called that
    made the merge call: "all_reduce", "assign_add", "fit". `detail` is what else has to be equal on all
    replicas; `values` is what the replica brings, and `eager` whether that are values now.
    """
    plain = _plain(merge_fn)
    name = getattr(plain, "__qualname__", None) or type(plain).__qualname__
    frame, called, thread = _user_frame(replica)
    if called and is_internal(getattr(getattr(plain, "__code__", None), "co_filename", "")):
        name = called
    name = name.replace("<locals>.", "").removeprefix(_CONVERTED)
    kind = detail[0] if detail and isinstance(detail[0], str) else "merge_call"
    place = _place(replica, frame, thread)
    return SyncPoint(name, *place, (identity(merge_fn), detail), kind, traced=not eager, values=values)


def user_location(replica: Replica) -> tuple[str, int, str]:
    """File, line and function of the innermost frame that belongs to the user."""
    frame, _, thread = _user_frame(replica)
    return _place(replica, frame, thread)


def _user_frame(replica: Replica) -> tuple[FrameType, str, int]:
    """The innermost frame of the user, the name of what it called, and the thread it is on.

    A replica of Keras' `fit` has no frame of the user's; then it is the line that called `fit`, which the
    thread that called `run` still stands at.
    """
    here = sys._getframe(1)
    coordinator = replica.coordinator.ident or 0
    for thread, innermost in (
        (threading.get_ident(), lambda: here),
        (coordinator, lambda: sys._current_frames().get(coordinator)),
    ):
        frame, called = innermost(), ""
        while frame is not None and not is_users(frame, (thread, coordinator)):
            if frame.f_code.co_name not in _WRAPPERS:
                called = frame.f_code.co_name
            frame = frame.f_back
        if frame is not None:
            return frame, called, thread
    return here, "", threading.get_ident()


def _place(replica: Replica, frame: FrameType, thread: int) -> tuple[str, int, str]:
    threads = (thread, replica.coordinator.ident or thread)
    return autograph.original_location(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name, threads)


def is_users(frame: FrameType, threads: tuple[int, ...]) -> bool:
    """Whether a frame runs code of the user's, also if AutoGraph has converted it.

    Args:
        frame: a frame.
        threads: the idents of those that may know what was converted; see `autograph.original_location`.
    """
    file = frame.f_code.co_filename
    if is_internal(file):
        return False
    if not autograph.is_generated(file):
        return True
    return not is_internal(autograph.original_location(file, frame.f_lineno, frame.f_code.co_name, threads)[0])


@functools.lru_cache(maxsize=4096)
def is_internal(filename: str) -> bool:
    """Whether a file is not the user's: Python's own, of this package, TensorFlow's, Keras', or of what these call."""
    if filename.startswith(_OURS):
        return not filename.startswith(_DEMO)
    if filename.startswith(_STANDARD_LIBRARY) and _SITE_PACKAGES not in filename:
        return True
    return filename.startswith(_plumbing())


@functools.cache
def _plumbing() -> tuple[str, ...]:
    """The folders of `_PLUMBING`, as far as they are installed. They are found, not imported."""
    folders = []
    for name in _PLUMBING:
        spec = None
        with contextlib.suppress(ImportError):  # of a finder that refuses to look
            spec = importlib.util.find_spec(name)
        for folder in (spec and spec.submodule_search_locations) or ():
            if name == "tensorflow" or any(part in folder for part in _INSTALLED):  # else somebody's own `tree`
                folders.append(folder + os.sep)
    return tuple(folders)


stacks.hide(is_internal)


def _plain(fn: Callable) -> Callable:
    """The user's function inside partial objects, bound methods and AutoGraph's wrappers."""
    if type(fn) is FunctionType and not fn.__dict__:  # nothing is wrapped in it
        return fn
    while True:
        inner = inspect.unwrap(fn)
        if isinstance(inner, functools.partial):
            inner = inner.func
        elif inspect.ismethod(inner):
            inner = inner.__func__
        if inner is fn:
            return fn
        fn = inner


def identity(fn: Callable[..., Any]) -> Any:
    """Equal for what one `def` or `lambda` in the source makes, each time it is executed.

    Replicas run the same source, and each makes its own closure of the merge function in it: other
    functions, equal code.
    """
    plain = _plain(fn)
    if inspect.isbuiltin(plain):
        return plain
    return getattr(plain, "__code__", type(plain))
