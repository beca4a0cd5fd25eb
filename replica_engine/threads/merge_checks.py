"""What must agree: the tensors that replicas bring to a reduction, and what workers launch.

When replicas meet in an all-reduce or all-gather, dtypes and static shapes are compared (`check_alike`), and a mismatch
raises before anything is reduced. In a graph, a size may be unknown until the graph runs. An all-gather of such tensors
gets an assertion (`assertions`), so that the error names the replicas and their shapes. TensorFlow's own error would
name only an op, ConcatV2.

Workers compare what they launch (`Launches`).
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import tensorflow as tf

from replica_engine import workers
from replica_engine.diagnostics import user_frames
from replica_engine.diagnostics.flight_record import Brought, texts
from replica_engine.engine import Replica, SyncPoint
from replica_engine.errors import CollectiveError, GraphModeError, ReplicaMismatchError
from replica_engine.process import interrupts
from replica_engine.upstream import distribute, worker_collectives
from replica_engine.values import variable_numbers
from replica_engine.values.structure import as_axis, flatten


def check_alike(points: Sequence[SyncPoint], replicas: Sequence[Replica]) -> None:
    """Compares the tensors that the replicas brought to a sync point.

    Only all-reduce and all-gather are checked; a merge function of the user may take any values.

    Args:
        points: the sync point of each replica.
        replicas: the replicas.

    Raises:
        ReplicaMismatchError: a replica has another dtype or shape than replica 0.
        CollectiveError: values of this dtype cannot be reduced, or have no such axis.
    """
    first = points[0]
    if first.kind == "all_reduce":
        check_reducible(first.how, first.values, first.where)
    if first.kind not in ("all_reduce", "all_gather"):
        return
    axis = _axis(replicas[0])
    if axis is not None:
        for value in first.values:
            rank = len(value.shape) if type(value.shape) is tuple else tf.TensorShape(value.shape).rank
            if rank is not None and not value.sparse and not -rank <= axis < rank:
                raise CollectiveError.no_axis("all_gather", axis, str(tf.TensorShape(value.shape)))
    for point in points[1:]:
        if len(point.values) == len(first.values):  # different structures are reported by `regroup`
            for one, other in zip(first.values, point.values, strict=True):
                if not _fit(one, other, first.kind == "all_gather", axis):
                    raise _mismatch(first, replicas, [", ".join(texts(each.values)) for each in points])


def check_reducible(name: str, values: Iterable[Any], where: str | Callable[[], str]) -> None:
    """Checks that values can be reduced.

    Args:
        name: the reduction, such as "SUM".
        values: what has a dtype.
        where: the place of the all-reduce, or a function that finds it.

    Raises:
        CollectiveError: they are of another dtype.
    """
    for value in values:
        dtype = value.dtype
        if dtype is _BOOL or (name in _ORDERED and dtype.is_complex):
            raise CollectiveError.wrong_dtype(name, dtype.name)
        if dtype is _STRING:
            raise CollectiveError.host_only("all_reduce", where if isinstance(where, str) else where(), dtype.name)


def check_divides(name: str, x: tf.Tensor, axis: int, parts: int) -> int:
    """Checks that an axis of a tensor can be divided into equal parts, as far as its shape is known.

    Returns:
        The axis, counted from the beginning.

    Raises:
        ReplicaValueError: the axis is not an int.
        CollectiveError: there is no such axis, or its size does not divide.
    """
    axis = as_axis(name, axis)
    if x.shape.rank is None:
        return axis
    if not isinstance(axis, int) or not -x.shape.rank <= axis < x.shape.rank:
        raise CollectiveError.no_axis(name, axis, str(x.shape))
    axis %= x.shape.rank
    if x.shape[axis] is not None and x.shape[axis] % parts:
        raise CollectiveError.not_divisible(axis, x.shape[axis], parts)
    return axis


def check_variables_and_gradients(merge_fn: Callable[..., Any], point: SyncPoint, args: Any, error: Exception) -> None:
    """Looks for what the replicas of an optimizer, or of another function that is not the user's, brought unlike.

    Called after such a merge function has failed: a program that runs is left alone, and an error of the user's own
    merge function stays as it is.

    Args:
        merge_fn: the merge function.
        point: the sync point of replica 0.
        args: the regrouped arguments.
        error: what the merge function raised.

    Raises:
        ReplicaMismatchError: the replicas brought different variables in one place, or one of them brought None.
    """
    module = getattr(getattr(merge_fn, "func", merge_fn), "__module__", None) or ""
    if not module.startswith(("keras.", "tensorflow.", "replica_engine.", "tf_keras.")):
        return
    leaves, _ = flatten(args, what="the arguments of a merge function")
    for leaf in leaves:
        values = leaf.values if isinstance(leaf, distribute.PerReplica) else ()
        if any(value is None for value in values):
            raise ReplicaMismatchError(
                f"The replicas meet in {point}, and not all of them have each gradient:\n"
                f"{_rows(['None' if value is None else 'a gradient' for value in values])}\n"
                "The tape gives None to a replica whose loss does not depend on the variable, as in a branch on the "
                "replica id. Let all replicas compute the same losses, or put tf.zeros_like(variable) in the place of "
                "the missing gradient."
            ) from error
        if any(hasattr(value, "assign") for value in values):
            names = [str(getattr(value, "path", None) or getattr(value, "name", value)) for value in values]
            raise ReplicaMismatchError(
                f"The replicas meet in {point}, and bring different variables in one place:\n"
                f"{_rows([name.removesuffix(':0') for name in names])}\n"
                "A replica's list of gradients and variables is merged with those of the others place by place. Give "
                "the variables in the same order on all replicas."
            ) from error


def _rows(texts: Sequence[str]) -> str:
    return "\n".join(f"  replica {replica}: {text}" for replica, text in enumerate(texts))


_BOOL, _STRING = tf.bool, tf.string  # compared with `is`: == of dtypes is slow
_ORDERED = ("MAX", "MIN")


def assertions(point: SyncPoint, replicas: Sequence[Replica], args: Sequence[Any]) -> list[tf.Operation]:
    """Adds ops to the current graph that check the shapes of an all-gather where these are not static.

    Args:
        point: the sync point of replica 0.
        replicas: the replicas.
        args: for each replica, the arguments that it passed to the merge function.

    Returns:
        The ops. They raise tf.errors.InvalidArgumentError with the text of ReplicaMismatchError.
    """
    axis = _axis(replicas[0])
    if point.kind != "all_gather" or axis is None:
        return []
    checks = []
    for tensors in zip(*map(tf.nest.flatten, args), strict=True):
        if not all(tf.is_tensor(tensor) for tensor in tensors) or _known_to_fit(tensors, axis):
            continue
        shapes = [tf.shape(tensor) for tensor in tensors]
        rest = [_without(shape, axis) for shape in shapes]
        fits = [_equal(rest[0], other) for other in rest[1:]]
        head, *rows, tail = str(_mismatch(point, replicas, [tensor.dtype.name for tensor in tensors])).split("\n")
        data = [head, *itertools.chain(*zip(rows, shapes, strict=True)), tail]
        checks.append(tf.debugging.Assert(tf.reduce_all(fits), data, summarize=8))
    return checks


def _axis(replica: Replica) -> int | None:
    """The axis of the all-gather in which a replica waits; None if it is unknown, or if this is not an all-gather."""
    detail: tuple = replica.meets[1]  # type: ignore[index]  # the engine compares `meets` and never looks inside
    if len(detail) < 2 or detail[0] != "all_gather":
        return None
    axis = tf.get_static_value(detail[1]) if tf.is_tensor(detail[1]) else detail[1]
    try:
        return int(axis)
    except (TypeError, ValueError):
        return None


def _mismatch(point: SyncPoint, replicas: Sequence[Replica], brought: Sequence[str]) -> ReplicaMismatchError:
    rows = "\n".join(f"  {replica}: {tensors}" for replica, tensors in zip(replicas, brought, strict=True))
    rule = (
        "Every replica must bring tensors of equal dtypes and shapes. If one replica has a smaller share of the batch, "
        "reduce over the samples first (tf.reduce_sum) and all-reduce the result, or pad the share, "
        "as replica_engine.split_batch does."
        if point.kind == "all_reduce"
        else "Every replica must bring tensors of equal dtypes, and shapes that differ along the axis only. Gather "
        "along the axis in which the shapes differ, or pad the tensors to one size first."
    )
    return ReplicaMismatchError(f"The replicas brought different tensors to {point}:\n{rows}\n{rule}")


def _fit(one: Brought, other: Brought, gathered: bool, axis: int | None) -> bool:
    if one.dtype is other.dtype and type(one.shape) is tuple and one.shape == other.shape:
        return True
    if one.dtype != other.dtype or one.sparse != other.sparse:
        return False
    if one.sparse:
        return True
    if not gathered:
        return one.shape is other.shape or tf.TensorShape(one.shape).is_compatible_with(other.shape)
    return _shapes_fit(tf.TensorShape(one.shape), tf.TensorShape(other.shape), axis)


def _shapes_fit(one: tf.TensorShape, other: tf.TensorShape, axis: int | None) -> bool:
    """Whether static shapes have the same rank, and compatible sizes in every dimension except `axis`."""
    if one.rank is None or other.rank is None:
        return True
    if one.rank != other.rank:
        return False
    if axis is None or not -one.rank <= axis < one.rank:  # an axis out of range raises its own error
        return True
    return _rest(one, axis).is_compatible_with(_rest(other, axis))


def _known_to_fit(tensors: Sequence[tf.Tensor], axis: int) -> bool:
    """Whether the check needs no ops: all sizes except along the axis are static, or the axis is out of range."""
    shapes = [tensor.shape for tensor in tensors]
    if any(shape.rank is None for shape in shapes):
        return False
    return not -shapes[0].rank <= axis < shapes[0].rank or all(
        _rest(shape, axis).is_fully_defined() for shape in shapes
    )


def _rest(shape: tf.TensorShape, axis: int) -> tf.TensorShape:
    sizes = list(shape)
    del sizes[axis]
    return tf.TensorShape(sizes)


def _without(shape: tf.Tensor, axis: int) -> tf.Tensor:
    """A shape, given as a vector, without the size of one axis."""
    index = axis if axis >= 0 else tf.size(shape) + axis
    return tf.concat([shape[:index], shape[index + 1 :]], 0)


def _equal(one: tf.Tensor, other: tf.Tensor) -> tf.Tensor:
    """Whether two vectors are equal; their lengths may differ."""
    sizes = tf.raw_ops.Equal(x=one, y=other, incompatible_shape_error=False)
    return tf.reduce_all(sizes) & tf.equal(tf.size(one), tf.size(other))


_MOST_COUNTED = 1 << 31  # launches of a program, after which they are counted from 0 again
_FIRST_KEY, _MOST_PROGRAMS, _MOST_LAUNCHES = 1 << 30, 1 << 13, 1 << 17
"""Numbers of collectives are below 2**31, and TensorFlow counts from 100: it makes variables with those numbers."""


class Launches:
    """Tells the job what this worker launches, for the comparison with the other workers.

    Nothing else notices when a sum meets a mean, or a loss meets a gradient. So each worker tells the job what its
    collectives are: the sync point with its line, the reduction, the dtype and the shape.

    - Before its first launch, a collective waits until the other workers are about to launch an equal one. So two
      workers that differ get ProgramDisagreementError, and no number.
    - Later launches are told without waiting. If they are in another order, the error comes about 0.1 s later. Until
      then each side waits: TensorFlow's number of a collective says which one it is and how often it was launched, so
      those that differ never meet. Programs over Gloo compare the same before they sum.

    Lines are compared for sync points in replicas and for calls of `reduce` (`user_frames.calling_lines`), without the
    folders of the files. They are not compared for variables that are read or made, since that may happen in lines of
    TensorFlow or Keras. Of these, of those that a sum updates, and of the model in a step of Keras, the numbers are
    compared.

    Args:
        member: the connection to the job.
        timeout: seconds to wait for the others before the first launch of a collective; None waits without a limit.
        warn_after: seconds until a warning about such a wait; None takes WARN_AFTER.
    """

    def __init__(self, member: workers.Member, timeout: float | None = None, warn_after: float | None = None):
        self._member = member
        self._timeout, self._warn_after = timeout, warn_after
        # By digest and not by program: two programs with one digest are the same to the other workers.
        self._known: set[str] = set()
        # By digest: which program this is, and how often it was launched.
        self._launches: dict[str, tuple[int, int]] = {}
        self._point: SyncPoint | None = None
        self._new_run = False
        self._steps = 0
        # The operation, its lines, what is compared of them, and numbers of variables.
        self._what: tuple[str, str, str, set[int]] | None = None

    def merging(self, point: SyncPoint) -> contextlib.AbstractContextManager[Any]:
        """Inside the block, collectives belong to a sync point of the replicas."""
        self._new_run = self._new_run or point.number == 1
        return interrupts.set_for_block(self, "_point", point)

    def doing(
        self, what: str, name: str | None = None, variables: Sequence[Any] = ()
    ) -> contextlib.AbstractContextManager[Any]:
        """Inside the block, collectives belong to an operation.

        Args:
            what: the operation, in words: "reduce SUM".
            name: the name of the variable that it reads; None for an operation that the user's code calls.
            variables: the distributed variables that it reads or updates; other values count for nothing.
        """
        point = self._point
        thread = None if point is None else point.thread
        lines = [] if point is None and name is not None else user_frames.calling_lines(thread)
        compared, outer = " ".join(lines), f", from {', '.join(lines[1:4])}" if lines[1:] else ""
        if point is not None:
            line = f"{os.path.basename(point.filename)}:{point.lineno}"
            operation, _, which = what.partition(" ")
            name = f"{point.name} {which}" if point.name == f"all_{operation}" else f"{point.name}: {what}"
            described = name, f"{line} in {point.function}{outer}", f"{line} {compared}"
        elif name is not None:
            described = f"{what} of {name}", "", ""
        else:
            line, function = user_frames.calling_line()
            described = what, f"{line} in {function}{outer}", compared
        numbers = variable_numbers.numbers(handle for each in variables for handle in variable_numbers.handles(each))
        return interrupts.set_for_block(self, "_what", (*described, numbers))

    def describe(self, kind: str, operand: Any) -> Any:
        """Describes a collective of TensorFlow; see `worker_collectives.note_launches`."""
        program, launched = self.described(kind, operand)
        return lambda: self._key(program.digest, launched())

    def described(self, kind: str, operand: Any) -> tuple[workers.Program, Callable[[], int]]:
        """What a collective is, and a function to call whenever it is about to be launched.

        The function tells the other workers, and returns how often the collective was launched before.

        Raises:
            GraphModeError: it is in a graph of tf.compat.v1.
        """
        check_mode()
        what, where, compared, numbers = self._what or (kind, "", "", set())
        new_run, self._new_run = self._new_run, False
        body = f"{what}, {_tensor_text(operand)}"
        program = workers.Program(_digest(_ADDED_NUMBER.sub("", f"{kind} {body} {compared}")), body, where)
        program = variable_numbers.using(program, numbers | variable_numbers.current_model())
        place = str(self._point or (f"{what} at {where}" if where else what))

        def launched() -> int:
            self._steps += new_run
            self._member.progress(self._steps or None, place)
            return self._launch(program)

        return program, launched

    def with_launch(self, program: workers.Program) -> tuple[workers.Program, Callable[[], int]]:
        """The same of a collective that is described already."""
        return program, lambda: self._launch(program)

    def _launch(self, program: workers.Program) -> int:
        self._wait_for_first(program)
        worker_collectives.begun()
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

    def launch(self, program: workers.Program) -> None:
        """Tells the job of a launch; of the first one, waits until the others are there.

        Raises:
            ProgramDisagreementError: another worker does something else.
            WorkersMissingError: the others did not come in time.
            WorkerLostError: a worker is lost.
        """
        self._wait_for_first(program)
        self._member.launched(program)

    def _wait_for_first(self, program: workers.Program) -> None:
        self._member.check()
        if program.digest not in self._known:
            self._member.compile(program, self._timeout, self._warn_after)
            self._known.add(program.digest)

    def note(self, program: workers.Program) -> None:
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


def make_dataset_program(rows: int) -> workers.Program:
    """The distribution of a dataset, as workers compare it: they would train on unequal shares without an error."""
    what = f"a dataset in batches of {rows} rows"
    return workers.Program(_digest(what), what, user_frames.calling_line()[0])


def check_mode() -> None:
    """Raises GraphModeError in a graph of tf.compat.v1, whose sessions do not know the other workers."""
    if not tf.executing_eagerly() and not tf.inside_function():
        raise GraphModeError(
            "MultiWorkerMirroredStrategy of several workers runs in eager mode and in tf.functions. In a graph of "
            "tf.compat.v1, TensorFlow's collectives would wait without end for the other workers. Remove the `with "
            "tf.Graph().as_default():` or tf.compat.v1.disable_eager_execution()."
        )


def make_variable_program(name: str, value: Any, how: str | None = None) -> workers.Program:
    """The making of a variable, as workers compare it.

    Args:
        name: its name; the numbers that make names unique are not compared, since a chief may have made more models.
        value: this worker's initial value.
        how: how it is divided over devices, in words.
    """
    what = f"creation of the variable {name}, {_tensor_text(value)}{f', {how}' if how else ''}"
    return workers.Program(_digest(_ADDED_NUMBER.sub("", what)), what)


def _tensor_text(value: Any) -> str:
    shape = getattr(value, "shape", None)
    sizes = "" if shape is None else str(list(shape)) if tf.TensorShape(shape).rank is not None else "[...]"
    return f"{tf.as_dtype(value.dtype).name if hasattr(value, 'dtype') else type(value).__name__}{sizes}"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


_ADDED_NUMBER = re.compile(r"_\d+(?=/|$|,| |:)")
