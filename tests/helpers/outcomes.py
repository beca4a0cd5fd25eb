"""Checks what a call does with bad input: the documented thing, or an error that says what is wrong with the input."""

import collections
import dataclasses
import re
from collections.abc import Mapping

import numpy as np
import tensorflow as tf
from tensorflow.python.distribute.values import DistributedValues, DistributedVariable

from helpers.bad_inputs import Refusal
from replica_engine.errors import ReplicaEngineError

_KINDS = (ReplicaEngineError, TypeError, ValueError, NotImplementedError, tf.errors.InvalidArgumentError, Refusal)

# What Python says when a program that was not prepared for a value goes on with it. ('<' is not in it: tf.nest says
# that of a mapping with keys that cannot be sorted, which it documents not to take.)
_ACCIDENTS = re.compile(
    r"has no attribute|'[^<]+' not supported between|unsupported operand|not subscriptable|unhashable|truth value|"
    r"recursion depth|missing \d+ required|object is not iterable|cannot unpack|object of type '\w+' has no len"
)


def unclear(error):
    """Why a user could not tell from an error what is wrong with the input; None if the error is clear."""
    text = str(error)
    if isinstance(error, tf.errors.NotFoundError) and "All kernels registered for op" in text:
        return None  # TensorFlow has the op for other dtypes only, and says for which
    if not isinstance(error, _KINDS):
        return f"a {type(error).__name__}"
    if len(text) < 20 and not isinstance(error, Refusal):
        return "too short to say anything"
    if not isinstance(error, ReplicaEngineError | Refusal) and (accident := _ACCIDENTS.search(text)):
        return f"an accident: {accident.group()}"
    return None


def attempt(call, *args, documented=(), **kwargs):
    """Returns (result, None), or (None, error) if the call raises. The error must be a clear one.

    Args:
        call: what to call with the other arguments.
        documented: kinds of errors that its documentation names.
    """
    try:
        return call(*args, **kwargs), None
    except (KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:
        why = None if isinstance(error, documented) else unclear(error)
        if why:
            raise AssertionError(f"{why}: {type(error).__name__}: {error}") from error
        return None, error.with_traceback(None)


class Witness:
    """A strategy of two replicas with a variable, to check that the strategy still works.

    Args:
        strategy: the strategy.

    Attributes:
        compiled: whether the function is compiled: then arrays and plain variables come back as tensors.
    """

    def __init__(self, strategy):
        self.strategy = strategy
        self.compiled = hasattr(strategy.extended, "device_group")
        with strategy.scope():
            self.total = tf.Variable(0.0, aggregation=tf.VariableAggregation.MEAN)
        self._expected = 0.0

    def check(self, added=0.0):
        """Checks that a good step has the right result, and changes the variable as it should.

        Args:
            added: what the call before should have added to the variable.
        """
        x = tf.constant(2.0)
        self._expected += added
        assert float(self.total.numpy()) == self._expected, "a failed call has changed a variable"
        result = self.strategy.run(self._step, args=(x,))
        self._expected += 2.0
        assert [float(each) for each in self.strategy.experimental_local_results(result)] == [4.0, 4.0]
        assert float(self.total.numpy()) == self._expected

    def restart(self):
        """Takes the variable as it is, so that one failure does not cause others."""
        self._expected = float(self.total.numpy())

    def _step(self, x):
        self.total.assign_add(x)
        return tf.distribute.get_replica_context().all_reduce("SUM", x)


def part(value, replica):
    """One replica's part of a structure, as documented: of distributed values its own, of all else the same."""
    if isinstance(value, DistributedVariable):
        return value
    if isinstance(value, DistributedValues):
        return value.values[replica]
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(part(each, replica) for each in value))
    if isinstance(value, (list, tuple)):
        return type(value)(part(each, replica) for each in value)
    if isinstance(value, Mapping):
        items = {key: part(each, replica) for key, each in value.items()}
        if isinstance(value, collections.defaultdict):
            return collections.defaultdict(value.default_factory, items)
        return type(value)(items)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = dataclasses.fields(value)
        return type(value)(**{field.name: part(getattr(value, field.name), replica) for field in fields})
    return value


def leaves(found, given, name="result"):
    """Pairs of the leaves of two structures, which have to be alike: (name, found, given)."""
    if dataclasses.is_dataclass(given) and not isinstance(given, type):
        assert type(found) is type(given), name
        for field in dataclasses.fields(given):
            yield from leaves(getattr(found, field.name), getattr(given, field.name), f"{name}.{field.name}")
    elif isinstance(given, (list, tuple)):
        assert type(found) is type(given), name
        assert len(found) == len(given), name
        for index, (left, right) in enumerate(zip(found, given, strict=True)):
            yield from leaves(left, right, f"{name}[{index}]")
    elif isinstance(given, Mapping):
        assert type(found) is type(given), name
        assert list(found) == list(given), name
        for key in given:
            yield from leaves(found[key], given[key], f"{name}[{key!r}]")
    else:
        yield name, found, given


def assert_same(name, found, given, compiled):
    """Asserts that a leaf came through unchanged: the same object, or a tensor with the same bytes."""
    if found is given or isinstance(given, DistributedVariable):
        assert found is given, name
        return
    if isinstance(given, tf.__internal__.CompositeTensor) and not isinstance(given, tf.Variable):
        assert type(found) is type(given), name
        left, right = (tf.nest.flatten(each, expand_composites=True) for each in (found, given))
        assert len(left) == len(right), name
        for each, other in zip(left, right, strict=True):
            assert_same(name, each, other, compiled)
        return
    if tf.is_tensor(found) and found.dtype == tf.string:  # TensorFlow has bytes, whatever they come from
        assert _bytes(found) == _bytes(tf.convert_to_tensor(given)), f"{name}: {found} is not {given}"
        return
    if not isinstance(given, (tf.Tensor, tf.Variable, np.ndarray, np.generic)):
        # One number for each replica is a tensor in a compiled program.
        assert compiled, f"{name} is another object"
        assert isinstance(given, (bool, int, float, complex)), f"{name}: {found!r} is not {given!r}"
        assert _bytes(found) == _bytes(tf.constant(given)), f"{name}: {found!r} is not {given!r}"
        return
    assert compiled, f"{name} is another object"
    assert tf.is_tensor(found), name
    assert found.dtype == tf.as_dtype(given.dtype), f"{name}: {found.dtype} is not {given.dtype}"
    assert tuple(found.shape) == tuple(given.shape), name
    assert _bytes(found) == _bytes(given), f"{name}: {found} is not {given}"


def _bytes(value):
    dtype = getattr(value, "dtype", None)
    if dtype in (tf.variant, tf.resource):
        return b""  # nothing else can be seen of them
    array = value.numpy() if isinstance(value, (tf.Tensor, tf.Variable)) else np.asarray(value)
    if dtype == tf.string:
        return repr(array)
    return np.ascontiguousarray(array.astype(array.dtype.newbyteorder("="))).tobytes()
