"""What a worker launches, for the comparison with the other workers.

Nothing else notices when a sum meets a mean, or a loss meets a gradient. So each worker tells the job what its
collectives are: the sync point with its line, the reduction, the dtype and the shape.

- Before its first launch, a collective waits until the other workers are about to launch an equal one. So two workers
  that differ get ProgramDisagreementError, and no number.
- Later launches are told without waiting. If they are in another order, the error comes about 0.1 s later. Until then
  each side waits: TensorFlow's number of a collective says which one it is and how often it was launched, so those that
  differ never meet. Programs over Gloo compare the same before they sum.

The line is compared for sync points in replicas and for calls of `reduce`, without the folder of the file. It is not
compared for variables that are read or made, since that may happen in lines of TensorFlow or Keras.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from replica_engine import hosts
from replica_engine._tf import collectives
from replica_engine.diagnostics.user_frames import calling_line
from replica_engine.engine import SyncPoint
from replica_engine.errors import GraphModeError

_MOST_COUNTED = 1 << 31  # launches of a program, after which they are counted from 0 again
_FIRST_KEY, _MOST_PROGRAMS, _MOST_LAUNCHES = 1 << 30, 1 << 13, 1 << 17
"""Numbers of collectives are below 2**31, and TensorFlow counts from 100: it makes variables with those numbers."""


class Launches:
    """Tells the job what this worker launches.

    Args:
        member: the connection to the job.
        timeout: seconds to wait for the others before the first launch of a collective; None waits without a limit.
        warn_after: seconds until a warning about such a wait; None takes WARN_AFTER.
    """

    def __init__(self, member: hosts.Member, timeout: float | None = None, warn_after: float | None = None):
        self._member = member
        self._timeout, self._warn_after = timeout, warn_after
        self._known: set[str] = set()
        # By digest: which program this is, and how often it was launched.
        self._launches: dict[str, tuple[int, int]] = {}
        self._point: SyncPoint | None = None
        self._new_run = False
        self._steps = 0
        self._what: tuple[str, str, str] | None = None  # operation, line, and what is compared of it

    @contextlib.contextmanager
    def merging(self, point: SyncPoint) -> Iterator[None]:
        """Inside the block, collectives belong to a sync point of the replicas."""
        before, self._point = self._point, point
        self._new_run = self._new_run or point.number == 1
        try:
            yield
        finally:
            self._point = before

    @contextlib.contextmanager
    def doing(self, what: str, name: str | None = None) -> Iterator[None]:
        """Inside the block, collectives belong to an operation.

        Args:
            what: the operation, in words: "reduce SUM".
            name: the name of the variable that it reads; None for an operation that the user's code calls.
        """
        before = self._what
        if self._point is not None:
            point = self._point
            line = f"{os.path.basename(point.filename)}:{point.lineno}"
            operation, _, which = what.partition(" ")
            name = f"{point.name} {which}" if point.name == f"all_{operation}" else f"{point.name}: {what}"
            self._what = name, f"{line} in {point.function}", line
        elif name is not None:
            self._what = f"{what} of {name}", "", ""
        else:
            line, function = calling_line()
            self._what = what, f"{line} in {function}", line
        try:
            yield
        finally:
            self._what = before

    def describe(self, kind: str, operand: Any) -> Any:
        """Describes a collective of TensorFlow; see `collectives.note_launches`."""
        program, launched = self.described(kind, operand)
        return lambda: self._key(program.digest, launched())

    def described(self, kind: str, operand: Any) -> tuple[hosts.Program, Callable[[], int]]:
        """What a collective is, and a function to call whenever it is about to be launched.

        The function tells the other workers, and returns how often the collective was launched before.

        Raises:
            GraphModeError: it is in a graph of tf.compat.v1.
        """
        check_mode()
        what, where, compared = self._what or (kind, "", "")
        new_run, self._new_run = self._new_run, False
        body = f"{what}, {_tensor_text(operand)}"
        program = hosts.Program(_digest(_ADDED_NUMBER.sub("", f"{kind} {body} {compared}")), body, where)
        place = str(self._point or (f"{what} at {where}" if where else what))

        def launched() -> int:
            self._steps += new_run
            self._member.progress(self._steps or None, place)
            return self._launch(program)

        return program, launched

    def of(self, program: hosts.Program) -> tuple[hosts.Program, Callable[[], int]]:
        """The same of a collective that is described already."""
        return program, lambda: self._launch(program)

    def _launch(self, program: hosts.Program) -> int:
        self._wait_for_first(program)
        collectives.begun()
        self._member.launched(program)
        number, count = self._launches.get(program.digest, (len(self._launches), 0))
        self._launches[program.digest] = number, (count + 1) % _MOST_COUNTED
        return count

    def _key(self, digest: str, count: int) -> int | None:
        """TensorFlow's number of a launch of a collective, equal on all workers; None if there are too many programs.

        All workers launch programs for the first time in the same order, since they wait for each other there. A number
        comes again after many launches of the same program, when all workers have long left the first one.
        """
        program, _ = self._launches[digest]
        if program >= _MOST_PROGRAMS:
            return None
        return _FIRST_KEY + program * _MOST_LAUNCHES + count % _MOST_LAUNCHES

    def launch(self, program: hosts.Program) -> None:
        """Tells the job of a launch; of the first one, waits until the others are there.

        Raises:
            ProgramDisagreementError: another worker does something else.
            WorkersMissingError: the others did not come in time.
            WorkerLostError: a worker is lost.
        """
        self._wait_for_first(program)
        self._member.launched(program)

    def _wait_for_first(self, program: hosts.Program) -> None:
        self._member.check()
        if program.digest not in self._known:
            self._member.compile(program, self._timeout, self._warn_after)
            self._known.add(program.digest)

    def note(self, program: hosts.Program) -> None:
        """Tells the job of work other than a collective, which all workers do in the same order."""
        self._member.check()
        self._member.launched(program)

    def meet(self, name: str, limited: bool = True) -> None:
        """Waits until all workers have come here, and have launched the same before.

        Args:
            name: the place in words, equal on all workers.
            limited: whether to wait no longer than the timeout; the end of work that others do has no limit.

        Raises:
            ProgramDisagreementError: another worker does something else.
            WorkersMissingError: the others did not come in time.
            WorkerLostError: a worker is lost.
        """
        self._member.progress(None, name)
        self._member.meet(name, self._timeout if limited else None, self._warn_after)


def of_batches(rows: int) -> hosts.Program:
    """The distribution of a dataset, as workers compare it: they would train on unequal shares without an error."""
    what = f"a dataset in batches of {rows} rows"
    return hosts.Program(_digest(what), what, calling_line()[0])


def check_mode() -> None:
    """Raises GraphModeError in a graph of tf.compat.v1, whose sessions do not know the other workers."""
    if not tf.executing_eagerly() and not tf.inside_function():
        raise GraphModeError(
            "MultiWorkerMirroredStrategy of several workers runs in eager mode and in tf.functions. In a graph of "
            "tf.compat.v1, TensorFlow's collectives would wait without end for the other workers. Remove the `with "
            "tf.Graph().as_default():` or tf.compat.v1.disable_eager_execution()."
        )


def of_variable(name: str, value: Any, how: str | None = None) -> hosts.Program:
    """The making of a variable, as workers compare it.

    Args:
        name: its name; the numbers that make names unique are not compared, since a chief may have made more models.
        value: this worker's initial value.
        how: how it is divided over devices, in words.
    """
    what = f"creation of the variable {name}, {_tensor_text(value)}{f', {how}' if how else ''}"
    return hosts.Program(_digest(_ADDED_NUMBER.sub("", what)), what)


def _tensor_text(value: Any) -> str:
    shape = getattr(value, "shape", None)
    sizes = "" if shape is None else str(list(shape)) if tf.TensorShape(shape).rank is not None else "[...]"
    return f"{tf.as_dtype(value.dtype).name if hasattr(value, 'dtype') else type(value).__name__}{sizes}"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


_ADDED_NUMBER = re.compile(r"_\d+(?=/|$|,| |:)")
