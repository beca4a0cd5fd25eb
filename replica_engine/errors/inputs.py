"""Calls of replicated functions: their arguments, and the place of the call."""

from __future__ import annotations

from collections.abc import Sequence

from replica_engine.errors.base import ReplicaEngineError, add_note, at, brief, shown, with_more
from replica_engine.errors.scopes import KERAS_RUNS

_LOOP = (
    "    for batch in strategy.experimental_distribute_dataset(dataset):\n"
    "        strategy.run(step, args=(batch,))\n"
    "If its batches are tuples and the step takes their parts, step(x, y), write args=batch."
)


class NotInBodyError(ReplicaEngineError, RuntimeError):
    """A cross-replica operation was used where no replicated body is being traced."""

    @classmethod
    def outside(cls, name: str, where: str) -> NotInBodyError:
        """The call is outside any replicated body."""
        return cls(
            f"xla.{name}() works inside a function that runs on replicas, but it was called outside one{at(where)}. "
            "Call it from the function that is passed to xla.replicate(fn, inputs) or to TPUStrategy.run(fn)."
        )

    @classmethod
    def on_thread(cls, name: str, where: str) -> NotInBodyError:
        """The call is in a function that MirroredStrategy, or another strategy with replicas on threads, runs."""
        instead = {
            "replica_id": "replica_id_in_sync_group",
            "num_replicas": "num_replicas_in_sync",
            "cross_replica_sum": 'all_reduce("SUM", value)',
            "all_reduce": 'all_reduce("SUM", value)',
            "all_gather": "all_gather(value, axis)",
        }
        cure = "Exchange the values in a merge call, context.merge_call(merge_fn, args=(value,))"
        if name in instead:
            cure = f"Write, for both strategies, tf.distribute.get_replica_context().{instead[name]}"
        return cls(
            f"xla.{name}() was called{at(where)} on a replica that runs on a thread, as those of MirroredStrategy do. "
            f"The functions of xla work in functions that TPUStrategy or xla.replicate compiles. {cure}."
        )

    @classmethod
    def on_host(cls, name: str, where: str) -> NotInBodyError:
        """The call is in a host function."""
        return cls(
            f"xla.{name}() was called in a function that outside_compilation runs on the host{at(where)}. Replicas "
            "meet on the devices: call it in the body and pass its result to outside_compilation."
        )


class NoMethodError(ReplicaEngineError, AttributeError):
    """A strategy was asked for a method that only another strategy has; `hasattr` is False."""

    @classmethod
    def run_steps(cls, strategy: str) -> NoMethodError:
        """A strategy whose replicas run on threads has no device loop."""
        return cls(
            f"{strategy} has no run_steps: a loop on the devices belongs to TPUStrategy, which compiles it. Here, "
            "write the loop in a tf.function, around strategy.run:\n"
            "    @tf.function\n"
            "    def train(iterator):\n"
            "        for _ in tf.range(100):\n"
            "            strategy.run(step, args=(next(iterator),))"
        )


class InputsError(ReplicaEngineError, ValueError, TypeError):
    """A replicated function, compiled body or device loop was called with unusable arguments, or in the wrong place."""

    @classmethod
    def no_list(cls, inputs: object) -> InputsError:
        """`inputs` is not a list, or is empty."""
        return cls(
            f"`inputs` must be a list with one argument list for each replica; got {brief(inputs)}. "
            "For two replicas of f(x, y): inputs=[[x0, y0], [x1, y1]]."
        )

    @classmethod
    def no_cache_dir(cls, path: object) -> InputsError:
        """The cache folder is not a path."""
        return cls(f"set_cache_dir takes the path of a folder, or None for no cache; got {brief(path)}.")

    @classmethod
    def no_argument_list(cls, each: object) -> InputsError:
        """An item of `inputs` is not a list of arguments."""
        return cls(
            f"`inputs` must hold a list of arguments for each replica; for one replica it holds {brief(each)}. "
            "For two replicas of f(x): inputs=[[x0], [x1]]."
        )

    @classmethod
    def wrong_length(cls, given: int, wanted: int) -> InputsError:
        """The number of argument lists differs from `num_replicas`."""
        return cls(
            f"`inputs` has argument lists for {given} replicas, but num_replicas is {wanted}. Pass one list for each "
            "replica, or leave num_replicas out."
        )

    @classmethod
    def output_of_branch(cls, name: object, where: str) -> InputsError:
        """A step of a device loop sets an output in a branch or loop on a tensor, or to a tensor from there."""
        return cls(
            f"The output {shown(name)} is set{at(where)} in a branch or loop on a tensor (`if`, `for`, `while`, "
            "tf.cond), or in a nested tf.function, and what is computed there is not known outside. Set it in the step "
            "itself: give the variable a value before the branch, change it there, and pass it out after it:\n"
            "    loss = 0.0\n"
            "    if x > 3.0:\n"
            "        loss = x\n"
            f'    context.set_last_step_output({shown(name)}, loss, "MEAN")'
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
    def distributed(cls, name: str, kind: str) -> InputsError:
        """`strategy.run` gets a distributed dataset, or an iterator over one."""
        return cls(
            f"{name} is a {kind}, and replicas take one batch of it at a time. Loop over it around the run:\n"
            "    for batch in distributed_dataset:\n"
            "        strategy.run(step, args=(batch,))\n"
            "If its batches are tuples and the step takes their parts, step(x, y), write args=batch. With an iterator, "
            "args=(next(iterator),)."
        )

    @classmethod
    def dataset(cls, name: str, kind: str) -> InputsError:
        """A dataset where a batch is expected."""
        return cls(
            f"{name} is a {kind}, and a compiled body takes the values of a batch. Distribute it, and run one batch "
            f"at a time:\n{_LOOP}"
        )

    @classmethod
    def no_dataset(cls, given: object) -> InputsError:
        """`experimental_distribute_dataset` gets an array, or something else that is not a dataset."""
        return cls(
            f"experimental_distribute_dataset takes a tf.data.Dataset, not {type(given).__name__}. Make a dataset of "
            "arrays, with the batch of all replicas:\n"
            "    dataset = tf.data.Dataset.from_tensor_slices(x).batch(n)\n"
            "    dataset = strategy.experimental_distribute_dataset(dataset)"
        )

    @classmethod
    def not_batched(cls) -> InputsError:
        """`experimental_distribute_dataset` gets a dataset of single samples."""
        return cls(
            "The dataset has single samples and no batches: its elements are scalars, or have scalars in them, which "
            "replicas cannot share. Batch it first, with the batch of all replicas:\n"
            "    dataset = strategy.experimental_distribute_dataset(dataset.batch(n))"
        )

    @classmethod
    def next_in_replica(cls, where: str) -> InputsError:
        """A replica takes the next batch of a distributed dataset, or calls a method of a Keras model that does."""
        return cls(
            f"A replica asks for the next batch of a distributed dataset{at(where)}. A batch has a part for each "
            f"replica, so take it outside, and pass it: strategy.run(step, args=(next(iterator),)). {KERAS_RUNS}"
        )

    @classmethod
    def nested(cls) -> InputsError:
        """The call is inside another replicated body."""
        return cls(
            "A replicated body cannot be replicated again. Call the function directly. To combine values of only some "
            "replicas, pass `groups` to xla.cross_replica_sum or another cross-replica operation."
        )

    @classmethod
    def in_function(cls, name: str) -> InputsError:
        """A compiled body was called while a graph is built."""
        return cls(f"`{name}` is compiled and runs in eager mode. In a tf.function, call xla.replicate(fn, inputs).")

    @classmethod
    def not_of_signature(cls, fn: str, name: str, given: str, wanted: str) -> InputsError:
        """An argument does not match the input signature."""
        return cls(f"{name} of `{fn}` is {given}, but the input_signature has {wanted}.")

    @classmethod
    def not_as_many(cls, fn: str, given: int, wanted: int) -> InputsError:
        """The number of arguments differs from the input signature."""
        return cls(f"`{fn}` was called with {given} tensors, but the input_signature has {wanted}.")

    @classmethod
    def other_batch(cls, fn: str, number: int, difference: str) -> InputsError:
        """A batch differs in structure or dtype from the first batch of a device loop."""
        return cls(
            f"Batch {number} for `{fn}` differs from the first batch of this run: {difference}. A device loop is one "
            "program for all of its batches: give every batch the same keys, lengths and dtypes."
        )

    @classmethod
    def other_batch_shape(cls, fn: str, number: int, name: str, given: str, wanted: str) -> InputsError:
        """A batch differs in shape from the first batch of a device loop."""
        return cls(
            f"{name} of batch {number} for `{fn}` has the shape {given}, but in the first batch of this run it has the "
            f"shape {wanted}. A device loop runs steps of one shape: batch with drop_remainder=True, or pad the last "
            "batch."
        )

    @classmethod
    def uneven_batch(cls, name: str, shapes: Sequence[str]) -> InputsError:
        """The replicas' shares of a batch have different shapes."""
        return cls(
            f"{name} has the shapes {', '.join(shapes)} on the replicas, but a device loop runs steps of one shape. "
            "Batch with drop_remainder=True and a batch size that is a multiple of the number of replicas."
        )

    @classmethod
    def steps_in_function(cls) -> InputsError:
        """A device loop was started while a graph is built."""
        return cls(
            "run_steps was called in a tf.function, but it runs in eager mode and is already a compiled loop. Call it "
            "outside the tf.function; run_steps does not need one."
        )

    @classmethod
    def no_iterator(cls, given: object) -> InputsError:
        """The argument is not an iterator."""
        return cls(f"run_steps takes an iterator, for example iter(dataset); got {brief(given)}.")

    @classmethod
    def no_step(cls, name: str, signature: str, parts: int | None) -> InputsError:
        """A step of a device loop does not take the arguments that it is called with, such as one without a context.

        Args:
            name: the name of the step.
            signature: what it takes, in parentheses.
            parts: how many parts a batch has if it is a tuple; None if it is not.
        """
        batch = f"the batch, a tuple of {parts} parts" if parts else "the batch"
        return cls(
            f"`{name}` takes {signature}, but run_steps calls a step with its context first, and then with {batch}:\n"
            f"{_step_forms(parts)}\n"
            'The context takes what the last step passes out: context.set_last_step_output("loss", loss, "MEAN").'
        )

    @classmethod
    def bad_iterations(cls, name: str, value: object) -> InputsError:
        """A number of steps or batches is not a positive int."""
        return cls(f"`{name}` must be a positive int; got {shown(value)}.")

    @classmethod
    def bad_initial_values(cls, given: object) -> InputsError:
        """`initial_loop_values` is not a mapping of names to values."""
        return cls(f"`initial_loop_values` must be a mapping of names to values, or None; got {brief(given)}.")

    @classmethod
    def bad_output_name(cls, name: object) -> InputsError:
        """The name of an output is not hashable."""
        return cls(f"The name of a step's output must be a string; got {brief(name)}, which is not hashable.")

    @classmethod
    def other_program(cls, fn: str, difference: str) -> InputsError:
        """The inputs differ from those that the body was compiled for."""
        return cls(
            f"`{fn}` was not compiled for these inputs: {difference}. Lower it again with the new inputs: "
            "xla.lower(fn, inputs).compile()."
        )


class ReplicaMismatchError(ReplicaEngineError, ValueError):
    """The replicas were given tensors of different shapes or dtypes, or brought such tensors to a sync point.

    Attributes:
        by_replica: the shapes of an argument of a compiled program that differ, one for each replica; else empty.
    """

    by_replica: Sequence[tuple[int, ...]] = ()

    @classmethod
    def shapes(cls, name: str, replica: int, first: str, other: str, met: str = "") -> ReplicaMismatchError:
        """Two replicas have different shapes; `met` is where they meet, such as "all_reduce at file.py:3 in step"."""
        met = met or "cross-replica operations (sums of gradients, for example)"
        return cls(
            f"{name} has shape {first} on replica 0 and {other} on replica {replica}. The replicas meet in {met}, so "
            "one program runs on all of them, and their shapes must be equal. Use a batch size that is a multiple of "
            "the number of replicas. If only the last batch is smaller, leave it out, dataset.batch(n, "
            "drop_remainder=True), or give Keras fit a number of samples that is a multiple of the batch size. For "
            "batches of any size in your own loop, replica_engine.split_batch(strategy, batch) makes equal shares, "
            "with weights that are 0 for padding."
        )

    @classmethod
    def dtypes(cls, name: str, replica: int, first: str, other: str) -> ReplicaMismatchError:
        """Two replicas have different dtypes."""
        return cls(f"{name} has dtype {first} on replica 0 and {other} on replica {replica}. Cast one of them.")

    @classmethod
    def at_sync_point(cls, point: str, brought: Sequence[tuple[str, str]], whole: bool) -> ReplicaMismatchError:
        """The replicas brought different tensors to an all-reduce or all-gather; one row for each replica."""
        rows = "\n".join(f"  {replica}: {tensors}" for replica, tensors in brought)
        rule = (
            "Every replica must bring tensors of equal dtypes and shapes. If one replica has a smaller share of the "
            "batch, reduce over the samples first (tf.reduce_sum) and all-reduce the result, or pad the share."
            if whole
            else "Every replica must bring tensors of equal dtypes, and shapes that differ along the axis only. Gather "
            "along the axis in which the shapes differ, or pad the tensors to one size first."
        )
        return cls(f"The replicas brought different tensors to {point}:\n{rows}\n{rule}")

    @classmethod
    def of_conditions(cls, what: str, where: str, values: Sequence[tuple[str, str]]) -> ReplicaMismatchError:
        """The replicas do not agree which way to go in an operator with merge calls; one row for each replica."""
        rows = "\n".join(f"  {replica}: {value}" for replica, value in values)
        return cls(
            f"The replicas do not agree on the condition of {what} at {where}:\n{rows}\n"
            "There is a merge call inside (all_reduce, optimizer.apply), so all replicas must go the same way. Make "
            "the condition of values that are equal on all replicas, or reduce it first: "
            'context.all_reduce("SUM", value).'
        )

    @classmethod
    def variables(cls, name: str) -> ReplicaMismatchError:
        """Each replica was given another variable."""
        return cls(
            f"{name} is another variable on each replica, but one program runs on all replicas. Pass values, "
            "`v.read_value()`; or make one variable under a strategy's scope, with ON_READ synchronization if each "
            "replica needs its own value."
        )

    @classmethod
    def not_tensors(cls, name: str, value: object) -> ReplicaMismatchError:
        """A value differs by replica and is not a tensor."""
        return cls(
            f"{name} differs by replica and holds {brief(value)}. A value that differs by replica must be a tensor, "
            "because one program runs on all replicas. To tell the replicas apart, use the replica id."
        )


@with_more
def warn_whole_batch(rows: int | None, size: int, where: str) -> str:
    """The warning that a batch of a dataset was not distributed, so that each replica gets all of it."""
    many = "" if rows is None else f" of {rows}"
    return (
        f"strategy.run{at(where)} gives the whole batch{many} to each of {size} replicas, which then compute the same, "
        "unless they look at their replica id. Distribute the dataset, and each gets its part:\n"
        "    dataset = strategy.experimental_distribute_dataset(dataset)\n"
        "If all replicas shall have all of it, say so: "
        "strategy.experimental_distribute_values_from_function(lambda context: batch)."
    )


@with_more
def warn_whole_batch_of_steps(rows: int | None, size: int, where: str) -> str:
    """The warning that the iterator of a plain dataset is given to `run_steps`, so that each replica gets all of it."""
    many = "" if rows is None else f" of {rows}"
    return (
        f"strategy.run_steps{at(where)} gives each whole batch{many} to each of {size} replicas, which then compute "
        "the same, unless they look at their replica id. Pass an iterator of the distributed dataset, and each gets "
        "its part:\n"
        "    batches = iter(strategy.experimental_distribute_dataset(dataset))\n"
        "If all replicas shall have all of each batch, say so:\n"
        "    everywhere = strategy.experimental_distribute_values_from_function\n"
        "    batches = (everywhere(lambda context: batch) for batch in dataset)"
    )


def note_no_context(error: BaseException, name: str, parts: int | None) -> None:
    """Adds a note to an exception of a step that took its context for the batch; `parts` is as in `no_step`."""
    forms = _step_forms(parts)
    add_note(error, f"the first argument of `{name}` is the context of run_steps. A step is written so:\n{forms}")


def _step_forms(parts: int | None) -> str:
    """How to write a step for batches that are tuples of so many parts; None for all other batches."""
    whole = "    def step(context, batch):"
    if parts is None:
        return whole
    names = {0: "", 1: ", x", 2: ", x, y", 3: ", x, y, z"}.get(parts, ", *parts")
    return f"    def step(context{names}):" + (f"  # or with all parts in a tuple:\n{whole}" if parts else "")


@with_more
def warn_dataset_for_each(name: str, size: int, where: str) -> str:
    """The warning that a dataset is given to `run`, so that each replica goes through all of it."""
    return (
        f"{name} of strategy.run{at(where)} is a tf.data.Dataset: each of {size} replicas goes through all of it. "
        f"Distribute it, and run one batch at a time:\n{_LOOP}"
    )
