"""One save of a checkpoint from beginning to end, on one worker or on several.

The workers of a job make the same save. Each takes its values at the same step. The chief writes; where all workers
save to one path, each also writes its own parts of the variables that are divided over workers. The chief waits for all
parts before it puts the checkpoint in place, and the others wait for the chief. So a save ends on all workers with the
same checkpoint, or with an error on each.
"""

from __future__ import annotations

import atexit
import contextvars
import functools
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any, TypeAlias

import tensorflow as tf

from replica_engine.checkpoints import checkpoint_files, file_owners
from replica_engine.errors import CheckpointError, ProgramDisagreementError, ReplicaEngineError, WorkerLostError
from replica_engine.process import interrupts, setup
from replica_engine.upstream import checkpoint_hooks
from replica_engine.workers import saving as workers

_PATTERN = frozenset("*?[\\")
_FOLDER = "/tmp"  # where the folder for temporary files is itself a pattern


class _Alone:
    """The turn of a worker that saves alone."""

    writes, together, worker, size = True, True, 0, 1

    def tell(self, name: str, value: object) -> None:
        """Nobody listens."""

    def hear(self, name: str) -> Any:
        """Nobody tells anything."""

    def exchange(self, what: str, value: object) -> list[Any]:
        """There is no other worker."""
        return [value]


AnyTurn: TypeAlias = workers.SaveTurn | _Alone
"""What this worker does in one save."""


def install() -> None:
    """Makes checkpoints that have variables of a strategy of this library come here; once per process."""
    checkpoint_hooks.take_over(CompleteSaver())


class CompleteSaver:
    """Implements `upstream.checkpoint_hooks.CheckpointSaver`."""

    concerns = staticmethod(file_owners.concerns)
    absolute = staticmethod(setup.absolute)
    reading = staticmethod(checkpoint_files.reading)

    @staticmethod
    def readable(path: str) -> str:
        """The prefix to read a checkpoint from: from the root, and one that TensorFlow takes for no pattern.

        TensorFlow's readers take `[ ] * ? \\` in the prefix of a checkpoint for a pattern, and find nothing:
        `lr[1]/ckpt`. No form of that prefix works, since one string is both the pattern and the name that is opened. So
        it is read through links in a folder of this process, which stay until the process ends: variables that are made
        later are restored then.
        """
        path = setup.absolute(path)
        if _PATTERN.isdisjoint(path) or not tf.io.gfile.exists(path + ".index"):
            return path
        alias = os.path.join(tempfile.mkdtemp(dir=_links()), "checkpoint")
        link = tf.io.gfile.copy if "://" in path else os.symlink
        for file in (path + ".index", *checkpoint_hooks.matching(path + checkpoint_hooks.DATA)):
            link(file, alias + file[len(path) :])
        return alias

    def save(
        self, saved: object, path: str, take: Callable[[], object], finish: Callable[[bool], None], asynchronous: bool
    ) -> None:
        """Saves a checkpoint; see `upstream.checkpoint_hooks.CheckpointSaver`.

        Raises:
            CheckpointError: it could not be written, or the asynchronous save before it could not.
            ReplicaValueError: a variable has no value that can be saved.
        """
        file_owners.check_values(saved)
        given, path = _given.get() or path, setup.absolute(path)
        with checkpoint_files.alone():
            team = file_owners.find_team(saved)
            with nullcontext(_Alone()) if team is None else team.taking_turns("a checkpoint", path, given) as turn:
                # Discards without the others, who may wait for this worker in an exchange.
                discard = functools.partial(checkpoint_files.discard, path)
                with checkpoint_files.taking(turn.together, asynchronous) as taken, _failing_together(turn, discard):
                    _begin(path, turn)
                    take()
                write = functools.partial(_write, taken, path, finish, turn, asynchronous)
                if asynchronous:
                    checkpoint_files.start(path, write)
                else:
                    write()

    def receiver(self) -> Callable[[list[list[tuple[str, str, tf.Tensor]]]], None] | None:
        """Takes the values of the save that this thread makes; None outside of one."""
        taken = checkpoint_files.current()
        if taken is None:
            return None

        def receive(bundles: list[list[tuple[str, str, tf.Tensor]]]) -> None:
            taken.bundles = [[checkpoint_files.SavedValue(*row) for row in rows] for rows in bundles]

        return receive

    def wait(self, raises: bool) -> None:
        """Waits for the asynchronous save."""
        checkpoint_files.wait() if raises else checkpoint_files.join()


_given: contextvars.ContextVar[str | None] = contextvars.ContextVar("replica_engine_given_path", default=None)


def as_given(path: str) -> AbstractContextManager[str]:
    """Inside, the path of a checkpoint is what the user gave at a time at which the program had perhaps another folder.

    Workers compare what they were given: a relative path may lead to a shared folder that machines have at two places.
    """
    return interrupts.variable_for_block(_given, path)


@contextmanager
def raises_checkpoint_errors(path: str, asynchronous: bool) -> Iterator[None]:
    """Turns what the file system says into a CheckpointError."""
    try:
        yield
    except (tf.errors.OpError, OSError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError.not_written(path, _reason(error), asynchronous) from error


def _begin(path: str, turn: AnyTurn) -> None:
    """Makes room for what is written. If one worker cannot, none goes on: a training's state is exchanged by all."""
    own = None
    if turn.writes:
        try:
            with raises_checkpoint_errors(path, False):
                checkpoint_files.begin(path)
        except CheckpointError as error:
            own = error
    failures = turn.exchange("the beginning of a checkpoint", own and str(own))
    if own is not None:
        raise own
    for each in failures:
        _check(each)


def _write(
    taken: checkpoint_files.Snapshot, path: str, finish: Callable[[bool], None], turn: AnyTurn, asynchronous: bool
) -> None:
    try:
        with _failing_together(turn, functools.partial(_discard, path, turn)):
            with raises_checkpoint_errors(path, asynchronous):
                (_write_all if turn.writes else _write_parts)(taken, path, turn)
            finish(turn.writes)
    finally:
        taken.release()


def _write_all(taken: checkpoint_files.Snapshot, path: str, turn: AnyTurn) -> None:
    """What the chief does, and a worker with a path of its own."""
    if not taken.bundles:  # objects with savers of their own have written all there is
        checkpoint_files.discard(path)
    else:
        own = checkpoint_files.split(taken.bundles, path, turn.size - 1)
        prefixes = [_prefix(path, 0, index) for index in range(len(own))]
        for prefix, rows in zip(prefixes, own, strict=True):
            checkpoint_files.write(rows, prefix)
        for worker in range(1, turn.size):
            prefixes += _receive_part(worker, path, turn)
        checkpoint_files.commit(prefixes, path)
    turn.tell("done", None)


def _write_parts(taken: checkpoint_files.Snapshot, path: str, turn: AnyTurn) -> None:
    """What a worker does whose path is the chief's."""
    if turn.together:
        rows = [row for rows in taken.bundles for row in rows if row.part]  # the chief has the whole values
        if rows:
            checkpoint_files.write(rows, _prefix(path, turn.worker, 0))
        turn.tell(f"part {turn.worker}", len(rows))
    _check(turn.hear("done"))


def _receive_part(worker: int, path: str, turn: AnyTurn) -> list[str]:
    """The prefixes of what another worker has written."""
    told, prefix = turn.hear(f"part {worker}"), _prefix(path, worker, 0)
    _check(told)
    if told and not tf.io.gfile.exists(prefix + ".index"):
        raise CheckpointError(
            f"The checkpoint {path!r} could not be written: the chief does not find there what worker {worker} has "
            "written. Each worker saves its own parts of a variable that is divided over workers. Save to a folder "
            "that all workers share."
        )
    return [prefix] if told else []


def _check(told: object) -> None:
    """Raises what another worker has failed with."""
    if isinstance(told, str):
        raise CheckpointError(told)


def _prefix(path: str, worker: int, index: int) -> str:
    return os.path.join(path + checkpoint_files.TEMPORARY, f"part-{worker}-{index}")


@contextmanager
def _failing_together(turn: AnyTurn, discard: Callable[[], None]) -> Iterator[None]:
    """Tells the other workers of an error in the block: they wait for what this worker does there."""
    try:
        yield
    except GeneratorExit:  # not of the block: Ctrl-C came at its end, and this is freed at any later time
        raise
    except BaseException as error:  # an interrupt too: the others would wait without end
        if not isinstance(error, (WorkerLostError, ProgramDisagreementError)):  # of which they hear anyway
            turn.tell("done" if turn.writes else f"part {turn.worker}", str(error) or type(error).__name__)
        if turn.writes:
            discard()
        raise


def _discard(path: str, turn: AnyTurn) -> None:
    """Deletes what was written, when no worker writes any more: it would find no folder, or make it again."""
    try:
        with suppress(ReplicaEngineError):  # a worker is lost
            for worker in range(1, turn.size):
                turn.hear(f"part {worker}")
    finally:
        checkpoint_files.discard(path)


def _reason(error: tf.errors.OpError | OSError) -> str:
    """What the file system says, without TensorFlow's name of the op."""
    text = error.message if isinstance(error, tf.errors.OpError) else str(error)
    return re.sub(r"^{{.*?}} | \[Op:.*", "", text.split("\n")[0])


@functools.cache
def _links() -> str:
    """The folder of the links."""
    usual = tempfile.gettempdir()
    folder = tempfile.mkdtemp(prefix="replica_engine_", dir=usual if _PATTERN.isdisjoint(usual) else _FOLDER)
    atexit.register(_delete, folder, os.getpid())
    return folder


def _delete(folder: str, owner: int) -> None:
    """Deletes the folder; a forked child leaves it to its owner."""
    if os.getpid() == owner:
        shutil.rmtree(folder, ignore_errors=True)
