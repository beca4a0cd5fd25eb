"""Compiled bodies: what cannot be compiled, what they cannot be given, and what happens while they run."""

from __future__ import annotations

from collections.abc import Sequence

from replica_engine.errors.base import ReplicaEngineError, add_note, at, brief


class NotInBodyError(ReplicaEngineError, RuntimeError):
    """A cross-replica operation was used where no replicated body is being traced."""

    def __init__(self, name: str):
        super().__init__(
            f"xla.{name}() works inside a function that runs on replicas, and there is none here. Call it from the "
            "function that is passed to xla.replicate(fn, inputs) or to TPUStrategy.run(fn)."
        )

    @classmethod
    def on_host(cls, name: str, where: str) -> NotInBodyError:
        """In a host call."""
        error = cls.__new__(cls)
        RuntimeError.__init__(
            error,
            f"xla.{name}() was called in a function that outside_compilation runs on the host{at(where)}. Replicas "
            "meet on the devices: call it in the body and pass its result to outside_compilation.",
        )
        return error


class InputsError(ReplicaEngineError, ValueError, TypeError):
    """The inputs of a replicated function are no list over replicas."""

    @classmethod
    def no_list(cls, inputs: object) -> InputsError:
        """Not a list, or an empty one."""
        return cls(
            f"`inputs` is a list over replicas of argument lists; got {brief(inputs)}. "
            "For two replicas of f(x, y): inputs=[[x0, y0], [x1, y1]]."
        )

    @classmethod
    def no_argument_list(cls, each: object) -> InputsError:
        """A list of something else than lists."""
        return cls(
            f"`inputs` has, for each replica, a list of arguments; for one it has {brief(each)}. "
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
    def other_batch(cls, fn: str, number: int) -> InputsError:
        """A batch of another structure or dtype than the first one of a device loop."""
        return cls(f"Batch {number} for `{fn}` has another structure, or other dtypes, than the first of this run.")

    @classmethod
    def other_batch_shape(cls, fn: str, number: int, name: str, given: str, wanted: str) -> InputsError:
        """A batch of another shape than the first one of a device loop."""
        return cls(
            f"{name} of batch {number} for `{fn}` has the shape {given}, and that of the first batch of this run has "
            f"{wanted}. A device loop runs steps of one shape: batch with drop_remainder=True, or pad the last batch."
        )

    @classmethod
    def uneven_batch(cls, name: str, shapes: Sequence[str]) -> InputsError:
        """A batch of which replicas have different shapes."""
        return cls(
            f"{name} has the shapes {', '.join(shapes)} on the replicas, and a device loop runs steps of one shape: "
            "batch with drop_remainder=True, by a multiple of the number of replicas."
        )

    @classmethod
    def steps_in_function(cls) -> InputsError:
        """A device loop in a graph."""
        return cls(
            "run_steps is a loop of its own and runs in eager mode. Call it outside the tf.function; it needs none."
        )

    @classmethod
    def no_iterator(cls, given: object) -> InputsError:
        """Nothing to iterate over."""
        return cls(f"run_steps takes an iterator, of a data set for example; got {brief(given)}.")

    @classmethod
    def bad_iterations(cls, name: str, value: object) -> InputsError:
        """No number of steps."""
        return cls(f"`{name}` must be a positive int; got {value!r}.")

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
            f"{name} has shape {first} on replica 0 and {other} on replica {replica}. The replicas meet in "
            "cross-replica operations (sums of gradients, say), so one program runs on all of them, and shapes must be "
            "equal: batch with drop_remainder=True, give Keras fit a number of samples that is a multiple of the batch "
            "size, or pad the last batch."
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
            f"{name} differs by replica and holds {brief(value)}. What differs by replica must be a tensor, since "
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
    def apart(cls, name: str) -> CollectiveError:
        """In a branch that not all replicas take."""
        return cls(f"{name} brings all replicas together, and this branch is not taken by all of them.")

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
            f"`{fn}` uses a resource that is not a variable{at(where)}: {what}. Lookup tables, dataset "
            "iterators and the like live on the host: use them there, in a function for xla.outside_compilation, "
            "or before the run."
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


class VariableCreationError(ReplicaEngineError, ValueError):
    """A replica body cannot create this variable."""

    @classmethod
    def each_time(cls, fn: str, names: Sequence[str]) -> VariableCreationError:
        """It creates new ones each time it is traced."""
        return cls(
            f"`{fn}` creates variables ({', '.join(names)}) each time it runs, and it is traced once for all runs. "
            "Create them once: before the run, under `with strategy.scope():`, or in the first run only, kept in "
            "an attribute (`if self.w is None: self.w = tf.Variable(...)`)."
        )

    @classmethod
    def of_arguments(cls, name: str) -> VariableCreationError:
        """Its initial value is known in the body only."""
        return cls(
            f"The initial value of the variable {name!r} depends on the arguments of the replica body that creates it, "
            "and variables outlive the body. Create it with tf.zeros(shape), say, and assign the value then."
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
    """A compiled body was called in a graph of tf.compat.v1."""

    def __init__(self) -> None:
        super().__init__(
            "Compiled bodies run in eager mode and in tf.functions, not in a graph of tf.compat.v1. Remove the "
            "`with tf.Graph().as_default():` or tf.compat.v1.disable_eager_execution(); MirroredStrategy runs there."
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


def note_kept_steps(error: BaseException, steps: int, iterations: int) -> None:
    """Adds to an exception that ended the inputs of a device loop what became of the steps."""
    add_note(error, f"{steps} of {iterations} steps of the device loop ran, and what they wrote is kept")


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
