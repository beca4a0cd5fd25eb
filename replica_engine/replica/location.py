"""Where in the user's program a sync point is, and which merge function meets there."""

from __future__ import annotations

import functools
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import tensorflow as tf

from replica_engine._compat import autograph
from replica_engine.engine import SyncPoint

_PACKAGE = os.path.dirname(os.path.dirname(__file__))
_KERAS = importlib.util.find_spec("keras")  # found, not imported: TensorFlow imports it when first used
# Frames of these are skipped on the way to the user's own. Of this package only the parts a call goes
# through: the demo is user code.
_INTERNAL = tuple(
    folder + os.sep
    for folder in (
        os.path.dirname(tf.__file__),
        *((os.path.dirname(_KERAS.origin),) if _KERAS is not None and _KERAS.origin else ()),
        *(os.path.join(_PACKAGE, part) for part in ("engine", "replica", "strategies", "_compat")),
    )
)
_STANDARD_LIBRARY = os.path.dirname(functools.__file__) + os.sep
_SITE_PACKAGES = os.sep + "site-packages" + os.sep


def sync_point(merge_fn: Callable) -> SyncPoint:
    """The record of a merge call that the caller of the caller is making."""
    plain = _plain(merge_fn)
    filename, lineno, function = user_location()
    name = getattr(plain, "__qualname__", None) or type(plain).__qualname__
    return SyncPoint(name.replace("<locals>.", ""), filename, lineno, function, _identity(plain))


def user_location() -> tuple[str, int, str]:
    """File, line and function of the innermost frame that belongs to the user."""
    frame: FrameType | None = sys._getframe(1)
    outermost = sys._getframe(1)
    while frame is not None:
        if not _is_internal(frame.f_code.co_filename):
            return autograph.original_location(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)
        outermost = frame
        frame = frame.f_back
    return outermost.f_code.co_filename, outermost.f_lineno, outermost.f_code.co_name


@functools.lru_cache(maxsize=4096)
def _is_internal(filename: str) -> bool:
    if filename.startswith(_STANDARD_LIBRARY) and _SITE_PACKAGES not in filename:
        return True
    return filename.startswith(_INTERNAL)


def _plain(fn: Callable) -> Callable:
    """The user's function inside partial objects, bound methods and AutoGraph's wrappers."""
    while True:
        inner = inspect.unwrap(fn)
        if isinstance(inner, functools.partial):
            inner = inner.func
        elif inspect.ismethod(inner):
            inner = inner.__func__
        if inner is fn:
            return fn
        fn = inner


def _identity(plain: Callable) -> Any:
    """Equal for what one `def` or `lambda` in the source makes, each time it is executed.

    Replicas run the same source, and each makes its own closure of the merge function in it: other
    functions, equal code.
    """
    return getattr(plain, "__code__", type(plain))
