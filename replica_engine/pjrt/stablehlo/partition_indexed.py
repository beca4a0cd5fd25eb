"""Gathers, scatters and reductions of divided values.

In gathers and scatters each device looks up, or changes, what it has itself. It takes the indices of its own part for
what they are and all others for none. After a gather the devices add their results up; all but one have nothing there.

Reductions are made in two steps: each device reduces its part, and then what all have found.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from replica_engine.pjrt.jaxlib import hlo, ir
from replica_engine.pjrt.stablehlo import mlir, partition_local
from replica_engine.pjrt.stablehlo.partition_local import Devices, Divided, Propagated

_NONE: tuple[str, ...] = ()


class Indexed:
    """An operation that takes or changes elements of its first operand at given places.

    Attributes:
        operation: the operation.
        map: the dimensions of the operand that are indexed, in the order of the entries of an index.
        vector: the dimension of the indices that has one entry for each of these.
        operand, indices: the types of the operand and of the indices.
        batch: the other dimensions of the indices.
        ends: the last index of each indexed dimension, to which larger ones are moved; None leaves them.
    """

    ends: list[int] | None = None

    def __init__(self, operation: ir.Operation, indexed: Iterable[int], vector: int, indices: ir.Value):
        self.operation = operation
        self.map, self.vector = list(indexed), vector
        self.operand, self.indices = (ir.RankedTensorType(each.type) for each in (operation.operands[0], indices))
        self.batch = [each for each in range(self.indices.rank) if each != vector]

    def indexed(self, divided: Divided) -> list[int]:
        """The dimensions of the operand that are indexed and divided."""
        return [each for each in self.map if divided[each]]


class Gather(Indexed):
    """What a gather does with the dimensions of its values."""

    def __init__(self, operation: ir.Operation):
        numbers = hlo.GatherDimensionNumbers(operation.attributes["dimension_numbers"])
        super().__init__(operation, numbers.start_index_map, numbers.index_vector_dim, operation.operands[1])
        self.offsets = list(numbers.offset_dims)
        self.collapsed = list(numbers.collapsed_slice_dims)
        self.has_batches = bool(numbers.operand_batching_dims)
        self.slices = list(ir.DenseI64ArrayAttr(operation.attributes["slice_sizes"]))
        self.ends = [self.operand.get_dim_size(each) - self.slices[each] for each in self.map]

    def is_of_rows(self, divided: Divided) -> bool:
        """Whether it takes single elements of the dimensions that are indexed and divided."""
        return not self.has_batches and all(self.slices[each] == 1 for each in self.indexed(divided))

    def compute_locally(self, propagated: Propagated, devices: Devices) -> None:
        """Lets each device look up its own part."""
        operand, indices = propagated.operands
        along = tuple(name for each in self.map for name in operand[each])
        kept = [each for each in range(self.operand.rank) if each not in self.collapsed]
        inputs = [names if each in self.map else _NONE for each, names in enumerate(operand)]
        result: list[tuple[str, ...]] = [_NONE] * ir.RankedTensorType(self.operation.results[0].type).rank
        # An axis divides one dimension of a value.
        used = set(along)
        for each in kept:
            whole = each not in self.map and self.slices[each] == self.operand.get_dim_size(each)
            if whole and _fits(self.operand.get_dim_size(each), operand[each], used, devices):
                inputs[each] = result[self.offsets[kept.index(each)]] = operand[each]
                used |= {*operand[each]}
        places = [each for each in range(len(result)) if each not in self.offsets]  # of the indices in the result
        of_indices = [_NONE] * self.indices.rank
        for place, each in zip(places, self.batch, strict=True):
            if _fits(self.indices.get_dim_size(each), indices[each], used, devices):
                of_indices[each] = result[place] = indices[each]
                used |= {*indices[each]}
        parts_of = [1 if each in self.map else devices.count(names) for each, names in enumerate(inputs)]
        slices = [size // count for size, count in zip(self.slices, parts_of, strict=True)]

        def build(parts: list[ir.Value]) -> list[ir.Value]:
            table, numbers = parts
            own = _Own(self, numbers, table, inputs, devices)
            found = hlo.gather(table, own.indices, self.operation.attributes["dimension_numbers"], slices)
            if not along:
                return [found]
            kind = ir.RankedTensorType(found.type)
            # The sum with -0.0 is each number itself; with 0.0, a -0.0 that was found would lose its sign.
            nothing = partition_local.zeros(kind, -0.0)
            truth = ir.RankedTensorType.get(kind.shape, ir.IntegerType.get_signless(1))
            seen = hlo.select(hlo.broadcast_in_dim(truth, own.are_here(), places), found, nothing)
            return [devices.added_up(seen, along)]

        partition_local.computed_locally(
            self.operation, [tuple(inputs), tuple(of_indices)], [tuple(result)], devices, build
        )


class Scatter(Indexed):
    """What a scatter does with the dimensions of its values."""

    def __init__(self, operation: ir.Operation):
        numbers = hlo.ScatterDimensionNumbers(operation.attributes["scatter_dimension_numbers"])
        first = len(operation.results)  # several values are changed at the same places
        super().__init__(
            operation, numbers.scattered_dims_to_operand_dims, numbers.index_vector_dim, operation.operands[first]
        )
        self.windows = list(numbers.update_window_dims)
        self.inserted = list(numbers.inserted_window_dims)
        self.has_batches = bool(numbers.input_batching_dims)
        self.updates = ir.RankedTensorType(operation.operands[first + 1].type)
        self.places = [each for each in range(self.updates.rank) if each not in self.windows]  # of indices in updates

    @property
    def adds(self) -> bool:
        """Whether it adds its updates, and so may add them in any order and in parts."""
        block = self.operation.regions[0].blocks[0]
        return [each.name for each in block.operations] == ["stablehlo.add", "stablehlo.return"]

    def divides_updates_wrongly(self, divided: Propagated) -> bool:
        """Whether updates are divided that are not added up, or otherwise than their indices are."""
        indices, *updates = divided.operands[len(self.operation.results) :]
        pairs = [
            (indices[each], one[place]) for one in updates for each, place in zip(self.batch, self.places, strict=True)
        ]
        return any(one != other or (one and not self.adds) for one, other in pairs)

    def is_of_rows(self, divided: Divided) -> bool:
        """Whether it changes single elements of the dimensions that are indexed and divided."""
        return not self.has_batches and all(each in self.inserted for each in self.indexed(divided))

    def compute_locally(self, propagated: Propagated, devices: Devices) -> None:
        """Lets each device change its own part."""
        operand, indices, updates = propagated.results[0], *propagated.operands[1:]
        inputs = [names if each in self.map else _NONE for each, names in enumerate(operand)]
        used = {name for entry in inputs for name in entry}
        of_updates = [_NONE] * self.updates.rank
        kept = [each for each in range(self.operand.rank) if each not in self.inserted]
        for place, each in zip(self.windows, kept, strict=True):
            size = self.operand.get_dim_size(each)
            whole = each not in self.map and self.updates.get_dim_size(place) == size
            if whole and _fits(size, operand[each], used, devices):
                inputs[each] = of_updates[place] = operand[each]
                used |= {*operand[each]}
        of_indices, summed = [_NONE] * self.indices.rank, _NONE
        for place, each in zip(self.places, self.batch, strict=True):
            names = updates[place] or indices[each]
            if self.adds and _fits(self.indices.get_dim_size(each), names, used, devices):
                of_indices[each] = of_updates[place] = names
                summed += names
                used |= {*names}

        def build(parts: list[ir.Value]) -> list[ir.Value]:
            table, numbers, rows = parts
            own = _Own(self, numbers, table, inputs, devices)
            kind = ir.RankedTensorType(table.type)
            # XLA takes a slice of a slice for one, though an index outside of the second is moved into that: so it
            # must not see where the part comes from.
            first = partition_local.zeros(kind, -0.0) if summed else mlir.barrier(table)
            made = hlo.ScatterOp(
                [kind], [first], own.indices, [rows], self.operation.attributes["scatter_dimension_numbers"]
            )
            # Moved: the operation itself is erased.
            self.operation.regions[0].blocks[0].append_to(made.regions[0])
            return [hlo.add(table, devices.added_up(made.results[0], summed)) if summed else made.results[0]]

        divided = [tuple(inputs), tuple(of_indices), tuple(of_updates)]
        partition_local.computed_locally(self.operation, divided, [tuple(inputs)], devices, build)


def _fits(size: int, names: tuple[str, ...], used: set[str], devices: Devices) -> bool:
    """Whether a dimension can stay divided: into equal parts, over axes that no other dimension has."""
    return not used & {*names} and size % devices.count(names) == 0


class _Own:
    """The indices within a device's part of a table, and which of them lie there.

    Attributes:
        indices: those within the part; outside of it they are too small or too large.
    """

    def __init__(
        self, of: Indexed, given: ir.Value, table: ir.Value, inputs: Sequence[tuple[str, ...]], devices: Devices
    ):
        """Takes the indices of the whole.

        Args:
            of: the operation.
            given: the indices.
            table: the device's part.
            inputs: how the dimensions of the table are divided.
            devices: of a replica.
        """
        kind = ir.RankedTensorType(given.type)
        # ui32 too: its largest numbers do not fit an int32.
        wide = str(kind.element_type) in ("i64", "ui64", "ui32")
        element = ir.IntegerType.get_signless(64 if wide else 32)
        self._kind = ir.RankedTensorType.get(kind.shape, element)
        self._scalar = ir.RankedTensorType.get([], element)
        self._vector = of.vector
        self._sizes = [ir.RankedTensorType(table.type).get_dim_size(each) for each in of.map]
        if kind != self._kind:
            given = hlo.convert(self._kind, given)
        if of.ends is not None:
            given = hlo.clamp(self._counted([0] * len(of.ends)), given, self._counted(of.ends))
        starts = []
        for each, size in zip(of.map, self._sizes, strict=True):
            start = hlo.multiply(devices.place(inputs[each]), partition_local.integer(size))
            starts.append(hlo.convert(self._scalar, start) if wide else start)
        self.indices = hlo.subtract(given, self._spread(starts))

    def are_here(self) -> ir.Value:
        """A truth value for each index, without the dimension of the entries."""
        inside = hlo.and_(
            mlir.compared(self.indices, self._counted([0] * len(self._sizes)), "GE"),
            mlir.compared(self.indices, self._counted(self._sizes), "LT"),
        )
        return inside if self._vector == self._kind.rank else mlir.reduced_over(inside, [self._vector], True, hlo.and_)

    def _counted(self, numbers: list[int]) -> ir.Value:
        return self._spread([partition_local.constant(each, self._scalar) for each in numbers])

    def _spread(self, numbers: Sequence[ir.Value]) -> ir.Value:
        """A number for each indexed dimension, in the shape of the indices."""
        if self._vector == self._kind.rank:
            return hlo.broadcast_in_dim(self._kind, numbers[0], [])
        one, row = (ir.RankedTensorType.get([size], self._scalar.element_type) for size in (1, len(numbers)))
        entries = [hlo.reshape(one, each) for each in numbers]
        joined = entries[0] if len(entries) == 1 else hlo.concatenate(entries, 0, results=[row])
        return hlo.broadcast_in_dim(self._kind, joined, [self._vector])


_EXTREMES = ("stablehlo.maximum", "stablehlo.minimum")


def drops_nan(operation: ir.Operation, divided: Propagated, devices: Devices) -> bool:
    """Whether a reduction looks for the largest or smallest value, or several at once, along a divided dimension."""
    first = ir.RankedTensorType(operation.operands[0].type)
    if not str(first.element_type).startswith(("f", "bf")):
        return False
    body = [each.name for each in operation.regions[0].blocks[0].operations]
    count = len(operation.results)
    looks = count > 1 or body[0] in _EXTREMES
    return looks and any(divided.operands[index][each] for index in range(count) for each in _dimensions(operation))


def reduce_in_two_steps(operation: ir.Operation, divided: Propagated, devices: Devices) -> None:
    """Lets each device reduce its part. Nothing is lost between the steps, as it is between devices."""
    count, reduced = len(operation.results), _dimensions(operation)
    rank = ir.RankedTensorType(operation.operands[0].type).rank
    shape = ir.RankedTensorType(operation.operands[0].type).shape
    by: list[tuple[str, ...]] = []
    used: set[str] = set()
    for each in range(rank):
        found = [divided.operands[index][each] for index in range(count) if divided.operands[index][each]]
        names = found[0] if found and devices.is_whole_axes((found[0],)) and not used & {*found[0]} else ()
        if each not in reduced and shape[each] % devices.count(names):
            names = ()
        by.append(names)
        used |= {*names}
    along = tuple(name for each in reduced for name in by[each])
    kept = tuple(names for each, names in enumerate(by) if each not in reduced)
    scalars: list[Divided] = [()] * count
    fillings = list(operation.operands)[count:]

    def build(parts: list[ir.Value]) -> list[ir.Value]:
        values, starts = parts[:count], parts[count:]
        found = _reduced(operation, values, starts, list(reduced))
        if not along:
            return found
        return _reduced(operation, [devices.gathered(each, along) for each in found], starts, [0])

    partition_local.computed_locally(operation, [tuple(by)] * count + scalars, [kept] * count, devices, build, fillings)


def _dimensions(operation: ir.Operation) -> list[int]:
    return list(ir.DenseI64ArrayAttr(operation.attributes["dimensions"]))


def _reduced(
    operation: ir.Operation, values: list[ir.Value], starts: list[ir.Value], dimensions: list[int]
) -> list[ir.Value]:
    """The same reduction of other values, at the current place."""
    kinds = []
    for value in values:
        kind = ir.RankedTensorType(value.type)
        left = [size for each, size in enumerate(kind.shape) if each not in dimensions]
        kinds.append(ir.RankedTensorType.get(left, kind.element_type))
    made = hlo.ReduceOp(kinds, values, starts, dimensions)
    # From a copy, since the second step needs the region too.
    copy = operation.operation.clone()
    copy.regions[0].blocks[0].append_to(made.regions[0])
    copy.erase()
    return list(made.results)
