"""Keras models that cannot be replicated, batches that cannot be shared out, optimizers out of place."""

from __future__ import annotations

from collections.abc import Sequence

from replica_engine.errors.base import ReplicaEngineError, add_note, brief, shown


class ReplicateError(ReplicaEngineError, ValueError):
    """`replicate_model` was given what it cannot replicate."""

    @classmethod
    def not_a_model(cls, given: object) -> ReplicateError:
        """Something that is no Keras model."""
        return cls(f"replicate_model takes a Keras 3 model (keras.Model), and got {brief(given)}.")

    @classmethod
    def other_backend(cls, backend: str) -> ReplicateError:
        """Keras runs on another backend."""
        return cls(
            f"Replicas run TensorFlow, and Keras runs on {backend!r} here. Set KERAS_BACKEND=tensorflow in the "
            "environment before keras is imported."
        )

    @classmethod
    def unbuilt(cls, name: str, layer: str) -> ReplicateError:
        """A model that has no variables yet."""
        whose = "" if layer == name else f" (its layer {layer!r} is not)"
        return cls(
            f"The model {name!r} is not built{whose}: it has no variables yet that replicas could share. Give it a "
            "keras.Input, or call it on a batch, model(x[:1]), and then replicate it."
        )

    @classmethod
    def own_function(cls, name: str, method: str) -> ReplicateError:
        """A model that runs its batches in a way of its own."""
        return cls(
            f"The model {name!r} has a {method} of its own, and replicate_model puts another one in its place. "
            "Override train_step, test_step or predict_step: those run on each replica."
        )

    @classmethod
    def busy(cls, name: str) -> ReplicateError:
        """Another replicated model of the same original is running."""
        return cls(
            f"The model {name!r} is running on other replicas, on another thread: two replicated models of one "
            "original take turns. Wait for it, or use one replicated model on both threads."
        )

    @classmethod
    def replicated(cls, name: str) -> ReplicateError:
        """A model that is a replicated one."""
        return cls(f"The model {name!r} is replicated already. Replicate the original one, with other replicas.")

    @classmethod
    def of_strategy(cls, name: str) -> ReplicateError:
        """A model that was built under a strategy."""
        return cls(
            f"The model {name!r} was built under strategy.scope(), so it already runs on the replicas of that "
            "strategy. Build it outside of the scope to replicate it."
        )

    @classmethod
    def bad_count(cls, given: object) -> ReplicateError:
        """A number of replicas that is none."""
        return cls(f"replicas must be a positive int, or None for all devices; got {shown(given)}.")

    @classmethod
    def bad_strategy(cls, given: object) -> ReplicateError:
        """A strategy that models are not replicated with."""
        return cls(
            "strategy must be a replica_engine.MirroredStrategy or a replica_engine.TPUStrategy (or a subclass, on one "
            f"machine), or None to have one chosen; got {brief(given)}."
        )

    @classmethod
    def too_many(cls, replicas: int, strategy: str, present: int) -> ReplicateError:
        """More replicas than a strategy has."""
        return cls(
            f"{replicas} replicas were asked for, and the {strategy} that was given has {present}. Leave out "
            "`replicas`, or give a strategy of that many devices."
        )

    @classmethod
    def too_few_devices(cls, replicas: int, kind: str, present: int) -> ReplicateError:
        """More replicas than devices."""
        more = (
            "TensorFlow makes more CPU devices only before it starts: call "
            f"replica_engine.testing.logical_devices({replicas}) first in the program"
            if kind == "CPU"
            else f"Ask for {present} or fewer"
        )
        return cls(f"{replicas} replicas need {replicas} {kind} devices, and this process has {present}. {more}.")

    @classmethod
    def fixed_batch(cls, name: str, size: int, share: int, replicas: int) -> ReplicateError:
        """An input whose batch size is a part of the model."""
        return cls(
            f"The input {name!r} has a fixed batch size of {size}, and each of {replicas} replicas would get "
            f"{share} samples. Build the model with keras.Input(shape), without a batch size."
        )


class BatchError(ReplicaEngineError, ValueError):
    """A batch that cannot be shared out to replicas."""

    @classmethod
    def lengths(cls, named: Sequence[tuple[str, int]]) -> BatchError:
        """Arrays of different lengths."""
        rows = ", ".join(f"{name} has {rows}" for name, rows in named)
        return cls(f"All arrays of a batch must have the same number of samples: {rows}.")

    @classmethod
    def nothing(cls) -> BatchError:
        """Nothing with samples in it."""
        return cls("The batch has no array with samples in it, so there is nothing to share out.")

    @classmethod
    def too_large(cls, rows: int, size: int) -> BatchError:
        """More samples than were said to be the most."""
        return cls(f"The batch has {rows} samples, more than the batch_size={size} that was given.")


def many_batch_sizes(step: str, model: str, sizes: int) -> str:
    """A warning: a step is compiled again and again."""
    return (
        f"{step} of {model!r} has been compiled for {sizes} batch sizes, each by itself. Batches of one size "
        "compile once. replicate_model(model, strategy=replica_engine.MirroredStrategy(...)) has one graph for all."
    )


def note_sparse_inputs(error: BaseException, inputs: Sequence[tuple[str, str, str]]) -> None:
    """Adds to an error of XLA which inputs of the model are sparse or ragged.

    Args:
        error: the error.
        inputs: of each its name in the batch, what it is, and the call that makes it dense.
    """
    named = ", ".join(f"{name} is a {kind}" for name, kind, _ in inputs)
    calls = ", ".join(dict.fromkeys(call for _, _, call in inputs))
    add_note(
        error,
        f"{named}. XLA compiles for dense tensors of fixed shapes: make the batches dense in dataset.map, with "
        f"{calls}. Replicas on threads take them as they are: "
        "replicate_model(model, strategy=replica_engine.MirroredStrategy()).",
    )


class OptimizerError(ReplicaEngineError, RuntimeError):
    """An optimizer was used where it cannot work."""

    @classmethod
    def not_in_replica(cls) -> OptimizerError:
        """Gradients applied across replicas, where they are reduced already or there are none."""
        return cls(
            "Gradients are reduced over replicas and applied in replica context: call apply() in the function that is "
            "given to strategy.run, not in a merge function or under strategy.scope() alone."
        )

    @classmethod
    def bad_reduction(cls, given: object) -> OptimizerError:
        """No reduction of gradients."""
        return cls(f'reduction must be "mean" or "sum"; got {shown(given)}.')

    @classmethod
    def no_optimizer(cls, given: object) -> OptimizerError:
        """Something that is no Keras optimizer."""
        return cls(f"CrossReplicaOptimizer wraps a Keras optimizer (keras.optimizers.Optimizer); got {brief(given)}.")

    @classmethod
    def unknown_weights(cls, layers: Sequence[str]) -> OptimizerError:
        """Weights that became trainable after the optimizer was built."""
        return cls(
            f"The optimizer was built before the weights of {', '.join(layers)} became trainable, and has no state for "
            "them. Call compile() again after changing `trainable`."
        )
