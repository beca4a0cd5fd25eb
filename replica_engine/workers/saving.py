"""Saving on several workers: which worker writes, and where the workers meet.

All workers make the same call that saves. They meet before it, so that a checkpoint holds the same step of all of them,
and a worker that does something else is found before a file is written. They meet again when the chief has written, so
that each can read the file. The timeout of runs does not limit that second wait.

The chief writes what all save to one path. A worker with a path that is not the chief's writes there itself.
"""

from __future__ import annotations

import contextlib
import contextvars
import itertools
import os
from collections.abc import Callable, Iterator
from typing import Any

from replica_engine.errors.worker_errors import SAVING
from replica_engine.workers.member import Member


class Saving:
    """This worker, as one that saves together with the others.

    Args:
        member: the connection to the job.
        meet: waits for the other workers; takes a name of the place in words, and whether the timeout of runs holds.

    Attributes:
        worker: the index of this worker.
        size: the number of workers.
        is_chief: whether this worker writes the files of a path that all have.
    """

    def __init__(self, member: Member, meet: Callable[[str, bool], None]):
        self.worker, self.size = member.worker, member.size
        self.is_chief = member.worker == 0
        self._member = member
        self._meet = meet
        self._told = "told "  # what the keys of the last checkpoint begin with

    @contextlib.contextmanager
    def saving(self, what: str, path: Any) -> Iterator[bool]:
        """A context manager around saving something on all workers.

        Args:
            what: what is saved, in words.
            path: where this worker is to save it.

        Yields:
            Whether this worker writes: it is the chief, or its path is not the chief's.

        Raises:
            ProgramDisagreementError: another worker does something else.
            WorkerLostError: a worker is lost.
        """
        with self.taking_turns(what, path, by_all=False) as turn:
            yield turn.writes

    @contextlib.contextmanager
    def taking_turns(self, what: str, path: Any, given: str | None = None, by_all: bool = True) -> Iterator[SaveTurn]:
        """Like `saving`, for what all workers may write together: it yields what this one does.

        Args:
            what: what is saved, in words.
            path: where this worker is to save it.
            given: the path as the user gave it, if that is another one.
            by_all: whether all may write together, rather than the chief and those with a path of their own.
        """
        if _inside.get():  # Keras backs a model up by saving its weights, and the path is chosen already
            yield SaveTurn(self, "", writes=True, together=False)
            return
        ours, key = _place(path, given), f"{SAVING} {what}: path {next(_numbers)} "
        if self.is_chief or by_all:
            self._member.put(f"{key}{self._member.worker}", ours)
        self._meet(f"{SAVING} {what}", True)
        if by_all and self.is_chief:  # each worker has come here, so the save before this one has ended on all
            self._member.drop(self._told)
            self._told = f"told {key}"
        # The chief asks for its own path too: if the job had no room for it, all workers must fail.
        chiefs = ours if self.is_chief and not by_all else self._member.get(f"{key}0")
        writes = self.is_chief or not _is_same(ours, chiefs)
        together = by_all and all(_is_same(chiefs, self._member.get(f"{key}{each}")) for each in range(1, self.size))
        token = _inside.set(True)
        try:
            yield SaveTurn(self, f"told {key}", writes, together)
        finally:
            _inside.reset(token)
        self._meet(f"the end of saving {what}", False)  # not after a failure: the others get an error that names it
        if self.is_chief:
            self._member.drop(key)

    def exchange(self, what: str, value: Any) -> list[Any]:
        """The values that all workers have called this with, in their order, when all have.

        Args:
            what: what they are, in words.
            value: something that JSON can hold; those of all workers fit into a megabyte.

        Raises:
            ValueError: they are larger.
            ProgramDisagreementError: another worker does something else.
            WorkerLostError: a worker is lost.
            WorkersMissingError: one did not come within `timeout`.
        """
        self._meet(what, True)  # which has the limit of runs, and warns
        return self._member.exchange(what, value)


class SaveTurn:
    """What this worker does in one save.

    Args:
        saving: this worker.
        key: what the keys of this save begin with; empty for a part of another save, which nobody else takes part in.
        writes: whether it writes to its path: it is the chief, or its path is not the chief's.
        together: whether all workers have one path.

    Attributes:
        worker: its index; 0 if it writes alone.
        size: the number of workers that write together.
    """

    def __init__(self, saving: Saving, key: str, writes: bool, together: bool):
        self.writes, self.together = writes, together
        self.worker, self.size = (saving.worker, saving.size) if together else (0, 1)
        self._saving, self._key = saving, key
        self._member = saving._member

    def tell(self, name: str, value: Any) -> None:
        """Stores something for the other workers."""
        if self.together or (self._saving.is_chief and self._key):
            self._member.put(f"{self._key}{name}", value)

    def hear(self, name: str) -> Any:
        """Waits for what another worker stores."""
        return self._member.get(f"{self._key}{name}")

    def exchange(self, what: str, value: Any) -> list[Any]:
        """The values of all workers; see `Saving.exchange`."""
        return self._saving.exchange(what, value) if self._key else [value]


def _place(path: Any, given: str | None) -> list[str]:
    """A path as it was given, and from the root."""
    path = os.fsdecode(path) if isinstance(path, (str, bytes, os.PathLike)) else str(path)
    return [given or path, os.path.abspath(path)]


def _is_same(ours: list[str], theirs: list[str]) -> bool:
    """Whether two places are one. A relative path may lead to a shared folder that machines have at two places."""
    return any(mine == other for mine, other in zip(ours, theirs, strict=True))


_numbers = itertools.count()  # all workers save the same in the same order, or do not get past the meeting

_inside: contextvars.ContextVar[bool] = contextvars.ContextVar("replica_engine_saves", default=False)
"""Whether this thread saves something that the workers have met for."""
