"""Shapes of the results of host ops, where TensorFlow does not know them.

Python functions (`tf.py_function`, `tf.numpy_function`) do not declare the shapes of their results. If the devices use
a result, XLA must know its shape, and the body sets it: `y.set_shape(...)` or `tf.ensure_shape(y, ...)`. The function
is never called to find it out: it may take items from a queue, or write a file. A result that the body only returns
stays on the host, and may have another shape each time.

Other host ops often have results of unknown shape too. For example, a vocabulary's indices of a padded sentence have
the shape of the batch and of the padded length. The devices can use such a result only if its shape is known. So while
a body is lowered, host ops without side effects are tried with several made-up inputs. A dimension that is the same for
all of them is assumed to be fixed. If the assumption is wrong, the run raises an error: the result of a piece is
compared with the declared shape. Since guesses can be wrong, at first only ops are tried that pad to a shape that is
given to them. All other ops are tried only if the body could not be lowered otherwise.

Inputs are made up for the arguments of the body, for values that the devices make of them, and for the results of host
ops that must not be tried, such as Python functions. What is known is never made up: constants, captured tensors, and
what is computed from these.

The kernel of an op that is not TensorFlow's may trust its inputs, such as the model of a tokenizer, and end the process
if they make no sense. It gets made-up texts, and what TensorFlow makes of them, but no made-up numbers.

The made-up inputs differ as much as possible, so that a dimension that depends on data comes out differently. Strings
have different numbers of words and characters, with the usual separators between the words; numbers are all equal or
all different.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from replica_engine._tf.graphs import host_ops, xla_ops
from replica_engine.xla.soft_placement import kinds
from replica_engine.xla.soft_placement.values import Value

_TRIES = 3
_BETWEEN = " ,;|:/.-_=\t\n"  # in made-up strings, between two words
_LARGEST = 1 << 20  # the most elements of a made-up input


def of_python_function(
    op: tf.Operation, inputs: Sequence[Value], seen: dict[str, list[tf.TensorShape]]
) -> list[tf.TensorShape]:
    """The shapes of the results of a Python function, as far as the body declares them.

    Args:
        op: the call of the function.
        inputs: the inputs of the call.
        seen: a dictionary; the shapes of the inputs are added to it, by the function's token. The results of the
            function's gradient have these shapes.
    """
    function = host_ops.PythonFunction(op)
    declared = [_declared(output) for output in op.outputs]
    if function.gradient_of is None:
        seen[function.token] = [value.shape for value in inputs]
        return declared
    known = seen.get(function.gradient_of, declared)
    return [shape if shape.is_fully_defined() else other for shape, other in zip(declared, known, strict=True)]


class Samples:
    """Results of host ops for made-up inputs, each computed once."""

    def __init__(self) -> None:
        self._found: dict[Value, list[Any] | None] = {}
        self._known: dict[Value, Any] = {}
        self._invented: set[Value] = set()  # made-up numbers, and what was computed from them
        self._results: dict[tuple[tf.Operation, tuple[Value, ...]], list[list[Any]] | None] = {}

    def shape(self, value: Value) -> tf.TensorShape:
        """The shape of a result of a host op, with the dimensions that were the same in all tries."""
        found = self.of(value)
        if found is None or len({tensor.shape.rank for tensor in found}) > 1:
            return value.shape
        sizes = [
            row[0] if len(set(row)) == 1 else None for row in zip(*(tensor.shape for tensor in found), strict=True)
        ]
        shape = tf.TensorShape(sizes)
        return value.shape.merge_with(shape) if value.shape.is_compatible_with(shape) else value.shape

    def of(self, value: Value) -> list[Any] | None:
        """The value in each of the tries; None if it cannot be made up."""
        if value not in self._found:
            self._found[value] = None  # until it is found
            self._found[value] = self._find(value)
        return self._found[value]

    def known(self, value: Value) -> Any:
        """The value, if it is the same in every run; None if it is not, or cannot be computed."""
        if not value.is_fixed:
            return None
        if value not in self._known:
            self._known[value] = None
            self._known[value] = self._compute(value)
        return self._known[value]

    def _compute(self, value: Value) -> Any:
        source = value.on_host()
        if source is not None and source.kind == "fixed":
            return source.what
        if value.captured is not None or value.maker is None:
            return value.captured
        op, inputs, index = value.maker
        if op.type in kinds.KNOWN_TO_XLA:
            shape = inputs[index].shape
            found = {"Size": shape.num_elements(), "Rank": shape.rank}.get(op.type, shape.as_list())
            with tf.init_scope(), tf.device("CPU:0"):
                return tf.constant(found, value.dtype)
        if not host_ops.only_computes(op) or not host_ops.has_host_kernel(op):
            return None
        columns = [self.known(each) for each in inputs]
        if any(column is None for column in columns):
            return None
        results = _run(op, [[column] for column in columns], tries=1)
        return None if results is None else results[0][index]

    def _find(self, value: Value) -> list[Any] | None:
        if (known := self.known(value)) is not None:
            return [known] * _TRIES
        if value.maker is not None and value.from_host and host_ops.only_computes(value.maker[0]):
            op, inputs, index = value.maker
            results = self._try(op, inputs)
            if not self._invented.isdisjoint(inputs):
                self._invented.add(value)
            return None if results is None else [outputs[index] for outputs in results]
        if not value.shape.is_fully_defined() or value.dtype in (tf.resource, tf.variant):
            return None
        if (value.shape.num_elements() or 0) > _LARGEST:
            return None
        if value.dtype != tf.string:
            self._invented.add(value)
        return [_made_up(value, number) for number in range(_TRIES)]

    def _try(self, op: tf.Operation, inputs: list[Value]) -> list[list[Any]] | None:
        key = op, tuple(inputs)
        if key not in self._results:
            self._results[key] = None
            columns = [self.of(value) for value in inputs]
            trusts = not hasattr(tf.raw_ops, op.type) and not self._invented.isdisjoint(inputs)
            if not trusts and all(column is not None for column in columns):
                self._results[key] = _run(op, columns)
        return self._results[key]


def is_worth_trying(op: tf.Operation, inputs: list[Value], value: Value, tries_all: bool) -> bool:
    """Whether a result of an op, of unknown shape, is tried for a shape: what the devices could have then, or pads.

    Padded strings are tried too, since the shape of an op on strings follows from the shape of the strings.
    """
    if value.shape.is_fully_defined():
        return False
    return _pads(op, inputs) or (tries_all and not xla_ops.is_host_only(value.dtype))


def _declared(output: tf.Tensor) -> tf.TensorShape:
    """The shape of a result that the body declares."""
    ensured = (op.outputs[0].shape for op in output.consumers() if op.type == "EnsureShape")
    return next((shape for shape in (output.shape, *ensured) if shape.is_fully_defined()), output.shape)


def _run(op: tf.Operation, columns: list[Any], tries: int = _TRIES) -> list[list[Any]] | None:
    run = host_ops.runner(op)
    try:
        with tf.init_scope(), tf.device("CPU:0"):
            return [run([column[number] for column in columns]) for number in range(tries)]
    except Exception:  # the op does not accept such inputs: the shape is known only when the body runs
        return None


def _made_up(value: Value, number: int) -> tf.Tensor:
    shape = value.shape.as_list()
    count = int(np.prod(shape, dtype=np.int64))
    with tf.init_scope(), tf.device("CPU:0"):
        if value.dtype == tf.string:
            words = [_BETWEEN.join(["a", f"b{each}", "c"][: ((each + 1) * number) % 4]) for each in range(count)]
            return tf.constant(np.array(words, object).reshape(shape))
        array = np.zeros(count) if number == 0 else (np.arange(count) * number) % 100 + number
        return tf.cast(tf.constant(array.reshape(shape)), value.dtype)


def _pads(op: tf.Operation, inputs: list[Value]) -> bool:
    """Whether an op pads to a shape that the body gives, except for the size of the batch."""
    if op.type != "RaggedTensorToTensor" or inputs[0].constant is None:
        return False
    shape = tf.make_ndarray(inputs[0].constant.get_attr("value"))
    return shape.ndim == 1 and bool(np.all(shape[1:] >= 0))
