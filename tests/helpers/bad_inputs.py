"""Bad arguments of all kinds, as users pass them by mistake, in tables of functions that make them.

Each test makes new values, so a test cannot change or exhaust those of another.
"""

import collections
import dataclasses
import datetime
import decimal
import enum
import fractions
import math
import types
import typing
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.distribute.values import Mirrored, PerReplica
from tensorflow.python.framework import dtypes


class Refusal(Exception):
    """The exception that the hostile objects below raise."""


class NoRepr:
    """Cannot be shown."""

    def __repr__(self):
        raise Refusal("no repr")


class NoEquality:
    """Can be neither compared nor hashed."""

    def __eq__(self, other):
        raise Refusal("no ==")

    __hash__ = None


class NoTruth:
    """Is neither true nor false."""

    def __bool__(self):
        raise Refusal("no bool")


class FalseShape:
    """Looks like an array, and is none."""

    shape = "wide"
    dtype = 3


class Colour(enum.Enum):
    """An enumeration."""

    RED = 1


class Pair(typing.NamedTuple):
    """A named tuple."""

    left: Any
    right: Any


@dataclasses.dataclass
class Record:
    """A dataclass."""

    first: Any
    second: Any = None


@dataclasses.dataclass(frozen=True, slots=True)
class Slotted:
    """A dataclass that is hard to change."""

    only: Any


def endless():
    """A list that contains itself."""
    made: list = [1.0]
    made.append(made)
    return made


def endless_mapping():
    """A dictionary that contains itself."""
    made: dict = {"x": 1.0}
    made["again"] = made
    return made


def deep(levels):
    """A number inside many lists."""
    made: Any = 1.0
    for _ in range(levels):
        made = [made]
    return made


def _cast(dtype):
    return lambda: tf.cast(tf.constant([[1, 0], [3, 2]]), dtype)


def _quantized(dtype, bits):
    return lambda: tf.bitcast(tf.constant([1, 2], bits), dtype)


PYTHON = {
    "None": lambda: None,
    "zero": lambda: 0,
    "int": lambda: -3,
    "int of 64 bits": lambda: -(2**63),
    "int of 80 bits": lambda: 2**80,
    "bool": lambda: True,
    "float": lambda: 1.5,
    "nan": lambda: math.nan,
    "inf": lambda: -math.inf,
    "-0.0": lambda: -0.0,
    "complex": lambda: 1j,
    "str": lambda: "text",
    "str no codec takes": lambda: "a\x00\udc80",
    "bytes": lambda: b"\xff\x00",
    "bytearray": lambda: bytearray(b"ab"),
    "memoryview": lambda: memoryview(b"ab"),
    "set": lambda: {1, 2},
    "frozenset": lambda: frozenset([1.0]),
    "range": lambda: range(3),
    "slice": lambda: slice(1, 2),
    "ellipsis": lambda: ...,
    "decimal": lambda: decimal.Decimal("1.5"),
    "fraction": lambda: fractions.Fraction(1, 3),
    "date": lambda: datetime.date(2020, 1, 1),
    "enum": lambda: Colour.RED,
    "generator": lambda: (number for number in range(3)),
    "iterator": lambda: iter([1.0]),
    "object": object,
    "function": lambda: math.sqrt,
    "lambda": lambda: lambda: 1,
    "class": lambda: Record,
    "module": lambda: math,
    "namespace": lambda: types.SimpleNamespace(a=1),
    "deque": lambda: collections.deque([1.0]),
    "exception": lambda: ValueError("a value"),
    "no repr": NoRepr,
    "no equality": NoEquality,
    "no truth": NoTruth,
    "false shape": FalseShape,
}
"""Python values that TensorFlow does not treat as containers."""

ARRAYS = {
    "object": lambda: np.array([1, "a", None], dtype=object),
    "object without axes": lambda: np.array(None, dtype=object),
    "strings": lambda: np.array(["a", "bc"]),
    "bytes": lambda: np.array([b"a", b"\xff"]),
    "strings as objects": lambda: np.array(["a", "b"], dtype=object),
    "float16": lambda: np.float16([1, np.nan]),
    "longdouble": lambda: np.longdouble([1.0]),
    "complex128": lambda: np.array([1j, np.nan]),
    "clongdouble": lambda: np.clongdouble([1.0]),
    "bool": lambda: np.array([True, False]),
    "uint64": lambda: np.array([2**64 - 1], np.uint64),
    "datetime": lambda: np.array(["2020-01-01", "NaT"], "datetime64[s]"),
    "timedelta": lambda: np.array([1], "timedelta64[s]"),
    "structured": lambda: np.zeros(2, [("a", "f4"), ("b", "i4")]),
    "void": lambda: np.zeros(2, "V3"),
    "without axes": lambda: np.array(3.0),
    "empty": lambda: np.zeros((0, 3), np.float32),
    "empty in the middle": lambda: np.zeros((2, 0, 3), np.int8),
    "steps": lambda: np.arange(12.0).reshape(3, 4)[::2, ::-1],
    "columns first": lambda: np.asfortranarray(np.arange(6.0).reshape(2, 3)),
    "other byte order": lambda: np.array([1.0, 2.0], ">f4"),
    "other byte order, without axes": lambda: np.array(1, ">i8"),
    "read only": lambda: np.broadcast_to(np.float32(1), (2, 2)),
    "of many axes": lambda: np.zeros((1,) * 20),
    "float32 scalar": lambda: np.float32(1.5),
    "int8 scalar": lambda: np.int8(3),
    "bool scalar": lambda: np.bool_(True),
    "str scalar": lambda: np.str_("x"),
    "datetime scalar": lambda: np.datetime64("2020"),
    "void scalar": lambda: np.zeros(1, [("a", "f4")])[0],
    "dtype": lambda: np.dtype("f4"),
}
"""Arrays of NumPy."""

DTYPES = (
    tf.float16,
    tf.bfloat16,
    tf.float32,
    tf.float64,
    dtypes.int4,
    dtypes.uint4,
    tf.int8,
    tf.uint8,
    tf.int16,
    tf.uint16,
    tf.int32,
    tf.uint32,
    tf.int64,
    tf.uint64,
    tf.bool,
    tf.complex64,
    tf.complex128,
)

TENSORS = {
    **{dtype.name: _cast(dtype) for dtype in DTYPES},
    "qint8": _quantized(tf.qint8, tf.int8),
    "quint8": _quantized(tf.quint8, tf.uint8),
    "qint16": _quantized(tf.qint16, tf.int16),
    "quint16": _quantized(tf.quint16, tf.uint16),
    "qint32": _quantized(tf.qint32, tf.int32),
    "string": lambda: tf.constant(["a", "b"]),
    "one string": lambda: tf.constant("a"),
    "nan": lambda: tf.constant([math.nan, -math.inf, -0.0]),
    "empty": lambda: tf.zeros([0, 2]),
    "without axes": lambda: tf.constant(2.0),
    "variant": lambda: tf.raw_ops.TensorListReserve(element_shape=[1], num_elements=2, element_dtype=tf.float32),
    "resource": lambda: tf.raw_ops.VarHandleOp(dtype=tf.float32, shape=[]),
}
"""Eager tensors."""

COMPOSITES = {
    "ragged": lambda: tf.ragged.constant([[1.0, 2.0], [3.0]]),
    "ragged, empty rows": lambda: tf.ragged.constant([[], []]),
    "ragged, no rows": lambda: tf.RaggedTensor.from_row_lengths(tf.zeros([0]), tf.zeros([0], tf.int64)),
    "ragged strings": lambda: tf.ragged.constant([["a"], []]),
    "sparse": lambda: tf.sparse.from_dense([[1.0, 0.0], [0.0, 2.0]]),
    "sparse of nothing": lambda: tf.SparseTensor(np.zeros((0, 2), np.int64), np.zeros((0,), np.float32), [2, 2]),
    "slices": lambda: tf.IndexedSlices(tf.ones([1, 2]), tf.constant([0]), tf.constant([3, 2])),
    "slices without a shape": lambda: tf.IndexedSlices(tf.ones([1, 2]), tf.constant([0])),
}
"""Tensors that are made of several."""

VARIABLES = {
    "variable": lambda: tf.Variable([1.0, math.nan]),
    "string variable": lambda: tf.Variable("a"),
    "variable of any length": lambda: tf.Variable([1.0, 2.0], shape=[None]),
}
"""Variables of no strategy."""

OBJECTS = {
    "optional": lambda: tf.experimental.Optional.from_value(1.0),
    "dataset": lambda: tf.data.Dataset.range(3),
    "iterator of a dataset": lambda: iter(tf.data.Dataset.range(3)),
    "table": lambda: tf.lookup.StaticHashTable(tf.lookup.KeyValueTensorInitializer([1], [2]), 0),
    "tensor array": lambda: tf.TensorArray(tf.float32, 2),
    "tf.function": lambda: tf.function(lambda: 1),
    "tf.Module": tf.Module,
    "shape": lambda: tf.TensorShape([1, None]),
    "spec": lambda: tf.TensorSpec([1]),
    "dtype of TensorFlow": lambda: tf.float32,
}
"""Objects of TensorFlow that are not values."""

DISTRIBUTED = {
    "tensors": lambda: PerReplica([tf.constant(1.0), tf.constant(2.0)]),
    "mirrored": lambda: Mirrored([tf.constant(1.0), tf.constant(1.0)]),
    "arrays": lambda: PerReplica([np.zeros(2), np.ones(2)]),
    "empty tensors": lambda: PerReplica([tf.zeros([0, 2]), tf.zeros([0, 2])]),
    "other shapes": lambda: PerReplica([tf.zeros([2]), tf.zeros([3])]),
    "other ranks": lambda: PerReplica([tf.zeros([2]), tf.zeros([2, 1])]),
    "other dtypes": lambda: PerReplica([tf.constant(1.0), tf.constant(2)]),
    "strings": lambda: PerReplica([tf.constant("a"), tf.constant("b")]),
    "numbers": lambda: PerReplica([1, 2]),
    "an int and a float": lambda: PerReplica([1, 2.5]),
    "bools": lambda: PerReplica([True, False]),
    "large ints": lambda: PerReplica([2**80, 1]),
    "texts": lambda: PerReplica(["a", "b"]),
    "nothing": lambda: PerReplica([None, None]),
    "nothing and a number": lambda: PerReplica([None, 1.0]),
    "a tensor and a text": lambda: PerReplica([tf.constant(1.0), "a"]),
    "objects": lambda: PerReplica([object(), object()]),
    "no reprs": lambda: PerReplica([NoRepr(), NoRepr()]),
    "arrays of objects": lambda: PerReplica([np.array([object()]), np.array([object()])]),
    "ragged": lambda: PerReplica([tf.ragged.constant([[1], [2, 3]]), tf.ragged.constant([[1, 2], [3]])]),
    "ragged, other numbers": lambda: PerReplica([tf.ragged.constant([[1], [2]]), tf.ragged.constant([[1], [2, 3]])]),
    "ragged, other rows": lambda: PerReplica([tf.ragged.constant([[1]]), tf.ragged.constant([[1, 2], [3]])]),
    "sparse": lambda: PerReplica([tf.sparse.from_dense([[1.0]]), tf.sparse.from_dense([[0.0]])]),
    "sparse and dense": lambda: PerReplica([tf.sparse.from_dense([[1.0]]), tf.constant([[1.0]])]),
    "slices": lambda: PerReplica([COMPOSITES["slices"](), COMPOSITES["slices"]()]),
    "slices of no tensors": lambda: PerReplica([tf.IndexedSlices(tf.ones([1, 2]), [0], [3, 2]) for _ in range(2)]),
    "lists": lambda: PerReplica([[1.0], [2.0]]),
    "lists of other lengths": lambda: PerReplica([[1.0], [2.0, 3.0]]),
    "mappings of other keys": lambda: PerReplica([{"a": 1.0}, {"b": 1.0}]),
    "distributed": lambda: PerReplica([PerReplica([1.0, 2.0]), PerReplica([3.0, 4.0])]),
    "variables": lambda: PerReplica([tf.Variable(1.0), tf.Variable(2.0)]),
}
"""Values of two replicas."""

OTHER_NUMBERS = {
    "of none": lambda: PerReplica([]),
    "of one": lambda: PerReplica([tf.constant(1.0)]),
    "of three": lambda: PerReplica([tf.constant(float(replica)) for replica in range(3)]),
    "mirrored on three": lambda: Mirrored([tf.constant(1.0)] * 3),
}
"""Values of another number of replicas than two."""

ENDLESS = {"list": endless, "mapping": endless_mapping, "deep": lambda: deep(20_000)}
"""Structures that nobody comes to the end of."""
