"""Functions around which TensorFlow or Keras has put a handler of errors: a filter of tracebacks, or a dispatch.

A program may have a name of its own for such a function (`fit = keras.Model.fit`), or a bound method. So the function
stays, and what its handler calls is replaced. A filter then takes our frames out of tracebacks with the others. Checked
on TensorFlow 2.21.0 and Keras 3.15.1. This module does not import Keras.
"""

from __future__ import annotations

import sys
import types
from typing import Any

_HANDLED = "fn"  # the variable of a handler that has the function
_HANDLERS = ("tensorflow.python.util.traceback_utils", "keras.src.utils.traceback_utils")


def cell_of(function: Any) -> types.CellType | None:
    """What has the function that a handler calls; None for a function without a handler."""
    code, cells = getattr(function, "__code__", None), getattr(function, "__closure__", None)
    if code is None or cells is None or _HANDLED not in code.co_freevars:
        return None
    if code.co_filename not in {getattr(sys.modules.get(name), "__file__", None) for name in _HANDLERS}:
        return None
    cell: types.CellType = cells[code.co_freevars.index(_HANDLED)]
    return cell
