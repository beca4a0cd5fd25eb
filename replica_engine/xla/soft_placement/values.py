"""A value of the body while its graph is copied: where it is, on the devices, on the host, or both."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from replica_engine._tf import host_ops, xla_ops
from replica_engine.xla.soft_placement.piece import Source


class Value:
    """What a tensor of the original graph is in the copy.

    Args:
        dtype: its dtype.
        shape: what is known about its shape.
        tensor: the tensor in the copy; None where the devices do not have it, or not yet.
        source: where a piece finds it on the host; None where the host does not have it, or not yet.
        constant: the Const op that makes it.

    Attributes:
        from_host: whether a host op has made it, or what it was computed from; so XLA cannot know it.
        maker: the op that makes it, its inputs, and which of its outputs it is.
        made_by: the type of the op on the host that makes it, and the user's line, for messages.
        depends_on_data: whether the devices have it, in a shape that depends on data.
        pending: whether the op that makes it waits to become part of a piece.
    """

    __slots__ = (
        "constant",
        "depends_on_data",
        "dtype",
        "from_host",
        "made_by",
        "maker",
        "pending",
        "shape",
        "source",
        "tensor",
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
        self.from_host = False
        self.pending = False

    @classmethod
    def of(cls, tensor: tf.Tensor) -> Value:
        """A value that the devices have."""
        return cls(tensor.dtype, tensor.shape, tensor)

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
        """The source of what is the same in each launch; None for anything else, which has to be passed."""
        if self.constant is not None and self.source is None:
            self.source = Source("fixed", host_ops.constant_of(self.constant))
        return self.source
