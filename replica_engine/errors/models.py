"""Keras models that cannot be replicated, batches that cannot be split, and misused optimizers."""

from __future__ import annotations

from collections.abc import Sequence

from replica_engine.errors.base import ReplicaEngineError, add_note, at, brief, shown, with_more
from replica_engine.errors.timeouts import count_of


class ReplicateError(ReplicaEngineError, ValueError):
    """`replicate_model` cannot replicate this model, or cannot use its other arguments."""

    @classmethod
    def not_a_model(cls, given: object) -> ReplicateError:
        """The argument is not a Keras 3 model."""
        return cls(f"replicate_model takes a Keras 3 model (keras.Model); got {brief(given)}.")

    @classmethod
    def other_backend(cls, backend: str) -> ReplicateError:
        """Keras runs on a backend other than TensorFlow."""
        return cls(
            f"Replicas run TensorFlow, but Keras runs on the backend {backend!r} in this process. Set "
            "KERAS_BACKEND=tensorflow in the environment before keras is imported."
        )

    @classmethod
    def unbuilt(cls, name: str, layer: str) -> ReplicateError:
        """The model, or one of its layers, is not built."""
        whose = "" if layer == name else f" (its layer {layer!r} is not)"
        return cls(
            f"The model {name!r} is not built{whose}: it has no variables yet that the replicas could share. Give it a "
            "keras.Input, or call it on a batch, model(x[:1]), before you replicate it."
        )

    @classmethod
    def own_function(cls, name: str, method: str) -> ReplicateError:
        """The model overrides a method that makes one of Keras' functions."""
        return cls(
            f"The model {name!r} overrides {method}, but replicate_model replaces this method. Override "
            "train_step, test_step or predict_step instead: they run on each replica."
        )

    @classmethod
    def busy(cls, name: str) -> ReplicateError:
        """Another replicated model of the same original model is running."""
        return cls(
            f"The model {name!r} is running on other replicas in another thread. Two replicated models of one original "
            "model must take turns. Wait for the other one, or use one replicated model in both threads."
        )

    @classmethod
    def replicated(cls, name: str) -> ReplicateError:
        """The model is already a replicated one."""
        return cls(f"The model {name!r} is replicated already. Replicate the original one, with other replicas.")

    @classmethod
    def of_strategy(cls, name: str) -> ReplicateError:
        """The model was built under a strategy."""
        return cls(
            f"The model {name!r} was built under strategy.scope(), so it already runs on the replicas of that "
            "strategy. Build it outside of the scope to replicate it."
        )

    @classmethod
    def bad_count(cls, given: object) -> ReplicateError:
        """The number of replicas is not a positive int."""
        return cls(f"replicas must be a positive int, or None for all devices; got {shown(given)}.")

    @classmethod
    def bad_strategy(cls, given: object) -> ReplicateError:
        """The strategy is not one that `replicate_model` can use."""
        return cls(
            "strategy must be a MirroredStrategy, MultiWorkerMirroredStrategy or TPUStrategy of replica_engine, or one "
            "of your own whose extended class has ReplicaThreads, or None to let replicate_model choose; got "
            f"{brief(given)}."
        )

    @classmethod
    def too_many(cls, replicas: int, strategy: str, present: int) -> ReplicateError:
        """More replicas were requested than the strategy has."""
        return cls(
            f"{replicas} replicas were requested, but the {strategy} that was given has {present}. Leave out "
            "`replicas`, or pass a strategy with that many devices."
        )

    @classmethod
    def too_few_devices(cls, replicas: int, kind: str, present: int) -> ReplicateError:
        """More replicas were requested than there are devices."""
        more = (
            "TensorFlow can make more CPU devices only before it starts: call "
            f"replica_engine.logical_devices({replicas}) first in the program"
            if kind == "CPU"
            else f"Ask for {present} or fewer"
        )
        return cls(f"{replicas} replicas need {replicas} {kind} devices, but this process has {present}. {more}.")

    @classmethod
    def fixed_batch(cls, name: str, size: int, share: int, replicas: int) -> ReplicateError:
        """The batch size of an input is fixed in the model."""
        return cls(
            f"The input {name!r} has a fixed batch size of {size}, but each of {replicas} replicas would get "
            f"{share} samples. Build the model with keras.Input(shape), without a batch size."
        )


class BatchError(ReplicaEngineError, ValueError):
    """A batch cannot be divided among the replicas."""

    @classmethod
    def lengths(cls, named: Sequence[tuple[str, int]]) -> BatchError:
        """The arrays of a batch have different lengths."""
        rows = ", ".join(f"{name} has {rows}" for name, rows in named)
        return cls(
            f"All arrays of a batch must have the same number of samples: {rows}. If they are an element of a "
            "tf.data.Dataset: is it batched? dataset.batch(n)."
        )

    @classmethod
    def uneven(cls, rows: Sequence[int]) -> BatchError:
        """The first batch of `fit` gives replicas unequal shares, under a strategy's scope."""
        size, total = len(rows), sum(rows)
        fits = -(-total // size) * size
        return cls(
            f"A batch of {total} samples does not divide by {size} replicas: they get "
            f"{', '.join(map(str, rows[:-1]))} and {rows[-1]}, and Keras would average over replicas, not over "
            f"samples. Pass a batch size that is a multiple of {size}, such as batch_size={fits}. Or let "
            "replicate_model(model) divide batches of any size, with the results of one device."
        )

    @classmethod
    def uneven_rest(cls, rows: int, size: int) -> BatchError:
        """The last batch of the samples for `fit` would give replicas unequal shares of a program."""
        most = rows % size
        return cls(
            f"The last batch, of {count_of(rows, 'sample')}, does not divide by {size} replicas, and a compiled "
            f"step has one shape on all of them. Leave out {count_of(most, 'sample')}: "
            f"fit(x[:-{most}], y[:-{most}]), or of a dataset the rest, dataset.batch(n, drop_remainder=True). Or let "
            "replicate_model(model) divide batches of any size, with the results of one device."
        )

    @classmethod
    def uneven_later(cls, size: int) -> BatchError:
        """A later batch of `fit` or `evaluate`, such as the last one, gives replicas unequal shares of a program."""
        return cls(
            f"A batch, probably the last one, does not divide by {size} replicas, and a compiled step has one shape on "
            "all of them. Leave the rest out, dataset.batch(n, drop_remainder=True). Or let replicate_model(model) "
            "divide batches of any size, with the results of one device."
        )

    @classmethod
    def distributed(cls, method: str, kind: str) -> BatchError:
        """A replicated model gets a distributed dataset."""
        return cls(
            f"{method} of a replicated model got a {kind}, and divides each batch among the replicas itself. Pass the "
            "dataset as it is, before experimental_distribute_dataset: replicated.fit(dataset)."
        )

    @classmethod
    def nothing(cls) -> BatchError:
        """The batch has no array with samples."""
        return cls("The batch has no array with samples, so there is nothing to divide among the replicas.")

    @classmethod
    def too_large(cls, rows: int, size: int) -> BatchError:
        """The batch has more samples than `batch_size`."""
        return cls(f"The batch has {rows} samples, more than the batch_size={size} that was given.")


@with_more
def warn_uneven_rest(rows: int, size: int) -> str:
    """The warning that the last batch of `fit` gives replicas unequal shares, in a strategy's scope."""
    most = rows % size
    return (
        f"The last batch, of {count_of(rows, 'sample')}, does not divide by {size} replicas. Keras averages over "
        "replicas, not over samples, as in tf.distribute: its samples do not count equally, and the numbers are not "
        "quite those of one device. replicate_model(model) divides batches of any size with the numbers of one device. "
        f"Or leave out {count_of(most, 'sample')}: x[:-{most}], y[:-{most}], or of a dataset the rest: "
        "dataset.batch(n, drop_remainder=True)."
    )


@with_more
def warn_metric_not_a_sum(metric: str, kind: str, variable: str, where: str, size: int) -> str:
    """The warning that the variable of a metric is not a sum over samples, in a strategy's scope."""
    return (
        f"The metric {metric!r} ({kind}) assigns its variable {variable!r}{at(where)}, and the value is not a sum over "
        f"samples but, for example, a maximum or the last value. Each of {size} replicas does so for its own samples, "
        "and their values are added up when the metric is read, as in tf.distribute. So the number is not that of one "
        "device. Build the model outside of the scope and train replicate_model(model, strategy=strategy), which "
        "computes such metrics as one device does. Or make each variable of the metric a sum over samples, with "
        "assign_add."
    )


@with_more
def warn_uneven_evaluation(model: str, rows: int, size: int) -> str:
    """The warning that a batch gives replicas unequal shares, in `evaluate` of a model with its own `test_step`."""
    return (
        f"A batch of {count_of(rows, 'sample')} for `evaluate`, or for the validation in `fit`, does not divide by "
        f"{size} replicas, and {model!r} has its own `test_step`. What its metrics count is right. What the step "
        "returns otherwise, such as a mean over its samples, Keras averages over replicas, not over samples. Count it "
        "with a metric: metric.update_state(values), and return metric.result()."
    )


@with_more
def many_batch_sizes(step: str, model: str, sizes: int) -> str:
    """The warning that a step has been compiled for many batch sizes."""
    return (
        f"{step} of {model!r} has been compiled for {sizes} batch sizes, once for each size. Batches of one size "
        "compile once. replicate_model(model, strategy=replica_engine.MirroredStrategy(...)) has one graph for all "
        "sizes."
    )


def note_sparse_inputs(error: BaseException, inputs: Sequence[tuple[str, str, str]]) -> None:
    """Adds a note to an XLA error: which inputs of the model are sparse or ragged.

    Args:
        error: the XLA error.
        inputs: for each such input, its name in the batch, its kind of tensor in words, and the call that makes it
            dense.
    """
    named = ", ".join(f"{name} is a {kind}" for name, kind, _ in inputs)
    calls = ", ".join(dict.fromkeys(call for _, _, call in inputs))
    add_note(
        error,
        f"{named}. XLA compiles for dense tensors of fixed shapes: make the batches dense in dataset.map, with "
        f"{calls}. Replicas on threads accept these inputs unchanged: "
        "replicate_model(model, strategy=replica_engine.MirroredStrategy()).",
    )


class LogError(ReplicaEngineError, ValueError):
    """A step of a replicated model returned a value that the replicas cannot combine to that of one device."""

    @classmethod
    def not_a_number(cls, name: str, dtype: str) -> LogError:
        """A value is text, for example."""
        return cls(
            f"The step returned {name!r} of dtype {dtype}, of which no mean over replicas exists. Return numbers, or "
            "print it in a callback."
        )

    @classmethod
    def of_samples(cls, name: str, shape: str) -> LogError:
        """An array may have one number for each sample of the shard."""
        return cls(
            f"The step returned {name!r} of shape {shape}, which may be one number for each sample of the replica's "
            "shard. One device would return those of the whole batch. Return their mean, "
            f'{{"{name}": tf.reduce_mean(...)}}, or the result() of a metric.'
        )

    @classmethod
    def integer(cls, name: str, dtype: str) -> LogError:
        """An integer may count samples of the shard."""
        return cls(
            f"The step returned {name!r} of dtype {dtype}, which may be a count of the replica's shard. One device "
            "would count the whole batch. For a sum over samples return the result() of a keras.metrics.Sum; for a "
            f'mean return {{"{name}": tf.cast(..., "float32")}}; for a counter of steps return the variable.'
        )


class OptimizerError(ReplicaEngineError, RuntimeError):
    """An optimizer was used where or when it cannot work, or was made with unusable arguments."""

    @classmethod
    def not_in_replica(cls) -> OptimizerError:
        """Gradients were applied in cross-replica context, where they are already reduced or do not exist."""
        return cls(
            "The optimizer reduces gradients over the replicas and applies them in replica context: call apply() in "
            "the function that is given to strategy.run, not in a merge function or under strategy.scope() alone."
        )

    @classmethod
    def bad_reduction(cls, given: object) -> OptimizerError:
        """The reduction of gradients is unknown."""
        return cls(f'reduction must be "mean" or "sum"; got {shown(given)}.')

    @classmethod
    def no_optimizer(cls, given: object) -> OptimizerError:
        """The wrapped object is not a Keras optimizer."""
        return cls(f"CrossReplicaOptimizer wraps a Keras optimizer (keras.optimizers.Optimizer); got {brief(given)}.")

    @classmethod
    def unknown_weights(cls, layers: Sequence[str]) -> OptimizerError:
        """Weights became trainable after the optimizer was built."""
        return cls(
            f"The optimizer was built before the weights of {', '.join(layers)} became trainable, so it has no state "
            "for them. Call compile() again after changing `trainable`."
        )
