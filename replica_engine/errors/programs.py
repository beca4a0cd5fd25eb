"""Compiled bodies: what cannot be compiled, and what happens while they run."""

from __future__ import annotations

import re
from collections.abc import Sequence

from replica_engine.errors.base import ReplicaEngineError, add_note, at, shown


class CollectiveError(ReplicaEngineError, ValueError):
    """A cross-replica operation cannot be done as asked."""

    @classmethod
    def unknown_reduction(cls, op: object, known: Sequence[str]) -> CollectiveError:
        """No such reduction."""
        return cls(f"Replicas cannot be reduced with {shown(op)}; it is one of {', '.join(known)}.")

    @classmethod
    def wrong_dtype(cls, op: str, dtype: str) -> CollectiveError:
        """A dtype without that reduction."""
        return cls(f"Values of dtype {dtype} cannot be reduced with {op}. Cast them first: tf.cast(x, tf.int32).")

    @classmethod
    def host_only(cls, name: str, where: str, dtype: str) -> CollectiveError:
        """Values that no device can have: strings, variants, resources, quantized numbers."""
        return cls(
            f"{name}{at(where)} cannot combine values of dtype {dtype}: they stay on the host, and replicas meet on "
            "the devices. Turn them into numbers first. Strings can also be returned from the body and gathered after "
            "the run: strategy.gather(result, axis=0)."
        )

    @classmethod
    def apart(cls, name: str) -> CollectiveError:
        """In a branch that not all replicas take: replicate_model then has each of them run the whole batch."""
        return cls(f"{name} brings all replicas together, and this branch is not taken by all of them.")

    @classmethod
    def bad_groups(cls, groups: object, size: int) -> CollectiveError:
        """Groups that are no partition."""
        return cls(
            f"`groups` must have each of the {size} replicas exactly once; got {groups}. For two halves of four: "
            "groups=[[0, 1], [2, 3]]."
        )

    @classmethod
    def unequal_groups(cls, name: str, groups: object) -> CollectiveError:
        """Groups of different sizes, where results would differ in shape."""
        return cls(
            f"`groups` of {name} must be of equal sizes, since the shape of its result depends on them; got {groups}. "
            "For two halves of four: groups=[[0, 1], [2, 3]]."
        )

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
        return cls(f"{name} along dimension {axis} was asked for of a tensor of shape {shape}, which has no such one.")

    @classmethod
    def not_divisible(cls, axis: int, length: int, parts: int) -> CollectiveError:
        """A dimension that cannot be split."""
        return cls(
            f"Dimension {axis} has length {length} and cannot be split into {parts} equal parts, one for each replica. "
            f"Pad it to a multiple of {parts}."
        )

    @classmethod
    def unknown_shape(cls, name: str, where: str, shape: str, arguments: Sequence[str]) -> CollectiveError:
        """A shape that is not static, on any replica; `arguments` are those that it comes from."""
        source = f"comes from {' and '.join(arguments)}" if arguments else "depends on data"
        return cls(
            f"{name}{at(where)} needs a shape that is known while the body is traced for all replicas, and this one is "
            f"{shape}, which {source}. Give the batch a fixed size, dataset.batch(n, drop_remainder=True), or set the "
            "shape: tf.ensure_shape(x, ...)."
        )


class CaptureError(ReplicaEngineError, ValueError):
    """A replica body uses something from outside that cannot be on a device."""

    @classmethod
    def not_a_variable(cls, fn: str, what: str, where: str) -> CaptureError:
        """A resource of another kind: a table, an iterator, a summary writer."""
        kind = re.search(r'type="([^"]+)"', what)  # in the middle of what a handle prints
        return cls(
            f"`{fn}` uses a resource that is not a variable{at(where)}: {kind[1] if kind else what}. Lookup tables, "
            "dataset iterators and the like live on the host: use them there, in a function for "
            "xla.outside_compilation, or before the run."
        )

    @classmethod
    def unknown_shape(cls, fn: str, shape: str, where: str) -> CaptureError:
        """A variable whose shape may change."""
        return cls(
            f"`{fn}` uses a variable of shape {shape}{at(where)}, and XLA compiles for fixed shapes. Make the "
            "variable without shape=, so that it has the shape of its value."
        )

    @classmethod
    def host_only(cls, fn: str, dtype: str, where: str) -> CaptureError:
        """A tensor of strings and the like."""
        return cls(
            f"`{fn}` uses a tensor of dtype {dtype} from outside{at(where)}, which no device has. Turn it into "
            "numbers before the run."
        )

    @classmethod
    def host_only_variable(cls, fn: str, name: str, dtype: str, where: str) -> CaptureError:
        """A variable of strings and the like."""
        return cls(
            f"`{fn}` uses the variable {name!r}{at(where)}. Its dtype is {dtype}, which no device has: use it on the "
            "host, in a function for xla.outside_compilation, or before the run."
        )


class VariableCreationError(ReplicaEngineError, ValueError):
    """A replica body cannot create this variable."""

    @classmethod
    def each_time(cls, fn: str, created: Sequence[tuple[str, str]]) -> VariableCreationError:
        """It creates new ones each time it is traced; of each its name and the line."""
        names = ", ".join(f"{name}{at(where)}" for name, where in created)
        return cls(
            f"`{fn}` creates variables ({names}) each time it runs, and it is traced once for all runs. "
            "Create them once: before the run, under `with strategy.scope():`, or in the first run only, kept in "
            "an attribute (`if self.w is None: self.w = tf.Variable(...)`)."
        )

    @classmethod
    def of_arguments(cls, name: str, argument: str, where: str) -> VariableCreationError:
        """Its initial value is known in the body only; `argument` says of what."""
        return cls(
            f"The initial value of the variable {name!r}, created{at(where)}, depends on {argument}. A variable is "
            "there before the body that creates it runs, and outlives it. Create it with tf.zeros(shape), say, and "
            "assign the value then."
        )

    @classmethod
    def of_run(cls, name: str, where: str, what: str, there: str) -> VariableCreationError:
        """Its initial value comes from something that only a run can do."""
        return cls(
            f"The initial value of the variable {name!r}, created{at(where)}, depends on {what}{at(there)}, which only "
            "a run of the body can do. A variable is there before the body that creates it runs, and outlives it. "
            "Create it with tf.zeros(shape), say, and assign the value then."
        )


class LoweringError(ReplicaEngineError, ValueError):
    """XLA cannot compile a replica body. Raised before anything runs.

    Attributes:
        op_name: the name of the op, with the name scopes that it is in; empty where it is not known.
    """

    op_name = ""

    @classmethod
    def unsupported_op(cls, fn: str, op: str, where: str) -> LoweringError:
        """An op without a lowering."""
        return cls(
            f"`{fn}` uses {op}{at(where)}, which XLA cannot compile. Let the host do it, in the middle of the body "
            "with xla.outside_compilation(fn, ...), or before the run; MirroredStrategy runs it as it is."
        )

    @classmethod
    def stays_on_host(
        cls, fn: str, op: str, where: str, described: str, is_dtype: bool, made_by: str, made_at: str
    ) -> LoweringError:
        """An op that only the devices can run needs a value that cannot leave the host."""
        value = f"a value of dtype {described}" if is_dtype else f"a value of the unknown shape {described}"
        made = f", made by {made_by}{at(made_at)}" if made_by else ""
        advice = (
            "Turn it into numbers first."
            if is_dtype
            else "Give it a static shape first: pad it, or where the shape is known, tf.ensure_shape(x, ...)."
        )
        return cls(
            f"In `{fn}`, {op}{at(where)} runs on the devices and needs {value}, which cannot leave the host{made}. "
            f"{advice}"
        )

    @classmethod
    def not_on_host(cls, fn: str, op: str, where: str, made_by: str, made_at: str) -> LoweringError:
        """An op on the host needs a value that cannot leave the devices."""
        return cls(
            f"In `{fn}`, {op}{at(where)} runs on the host and needs a result of {made_by}{at(made_at)} whose shape "
            "depends on data, or which is a list of tensors. Such a result cannot leave the devices. Give it a static "
            "shape: use a mask, or values padded to a fixed size."
        )

    @classmethod
    def shaped_by_data(cls, fn: str, call: str) -> LoweringError:
        """A host call is given something of the devices whose shape depends on data."""
        return cls(
            f"In `{fn}`, {call}, needs a value of the devices whose shape depends on data, as of tf.where(mask), "
            "tf.unique or tf.boolean_mask. Use a mask, or values padded to a fixed size."
        )

    @classmethod
    def tried_shape(cls, fn: str, op: str, where: str, shape: str, tried_with: str, message: str) -> LoweringError:
        """An op does not accept a shape that was found by a trial."""
        return cls(
            f"In `{fn}`, {op}{at(where)} does not accept the shape {shape}. That shape was found by a trial of an op "
            f"on the host with {tried_with}. If the shape is another one in a run, declare it: "
            f"tf.ensure_shape(y, shape). TensorFlow says: {message}"
        )

    @classmethod
    def python_gradient(cls, fn: str, where: str) -> LoweringError:
        """The gradient of a tf.py_function that is in a function which is called more than once."""
        return cls(
            f"In `{fn}` a tf.function with a tf.py_function in it is called more than once{at(where)}, and the "
            "gradients of the calls cannot be told apart. Call tf.py_function in the body itself, or run the function "
            "with xla.outside_compilation, which has gradients of every order."
        )

    @classmethod
    def not_constant(cls, fn: str, op: str, where: str) -> LoweringError:
        """A shape or axis that depends on data."""
        return cls(
            f"In `{fn}` a shape or an axis of {op} depends on data{at(where)}. XLA compiles for fixed shapes: use a "
            "Python number there, or mask values instead of cutting them out."
        )

    @classmethod
    def unbounded_loop(cls, fn: str, where: str) -> LoweringError:
        """A loop whose gradient needs a bound."""
        return cls(
            f"In `{fn}` a loop keeps a value of each iteration, for its gradient or in a TensorArray{at(where)}, and "
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
            f"Result {index} of `{fn}` has a shape that depends on data{at(where)}, as of tf.where(mask), "
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
            f"Result {index} of `{fn}` is a string or the like, made by {op}{at(where)}, which no device has. Return "
            "numbers, and make what you need of them after the run; MirroredStrategy runs it as it is."
        )

    @classmethod
    def other(cls, fn: str, message: str, where: str) -> LoweringError:
        """Whatever else XLA says."""
        return cls(f"XLA cannot compile `{fn}`{at(where)}: {message}")


class GraphModeError(ReplicaEngineError, RuntimeError):
    """A TPUStrategy or a compiled body was used in a graph of tf.compat.v1."""

    @classmethod
    def in_graph(cls) -> GraphModeError:
        """Eager mode is off."""
        return cls(
            "TPUStrategy and compiled bodies run in eager mode and in tf.functions, not in a graph of tf.compat.v1. "
            "Remove the `with tf.Graph().as_default():` or tf.compat.v1.disable_eager_execution(); MirroredStrategy "
            "runs there."
        )


class ProgramError(ReplicaEngineError, RuntimeError):
    """A compiled program failed while it ran, or cannot run on this machine."""

    @classmethod
    def failed(cls, name: str, devices: Sequence[str], message: str) -> ProgramError:
        """The runtime says so."""
        return cls(
            f"The compiled program of `{name}` failed while it ran on {len(devices)} replicas ({', '.join(devices)}):\n"
            f"{message}\n"
            "Variables that it was to write may be lost: whoever reads one is told. Assign them, or load a checkpoint."
        )

    @classmethod
    def too_large(cls, name: str, replicas: int, each: int, limit: int) -> ProgramError:
        """It needs more memory than there is."""
        return cls(
            f"The compiled program of `{name}` needs {_size(each)} for values in between and results on each of "
            f"{replicas} replicas, and there are {_size(limit)} of memory. It was not launched, so all variables are "
            "as they were. Take a smaller batch."
        )


def _size(number: int) -> str:
    """Bytes in words."""
    size = float(number)
    units = ["bytes", "KiB", "MiB", "GiB", "TiB"]
    while size >= 1024 and len(units) > 1:
        size /= 1024
        del units[0]
    return f"{size:.4g} {units[0]}"


class StuckProgramError(ReplicaEngineError, RuntimeError):
    """A compiled program that was interrupted has not ended, and no other can run on its devices."""

    PATIENCE = 10.0
    """Seconds that the next run waits for it."""

    @classmethod
    def given_up(cls, name: str, replicas: int) -> StuckProgramError:
        """It was given up, and goes on."""
        return cls(
            f"The compiled program of `{name}` on {replicas} replicas was given up earlier (Ctrl-C, or timeout=) and "
            f"has not ended for another {cls.PATIENCE:g} s, so nothing else can run on its devices. A host call in it "
            "may not return, or its replicas wait for each other: every replica must reach the same cross-replica "
            "operations, so there can be none in a branch on the replica id. Make a new strategy, and load the "
            "variables from a checkpoint."
        )


class LostVariableError(ReplicaEngineError, RuntimeError):
    """A variable's value was given to a program that failed, and is gone."""

    @classmethod
    def read(cls, name: str) -> LostVariableError:
        """It is to be read, and no value has been assigned since."""
        return cls(
            f"The value of the variable {name!r} was given to a compiled program that failed while it ran (out of "
            "memory, say), and is gone. Assign it, or load a checkpoint."
        )


def note_kept_steps(error: BaseException, steps: int, iterations: int) -> None:
    """Adds to an exception that ended the inputs of a device loop what became of the steps."""
    add_note(error, f"{steps} of {iterations} steps of the device loop ran, and what they wrote is kept")


def many_traces(name: str, times: int) -> str:
    """The warning about a function that is traced and compiled again and again."""
    return (
        f"`{name}` has been traced {times} times, and most traces are compiled. It is traced anew for other shapes and "
        "dtypes, other Python values among its arguments (pass tensors: tf.constant(count)), and for a function made "
        "anew around other objects (pass what it closes over as arguments)."
    )
