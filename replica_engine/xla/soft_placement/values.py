"""A value of the body while its graph is copied, and the shapes of what host ops make.

XLA must know the shape of each value that the devices use. The shape of a host op's result follows from three rules:

- TensorFlow infers it from the shapes of the inputs, and from the constants among them.
- The body declares it: `y.set_shape(...)` or `tf.ensure_shape(y, ...)`. Python functions, which have an unknown shape
  otherwise, are never called to find it out: they may take items from a queue, or write a file.
- Ragged rows of words have as many rows as there are texts: so `ragged.to_tensor(shape=[None, 6])` has a known shape.

Any other result stays on the host. What a host op returns is compared with the shape when it has run.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from replica_engine._tf.graphs import host_ops, subgraphs, xla_ops
from replica_engine.xla.corrected_ops import bounds
from replica_engine.xla.soft_placement.piece import Source


@dataclasses.dataclass(eq=False, repr=False, slots=True)  # its own would be of all that it is made of
class Value:
    """The counterpart, in the copy, of a tensor of the original graph.

    Attributes:
        dtype: its dtype.
        shape: its shape, as far as it is known.
        tensor: the tensor in the copy; None if the devices do not have it.
        source: where a host call finds it; None if the program must pass it.
        maker: the op of the original graph that makes it; None for an input.
        inputs: the inputs of that op.
        outputs: all its outputs.
        from_host: whether a host op made it, or made a value that it depends on. XLA cannot know such a value.
        by_data: whether the devices have it, in a shape that depends on data.
    """

    dtype: tf.DType
    shape: tf.TensorShape
    tensor: tf.Tensor | None = None
    source: Source | None = None
    maker: tf.Operation | None = None
    inputs: Sequence[Value] = ()
    outputs: Sequence[Value] = ()
    from_host: bool = False
    by_data: bool = False

    @classmethod
    def of(cls, tensor: tf.Tensor, maker: tf.Operation | None = None) -> Value:
        """The counterpart of a tensor that the devices have."""
        return cls(tensor.dtype, tensor.shape, tensor, maker=maker)

    @property
    def is_constant(self) -> bool:
        """Whether a Const op makes it, which is copied where it is used."""
        return self.maker is not None and self.maker.type == "Const"

    @property
    def fits_device(self) -> bool:
        """Whether a host call could return it to the program."""
        return not xla_ops.is_host_only(self.dtype) and self.shape.is_fully_defined()

    @property
    def stays_on_host(self) -> bool:
        """Whether no op on the devices can use it."""
        if self.tensor is not None:
            return False
        return xla_ops.is_host_only(self.dtype) if self.is_constant else not self.fits_device


class Shapes:
    """Finds the shapes of results of host ops."""

    def __init__(self) -> None:
        self._scratch = tf.Graph()
        self._python_inputs: dict[str, list[tf.TensorShape]] = {}  # of Python functions, by token

    def inferred(self, op: tf.Operation, inputs: Sequence[Value]) -> list[tf.TensorShape]:
        """What TensorFlow infers for these inputs, whatever the original graph says."""
        with self._scratch.as_default():
            stand_ins = [
                tf.compat.v1.placeholder(value.dtype, value.shape) if known is None else tf.constant(known, value.dtype)
                for value, known in zip(inputs, map(_known, inputs), strict=True)
            ]
            return [output.shape for output in subgraphs.apply_op(op, stand_ins).outputs]

    def of_results(self, op: tf.Operation, inputs: Sequence[Value], values: dict[int, Value]) -> list[tf.TensorShape]:
        """The shapes of the results of a host op, as far as the three rules tell.

        Args:
            op: the op.
            inputs: its inputs.
            values: the values of its graph, by the id of the tensor.
        """
        shapes = [_merged(*each) for each in zip(map(_declared, op.outputs), self.inferred(op, inputs), strict=True)]
        if host_ops.PythonFunction.is_of(op):
            function = host_ops.PythonFunction(op)
            if function.gradient_of is None:
                self._python_inputs[function.token] = [value.shape for value in inputs]
            else:
                shapes = list(map(_merged, shapes, self._python_inputs.get(function.gradient_of, shapes)))
        elif (rows := _rows(op, inputs, values)) is not None:
            shapes[0] = _merged(shapes[0], tf.TensorShape([rows]).concatenate(shapes[0][1:]))
        return shapes


def _known(value: Value) -> Any:
    """The value itself, if it is a constant or a number that XLA computes from shapes; otherwise None."""
    if value.maker is not None and value.is_constant:
        return tf.make_ndarray(value.maker.get_attr("value"))
    is_number = value.tensor is not None and value.dtype.is_integer and value.shape.rank in (0, 1)
    return tf.get_static_value(value.tensor) if is_number else None


def _merged(shape: tf.TensorShape, other: tf.TensorShape) -> tf.TensorShape:
    return shape.merge_with(other) if shape.is_compatible_with(other) else shape


def _declared(output: tf.Tensor) -> tf.TensorShape:
    """The shape of a result that the body declares."""
    if any(op.type in subgraphs.BRANCHES and op.inputs[0] is output for op in output.consumers()):
        return tf.TensorShape([])
    ensured = (op.outputs[0].shape for op in output.consumers() if op.type == "EnsureShape")
    return next((shape for shape in (output.shape, *ensured) if shape.is_fully_defined()), output.shape)


def _rows(op: tf.Operation, inputs: Sequence[Value], values: dict[int, Value]) -> int | None:
    """The first dimension of the result of an op on ragged rows, from how many texts were split."""

    def known(number: tf.Tensor) -> Any:
        made = number.op
        if made.type == "StridedSlice" and made.inputs[0].op.type == "StringSplitV2":
            split = made.inputs[0].op
            if made.inputs[0] is split.outputs[2] and tf.get_static_value(made.inputs[1]) == [0]:
                return tf.compat.dimension_value(values[id(split.inputs[0])].shape[0])
        return tf.get_static_value(number)

    if op.type in ("Bincount", "DenseBincount") and inputs[0].shape.rank == 1:
        least, most = bounds(op.inputs[1], known)
        return least if least == most else None
    if op.type != "RaggedTensorToTensor":
        return None
    if op.get_attr("row_partition_types")[0] == b"FIRST_DIM_SIZE":
        return bounds(op.inputs[3], known)[0]
    splits = inputs[3].shape.num_elements()
    return None if splits is None else splits - 1
