"""Checks of what users pass to strategies, `run` and `reduce`, before anything is done with it.

`resolve_devices` parses, checks and completes the names of a strategy's devices. `note_arguments` says what to write
instead of a call of `run` whose arguments do not fit the function.
"""

from __future__ import annotations

import contextlib
import difflib
import functools
import inspect
import operator
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, ParamSpec, TypeVar

import numpy as np
import tensorflow as tf

from replica_engine.diagnostics.misuse import make_plain_variable_error
from replica_engine.errors import CollectiveError, DeviceError, ReplicaEngineError, ReplicaValueError
from replica_engine.errors.base import add_note, brief, shown
from replica_engine.threads.replica_run import short_name
from replica_engine.upstream import distribute
from replica_engine.values.structure import as_tensor

_MOST_NAMED = 4


def resolve_devices(devices: Sequence[str | tf.config.LogicalDevice] | None) -> list[str] | None:
    """Returns the full names of `devices`.

    Args:
        devices: names such as "CPU:0", "/gpu:1", "/device:GPU:1", or `tf.config.LogicalDevice`s; one of them alone is
            a list of one. None, or an empty list, means all GPUs, or all CPUs on a machine without GPUs.

    Returns:
        Full names in the order given; None where TensorFlow must choose, which is the case in tf.compat.v1 graphs.

    Raises:
        DeviceError: a device does not exist, is named twice, or is of another kind than the rest.
    """
    eager = tf.compat.v1.executing_eagerly_outside_functions()
    given = listed(devices)
    if not given:
        if not eager:
            return None
        given = tf.config.list_logical_devices("GPU") or tf.config.list_logical_devices("CPU")
    names = [_full_name(device) for device in given]
    if len(set(names)) < len(names):
        twice = sorted({short_name(name) for name in names if names.count(name) > 1})
        raise DeviceError(
            f"No duplicates allowed in `devices`: {', '.join(twice)}. One replica runs on each device, so name each "
            "device once. For several replicas on one CPU, make logical devices: "
            "replica_engine.logical_devices(n)."
        )
    kinds = sorted({tf.DeviceSpec.from_string(name).device_type for name in names})
    if len(kinds) > 1:
        raise DeviceError(
            f"`devices` mixes kinds ({', '.join(kinds)}), so the slowest kind would delay every step. Pass devices "
            "of one kind."
        )
    if eager:  # In a tf.compat.v1 program the session decides which devices exist.
        _check_exist(names, kinds[0])
    return names


def described(strategy: tf.distribute.Strategy, devices: Sequence[str]) -> str:
    """A strategy in one line: "MirroredStrategy(2 replicas: CPU:0, CPU:1)".

    Args:
        strategy: the strategy.
        devices: the devices of this process, as messages name them; of a worker: "worker:0/CPU:1", "worker 0, CPU:1".
    """
    size = strategy.num_replicas_in_sync
    devices = [re.split(r"/|, ", device)[-1] for device in devices]
    named = [*devices[: _MOST_NAMED - 2], "...", devices[-1]] if len(devices) > _MOST_NAMED else devices
    here = "" if len(devices) == size else ", on this worker"
    return f"{type(strategy).__name__}({size} replica{'' if size == 1 else 's'}{here}: {', '.join(named)})"


def listed(devices: object) -> list[Any]:
    """The devices that the user named, as `resolve_devices` takes them; none if they are left to it."""
    if devices is None:
        return []
    if isinstance(devices, (str, bytes, tf.config.LogicalDevice)):
        return [devices]
    if not isinstance(devices, Iterable):
        raise DeviceError.unreadable(devices)
    try:
        return list(devices)
    except (TypeError, ValueError, RuntimeError, tf.errors.OpError):  # a scalar, or a dataset that fails
        raise DeviceError.unreadable(devices) from None


def _full_name(device: object) -> str:
    name = device.name if isinstance(device, tf.config.LogicalDevice) else device
    if not isinstance(name, str) or not name.strip():  # TensorFlow takes no name for any device
        raise DeviceError.unreadable(device)
    with contextlib.suppress(ValueError, TypeError, AttributeError):
        full = distribute.resolve(name)
        if tf.DeviceSpec.from_string(full).device_type is not None:
            return full
    raise DeviceError.unreadable(device)


def _check_exist(names: list[str], kind: str) -> None:
    present = {device.name for device in tf.config.list_logical_devices()}
    known = {(spec.device_type, spec.device_index) for spec in map(tf.DeviceSpec.from_string, present)}
    missing = []
    for name in names:
        spec = tf.DeviceSpec.from_string(name)
        if spec.job in (None, "localhost") and (spec.device_type, spec.device_index) not in known:
            missing.append(short_name(name))
    if missing:
        more = (
            "To make more CPU devices, call replica_engine.logical_devices(n) before TensorFlow starts"
            if kind == "CPU"
            else f"tf.config.list_physical_devices({kind!r}) lists the {kind} devices that TensorFlow finds"
        )
        raise DeviceError(
            f"No such device: {', '.join(missing)}. This process has {', '.join(sorted(map(short_name, present)))}. "
            f"{more}."
        )


P = ParamSpec("P")
R = TypeVar("R")

Axis = int | tuple[int, ...] | None
"""The axis or axes along which values of replicas are reduced too."""

_OF_ONE = "A non-DistributedValues value"  # of the error of a sum of one value for all replicas
_OF_DIVIDED = ("distribution", "cores_per_replica")  # arguments that divide a model over devices
_OF_TPU_STRATEGY = (*_OF_DIVIDED, "num_cores", "steps_per_run", "same_random_numbers", "soft_placement")
NUMBERS_OF_REPLICAS = ("replicas", "num_replicas")  # near to `cores_per_replica`, which is something else
_MOST_AXES = 254  # the largest rank of a TensorFlow tensor


def check_call(fn: object, args: object, kwargs: object) -> None:
    """Checks that `run` gets a function, a list or tuple of arguments, and None or a mapping of keyword arguments.

    Raises:
        ReplicaValueError: an argument is of another kind.

    Example:
        >>> check_call(abs, (1,), None)
    """
    if not callable(fn):
        raise ReplicaValueError.no_function(fn)
    if not isinstance(args, (list, tuple)):
        raise ReplicaValueError.no_positional(args)
    if isinstance(kwargs, distribute.DistributedValues):  # one mapping per replica; it is checked when it is split
        return
    if kwargs is not None and not (isinstance(kwargs, Mapping) and all(isinstance(name, str) for name in kwargs)):
        raise ReplicaValueError.no_keywords(kwargs)


def check_flags(**values: object) -> None:
    """Checks that each value is True or False.

    Raises:
        ReplicaValueError: a value is neither.

    Example:
        >>> check_flags(concurrent=True)
    """
    for name, value in values.items():
        if not isinstance(value, (bool, np.bool_)):
            raise ReplicaValueError(f"{name} must be True or False; got {brief(value)}.")


def check_choice(name: str, value: object, choices: Sequence[str]) -> None:
    """Checks that a value is None or one of some words.

    Raises:
        ReplicaValueError: it is something else.

    Example:
        >>> check_choice("graph_optimizer", "light", ["light", "full"])
    """
    if value is not None and value not in choices:
        raise ReplicaValueError(f"{name} must be {', '.join(map(repr, choices))} or None; got {brief(value)}.")


def refuse(strategy: type, arguments: Mapping[str, object]) -> None:
    """Refuses keyword arguments that a strategy on replica threads does not have.

    Raises:
        ReplicaValueError: `TPUStrategy` has the argument.
        TypeError: no strategy has it.

    Example:
        >>> refuse(type(tf.distribute.get_strategy()), {})
    """
    for name in arguments:
        if name not in _OF_TPU_STRATEGY:
            names = list_keywords(inspect.signature(strategy))
            if name in NUMBERS_OF_REPLICAS and "devices" in names:
                raise TypeError(
                    f"{strategy.__name__} got an unexpected keyword argument {name!r}. Each device has a replica: "
                    'write devices=["CPU:0", "CPU:1"].'
                )
            raise misspelt(strategy.__name__, name, [*names, *_OF_TPU_STRATEGY])
        raise ReplicaValueError(
            f"{strategy.__name__} takes no {name}=: each device is a replica and has all variables. Write "
            f"replica_engine.TPUStrategy({name}=...), which runs on CPUs, GPUs and TPUs."
            if name in _OF_DIVIDED
            else f"{strategy.__name__} takes no {name}=; it is an argument of replica_engine.TPUStrategy."
        )


def misspelt(called: str, name: str, names: Sequence[str]) -> TypeError:
    """The error for a keyword argument that does not exist, with the nearest one that does.

    Args:
        called: what was called, as users write it: "strategy.run".
        name: the keyword.
        names: the keywords that there are.

    Example:
        >>> str(misspelt("strategy.run", "arg", ["fn", "args", "kwargs"]))
        "strategy.run got an unexpected keyword argument 'arg'. Did you mean args=?"
    """
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    instead = f"Did you mean {near[0]}=?" if near else f"It takes {', '.join(f'{each}=' for each in names)}."
    return TypeError(f"{called} got an unexpected keyword argument {name!r}. {instead}")


def names_keywords(
    called: str, instead: Mapping[str, str] = MappingProxyType({})
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorates a function that users call: a misspelt keyword argument is an error that says the nearest one.

    Args:
        called: what is called, as users write it: "strategy.reduce".
        instead: what to write for keywords that another library has, as a sentence.

    Example:
        >>> @names_keywords("double")
        ... def double(number):
        ...     return 2 * number
        >>> double(numbr=1)
        Traceback (most recent call last):
        TypeError: double got an unexpected keyword argument 'numbr'. Did you mean number=?
    """

    def decorate(fn: Callable[P, R]) -> Callable[P, R]:
        names = list_keywords(inspect.signature(fn))

        @functools.wraps(fn)
        def checked(*args: P.args, **kwargs: P.kwargs) -> R:
            for name in kwargs:
                if name in instead and name not in names:
                    raise TypeError(f"{called} got an unexpected keyword argument {name!r}. {instead[name]}")
                if name not in names:
                    raise misspelt(called, name, [each for each in names if each != "self"])
            return fn(*args, **kwargs)

        return checked

    return decorate


def list_keywords(signature: inspect.Signature) -> list[str]:
    """The names of the arguments that a function, or a strategy's constructor, takes by name.

    Example:
        >>> list_keywords(inspect.signature(lambda x, /, y, *z, w: None))
        ['y', 'w']
    """
    kinds = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY
    return [each.name for each in signature.parameters.values() if each.kind in kinds]


def check_updated(variable: object, args: object) -> None:
    """Checks that a variable to update has a component on each replica, and that its update gets a list or tuple.

    Raises:
        ScopeError: it is a plain variable.
        ReplicaValueError: `args` is something else.
    """
    if not isinstance(args, (list, tuple)):
        raise ReplicaValueError.no_positional(args)
    if isinstance(variable, tf.Variable) and not isinstance(variable, distribute.DistributedVariable):
        raise make_plain_variable_error(variable)


def check_seconds(**values: float | None) -> None:
    """Raises ValueError if a value is neither None nor a positive number of seconds."""
    for name, value in values.items():
        if value is not None and (isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0):
            raise ValueError(f"{name} is in seconds and must be positive, or None; got {shown(value)}.")


def as_reduction(reduce_op: object) -> tf.distribute.ReduceOp:
    """Returns the operation that a name stands for.

    Raises:
        ReplicaValueError: there is no such reduction.

    Example:
        >>> as_reduction("sum")
        <ReduceOp.SUM: 'SUM'>
    """
    if isinstance(reduce_op, str):
        reduce_op = tf.distribute.ReduceOp.__members__.get(reduce_op.upper(), reduce_op)
    if not isinstance(reduce_op, tf.distribute.ReduceOp):
        raise ReplicaValueError.bad_reduction(reduce_op)
    return reduce_op


def checked_reduction(reduce_op: object, value: object, axis: Any) -> tuple[tf.distribute.ReduceOp, object, Axis]:
    """Returns the operation, value and axis of `reduce` in the form that TensorFlow takes.

    Args:
        reduce_op: "SUM", "MEAN" or a `tf.distribute.ReduceOp`.
        value: the value to reduce.
        axis: one axis, a list or tuple of axes, or None.

    Raises:
        ReplicaValueError: one of the arguments is of another kind.

    Example:
        >>> checked_reduction("sum", 1.0, 0)
        (<ReduceOp.SUM: 'SUM'>, 1.0, 0)
    """
    if isinstance(value, _REDUCTIONS) and not isinstance(reduce_op, _REDUCTIONS):
        reduction = getattr(value, "value", value)
        raise ReplicaValueError(
            "The first two arguments of strategy.reduce are swapped: the reduction comes first, then the values. "
            f'Write strategy.reduce("{reduction}", values, axis=None).'
        )
    reduce_op = as_reduction(reduce_op)
    if axis is None:
        return reduce_op, value, None
    try:
        axis = tuple(map(operator.index, axis)) if isinstance(axis, (list, tuple)) else operator.index(axis)
    except (TypeError, ValueError, AttributeError, RuntimeError, tf.errors.OpError, ReplicaEngineError):  # of tensors
        raise ReplicaValueError.bad_axis(axis) from None
    if any(abs(dimension) > _MOST_AXES for dimension in (axis if isinstance(axis, tuple) else (axis,))):
        raise ReplicaValueError.bad_axis(axis)
    if isinstance(value, Mapping):
        raise ReplicaValueError.no_tensor("A value to reduce along an axis", value, "it is a mapping")
    if reduce_op == tf.distribute.ReduceOp.MEAN:  # TensorFlow reads the shape of the value
        value = _with_shape(value)
    return reduce_op, value, axis


_REDUCTIONS = (str, tf.distribute.ReduceOp)
NOT_REDUCED = (ValueError, TypeError, tf.errors.InvalidArgumentError)
"""What TensorFlow raises of values that it cannot reduce."""


def not_reduced(error: Exception, value: object, axis: Axis = None) -> Exception:
    """The error that says which values cannot be reduced, and why; the error itself if the values do not explain it.

    Nothing is looked at before something fails: a reduction that works costs as much as without this.

    Args:
        error: what a reduction raised, one of `NOT_REDUCED`.
        value: what was to be reduced.
        axis: the axis or axes, or None.
    """
    better = None if isinstance(error, ReplicaEngineError) else _find_better_error(error, value, axis)
    if better is None:
        return error
    better.__suppress_context__ = True
    return better


def not_gathered(error: Exception, value: object, axis: object) -> Exception:
    """The error that says that values have no such axis to be gathered along; otherwise the error itself.

    Args:
        error: what `gather` raised, one of `NOT_REDUCED`.
        value: what was to be gathered.
        axis: the axis.
    """
    components = value.values if isinstance(value, distribute.DistributedValues) else ()
    for _, shape in (kind for kind in map(_kind, components) if kind is not None):
        if isinstance(axis, int) and shape.rank is not None and not -shape.rank <= axis < shape.rank:
            better = CollectiveError.no_axis("strategy.gather", axis, str(shape))
            better.__suppress_context__ = True
            return better
    return error


def _find_better_error(error: Exception, value: Any, axis: Axis) -> ReplicaValueError | None:
    text = str(error)
    is_structure = axis is None or isinstance(value, distribute.DistributedValues)  # else a list stands for a tensor
    for leaf in tf.nest.flatten(value) if is_structure else [value]:
        is_variable = isinstance(leaf, distribute.DistributedVariable)
        several = isinstance(leaf, distribute.DistributedValues) and not is_variable
        if _OF_ONE in text and not several:
            if isinstance(leaf, (bool, int, float, complex)) and not leaf:
                continue  # the sum of zeros is zero
            return ReplicaValueError.sum_of_one(leaf, isinstance(leaf, tf.Variable))
        kinds = [kind for kind in map(_kind, leaf.values if several else (leaf,)) if kind is not None]
        better = _explain_kinds(kinds, axis)
        if better is not None:
            return better
    return None


def _kind(value: object) -> tuple[tf.DType, tf.TensorShape] | None:
    """The dtype and shape of a tensor or of what becomes one."""
    if isinstance(value, (tf.Tensor, tf.Variable)):
        return value.dtype, value.shape
    try:
        array = np.asarray(value)
        return tf.as_dtype(array.dtype), tf.TensorShape(array.shape)
    except (TypeError, ValueError):
        return None


def _explain_kinds(kinds: list[tuple[tf.DType, tf.TensorShape]], axis: Axis) -> ReplicaValueError | None:
    """The error that explains why values of these dtypes and shapes, those of one leaf, cannot be reduced."""
    for dtype, shape in kinds:
        if not (dtype.is_floating or dtype.is_integer or dtype.is_complex):
            instead = (
                "Cast them in the replicas, tf.cast(x, tf.float32): their mean is then the part that is true. Or write "
                "any(strategy.experimental_local_results(x)), or all(...)."
                if dtype == tf.bool
                else "strategy.experimental_local_results(x) has the values of all replicas."
            )
            return ReplicaValueError(f"Values of dtype {dtype.name} have no sum and no mean over replicas. {instead}")
        for one in axis if isinstance(axis, tuple) else () if axis is None else (axis,):
            if shape.rank is not None and not -shape.rank <= one < shape.rank:
                return ReplicaValueError(
                    f"Values are reduced over replicas and along axis {one}, but a replica has a value of shape "
                    f"{shape}, which has no such axis. axis=None reduces over replicas only."
                )
    if axis is None and not all(shape.is_compatible_with(kinds[0][1]) for _, shape in kinds):
        return ReplicaValueError(
            "The values of the replicas have different shapes, "
            f"{' and '.join([str(shape) for _, shape in kinds])}, and cannot be added. If they are rows of a "
            "batch, strategy.reduce(op, x, axis=0) reduces the rows of all replicas, and strategy.gather(x, "
            "axis=0) puts them into one tensor."
        )
    return None


def _with_shape(value: object) -> object:
    if isinstance(value, (tf.Tensor, tf.Variable, distribute.DistributedVariable)):
        return value
    if isinstance(value, distribute.DistributedValues):
        return distribute.PerReplica(tuple(map(_with_shape, value.values)))
    return as_tensor(value, "A value to reduce along an axis")


def note_arguments(error: BaseException, fn: Any, args: Any, kwargs: Any) -> None:
    """Adds a note to the TypeError of a function that `run` could not call with its arguments: what to write.

    Only the signature decides. So an error from a call inside the function has no note.

    Args:
        error: what the run raised.
        fn: the function that `run` got.
        args: its positional arguments.
        kwargs: its keyword arguments.
    """
    if not isinstance(error, TypeError) or not isinstance(args, (list, tuple)):
        return
    named = {} if kwargs is None else kwargs
    if not isinstance(named, Mapping):  # one mapping per replica
        return
    try:
        signature = inspect.signature(fn)
    except (TypeError, ValueError):  # a callable that does not say what it takes
        return
    if _takes(signature, args, named):
        return
    name = getattr(fn, "__name__", type(fn).__name__)
    plain = [each.replace(default=each.empty, annotation=each.empty) for each in signature.parameters.values()]
    shown = signature.replace(parameters=plain, return_annotation=signature.empty)
    given = f"args held {_counted(args)}" + (f", and kwargs {', '.join(map(str, named))}" if named else "")
    instead = _instead(signature, args, named, name)
    add_note(error, f"strategy.run could not call `{name}{shown}`: {given}. {instead}")


def _instead(signature: inspect.Signature, args: Sequence[Any], named: Mapping[str, Any], name: str) -> str:
    """What to write, for a call that does not bind."""
    parameters = list(signature.parameters.values())
    has_object = bool(args) and hasattr(type(args[0]), name)
    if parameters and parameters[0].name == "self" and not has_object:
        rest = signature.replace(parameters=parameters[1:])
        call = "the same arguments" if _takes(rest, args, named) else _call(rest, args, named)
        return f"It is a method, and has no object here. Write strategy.run(x.{name}, ...) of an object x, with {call}."
    only = args[0] if len(args) == 1 else None
    if isinstance(only, (list, tuple)) and _takes(signature, only, named):
        return f"Write args=batch for args=(batch,), or {_call(signature, only, named)}."
    if isinstance(only, Mapping) and not named and _takes(signature, (), only):
        return "Write kwargs=batch for args=(batch,)."
    if len(args) > 1 and _takes(signature, (args,), named):
        return "Write args=(batch,) for args=batch: the comma makes a batch one argument."
    call = _call(signature, args, named)
    return f"{_list_unknown(signature, named)}Write {call}{'' if call == 'args=()' else ', with a value for each'}."


def _call(signature: inspect.Signature, args: Sequence[Any], named: Mapping[str, Any]) -> str:
    """Arguments that the function takes, each as the name of its parameter: the given ones, and all without default.

    A value stays where it was given, in `args` or in `kwargs`, if the function takes it there.
    """
    by_position, by_name = [], []
    given = 0 if named and not args else None  # who gives all by name gives the missing ones by name as well
    for index, each in enumerate(signature.parameters.values()):
        if each.kind is each.VAR_POSITIONAL:
            by_position += [f"*{each.name}"] if len(args) > index else []
        elif each.kind is each.VAR_KEYWORD:
            by_name += [name for name in named if name not in list_keywords(signature)]
        elif each.kind is each.KEYWORD_ONLY:
            by_name += [each.name] if each.name in named or each.default is each.empty else []
        elif index < len(args) or (each.kind is each.POSITIONAL_ONLY and each.default is each.empty):
            by_position.append(each.name)
        elif each.name in named and each.kind is each.POSITIONAL_OR_KEYWORD:
            by_name.append(each.name)
            given = index
        elif each.default is not each.empty:
            given = index  # it is left out, and what comes after it has to have a name
        else:
            (by_position if given is None else by_name).append(each.name)
    listed = f"{by_position[0]}," if len(by_position) == 1 else ", ".join(by_position)
    keywords = "kwargs={" + ", ".join(f'"{name}": {name}' for name in by_name) + "}"
    if not by_name:
        return f"args=({listed})"
    return f"args=({listed}), {keywords}" if by_position else keywords


def _list_unknown(signature: inspect.Signature, named: Mapping[str, Any]) -> str:
    """Says which of the keywords the function does not take, with the nearest that it does."""
    parameters = signature.parameters
    if any(each.kind is each.VAR_KEYWORD for each in parameters.values()):
        return ""
    free = list_keywords(signature)
    said = ""
    for name in (name for name in named if name not in free):
        near = difflib.get_close_matches(name, [each for each in free if each not in named], n=1)
        if name in parameters and parameters[name].kind is inspect.Parameter.POSITIONAL_ONLY:
            said += f"It takes {name} in args only. "
        else:
            said += f"It has no argument {name}" + (f"; did you mean {near[0]}? " if near else ". ")
    return said


def _takes(signature: inspect.Signature, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a function of this signature can be called so."""
    try:
        signature.bind(*args, **kwargs)
    except TypeError:
        return False
    return True


def _counted(args: Sequence[Any]) -> str:
    """How many values there are; of a single one, also what is in it."""
    if len(args) != 1:
        return f"{len(args)} values" if args else "no value"
    (only,) = args
    if isinstance(only, (list, tuple, Mapping)):
        return f"1 value, a {type(only).__name__} of {len(only)}"
    return "1 value"
