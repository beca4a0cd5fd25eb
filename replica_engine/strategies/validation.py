"""Checks the arguments of strategies, `run` and `reduce` before anything is done with them."""

from __future__ import annotations

import difflib
import functools
import inspect
import operator
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, ParamSpec, TypeVar

import numpy as np
import tensorflow as tf

from replica_engine._tf import distribute
from replica_engine.diagnostics.misuse import of_plain_variable
from replica_engine.errors import CollectiveError, ReplicaEngineError, ReplicaValueError
from replica_engine.errors.base import brief, shown
from replica_engine.values.structure import as_tensor

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
            names = keywords_of(inspect.signature(strategy))
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
        names = keywords_of(inspect.signature(fn))

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


def keywords_of(signature: inspect.Signature) -> list[str]:
    """The names of the arguments that a function, or a strategy's constructor, takes by name.

    Example:
        >>> keywords_of(inspect.signature(lambda x, /, y, *z, w: None))
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
        raise of_plain_variable(variable)


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
    except Exception:  # TensorFlow's tensors raise errors of other classes here
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
    better = None if isinstance(error, ReplicaEngineError) else _explained(error, value, axis)
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


def _explained(error: Exception, value: Any, axis: Axis) -> ReplicaValueError | None:
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
        better = _of_kinds(kinds, axis)
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


def _of_kinds(kinds: list[tuple[tf.DType, tf.TensorShape]], axis: Axis) -> ReplicaValueError | None:
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
