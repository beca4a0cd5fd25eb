"""Errors about values, models, optimizers and checkpoints, and of parity checks and the contrib API.

The contrib API is TensorFlow's of 2018. A parity check compares the results of one device and of N replicas.
"""

from __future__ import annotations

from collections.abc import Sequence

from replica_engine.errors.base import ReplicaEngineError, add_note, at, brief, meant_reduction, plural, warning

__all__ = ["BackupError", "BatchError", "CheckpointError", "ContribError", "DebugError", "LogError", "NoValueError"]
__all__ += ["OptimizerError", "ParityArgumentError", "ParityError", "ReplicaValueError", "ReplicateError"]

_NUMBERS = (bool, int, float, complex)


class ReplicaValueError(ReplicaEngineError, ValueError, TypeError):
    """A value, or a structure of values, cannot be passed to replicas, reduced, or joined.

    Raised by the call that gets the value. Pass and return tensors, numbers, and structures of them, one for each
    replica.
    """

    @classmethod
    def other_size(cls, name: str, given: int, size: int) -> ReplicaValueError:
        """A distributed value belongs to another number of replicas."""
        return cls(
            f"{name} is a distributed value of {given} replica{'' if given == 1 else 's'}, but this strategy has "
            f"{size}. The values of a strategy are for its own replicas only: make the value again with "
            "strategy.experimental_distribute_values_from_function(fn)."
        )

    @classmethod
    def several(cls, asked: str, size: int, in_replica: bool) -> ReplicaValueError:
        """The result of `run` is used as if it were one number or one tensor; `asked` is the user's code in short."""
        asker = f"`{asked}`" if "x" in asked else asked
        instead = _ONE_TRUTH if asked == "if x" and not in_replica else _advise_one_value(in_replica)
        return cls(f"{asker} needs one value, but x holds one for each of {size} replicas. {instead}")

    @classmethod
    def endless(cls, what: str) -> ReplicaValueError:
        """A structure contains itself or is nested too deeply."""
        return cls(
            f"A structure among {what} contains itself, or has more levels of lists, tuples and mappings than Python "
            "can follow. Keep tensors in a few levels; put an object that refers to itself into a class of your own."
        )

    @classmethod
    def no_tensor(cls, name: str, value: object, reason: str) -> ReplicaValueError:
        """An array or number cannot become a tensor."""
        if value is None and name.endswith("all_reduce"):
            return cls(
                f"{name} is None. A tape gives None for a variable that the loss does not depend on: "
                "leave such gradients out on all replicas, or put tf.zeros_like(variable) in their place."
            )
        return cls(f"{name} cannot become a tensor: {reason.rstrip('.')}. It is {brief(value)}.")

    @classmethod
    def sum_of_one(cls, value: object, of_variable: bool, where: str = "") -> ReplicaValueError:
        """The sum was requested of one value that all replicas share; a `value` that is a text describes it."""
        what = f"the variable {getattr(value, 'name', '')!r}" if of_variable else brief(value)
        what = value if isinstance(value, str) else what
        own = (
            "the value that each replica reads: v.read_value()"
            if of_variable
            else f"a tensor that each replica makes: tf.{'constant' if isinstance(value, _NUMBERS) else 'identity'}(x)"
        )
        return cls(
            f"The sum over replicas of {what}{at(where)} is not defined: it is one value for all replicas, not one "
            f"value for each. Read it directly, reduce it with MEAN, or add up {own}."
        )

    @classmethod
    def bad_reduction(cls, given: object) -> ReplicaValueError:
        """The reduction is unknown."""
        return cls(
            f'Values are reduced with "SUM" or "MEAN", or a tf.distribute.ReduceOp; got {brief(given)}.'
            f"{meant_reduction(given, ('SUM', 'MEAN'), 'strategy.experimental_local_results(values)')}"
        )

    @classmethod
    def bad_axis(cls, given: object) -> ReplicaValueError:
        """`axis` is not an axis to reduce along."""
        return cls(f"`axis` must be an int, a tuple of ints, or None to reduce over replicas only; got {brief(given)}.")

    @classmethod
    def no_function(cls, given: object) -> ReplicaValueError:
        """The argument is not callable."""
        return cls(
            f"Replicas run a function: `run` takes a function, and its arguments in args=(...). Got {brief(given)}."
        )

    @classmethod
    def no_strategy(cls, given: object) -> ReplicaValueError:
        """The first argument of a function that takes a strategy is none."""
        return cls(f"The first argument must be the strategy that the replicas belong to; got {brief(given)}.")

    @classmethod
    def no_positional(cls, given: object, name: str = "args") -> ReplicaValueError:
        """The positional arguments, which the argument `name` takes, are not a list or tuple."""
        return cls(
            f"positional args must be a list or tuple, {name}=(x,); got {brief(given)}. It is the comma that makes a "
            f"tuple: {name}=(x) is {name}=x."
        )

    @classmethod
    def no_keywords(cls, given: object) -> ReplicaValueError:
        """The keyword arguments are not a mapping."""
        return cls(f"`kwargs` must be a mapping of names to arguments, kwargs={{'x': x}}, or None; got {brief(given)}.")

    @classmethod
    def bad_rows(cls, name: str, given: object) -> ReplicaValueError:
        """A number of rows is negative or not an int."""
        return cls(f"{name} must be an int that is not negative, or None; got {brief(given)}.")


class NoValueError(ReplicaEngineError, AttributeError):
    """A tensor of a traced function was asked for its value, or values of several replicas for what one tensor has.

    Raised where the attribute is read. Compute with ops of TensorFlow, and read results after the run.
    """

    @classmethod
    def several(cls, name: str, in_replica: bool) -> NoValueError:
        """The result of `run` is asked for an attribute that only one tensor has."""
        return cls(
            f"x.{name} is of one tensor, but x holds one value for each replica. {_advise_one_value(in_replica)}"
        )


_ONE_TRUTH = "Write any(strategy.experimental_local_results(x)), or all(...)."


def _advise_one_value(in_replica: bool) -> str:
    """What to write where the value of several replicas is used as if it were one."""
    if in_replica:
        return "A replica gets its own value as an argument: strategy.run(fn, args=(x,))."
    return (
        'For one number, write strategy.reduce("MEAN", x, axis=None), or "SUM"; for a list of the values of all '
        "replicas, strategy.experimental_local_results(x); for their rows in one tensor, strategy.gather(x, axis=0)."
    )


_ASKS = " asks for the value of a "

_TENSORFLOWS = {name: f"tf.reduce_{name}(x)" for name in ("sum", "mean", "max", "min", "prod")}
_TENSORFLOWS |= {name: f"tf.{name}(x)" for name in ("argmax", "argmin", "transpose", "argsort", "sort")}
_TENSORFLOWS |= {"std": "tf.math.reduce_std(x)", "var": "tf.math.reduce_variance(x)", "reshape": "tf.reshape(x, shape)"}
_TENSORFLOWS |= {"concatenate": "tf.concat(...)", "stack": "tf.stack(...)"}
_PRINTED = "Write tf.print(x), which shows the value when the function runs."
_RETURNED = "Return x from the function, and read it after the run."
_INSTEAD = {
    "numpy": "Write TensorFlow's function of that name: tf.exp(x) for np.exp(x).",
    "float(x)": "Write tf.cast(x, tf.float32).",
    "int(x)": "Write tf.cast(x, tf.int32).",
    "if x": "Write tf.where(x > 0, a, b), or tf.cond. AutoGraph turns `if` and `while` into ops where it is on: not "
    "with autograph=False, and not in a function whose source it cannot read, such as one of two lambdas on a line.",
    "for each in x": "Write tf.unstack(x), or tf.map_fn(fn, x).",
    "float(x), int(x) or range(x)": "Write tf.cast(x, tf.float32), tf.cast(x, tf.int32) or tf.range(x).",
    "v.numpy()": "Compute with v itself, v * 2.0, and read v.numpy() after the run. To see it while the function runs: "
    "tf.print(v).",
    "x.item()": _RETURNED,
    "x.tolist()": _RETURNED,
    "'%f' % x": _PRINTED,
    "f'{x:.2f}'": _PRINTED,
}


def note_no_value(error: BaseException, asked: str, where: str, of_variable: bool = False) -> None:
    """Adds a note to an exception about a value in a traced function: what asked for it, and what to write instead.

    Args:
        error: the exception, which keeps its type and text.
        asked: the user's code in short, "float(x)"; "numpy" if the name of the NumPy function is unknown.
        where: the user's line, "train.py:12 in step".
        of_variable: whether the value of a variable was asked for.
    """
    if any(_ASKS in str(note) for note in getattr(error, "__notes__", ())):
        return  # by a run inside another
    name, host = asked.removeprefix("np.").removesuffix("(x)"), ""
    instead = f"Write {_TENSORFLOWS[name]}." if name in _TENSORFLOWS else _INSTEAD.get(asked, _INSTEAD["numpy"])
    if asked == "numpy" or asked.startswith("np."):
        host = (
            " Code that needs NumPy can run on the host, while the function runs: "
            "replica_engine.xla.outside_compilation(fn, x) under TPUStrategy, and elsewhere "
            "tf.py_function(fn, [x], x.dtype)."
        )
    asker = "A NumPy function" if asked == "numpy" else f"`{asked}`"
    what = "variable" if of_variable else "tensor"
    why = "no value of a variable can be read" if of_variable else "a tensor has no value yet"
    add_note(
        error,
        f"{asker}{_ASKS}{what}{at(where)}. The function is traced, by tf.function or "
        f"by TPUStrategy: while it is traced, {why}. {instead}{host}",
    )


class CheckpointError(ReplicaEngineError, OSError):
    """A checkpoint could not be written.

    Raised by `tf.train.Checkpoint.save` and `write`, by `tf.train.CheckpointManager.save`, and by a `fit` whose
    `BackupAndRestore` cannot write. If the checkpoint was saved asynchronously, the next save or `sync`, or the end of
    the program, raises it. What was at the path before is
    still there and complete. Make room on the disk, or choose another folder.
    """

    @classmethod
    def not_written(cls, path: str, reason: str, asynchronous: bool) -> CheckpointError:
        """The files could not be written."""
        late = (
            " It was saved asynchronously, by an earlier call. The call that raises this has saved nothing."
            if asynchronous
            else ""
        )
        return cls(
            f"The checkpoint {path!r} could not be written: {reason.rstrip('.')}.{late} Earlier checkpoints, and what "
            "was at this path before, are untouched."
        )


# Keras models, their batches and their optimizers.
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
    def fewer_batches(cls, batch: int, found: int, had: int | None) -> BackupError:
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
    what = f"an epoch has {now} batches" if is_smaller is None else f"a batch has {plural(now, 'sample')}"
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
        f"A batch of {plural(rows, 'sample')} gives {size} replicas unequal shares. The train_step or compute_loss "
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


class DebugError(ReplicaEngineError, RuntimeError):
    """Debug mode has found a mistake that raises nothing by itself.

    Raised out of the step in which it was found, while `replica_engine.debug()` is on: copies of a variable have become
    unequal, a number that is not finite was made and used, a mean was taken over shards of unequal size, or a tape is
    open around a run.
    """


class ContribError(ReplicaEngineError, ValueError):
    """A method of the contrib `TPUStrategy` was called with unusable arguments.

    Raised by the methods that take the place of those of 2018: aggregations, destinations and hosts. Pass one of the
    values that the message names, or move the call to today's name.
    """

    @classmethod
    def bad_aggregation(cls, given: object, known: Sequence[str]) -> ContribError:
        """The aggregation is unknown, or does not reduce."""
        return cls(
            f"Values cannot be reduced with the aggregation {given}. The aggregation must be one of {', '.join(known)}."
        )


class ParityError(ReplicaEngineError, AssertionError):
    """N replicas compute other numbers than one device. The message is the report of `check_parity`.

    Raised by `raise_if_different` of the report. Begin with the first difference that it lists: what comes after it may
    follow from it.
    """


class ParityArgumentError(ReplicaEngineError, ValueError):
    """`check_parity` cannot check what it was given.

    Raised by `check_parity`. Write the call as the message shows: a model with its data.
    """
