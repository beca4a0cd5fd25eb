"""Arrays of tensors that grow: a `tf.TensorArray` with `dynamic_size=True`.

An array in a compiled program has the size that it is made with. XLA drops a write beyond it without a word, and the
sum of such an array is wrong. So a body with such arrays is traced twice. The first trace shows which sizes they will
have (`analysis.array_sizes`), and in the second trace they have those sizes from the beginning. Where the size is
unknown, each write that may be beyond the size is checked while the program runs.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import tensorflow as tf

from replica_engine._tf.graphs import made_ops
from replica_engine.diagnostics.op_lines import here
from replica_engine.errors.programs import WRITTEN_BEYOND_ITS_SIZE

_GROWS = "resize_if_index_out_of_bounds"


class Final(NamedTuple):
    """What is known of the arrays of a body before it runs.

    Attributes:
        sizes: by the number of an array, its final size and the shape of its elements. Where the size is unknown, it is
            None. XLA needs the shape even then, if the array is first written in a branch.
        stacks: by the number of an op that stacks an array, how many elements it stacks.
        writes: the numbers of the writes to such arrays only.
    """

    sizes: Mapping[int, tuple[int | None, tf.TensorShape]]
    stacks: Mapping[int, int]
    writes: frozenset[int]


@dataclasses.dataclass
class Seen:
    """The ops on arrays that a trace has made, each kind numbered in the order of the trace.

    Attributes:
        made: the ops that make an array of a certain size.
        stacks: the ops that stack the elements of an array.
        writes: the writes that may let an array grow.
        lines: the user's lines of the writes.
        checks: the ops that ask for the size of an array only to check a write.
        has_fixed: whether there are writes to arrays that do not grow.
    """

    made: list[tf.Operation] = dataclasses.field(default_factory=list)
    stacks: list[tf.Operation] = dataclasses.field(default_factory=list)
    writes: list[tf.Operation] = dataclasses.field(default_factory=list)
    lines: list[str] = dataclasses.field(default_factory=list)
    checks: list[tf.Operation] = dataclasses.field(default_factory=list)
    has_fixed: bool = False

    def is_like(self, other: Seen) -> bool:
        """Whether another trace made as many of each kind, at the same lines."""
        counts = len(self.made), len(self.stacks), self.lines
        return counts == (len(other.made), len(other.stacks), other.lines)


@contextlib.contextmanager
def fixed(seen: Seen, final: Final | None, checks: bool) -> Iterator[None]:
    """Inside, arrays keep the size that they are made with.

    Args:
        seen: gets the ops on arrays that are made inside.
        final: what a trace before found out; the arrays inside get these sizes.
        checks: whether the other writes are checked when they run.
    """

    def see_array(op: tf.Operation) -> list[tf.Tensor] | None:
        seen.made.append(op)
        if final is None or len(seen.made) - 1 not in final.sizes:
            return None
        size, element = final.sizes[len(seen.made) - 1]
        shape = tf.constant(element.as_list(), tf.int32) if element.is_fully_defined() else op.inputs[0]
        made = tf.raw_ops.TensorListReserve(
            element_shape=shape,
            num_elements=op.inputs[1] if size is None else size,
            element_dtype=op.get_attr("element_dtype"),
        )
        seen.made[-1] = made.op
        return [made]

    def see_stack(op: tf.Operation) -> None:
        seen.stacks.append(op)
        if final is not None and len(seen.stacks) - 1 in final.stacks:
            (stacked,) = op.outputs
            stacked.set_shape(tf.TensorShape([final.stacks[len(seen.stacks) - 1]]).concatenate(stacked.shape[1:]))

    def see_write(op: tf.Operation) -> None:
        if not op.get_attr(_GROWS):
            seen.has_fixed = True
            return
        made_ops.set_flag(op, _GROWS, False)  # XLA has no gradient of a write that grows
        seen.writes.append(op)
        seen.lines.append(here())
        if checks and (final is None or len(seen.writes) - 1 not in final.writes):
            array, index = op.inputs[:2]
            size = tf.raw_ops.TensorListLength(input_handle=array)
            seen.checks.append(size.op)
            tf.debugging.Assert(index < size, [WRITTEN_BEYOND_ITS_SIZE, index, size])

    see = {"TensorListReserve": see_array, "TensorListStack": see_stack, "TensorListSetItem": see_write}
    with made_ops.seen(see):
        yield
