"""What XLA's partitioner divides wrongly, and how a program avoids it.

Checked on jaxlib 0.10.2:

- The gradient of the kernel of a grouped convolution is a convolution with `batch_group_count`. Its sum over the batch
  came out as often too large as there are devices in the axes of the mesh that do not divide the batch (in a program
  of plain JAX too). It takes a mesh with two axes. Such a convolution becomes one of a part of the batch on each
  device, and a sum over the devices.
- A gather or a scatter whose operand is divided along an indexed dimension aborts the process at times, in a manual
  computation with two other axes, which replicas of several devices are (spmd_partitioner_util.cc, "Check failed:
  partition_group_list"). Such an operand is whole along the indexed dimensions. A table of embeddings would be too
  large for that: one that is divided by rows, and not over the axis of the batch, works if it stays as it is.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from replica_engine.pjrt.jaxlib import hlo, ir
from replica_engine.pjrt.partitions import ops
from replica_engine.pjrt.partitions.layout import MESH, Axes, Layout, dimensions, names

_CONVOLUTION, _BATCH_GROUPS = "stablehlo.convolution", "batch_group_count"
_GATHER, _SCATTER = "stablehlo.gather", "stablehlo.scatter"


def avoid(module: Any, layout: Layout, channels: Iterator[int], arguments: Sequence[Any]) -> None:
    """Replaces the operations of a module that the partitioner would divide wrongly.

    Args:
        module: the module, whose collectives are already those of devices.
        layout: how its values are divided.
        channels: numbers of channels that no other collective of the module has.
        arguments: the types of the arguments of the body.
    """
    if sum(size > 1 for _, size in layout.mesh.axes) < 2:
        return
    tables = _tables(layout, arguments)
    convolutions, indexed = [], []

    def collect(operation: Any) -> Any:
        if operation.name == _CONVOLUTION and ir.IntegerAttr(operation.attributes[_BATCH_GROUPS]).value > 1:
            convolutions.append(operation)
        elif operation.name in (_GATHER, _SCATTER) and layout.rows:
            indexed.append(operation)
        return ir.WalkResult.ADVANCE

    module.operation.walk(collect)
    for each in convolutions:
        _sum_of_parts(each, layout, channels)
    for each in indexed:
        _index_whole(each, layout, tables)


def _sum_of_parts(convolution: Any, layout: Layout, channels: Iterator[int]) -> None:
    """Lets each device convolve a part of what the convolution sums over, and adds up the results.

    That is a dimension of each operand: the features of the input, which are the batch of the layer. The convolution is
    made whole on each device if the dimension does not divide by the number of devices.
    """
    numbers = hlo.ConvDimensionNumbers(convolution.attributes["dimension_numbers"])
    summed = (numbers.input_feature_dimension, numbers.kernel_input_feature_dimension)
    input_ = ir.RankedTensorType(convolution.operands[0].type)
    if input_.get_dim_size(summed[0]) % layout.mesh.size:
        ops.wrap(convolution, layout)
        return
    ops.wrap(convolution, layout, summed)
    uses = list(convolution.results[0].uses)
    with ir.InsertionPoint.after(convolution), convolution.location:
        total = _added_up(convolution.results[0], layout, channels)
    for use in uses:
        use.owner.operands[use.operand_number] = total


def _tables(layout: Layout, arguments: Sequence[Any]) -> dict[tuple[int, ...], Axes]:
    """The shapes and the axes of the arguments that are divided along their first dimension alone, as tables are."""
    found = {}
    for kind, axes in zip(arguments, layout.arguments, strict=True):
        shape = tuple(ir.RankedTensorType(kind).shape)
        first, *others = map(names, axes or (None,))
        if first and layout.mesh.batch not in first and not any(others):
            found[shape] = (axes[0], *[None] * (len(shape) - 1))
    return found


def _index_whole(operation: Any, layout: Layout, tables: dict[tuple[int, ...], Axes]) -> None:
    """Makes what a gather or a scatter indexes whole along the indexed dimensions.

    What has the shape of a table is divided as the table: it may be the table's gradient, which is as large.
    """
    if operation.name == _GATHER:
        gathered = hlo.GatherDimensionNumbers(operation.attributes["dimension_numbers"])
        indexed, changed = gathered.start_index_map, list(operation.operands)[:1]
    else:
        scattered = hlo.ScatterDimensionNumbers(operation.attributes["scatter_dimension_numbers"])
        indexed, changed = scattered.scattered_dims_to_operand_dims, list(operation.results)
    kinds = [ir.RankedTensorType(each.type) for each in changed]
    for index, kind in enumerate(kinds):
        axes = tables.get(tuple(kind.shape)) if list(indexed) == [0] else None
        open_ = ", ".join("{}" if each in indexed else "{?}" for each in range(kind.rank))
        divided = dimensions(axes) if axes else f"[{open_}]"
        if layout.mesh.batch and 0 in indexed:  # the indices are divided over this axis, so another dimension cannot be
            divided += f', replicated={{"{layout.mesh.batch}"}}'
        sharding = ir.Attribute.parse(f"#sdy.sharding<@{MESH}, {divided}>")
        with ir.InsertionPoint(operation), operation.location:
            operation.operands[index] = _constrained(operation.operands[index], sharding)
        if operation.name == _SCATTER:
            result = operation.results[index]
            uses = list(result.uses)
            with ir.InsertionPoint.after(operation), operation.location:
                made = _constrained(result, sharding)
            for use in uses:
                use.owner.operands[use.operand_number] = made


def _constrained(value: Any, sharding: Any) -> Any:
    made = ir.Operation.create(
        "sdy.sharding_constraint", results=[value.type], operands=[value], attributes={"sharding": sharding}
    )
    return made.results[0]


def _added_up(value: Any, layout: Layout, channels: Iterator[int]) -> Any:
    """The sum of a value over the devices of a replica."""
    scalar = ir.RankedTensorType.get([], ir.RankedTensorType(value.type).element_type)
    total = ir.Operation.create(
        "stablehlo.all_reduce",
        results=[value.type],
        operands=[value],
        attributes={key: ir.Attribute.parse(text) for key, text in ops.within_replicas(layout, channels).items()},
        regions=1,
    )
    location = ir.Location.current
    block = total.regions[0].blocks.append(scalar, scalar, arg_locs=[location] * 2)
    with ir.InsertionPoint(block):
        both = ir.Operation.create("stablehlo.add", results=[scalar], operands=list(block.arguments))
        ir.Operation.create("stablehlo.return", operands=list(both.results))
    return total.results[0]
