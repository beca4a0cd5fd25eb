"""Keras models that cannot be replicated, batches that cannot be split, and misused optimizers."""

from __future__ import annotations

from replica_engine.errors.base import ReplicaEngineError, at, warning
from replica_engine.errors.timeouts import count_of


class ReplicateError(ReplicaEngineError, ValueError):
    """`replicate_model` cannot replicate this model, or cannot use its other arguments.

    Raised by `replicate_model`, or by the first use of the replicated model. Pass a built Keras model that was made
    outside a strategy's scope, and replicas that exist.
    """


class BatchError(ReplicaEngineError, ValueError):
    """A batch cannot be divided among the replicas.

    Raised by `fit`, `evaluate`, `predict` and `split_batch`. Give all arrays as many samples, and choose a batch size
    that is a multiple of the number of replicas where the message asks for it.
    """


class BackupError(ReplicaEngineError, ValueError):
    """`BackupAndRestore` or `TrainingState` cannot save or restore this training.

    Raised before training begins, or by the first backup that cannot save a value. Pass a local folder and arguments
    that exist, and restore into the model that was saved. Delete a folder of another training, or pass another one.
    """

    @classmethod
    def of_fewer_batches(cls, batch: int, found: int, had: int | None) -> BackupError:
        """The epoch has ended before the place of the backup."""
        before = "" if had is None else f", and had {had}"
        return cls(
            f"The backup was written after batch {batch} of an epoch, and the epoch has {found} batches now{before}. "
            "The place in the data is counted in batches: train with the batch size and the data of the program that "
            "saved it, or delete the folder to begin from the first epoch."
        )


def warn_other_batches(batch: int, had: int, now: int, is_smaller: bool | None) -> str:
    """The warning that the place of a backup is another place in the data now.

    Args:
        batch: the place, in batches.
        had: how many samples a batch had, or batches an epoch.
        now: how many it has now.
        is_smaller: whether batches are smaller now; None if `had` and `now` count the batches of an epoch.
    """
    what = f"an epoch has {now} batches" if is_smaller is None else f"a batch has {count_of(now, 'sample')}"
    lost = {
        True: "samples that were trained are trained again",
        False: "samples are left out that were not trained",
        None: "samples may be trained again or left out",
    }[is_smaller]
    return warning(
        "warn_other_batches",
        f"The training goes on after batch {batch} of the epoch, and {what} now, and had {had}. The place in the "
        f"data is counted in batches: in this epoch, {lost}; later epochs are whole. Train with the batch size and the "
        "data of the program that saved it.",
    )


def warn_uneven_rest(model: str, rows: int, size: int) -> str:
    """The warning that replicas get unequal shares of a batch, of a model with a step of its own in a scope."""
    return warning(
        "warn_uneven_rest",
        f"A batch of {count_of(rows, 'sample')} gives {size} replicas unequal shares. The train_step or compute_loss "
        f"of {model!r} follows the rule of tf.distribute in a scope: each replica computes its part of a sum. That is "
        "right if the step divides by the batch of all replicas. If it takes means over its samples, they count "
        "unequally. Leave out a rest: dataset.batch(n, drop_remainder=True). Or let replicate_model(model) divide "
        "batches of any size, with the results of one device.",
    )


def warn_metric_not_a_sum(metric: str, kind: str, variable: str, where: str, size: int) -> str:
    """The warning that the variable of a metric is not a sum over samples, in a step of the user's own in a scope."""
    return warning(
        "warn_metric_not_a_sum",
        f"The metric {metric!r} ({kind}) assigns its variable {variable!r}{at(where)}, and the value is not a sum over "
        f"samples but, for example, a maximum or the last value. Each of {size} replicas does so for its own samples, "
        "and their values are added up when the metric is read, as in tf.distribute. So the number is not that of one "
        "device. Build the model outside of the scope and train replicate_model(model, strategy=strategy), which "
        "computes such metrics as one device does. Or make each variable of the metric a sum over samples, with "
        "assign_add.",
    )


def warn_whole_steps(step: str, model: str, why: str, where: str, instead: str) -> str:
    """The warning that every replica computes whole batches in a step of a model, because of one line."""
    return warning(
        "warn_whole_steps",
        f"Every replica computes the whole batch in `{step}` of {model!r}, because {why}{at(where)}. The numbers are "
        "those of one device, and the step takes as long as on one device: in parts of the batch the numbers would be "
        f"others, or it is not known that they are the same.{' ' * bool(instead)}{instead}",
    )


class LogError(ReplicaEngineError, ValueError):
    """A step of a replicated model returned a value that the replicas cannot combine to that of one device.

    Raised while the step is traced. Return means, results of metrics, or variables, which are equal on all replicas.
    """


class OptimizerError(ReplicaEngineError, RuntimeError):
    """An optimizer was used where or when it cannot work, or was made with unusable arguments.

    Raised when the optimizer is made, or where it applies gradients. Apply gradients in the function that replicas run,
    and compile the model again when `trainable` has changed.
    """
