"""Every exception of the package, each with its wording.

Three families, so that a reader of a traceback knows whose turn it is:

- misuse (`MergeCallMismatchError`, `StructureMismatchError`, ...): the program has to change;
- the outside world (`ReplicaTimeoutError`): something did not come back;
- `ReplicaUnwound`: not an error at all, but how a paused replica is taken down when another failed. It
  derives from BaseException so that no `except Exception` in user code stops it on its way.

A user's own exception is never wrapped: it leaves `run` as the object that was raised, and `note_failure`
adds to it which replica it came from. Nothing here imports anything but the standard library.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any


class ReplicaEngineError(Exception):
    """Base of every error that this package raises on its own account.

    Example:
        >>> issubclass(MergeCallMismatchError, ReplicaEngineError)
        True
    """

    def __reduce__(self) -> tuple[Any, ...]:
        # Most of these build their message from other arguments, and could not be made again of it.
        return _rebuild, (type(self), self.args, self.__dict__)

    ag_pass_through = True  # AutoGraph, leave it as it is: another type would hide what it says and holds


def _rebuild(kind: type[ReplicaEngineError], args: tuple[Any, ...], state: dict[str, Any]) -> ReplicaEngineError:
    error = kind.__new__(kind, *args)
    error.args = args
    error.__dict__.update(state)
    return error


@dataclass(frozen=True)
class ReplicaRow:
    """What is known of one replica when something went wrong; a row in an error's table.

    Attributes:
        replica: its index in the run, from 0.
        size: how many replicas the run has.
        device: its device, in the short form "CPU:1".
        state: what it is doing, in words.
        merge_calls: how many sync points it has reached in this run.
        where: its last sync point with file and line, or "" when it reached none.
    """

    replica: int
    size: int
    device: str
    state: str
    merge_calls: int
    where: str

    def __str__(self) -> str:
        calls = f"{self.merge_calls} merge call{'' if self.merge_calls == 1 else 's'}"
        where = f", last: {self.where}" if self.where else ""
        return f"replica {self.replica} of {self.size} ({self.device}): {self.state}; {calls}{where}"


def _table(rows: Iterable[ReplicaRow]) -> str:
    return "\n".join(f"  {row}" for row in rows)


class MergeCallMismatchError(ReplicaEngineError, RuntimeError):
    """The replicas of one run did not meet at the same merge calls.

    Raised out of `strategy.run` when some replicas finish while others wait in a merge call, or when they
    wait in different merge functions. `rows` has one `ReplicaRow` a replica.

    Example:
        >>> row = ReplicaRow(0, 1, "CPU:0", "finished", 0, "")
        >>> MergeCallMismatchError.different_counts([row]).rows == (row,)
        True
    """

    def __init__(self, message: str, rows: Sequence[ReplicaRow] = ()):
        super().__init__(message)
        self.rows = tuple(rows)

    @classmethod
    def different_counts(cls, rows: Sequence[ReplicaRow]) -> MergeCallMismatchError:
        """Some replicas finished, others wait for them in a merge call."""
        return cls(
            "Some replicas made a different number of merge_call() calls:\n"
            f"{_table(rows)}\n"
            "Every replica must make the same merge calls in the same order; all_reduce, all_gather, "
            "optimizer.apply_gradients and assignments to aggregated variables are merge calls too. "
            "Move the call out of the branch that only some replicas take, or let every replica make it "
            "(with zeros, say, where there is nothing to add).",
            rows,
        )

    @classmethod
    def different_functions(cls, rows: Sequence[ReplicaRow]) -> MergeCallMismatchError:
        """All replicas wait, but not in the same merge function."""
        return cls(
            "The replicas met in different merge functions:\n"
            f"{_table(rows)}\n"
            "A merge call runs one function for all replicas, so every replica must pass the same one. "
            "Choose the function before the branch on the replica id, or pass what differs as an argument: "
            "merge_call(merge_fn, args=(value,)).",
            rows,
        )


class StructureMismatchError(ReplicaEngineError, ValueError, AssertionError):
    """Replicas returned, or passed to a merge call, values of different structure.

    It is an AssertionError as well because `tf.distribute` raises that here. `path` says where in the
    structure, `replicas` names the two that differ.
    """

    def __init__(self, what: str, path: str, replicas: tuple[int, int], details: tuple[str, str]):
        first, second = replicas
        super().__init__(
            f"{what} differ in structure at `{path}`: replica {first} has {details[0]}, "
            f"replica {second} has {details[1]}. Every replica must give the same structure: the same "
            "lengths, the same keys, the same kinds of containers. Put None where a replica has nothing."
        )
        self.path = path
        self.replicas = replicas


class MergeCallGraphError(ReplicaEngineError, RuntimeError):
    """merge_call was made while another graph was being built than the one `run` was called in."""

    def __init__(self, replica: str, where: str):
        super().__init__(
            f"`merge_call` called while defining a new graph or a tf.function, by {replica}, at {where}. "
            "The merge function runs where `strategy.run` was called and cannot see tensors of a graph that "
            "is still being built inside one replica. The usual causes: a nested @tf.function, a tf.cond or "
            "a tf.while_loop (AutoGraph makes them from `if` and `while` on tensors) around all_reduce, "
            "apply_gradients or merge_call. Write instead:\n"
            "    @tf.function\n"
            "    def step(batch):\n"
            "        return strategy.run(fn, args=(batch,))   # and no tf.function inside fn\n"
            "and move the control flow out of fn, or the merge call out of the control flow. The replica id is a "
            "tensor; to branch on it in Python: tf.get_static_value(context.replica_id_in_sync_group)."
        )


class NotInReplicaError(ReplicaEngineError, RuntimeError):
    """A replica's context was used from a thread that is not running that replica."""

    def __init__(self, thread: str):
        super().__init__(
            f"merge_call was made from thread {thread!r}, which is not running a replica of this context. Call it "
            "from the function that strategy.run runs, on the thread that runs it: a thread of your own "
            "can compute values, and the replica passes them to merge_call."
        )


class VariableMismatchError(ReplicaEngineError, RuntimeError):
    """A replica asked for a variable that the first replica did not create."""

    def __init__(self, name: str | None, replica: int, created: Sequence[str]):
        name = name or "without a name"
        made = ", ".join(created) if created else "none"
        super().__init__(
            f"Tried to create variable {name} with mismatching name on device {replica}: replica 0, which "
            f"creates each variable for all replicas, has not created it in this run (it created: {made}). "
            "Create the same variables, in the same order and under the same names, on every replica; "
            "best before the run, under `with strategy.scope():`."
        )


class DeviceError(ReplicaEngineError, ValueError, AssertionError):
    """The devices given to a strategy cannot be used together. (AssertionError, as in `tf.distribute`.)"""

    @classmethod
    def missing(cls, missing: Sequence[str], present: Sequence[str], kind: str) -> DeviceError:
        """Devices that TensorFlow does not know."""
        more = (
            "more CPU devices can be made before TensorFlow starts: replica_engine.testing.logical_devices(n)"
            if kind == "CPU"
            else f"tf.config.list_logical_devices({kind!r}) lists those of this kind"
        )
        return cls(f"No such device: {', '.join(missing)}. This process has {', '.join(present)}; {more}.")

    @classmethod
    def duplicated(cls, devices: Sequence[str]) -> DeviceError:
        """The same device more than once."""
        return cls(f"No duplicates allowed in `devices`, one replica runs on each: {', '.join(devices)}.")

    @classmethod
    def mixed(cls, kinds: Sequence[str]) -> DeviceError:
        """Devices of several kinds."""
        return cls(
            f"`devices` mixes kinds ({', '.join(kinds)}); the slowest would hold up every step. "
            "Pass devices of one kind."
        )

    @classmethod
    def unreadable(cls, device: object) -> DeviceError:
        """Something that does not name a device."""
        return cls(
            f'Not a device: {device!r}. `devices` is a list of names such as "CPU:0" or "/device:GPU:1", or of '
            'tf.config.LogicalDevices: ["CPU:0", "CPU:1"].'
        )

    @classmethod
    def bad_count(cls, count: object) -> DeviceError:
        """A number of devices that is none."""
        return cls(f"The number of devices must be a positive int; got {count!r}.")

    @classmethod
    def too_few(cls, wanted: int, kind: str, present: int) -> DeviceError:
        """More replicas than there can be devices."""
        return cls(
            f"{wanted} replicas need {wanted} {kind} devices, and this process has {present}. Ask for {present} or "
            "fewer, or run on CPU devices, of which there are as many as you ask for: "
            f"TPUStrategy(PjrtClusterResolver('cpu'), num_cores={min(wanted, 1024)})."
        )

    @classmethod
    def other_size(cls, given: int, wanted: int) -> DeviceError:
        """A program compiled for another number of replicas."""
        return cls(
            f"The body was traced for {wanted} replicas and cannot be compiled for {given} devices. Trace it anew."
        )

    @classmethod
    def unknown_platform(cls, platform: object, known: Sequence[str]) -> DeviceError:
        """No such kind of device."""
        return cls(f"No such platform: {platform!r}. It is one of {', '.join(known)}, or None for the first there is.")

    @classmethod
    def none_of_platform(cls, platform: str, present: Sequence[str]) -> DeviceError:
        """jax finds no device of that kind."""
        return cls(
            f"jax finds no {platform.upper()} device; this process has: {', '.join(present)}. For GPUs install "
            '"replica-engine[cuda]", for TPUs "replica-engine[tpu]".'
        )

    @classmethod
    def too_late(cls, wanted: int, kind: str, present: int) -> DeviceError:
        """Logical devices asked for after TensorFlow made its devices."""
        return cls(
            f"Asked for {wanted} logical {kind} devices, but TensorFlow has started with {present}. Logical "
            "devices are made before TensorFlow first runs anything: call "
            f"replica_engine.testing.logical_devices({wanted}) at the top of the program."
        )

    @classmethod
    def none_of_kind(cls, kind: str) -> DeviceError:
        """No physical device of the kind to divide into logical ones."""
        return cls(f"This machine has no {kind} device to make logical devices of.")


class BackendMissingError(ReplicaEngineError, ImportError):
    """jax, which compiled programs run on, is not installed or not of a version that works."""

    @classmethod
    def not_installed(cls) -> BackendMissingError:
        """There is no jax."""
        needs = " (It takes Python 3.11 or newer.)" if sys.version_info < (3, 11) else ""
        return cls(
            "TPUStrategy and replica_engine.xla run programs through jax, which is not installed. Install it with\n"
            f'    pip install "replica-engine[xla]"     # CPU; [cuda] for GPUs, [tpu] for TPUs{needs}'
        )

    @classmethod
    def unsupported(cls, version: str, oldest: str) -> BackendMissingError:
        """A version that is too old."""
        return cls(
            f"jax {version} is installed; replica_engine needs {oldest} or newer. Install it with\n"
            '    pip install --upgrade "replica-engine[xla]"'
        )

    @classmethod
    def name_vanished(cls, version: str, error: BaseException) -> BackendMissingError:
        """A version that lacks a name that is needed."""
        return cls(
            f"jax {version} lacks a name that replica_engine uses ({error}). Install a version that it was checked "
            'with:\n    pip install "jax==0.10.2" "jaxlib==0.10.2"'
        )


class NotInBodyError(ReplicaEngineError, RuntimeError):
    """A cross-replica operation was used where no replicated body is being traced."""

    def __init__(self, name: str):
        super().__init__(
            f"xla.{name}() works inside a function that runs on replicas, and there is none here. Call it from the "
            "function that is passed to xla.replicate(fn, inputs) or to TPUStrategy.run(fn)."
        )


class InputsError(ReplicaEngineError, ValueError, TypeError):
    """The inputs of a replicated function are no list over replicas."""

    @classmethod
    def no_list(cls, inputs: object) -> InputsError:
        """Not a list, or an empty one."""
        return cls(
            f"`inputs` is a list over replicas of argument lists; got {_brief(inputs)}. "
            "For two replicas of f(x, y): inputs=[[x0, y0], [x1, y1]]."
        )

    @classmethod
    def no_argument_list(cls, each: object) -> InputsError:
        """A list of something else than lists."""
        return cls(
            f"`inputs` has, for each replica, a list of arguments; for one it has {_brief(each)}. "
            "For two replicas of f(x): inputs=[[x0], [x1]]."
        )

    @classmethod
    def wrong_length(cls, given: int, wanted: int) -> InputsError:
        """As many lists as there are not replicas."""
        return cls(f"`inputs` has argument lists for {given} replicas, and num_replicas is {wanted}.")

    @classmethod
    def nested(cls) -> InputsError:
        """Inside another replicated body."""
        return cls(
            "A replicated body cannot be replicated again. Call the function itself, and xla.cross_replica_sum and "
            "its like with `groups` for a part of the replicas."
        )

    @classmethod
    def in_function(cls, name: str) -> InputsError:
        """A compiled body called while a graph is built."""
        return cls(f"`{name}` is compiled and runs in eager mode. In a tf.function call xla.replicate(fn, inputs).")

    @classmethod
    def not_of_signature(cls, name: str, signature: str) -> InputsError:
        """Arguments that an input signature excludes."""
        return cls(f"The arguments of `{name}` do not fit its input_signature, {signature}: in number, dtype or shape.")

    @classmethod
    def other_program(cls, name: str) -> InputsError:
        """Inputs that a compiled body was not compiled for."""
        return cls(
            f"`{name}` was compiled for inputs of another structure, or of other shapes or dtypes. Lower it again "
            "with these: xla.lower(fn, inputs).compile()."
        )


class ReplicaMismatchError(ReplicaEngineError, ValueError):
    """Replicas were given tensors of different shapes or dtypes, and one program runs on all of them."""

    @classmethod
    def shapes(cls, name: str, replica: int, first: str, other: str) -> ReplicaMismatchError:
        """Two shapes."""
        return cls(
            f"{name} has shape {first} on replica 0 and {other} on replica {replica}. One program runs on all "
            "replicas, so shapes must be equal: batch with drop_remainder=True, or pad the last batch."
        )

    @classmethod
    def dtypes(cls, name: str, replica: int, first: str, other: str) -> ReplicaMismatchError:
        """Two dtypes."""
        return cls(f"{name} is of dtype {first} on replica 0 and {other} on replica {replica}. Cast one of them.")

    @classmethod
    def variables(cls, name: str) -> ReplicaMismatchError:
        """A variable for each replica."""
        return cls(
            f"{name} is another variable on each replica, and one program runs on all of them. Pass values, "
            "`v.read_value()`; or make one variable under a strategy's scope, with ON_READ synchronization if replicas "
            "are to have values of their own."
        )

    @classmethod
    def not_tensors(cls, name: str, value: object) -> ReplicaMismatchError:
        """Values that differ by replica and are no tensors."""
        return cls(
            f"{name} differs by replica and holds {_brief(value)}. What differs by replica must be a tensor, since "
            "one program runs on all replicas; tell them apart with the replica id."
        )


class CollectiveError(ReplicaEngineError, ValueError):
    """A cross-replica operation cannot be done as asked."""

    @classmethod
    def unknown_reduction(cls, op: object, known: Sequence[str]) -> CollectiveError:
        """No such reduction."""
        return cls(f"Replicas cannot be reduced with {op!r}; it is one of {', '.join(known)}.")

    @classmethod
    def wrong_dtype(cls, op: str, dtype: str) -> CollectiveError:
        """A dtype without that reduction."""
        return cls(f"Values of dtype {dtype} cannot be reduced with {op}. Cast them first: tf.cast(x, tf.int32).")

    @classmethod
    def bad_groups(cls, groups: object, size: int) -> CollectiveError:
        """Groups that are no partition."""
        return cls(
            f"`groups` must have each of the {size} replicas exactly once; got {groups}. For two halves of four: "
            "groups=[[0, 1], [2, 3]]."
        )

    @classmethod
    def unequal_groups(cls, groups: object) -> CollectiveError:
        """Groups of different sizes, where results would differ in shape."""
        return cls(f"`groups` must be of equal sizes here, since shapes depend on them; got {groups}.")

    @classmethod
    def bad_pairs(cls, pairs: object, size: int) -> CollectiveError:
        """Pairs that are no permutation."""
        return cls(
            f"`pairs` are (from, to) replicas, each sending and receiving at most once, of 0 to "
            f"{size - 1}; got {pairs}."
        )

    @classmethod
    def no_axis(cls, name: str, axis: object, shape: str) -> CollectiveError:
        """A dimension that is not there."""
        return cls(f"{name} along dimension {axis} of a tensor of shape {shape}, which has no such dimension.")

    @classmethod
    def not_divisible(cls, axis: int, length: int, parts: int) -> CollectiveError:
        """A dimension that cannot be split."""
        return cls(f"Dimension {axis} has length {length} and cannot be split into {parts} equal parts.")

    @classmethod
    def unknown_shape(cls, name: str, shape: str) -> CollectiveError:
        """A shape that is not static."""
        return cls(
            f"{name} needs a static shape, and this one is {shape}. Give the batch a fixed size, "
            "dataset.batch(n, drop_remainder=True), or set it: tf.ensure_shape(x, ...)."
        )


class CaptureError(ReplicaEngineError, ValueError):
    """A replica body uses something from outside that cannot be on a device."""

    @classmethod
    def not_a_variable(cls, fn: str, what: str, where: str) -> CaptureError:
        """A resource of another kind: a table, an iterator, a summary writer."""
        return cls(
            f"`{fn}` uses a resource that is not a variable{_at(where)}: {what}. Lookup tables, dataset "
            "iterators and the like live on the host: use them before the run and pass their results as arguments."
        )

    @classmethod
    def unknown_shape(cls, fn: str, shape: str, where: str) -> CaptureError:
        """A variable whose shape may change."""
        return cls(
            f"`{fn}` uses a variable of shape {shape}{_at(where)}, and XLA compiles for fixed shapes. Make the "
            "variable without shape=, so that it has the shape of its value."
        )

    @classmethod
    def host_only(cls, fn: str, dtype: str, where: str) -> CaptureError:
        """A tensor of strings and the like."""
        return cls(
            f"`{fn}` uses a tensor of dtype {dtype} from outside{_at(where)}, which no device has. Turn it into "
            "numbers before the run."
        )


class StuckProgramError(ReplicaEngineError, RuntimeError):
    """A compiled program that was interrupted has not ended, and no other can run on its devices."""

    PATIENCE = 10.0
    """Seconds that the next run waits for it."""

    def __init__(self, replicas: int):
        super().__init__(
            f"A compiled program on {replicas} replicas was interrupted earlier and has not ended for another "
            f"{self.PATIENCE:g} s, so nothing else can run on its devices. Its replicas may wait for each other: every "
            "replica must reach the same cross-replica operations, so there can be none in a branch on the replica id. "
            "Make a new strategy, and load the variables from a checkpoint."
        )


class LostVariableError(ReplicaEngineError, RuntimeError):
    """A variable's value was given to a program that failed, and is gone."""

    def __init__(self) -> None:
        super().__init__(
            "The value of a variable was given to a compiled program that failed while it ran (out of memory, say), "
            "and is gone. Assign it, or load a checkpoint."
        )


class GraphModeError(ReplicaEngineError, RuntimeError):
    """A compiled body was called in a graph of tf.compat.v1."""

    def __init__(self) -> None:
        super().__init__(
            "Compiled bodies run in eager mode and in tf.functions, not in a graph of tf.compat.v1. Remove the "
            "`with tf.Graph().as_default():` or tf.compat.v1.disable_eager_execution(); MirroredStrategy runs there."
        )


class VariableCreationError(ReplicaEngineError, ValueError):
    """A replica body creates new variables each time it is traced."""

    def __init__(self, fn: str, names: Sequence[str]):
        super().__init__(
            f"`{fn}` creates variables ({', '.join(names)}) each time it runs, and it is traced once for all runs. "
            "Create them once: before the run, under `with strategy.scope():`, or in the first run only, kept in "
            "an attribute (`if self.w is None: self.w = tf.Variable(...)`)."
        )


class LoweringError(ReplicaEngineError, ValueError):
    """XLA cannot compile a replica body. Raised before anything runs."""

    @classmethod
    def unsupported_op(cls, fn: str, op: str, where: str) -> LoweringError:
        """An op without a lowering."""
        return cls(
            f"`{fn}` uses {op}{_at(where)}, which XLA cannot compile. Do it before the run, in the input pipeline "
            "or around strategy.run, and pass the result as an argument; MirroredStrategy runs it as it is."
        )

    @classmethod
    def not_constant(cls, fn: str, op: str, where: str) -> LoweringError:
        """A shape or axis that depends on data."""
        return cls(
            f"In `{fn}` a shape or an axis of {op} depends on data{_at(where)}. XLA compiles for fixed shapes: use a "
            "Python number there, or mask values instead of cutting them out."
        )

    @classmethod
    def unbounded_loop(cls, fn: str, where: str) -> LoweringError:
        """A loop whose gradient needs a bound."""
        return cls(
            f"In `{fn}` a loop keeps a value of each iteration, for its gradient or in a TensorArray{_at(where)}, and "
            "XLA has to know how many: pass maximum_iterations to tf.while_loop, or loop over tf.range of a number."
        )

    @classmethod
    def dynamic_argument(cls, fn: str, name: str, shape: str) -> LoweringError:
        """An argument without a static shape."""
        return cls(
            f"{name} of `{fn}` has the shape {shape}, and XLA compiles for fixed shapes. Give it one: "
            "dataset.batch(n, drop_remainder=True), tf.ensure_shape(x, ...), or pad it."
        )

    @classmethod
    def dynamic_result(cls, fn: str, index: int, where: str) -> LoweringError:
        """A result whose shape depends on data."""
        return cls(
            f"Result {index} of `{fn}` has a shape that depends on data{_at(where)}, as of tf.where(mask), "
            "tf.unique or tf.boolean_mask. Return a mask, or values padded to a fixed size."
        )

    @classmethod
    def host_only(cls, fn: str, name: str, dtype: str) -> LoweringError:
        """An argument of strings and the like."""
        return cls(
            f"{name} of `{fn}` is of dtype {dtype}, which no device has. Turn it into numbers before the run, in the "
            "input pipeline for example; MirroredStrategy runs it as it is."
        )

    @classmethod
    def host_result(cls, fn: str, index: int, op: str, where: str) -> LoweringError:
        """A result of strings and the like."""
        return cls(
            f"Result {index} of `{fn}` is a string or the like, made by {op}{_at(where)}, which no device has. Return "
            "numbers, and make what you need of them after the run; MirroredStrategy runs it as it is."
        )

    @classmethod
    def other(cls, fn: str, message: str, where: str) -> LoweringError:
        """Whatever else XLA says."""
        return cls(f"XLA cannot compile `{fn}`{_at(where)}: {message}")


def _at(where: str) -> str:
    return f" at {where}" if where else ""


def _brief(value: object) -> str:
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) < 80 else text[:77] + '...'}"


class ReplicaTimeoutError(ReplicaEngineError, TimeoutError):
    """A replica did not come back in `timeout` seconds. `rows` has one `ReplicaRow` a replica."""

    def __init__(self, timeout: float, rows: Sequence[ReplicaRow], stacks: str = ""):
        super().__init__(
            f"A replica did not reach its next sync point in {timeout:g} s:\n{_table(rows)}\n"
            f"Where it was:\n{stacks}\n"
            "It was given up; pass a longer timeout= if the step needs it."
        )
        self.rows = tuple(rows)


class ReplicaUnwound(BaseException):
    """Raised inside a replica whose run is over because another failed. Let it pass.

    A replica paused in a merge call is left in no state to go on; this exception takes its stack down, so
    that `finally` blocks and context managers run. It never leaves `strategy.run`.
    """

    def __init__(self) -> None:
        super().__init__("This run was given up because another replica, or the merge function, failed.")


def slow_replicas(seconds: float, rows: Sequence[ReplicaRow], stacks: str) -> str:
    """The warning about replicas that have been running for long; `seconds` since their last sync point."""
    return (
        f"A replica has not reached its next sync point for {seconds:g} s:\n{_table(rows)}\n"
        f"Stacks of the replicas that run:\n{stacks}"
    )


def many_traces(name: str, times: int) -> str:
    """The warning about a function that is traced and compiled again and again."""
    return (
        f"`{name}` has been traced {times} times, and most traces are compiled. It is traced anew for other shapes and "
        "dtypes, other Python values among its arguments (pass tensors: tf.constant(rate)), and for a function made "
        "anew around other objects (pass what it closes over as arguments)."
    )


def slow_program(name: str, replicas: int, seconds: float) -> str:
    """The warning about a compiled program that has been running for long."""
    return (
        f"The compiled program of `{name}` has been running on {replicas} replicas for {seconds:.0f} s. If it should "
        "not, its replicas may wait for each other: every replica must reach the same cross-replica operations, so "
        "there can be none in a branch on the replica id. Ctrl-C ends the wait."
    )


def note_failure(error: BaseException, row: ReplicaRow, others: Iterable[tuple[ReplicaRow, BaseException]]) -> None:
    """Adds to a user's exception which replica raised it, and what else failed in the same run."""
    calls = f"{row.merge_calls} merge call{'' if row.merge_calls == 1 else 's'}"
    where = f" (the last: {row.where})" if row.where else ""
    add_note(error, f"replica {row.replica} of {row.size}, {row.device}, after {calls}{where}")
    for other, raised in others:
        what = "".join(traceback.format_exception_only(raised)).strip()
        add_note(error, f"also failed: replica {other.replica} of {other.size}, {other.device}: {what}")


def note_merge_failure(error: BaseException, name: str, where: str) -> None:
    """Adds to an exception out of a merge function where the replicas had met."""
    add_note(error, f"raised in merge function {name}, in cross-replica context; the replicas met at {where}")


def note_abandoned(error: BaseException, rows: Sequence[ReplicaRow]) -> None:
    """Adds to an exception which replicas could not be taken down and were left behind."""
    for row in rows:
        add_note(error, f"abandoned, it did not come back: {row}")


def add_note(error: BaseException, note: str) -> None:
    """`error.add_note(note)`, for Python 3.10 too, where tracebacks do not print `__notes__`."""
    if hasattr(error, "add_note"):
        error.add_note(note)
    else:
        notes = getattr(error, "__notes__", None)
        if notes is None:
            notes = error.__notes__ = []  # type: ignore[attr-defined]
        notes.append(note)
