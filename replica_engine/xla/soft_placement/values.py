"""A value of the body while its graph is copied: whether it is on the devices, on the host, or on both."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from replica_engine._tf.graphs import host_ops, xla_ops
from replica_engine.xla.soft_placement.kinds import KNOWN_TO_XLA
from replica_engine.xla.soft_placement.piece import Source


class Value:
    """The counterpart, in the copy, of a tensor of the original graph.

    Args:
        dtype: its dtype.
        shape: its shape, as far as it is known.
        tensor: the tensor in the copy; None if the devices do not have it, or not yet.
        source: where a piece finds it on the host; None if the host does not have it, or not yet.
        constant: the Const op that makes it, or None.

    Attributes:
        from_host: whether a host op made it, or made a value that it depends on. XLA cannot know such a value.
        maker: the op that makes it, the inputs of that op, and the index among its outputs.
        made_by: the type of the host op that makes it, and the user's line, for messages.
        depends_on_data: whether the devices have it, in a shape that depends on data.
        captured: the eager tensor that it is in every run, if it comes from outside of the body.
        is_computed: whether it follows from constants, shapes and captured tensors.
        tried_with: "made-up values" if the shape was found by trying a host op with them (`unknown_shapes`), or comes
            from such a shape; otherwise "".
        pending: whether the op that makes it still waits to become part of a piece.
    """

    __slots__ = (
        "captured",
        "constant",
        "depends_on_data",
        "dtype",
        "from_host",
        "is_computed",
        "made_by",
        "maker",
        "pending",
        "shape",
        "source",
        "tensor",
        "tried_with",
    )

    def __init__(
        self,
        dtype: tf.DType,
        shape: tf.TensorShape,
        tensor: tf.Tensor | None = None,
        source: Source | None = None,
        constant: tf.Operation | None = None,
    ):
        self.dtype = dtype
        self.shape = shape
        self.tensor = tensor
        self.source = source
        self.constant = constant
        self.maker: tuple[tf.Operation, list[Value], int] | None = None
        self.made_by: tuple[str, str] = ("", "")
        self.depends_on_data = False
        self.captured: tf.Tensor | None = None
        self.is_computed = False
        self.from_host = False
        self.pending = False
        self.tried_with = ""

    @classmethod
    def of(cls, tensor: tf.Tensor) -> Value:
        """The counterpart of a tensor that the devices have."""
        return cls(tensor.dtype, tensor.shape, tensor)

    @property
    def is_fixed(self) -> bool:
        """Whether it is the same in every run."""
        is_stored = self.source is not None and self.source.kind == "fixed"
        return is_stored or self.is_computed or self.constant is not None or self.captured is not None

    def made_of(self, op: tf.Operation, inputs: list[Value], index: int) -> None:
        """Notes the op that makes it."""
        self.maker = op, inputs, index
        if op.type in KNOWN_TO_XLA:
            self.is_computed = all(each.shape.is_fully_defined() for each in inputs)
        else:
            is_xla = op.type.startswith("Xla")
            self.is_computed = bool(inputs) and all(each.is_fixed for each in inputs) and not is_xla

    @property
    def fits_device(self) -> bool:
        """Whether a host call could return it to the program."""
        return not xla_ops.is_host_only(self.dtype) and self.shape.is_fully_defined()

    @property
    def stays_on_host(self) -> bool:
        """Whether no op on the devices can use it."""
        if self.tensor is not None:
            return False
        return xla_ops.is_host_only(self.dtype) if self.constant is not None else not self.fits_device

    def on_host(self) -> Any:
        """The source of a value that the host has; None if the program must pass the value."""
        if self.constant is not None and self.source is None:
            self.source = Source("fixed", host_ops.constant_of(self.constant))
        return self.source
