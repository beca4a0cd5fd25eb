"""What stands in a body for the results of a host function that are not known before the run.

A host function that cannot be traced, and whose results are not declared, is never called to find its results out: it
may take items from a queue, or write a file. A body that does not use its results needs no declaration.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn

from replica_engine.errors import HostResultError

_USES = """
tf_tensor array bool int float complex index round format bytes iter next len contains getitem setitem delitem call
enter exit neg pos abs invert eq ne lt le gt ge setattr
"""
_OPERATORS = "add sub mul truediv floordiv mod divmod pow matmul and or xor lshift rshift"


class UnknownResults:
    """Results that are not known: any use of them, also of an attribute, raises an error. Printing them does not.

    Args:
        error: makes the error.
    """

    __slots__ = ("_error",)
    __hash__ = object.__hash__

    _error: Callable[[], HostResultError]

    def __init__(self, error: Callable[[], HostResultError]):
        object.__setattr__(self, "_error", error)

    def __getattr__(self, name: str) -> NoReturn:
        raise self._error()

    def __repr__(self) -> str:
        return "<unknown results of a host function; declare them with xla.returns>"


def _used(self: UnknownResults, *args: object, **kwargs: object) -> NoReturn:
    raise self._error()


for _method in (*_USES.split(), *(kind + name for name in _OPERATORS.split() for kind in ("", "r", "i"))):
    setattr(UnknownResults, f"__{_method}__", _used)


def check_known(value: object) -> None:
    """Checks a value that leaves the body, or that a host function gets.

    Raises:
        HostResultError: it stands for unknown results.
    """
    if isinstance(value, UnknownResults):
        raise value._error()
