"""What XLA's partitioner divides wrongly, as a table, and how a program avoids it.

Checked on jaxlib 0.10.2. Without their rows of the table, all are wrong on 0.12.0.1 too, but for gathers, scatters and
pads, which were not shown to be mended there. How the values of a program will be divided is asked of Shardy
beforehand, so a program pays only for what it has. `FAULTS` says for each fault which operations have it, in which
layouts, and what is done.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from replica_engine.pjrt.jaxlib import hlo, ir
from replica_engine.pjrt.stablehlo import mlir, partition_indexed, partition_local
from replica_engine.pjrt.stablehlo.partition_local import Devices, Divided, Layout, Propagated

_ROUNDS = 32
"""How often Shardy is asked again, at most: what one fault needs whole may divide another operation in another way."""


Whole = Mapping[int, Sequence[int]]
"""By the number of an operand or a result, the dimensions along which it is made whole."""


class Fault(NamedTuple):
    """A fault of the partitioner.

    Attributes:
        operations: the names of the operations that have it.
        holds: whether an operation has it, as it is divided.
        mend: puts something else in its place, or constrains its values.
    """

    operations: tuple[str, ...]
    holds: Callable[[ir.Operation, Propagated, Devices], bool]
    mend: Callable[[ir.Operation, Propagated, Devices], None]


def avoid(module: ir.Module, layout: Layout, channels: Iterator[int]) -> None:
    """Replaces the operations of a module that the partitioner would divide wrongly.

    Args:
        module: the module, with its layout, whose collectives are already those of devices.
        layout: how its values are divided.
        channels: numbers of channels that no other collective of the module has.
    """
    partition_local.inline_calls(module)
    partition_local.drop_reshapes(module)
    devices = Devices(layout, channels)
    names = {name for fault in FAULTS for name in fault.operations}
    for _ in range(_ROUNDS):
        suspects = mlir.operations(module, *names)
        if not suspects or not _mend(suspects, partition_local.propagated(module, suspects), devices):
            return


def _mend(suspects: list[ir.Operation], found: list[Propagated], devices: Devices) -> bool:
    """Mends those of some operations that are divided wrongly. Returns whether there were any."""
    mended = False
    for operation, divided in zip(suspects, found, strict=True):
        if not any(entry for value in (*divided.operands, *divided.results) for entry in value):
            continue
        for fault in FAULTS:
            if operation.name in fault.operations and fault.holds(operation, divided, devices):
                fault.mend(operation, divided, devices)
                mended = True
                break
    return mended


def _has_two_axes(devices: Devices) -> bool:
    return sum(size > 1 for _, size in devices.layout.mesh.axes) > 1


def _uneven(value: ir.Value, divided: Divided, devices: Devices) -> list[int]:
    """The dimensions that are divided into unequal parts; all if an axis is divided itself."""
    shape = ir.RankedTensorType(value.type).shape
    if not devices.is_whole_axes(divided):
        return list(range(len(shape)))
    return [each for each, (size, names) in enumerate(zip(shape, divided, strict=True)) if size % devices.count(names)]


def _indexes_wrongly(operation: ir.Operation, divided: Propagated, devices: Devices) -> bool:
    values = [
        *zip(operation.operands, divided.operands, strict=True),
        *zip(operation.results, divided.results, strict=True),
    ]
    if any(_uneven(value, each, devices) for value, each in values) or _are_beside_others(devices):
        return True
    if operation.name == "stablehlo.gather":
        return _needs_neighbours(partition_indexed.Gather(operation), divided.operands[0], divided.operands[1], devices)
    scatter = partition_indexed.Scatter(operation)
    if _has_two_axes(devices) and scatter.divides_updates_wrongly(divided):
        return True
    if scatter.adds:
        return _needs_neighbours(scatter, divided.results[0], divided.operands[len(operation.results)], devices)
    return bool(scatter.indexed(divided.results[0]))


def _are_beside_others(devices: Devices) -> bool:
    """Whether there are other replicas: the partitioner looks for groups of their devices that are not there."""
    return devices.layout.replicas > 1 and _has_two_axes(devices)


def _needs_neighbours(
    indexed: partition_indexed.Gather | partition_indexed.Scatter, divided: Divided, indices: Divided, devices: Devices
) -> bool:
    """Whether an index may lie in another part, in a way that the partitioner does not know.

    It knows the samples of a batch: each part has the indices of its own samples.
    """
    along = {name for each in indexed.indexed(divided) for name in divided[each]}
    of_batch = {name for entry in indices for name in entry}
    return bool(along) and (_has_two_axes(devices) or (len(indexed.map) > 1 and not along <= of_batch))


def _index_locally(operation: ir.Operation, divided: Propagated, devices: Devices) -> None:
    if operation.name == "stablehlo.gather":
        gather = partition_indexed.Gather(operation)
        if gather.is_of_rows(divided.operands[0]) and _is_plain(divided, devices):
            gather.compute_locally(divided, devices)
        else:
            _index_whole(operation, divided, devices, {0: gather.map}, {})
    else:
        scatter = partition_indexed.Scatter(operation)
        if len(operation.results) == 1 and scatter.is_of_rows(divided.results[0]) and _is_plain(divided, devices):
            scatter.compute_locally(divided, devices)
        else:
            count = len(operation.results)
            whole = dict.fromkeys(range(count), scatter.map)
            updates: dict[int, Sequence[int]] = {}
            if scatter.divides_updates_wrongly(divided):
                updates = {count: scatter.batch, **dict.fromkeys(range(count + 1, 2 * count + 1), scatter.places)}
            _index_whole(operation, divided, devices, whole | updates, whole)


def _index_whole(
    operation: ir.Operation, divided: Propagated, devices: Devices, operands: Whole, results: Whole
) -> None:
    """Makes what is indexed whole along the indexed dimensions, and all else along those of unequal parts.

    Beside other replicas all are whole.
    """

    def together(values: Sequence[ir.Value], by: Sequence[Divided], along: Whole) -> Whole:
        return {
            index: range(len(each)) if beside_others else [*_uneven(value, each, devices), *along.get(index, ())]
            for index, (value, each) in enumerate(zip(values, by, strict=True))
        }

    beside_others = _are_beside_others(devices)
    before = together(operation.operands, divided.operands, operands)
    _constrain(operation, divided, before, together(operation.results, divided.results, results))


def _is_plain(divided: Propagated, devices: Devices) -> bool:
    return all(map(devices.is_whole_axes, (*divided.operands, *divided.results)))


def _numbers(convolution: ir.Operation) -> hlo.ConvDimensionNumbers:
    return hlo.ConvDimensionNumbers(convolution.attributes["dimension_numbers"])


def _sums_groups_of_batch(convolution: ir.Operation, divided: Propagated, devices: Devices) -> bool:
    return _has_two_axes(devices) and ir.IntegerAttr(convolution.attributes["batch_group_count"]).value > 1


def _sum_of_parts(convolution: ir.Operation, divided: Propagated, devices: Devices) -> None:
    """Lets each device convolve a part of what the convolution sums over, and adds up the results.

    That is a dimension of each operand: the features of the input, which are the batch of the layer. The convolution is
    made whole on each device if the dimension does not divide by the number of devices.
    """
    numbers = _numbers(convolution)
    summed = (numbers.input_feature_dimension, numbers.kernel_input_feature_dimension)
    axes = tuple(name for name, _ in devices.layout.mesh.axes)
    kinds = [ir.RankedTensorType(each.type) for each in convolution.operands]
    if kinds[0].get_dim_size(summed[0]) % devices.layout.mesh.size:
        axes = ()
    inputs = [
        tuple(axes if each == place else () for each in range(kind.rank))
        for kind, place in zip(kinds, summed, strict=True)
    ]

    def build(parts: list[ir.Value]) -> list[ir.Value]:
        made = _copy_with(convolution, parts, convolution.results[0].type)
        return [devices.added_up(made, axes) if axes else made]

    partition_local.computed_locally(convolution, inputs, [((),) * kinds[0].rank], devices, build)


def _divided_along(
    name: str, dimensions: Callable[[ir.Operation], Sequence[Sequence[int]]], on_two_axes: bool
) -> Fault:
    """The fault of an operation that is right if its values are whole along some dimensions, and is made so.

    Args:
        name: the name of the operation.
        dimensions: those of its first operands, and behind them those of its result.
        on_two_axes: whether it is right on a mesh of one axis in any case.
    """

    def holds(operation: ir.Operation, divided: Propagated, devices: Devices) -> bool:
        *operands, result = dimensions(operation)
        pairs = [*zip(divided.operands[: len(operands)], operands, strict=True), (divided.results[0], result)]
        return (_has_two_axes(devices) or not on_two_axes) and any(
            value[each] for value, places in pairs for each in places
        )

    def mend(operation: ir.Operation, divided: Propagated, devices: Devices) -> None:
        *operands, result = dimensions(operation)
        _constrain(operation, divided, dict(enumerate(operands)), {0: result})

    return Fault((name,), holds, mend)


def _spatial(convolution: ir.Operation) -> Sequence[Sequence[int]]:
    numbers = _numbers(convolution)
    return numbers.input_spatial_dimensions, numbers.kernel_spatial_dimensions, numbers.output_spatial_dimensions


def _cut_dimensions(operation: ir.Operation, divided: Propagated, devices: Devices) -> list[int]:
    """The dimensions that a slice at a computed place cuts, and that are divided into unequal parts."""
    whole = ir.RankedTensorType(operation.operands[0].type).shape
    update = operation.name == "stablehlo.dynamic_update_slice"
    part = ir.RankedTensorType((operation.operands[1] if update else operation.results[0]).type).shape
    values = [divided.operands[0], *divided.operands[1 : 1 + update], divided.results[0]]
    return [
        each
        for each, (size, cut) in enumerate(zip(whole, part, strict=True))
        if size != cut and any(size % devices.count(value[each]) for value in values)
    ]


def _cuts_uneven(operation: ir.Operation, divided: Propagated, devices: Devices) -> bool:
    return not _is_plain(divided, devices) or bool(_cut_dimensions(operation, divided, devices))


def _cut_whole(operation: ir.Operation, divided: Propagated, devices: Devices) -> None:
    rank = ir.RankedTensorType(operation.operands[0].type).rank
    places = _cut_dimensions(operation, divided, devices) if _is_plain(divided, devices) else range(rank)
    operands: dict[int, Sequence[int]] = {0: places}
    if operation.name == "stablehlo.dynamic_update_slice":
        operands[1] = places
    _constrain(operation, divided, operands, {0: places})


def _spread(pad: ir.Operation) -> Sequence[Sequence[int]]:
    """The dimensions in which a pad puts something between elements: of its operand, and of its result."""
    counts = ir.DenseI64ArrayAttr(pad.attributes["interior_padding"])
    return [[each for each, count in enumerate(counts) if count]] * 2


def _overlapping(pooled: ir.Operation) -> Sequence[Sequence[int]]:
    """The dimensions in which windows of a gradient of max pooling share elements, of its operands and its result."""
    windows, strides = (
        list(ir.DenseI64ArrayAttr(pooled.attributes[f"window_{name}"])) for name in ("dimensions", "strides")
    )
    return [[each for each, (size, stride) in enumerate(zip(windows, strides, strict=True)) if size > stride]] * 3


def _transform_locally(operation: ir.Operation, divided: Propagated, devices: Devices) -> None:
    """Lets each device transform its rows, each whole."""
    lengths = len(ir.DenseI64ArrayAttr(operation.attributes["fft_length"]))
    kind = ir.RankedTensorType(operation.operands[0].type)
    rows = [
        names if each < kind.rank - lengths and devices.is_whole_axes((names,)) else ()
        for each, names in enumerate(divided.operands[0])
    ]
    by = tuple(names if size % devices.count(names) == 0 else () for names, size in zip(rows, kind.shape, strict=True))

    def build(parts: list[ir.Value]) -> list[ir.Value]:
        whole = ir.RankedTensorType(operation.results[0].type)
        shape = [size // devices.count(names) for size, names in zip(whole.shape, by, strict=True)]
        return [_copy_with(operation, parts, ir.RankedTensorType.get(shape, whole.element_type))]

    partition_local.computed_locally(operation, [by], [by], devices, build)


def _copy_with(operation: ir.Operation, operands: list[ir.Value], kind: ir.Type) -> ir.Value:
    """The same operation of other operands, at the current place."""
    attributes = mlir.attributes(operation)
    return ir.Operation.create(operation.name, results=[kind], operands=operands, attributes=attributes).results[0]


def _constrain(operation: ir.Operation, divided: Propagated, operands: Whole, results: Whole) -> None:
    """Makes values of an operation whole along some dimensions, if any; the others stay as they are divided."""
    for index, whole in operands.items():
        if whole:
            with ir.InsertionPoint(operation), operation.location:
                operation.operands[index] = _made_whole(operation.operands[index], divided.operands[index], whole)
    for index, whole in results.items():
        if whole:
            uses = list(operation.results[index].uses)
            with ir.InsertionPoint.after(operation), operation.location:
                made = _made_whole(operation.results[index], divided.results[index], whole)
            for use in uses:
                use.owner.operands[use.operand_number] = made


def _made_whole(value: ir.Value, divided: Divided, whole: Sequence[int]) -> ir.Value:
    return partition_local.constrained(value, ([] if each in whole else names for each, names in enumerate(divided)))


FAULTS = (
    # The gradient of the kernel of a grouped convolution came out as often too large as there are devices in the axes
    # that do not divide the batch (in plain JAX too), on a mesh of two axes.
    Fault(("stablehlo.convolution",), _sums_groups_of_batch, _sum_of_parts),
    # A convolution of values that are divided along their length or height counts them several times, on a mesh of two
    # axes. Each device has them whole along those dimensions, which costs their memory and a gather.
    _divided_along("stablehlo.convolution", _spatial, on_two_axes=True),
    # A pad between elements, as in the gradient of a convolution with strides, puts some at wrong places, on a mesh of
    # two axes. It costs what the row before costs.
    _divided_along("stablehlo.pad", _spread, on_two_axes=True),
    # The gradient of max pooling adds what neighbours found in windows that overlap to one of them only, where the
    # length is divided. It costs what the row before costs.
    _divided_along("stablehlo.select_and_scatter", _overlapping, on_two_axes=False),
    # Rows that fill a batch up to equal parts are counted into row 0 by a scatter; a gather or scatter along a divided
    # dimension ends the process at times, on a mesh of two axes, or with several numbers in an index; a scatter that
    # sets elements sets some in each part; one whose updates are divided may end the process, and beside other replicas
    # either may, whatever is divided.
    Fault(("stablehlo.gather", "stablehlo.scatter"), _indexes_wrongly, _index_locally),
    # The largest and the smallest of divided values drop NaN, and so does their place.
    Fault(("stablehlo.reduce",), partition_indexed.drops_nan, partition_indexed.reduce_in_two_steps),
    # A slice that would end beyond the last row of a dimension of unequal parts does so, into the rows that fill it up.
    Fault(("stablehlo.dynamic_slice", "stablehlo.dynamic_update_slice"), _cuts_uneven, _cut_whole),
    # A Fourier transform gathers all rows on every device; along another dimension than the last it fails in the run.
    Fault(("stablehlo.fft",), lambda *_: True, _transform_locally),
)
