"""What replicated functions are called with, and from where."""

from __future__ import annotations

from collections.abc import Sequence

from replica_engine.errors.base import ReplicaEngineError, at, brief, shown


class NotInBodyError(ReplicaEngineError, RuntimeError):
    """A cross-replica operation was used where no replicated body is being traced."""

    @classmethod
    def outside(cls, name: str, where: str) -> NotInBodyError:
        """Where nothing is replicated."""
        return cls(
            f"xla.{name}() works inside a function that runs on replicas, and there is none{at(where)}. Call it from "
            "the function that is passed to xla.replicate(fn, inputs) or to TPUStrategy.run(fn)."
        )

    @classmethod
    def on_host(cls, name: str, where: str) -> NotInBodyError:
        """In a host call."""
        return cls(
            f"xla.{name}() was called in a function that outside_compilation runs on the host{at(where)}. Replicas "
            "meet on the devices: call it in the body and pass its result to outside_compilation."
        )


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
        return cls(
            f"`inputs` has argument lists for {given} replicas, and num_replicas is {wanted}. Give as many lists, or "
            "leave num_replicas out."
        )

    @classmethod
    def iterator(cls, name: str, kind: str) -> InputsError:
        """An iterator where a batch is expected."""
        return cls(
            f"{name} is a {kind}, and a compiled body takes the values of a batch: "
            "strategy.run(step, args=(next(iterator),)). For many steps in one launch, "
            "strategy.run_steps(step, iterator, iterations=100) takes the iterator itself."
        )

    @classmethod
    def dataset(cls, name: str, kind: str) -> InputsError:
        """A dataset where a batch is expected."""
        return cls(
            f"{name} is a {kind}, and a compiled body takes the values of a batch: "
            "for batch in dataset: strategy.run(step, args=(batch,))."
        )

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
    def not_of_signature(cls, fn: str, name: str, given: str, wanted: str) -> InputsError:
        """An argument that an input signature excludes."""
        return cls(f"{name} of `{fn}` is {given}, and the input_signature has {wanted}.")

    @classmethod
    def not_as_many(cls, fn: str, given: int, wanted: int) -> InputsError:
        """Another number of arguments than in the input signature."""
        return cls(f"`{fn}` is called with {given} tensors, and the input_signature has {wanted}.")

    @classmethod
    def other_batch(cls, fn: str, number: int, difference: str) -> InputsError:
        """A batch of another structure or dtype than the first one of a device loop."""
        return cls(
            f"Batch {number} for `{fn}` is unlike the first of this run: {difference}. A device loop is one program "
            "for all of its batches: give each the same keys, lengths and dtypes."
        )

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
        return cls(f"`{name}` must be a positive int; got {shown(value)}.")

    @classmethod
    def bad_initial_values(cls, given: object) -> InputsError:
        """No values by name."""
        return cls(f"`initial_loop_values` must be a mapping of names to values, or None; got {brief(given)}.")

    @classmethod
    def bad_output_name(cls, name: object) -> InputsError:
        """A name that nothing can be found by."""
        return cls(f"An output of a step is found by its name, a string; got {brief(name)}.")

    @classmethod
    def other_program(cls, fn: str, difference: str) -> InputsError:
        """Inputs that a compiled body was not compiled for."""
        return cls(
            f"These are not inputs that `{fn}` was compiled for: {difference}. Lower it again with these: "
            "xla.lower(fn, inputs).compile()."
        )


class ReplicaMismatchError(ReplicaEngineError, ValueError):
    """Replicas were given, or brought to a sync point, tensors of different shapes or dtypes."""

    @classmethod
    def shapes(cls, name: str, replica: int, first: str, other: str, met: str = "") -> ReplicaMismatchError:
        """Two shapes; `met` is where the replicas meet: "all_reduce at file.py:3 in step"."""
        met = met or "cross-replica operations (sums of gradients, say)"
        return cls(
            f"{name} has shape {first} on replica 0 and {other} on replica {replica}. The replicas meet in {met}, so "
            "one program runs on all of them, and shapes must be equal: batch with drop_remainder=True, give Keras fit "
            "a number of samples that is a multiple of the batch size, or pad the last batch: in a loop of your own, "
            "replica_engine.split_batch(strategy, batch) makes equal shares, with weights that are 0 for padding."
        )

    @classmethod
    def dtypes(cls, name: str, replica: int, first: str, other: str) -> ReplicaMismatchError:
        """Two dtypes."""
        return cls(f"{name} is of dtype {first} on replica 0 and {other} on replica {replica}. Cast one of them.")

    @classmethod
    def at_sync_point(cls, point: str, brought: Sequence[tuple[str, str]], whole: bool) -> ReplicaMismatchError:
        """What the replicas brought to an all-reduce or all-gather, of each its name and its tensors."""
        rows = "\n".join(f"  {replica}: {tensors}" for replica, tensors in brought)
        rule = (
            "Every replica must bring tensors of equal dtypes and shapes. Where one has a smaller share of the batch, "
            "reduce over the samples first (tf.reduce_sum) and all-reduce that, or pad the share."
            if whole
            else "Every replica must bring tensors of equal dtypes, and shapes that differ along the axis only. Gather "
            "along the axis in which they differ, or pad them to one size first."
        )
        return cls(f"The replicas brought different tensors to {point}:\n{rows}\n{rule}")

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
