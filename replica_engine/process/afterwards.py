"""What is done after a `with` block, whose own exception stays the one that is raised."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType

from replica_engine.errors.base import add_note, in_words


class afterwards:
    """Calls a function when the block ends, however it ends.

    If the block raises an exception and the function another one, the block's is raised: it is the cause, and the
    user's. The other one becomes a note of it. An interrupt in the function, such as Ctrl-C, is raised in any case.

    Not a generator: an interrupt then has no line more to come at than in a `finally`.

    Args:
        do: the function.
        what: what it does, in words: "giving the model back".
    """

    def __init__(self, do: Callable[[], object], what: str):
        self._do = do
        self._what = what

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, frames: TracebackType | None) -> None:
        if error is None:
            self._do()
            return
        try:
            self._do()
        except Exception as other:
            add_note(error, f"also failed, while {self._what}: {in_words(other)}")
