"""Arrays that a loop fills with one value, row by row, for a later loop to read.

TensorFlow keeps what the gradient of a loop needs of each step in an array with a row for each step. A variable that
the body reads, such as the kernel of an LSTM, is kept too: each step copies the whole kernel into its row, and the
gradient's loop copies it out again. But all rows are the same value, which the loop never changes. So the reads get
that value itself, and nothing is kept.

The array is rewritten only if the program shows that every row is written: the row is a counter from 0, and the loop's
condition lets it count to the last row. Then it does not matter which row is read.
"""

from __future__ import annotations

from collections.abc import Mapping

from replica_engine.pjrt.jaxlib import hlo, ir
from replica_engine.pjrt.stablehlo import mlir

WHILE = "stablehlo.while"

Functions = Mapping[str, ir.Operation]
"""The functions of a module, by name."""


def rewritten(loop: ir.Operation, functions: Functions) -> int:
    """Rewrites the arrays that a loop fills with one value. Returns how many there were.

    Args:
        loop: an operation `stablehlo.while`.
        functions: the functions of its module.
    """
    body = loop.regions[1].blocks[0]
    steps = _steps(loop, functions)
    found = []
    for index in range(len(body.arguments) if steps else 0):
        value = _filled_with(loop, index, steps, functions)
        reads = None if value is None else _reads(loop.results[index], functions)
        if value is not None and reads:
            found.append((index, value, reads))
    for index, value, reads in found:
        for read in reads:
            with ir.InsertionPoint(read), read.location:
                whole = mlir.reshape(value, mlir.shape(read.results[0]))
                if whole.type != read.results[0].type:
                    whole = hlo.convert(read.results[0].type, whole)
                read.results[0].replace_all_uses_with(whole)
            read.erase()
        end = _end(body)
        write = end.operands[index].owner
        end.operands[index] = body.arguments[index]
        write.erase()
    return len(found)


def _filled_with(loop: ir.Operation, index: int, steps: int, functions: Functions) -> mlir.Value | None:
    """The value, from outside a loop, that all rows of an array are after it; None if they are not one value.

    Args:
        loop: the loop.
        index: which of its values is the array.
        steps: the number of steps of the loop.
        functions: the functions of the module.
    """
    body, condition = (region.blocks[0] for region in reversed(list(loop.regions)))
    array, write = body.arguments[index], mlir.made_by(_end(body).operands[index], "stablehlo.dynamic_update_slice")
    if write is None or not ir.RankedTensorType(array.type).has_static_shape:
        return None
    # Each step only writes its row and passes the array on: a read in the loop would see rows of steps before.
    if write.operands[0] != array or len(list(array.uses)) != 1 or len(list(write.results[0].uses)) != 1:
        return None
    if _is_read(condition.arguments[index], functions):
        return None
    row, at, *others = list(write.operands)[1:]
    if mlir.shape(row) != [1, *mlir.shape(array)[1:]] or any(_integer(each) != 0 for each in others):
        return None
    # With fewer steps than rows, the last rows keep what they had before the loop.
    if steps < mlir.shape(array)[0] or not _counts(loop, _place(body, at)):
        return None
    converted = mlir.made_by(_same(row), "stablehlo.convert")  # to another type, as a step of bfloat16 uses a variable
    place = _place(body, row if converted is None else converted.operands[0])
    # A value that the loop changes is another one in each row.
    if place is None or _place(body, _end(body).operands[place]) != place:
        return None
    value = loop.operands[place]
    return value if mlir.shape(value) == mlir.shape(array)[1:] else None


def _reads(array: mlir.Value, functions: Functions) -> list[ir.Operation] | None:
    """The operations that read a row of an array in the loops that get it; None if anything else is done with it."""
    reads = []
    for use in array.uses:
        loop, index = use.owner.operation, use.operand_number
        # After the loop the array may be used as a whole, and then its rows must be there.
        if loop.name != WHILE or list(loop.results[index].uses):
            return None
        condition, body = (region.blocks[0] for region in loop.regions)
        inside = body.arguments[index]
        if _is_read(condition.arguments[index], functions) or _end(body).operands[index] != inside:
            return None
        for each in inside.uses:
            reader = each.owner.operation
            if reader == _end(body) and each.operand_number == index:
                continue
            if reader.name != "stablehlo.dynamic_slice" or each.operand_number != 0:
                return None
            if mlir.shape(reader.results[0]) != [1, *mlir.shape(array)[1:]]:
                return None
            reads.append(reader)
    return reads


def _steps(loop: ir.Operation, functions: Functions) -> int:
    """The number of steps of a loop, if its condition compares counters with constants; else 0."""
    condition = loop.regions[0].blocks[0]
    limits = _limits(_end(condition).operands[0], condition, functions)
    if not limits or not all(_counts(loop, place) for place, _ in limits):
        return 0
    return max(0, min(limit for _, limit in limits))


def _limits(value: mlir.Value, block: ir.Block, functions: Functions) -> list[tuple[int, int]] | None:
    """The comparisons behind a truth value: pairs of an argument of its block and the constant that it is less than.

    The value is true if all of them hold. None for a value that is made in another way.
    """
    value = _same(value)
    owner = mlir.made_by(value, "stablehlo.and", "func.call", "stablehlo.compare")
    if owner is None:
        return None
    if owner.name == "stablehlo.and":
        both = [_limits(each, block, functions) for each in owner.operands]
        return None if None in both else [limit for each in both for limit in each or ()]
    if owner.name == "func.call":
        function = functions.get(mlir.callee(owner))
        if function is None:
            return None
        entry = function.regions[0].blocks[0]
        inner = _limits(_end(entry).operands[ir.OpResult(value).result_number], entry, functions)
        outer = [(_place(block, owner.operands[place]), limit) for place, limit in inner or ()]
        return None if inner is None or any(place is None for place, _ in outer) else outer  # type: ignore[return-value]
    if "LT" not in str(owner.attributes["comparison_direction"]):
        return None
    place, limit = _place(block, owner.operands[0]), _integer(owner.operands[1])
    return None if place is None or limit is None else [(place, limit)]


def _counts(loop: ir.Operation, place: int | None) -> bool:
    """Whether a value of a loop counts its steps from 0."""
    if place is None or _integer(loop.operands[place]) != 0:
        return False
    body = loop.regions[1].blocks[0]
    after = mlir.made_by(_same(_end(body).operands[place]), "stablehlo.add")
    return (
        after is not None
        and _place(body, after.operands[0]) == place
        and _integer(after.operands[1]) == 1
        and str(mlir.element_type(after.results[0])) in ("i32", "i64")
    )


def _is_read(value: mlir.Value, functions: Functions) -> bool:
    """Whether anything uses a value, other than functions that do not use their argument."""
    for use in value.uses:
        call = use.owner.operation
        function = functions.get(mlir.callee(call)) if call.name == "func.call" else None
        if function is None or _is_read(function.regions[0].blocks[0].arguments[use.operand_number], functions):
            return True
    return False


def _place(block: ir.Block, value: mlir.Value) -> int | None:
    """The index of the argument that a value is; None if it is not an argument of the block."""
    value = _same(value)
    return next((place for place, each in enumerate(block.arguments) if each == value), None)


def _same(value: mlir.Value) -> mlir.Value:
    """A value without the operations that leave its elements as they are, in the same order."""
    while (change := mlir.made_by(value, "stablehlo.reshape", "mhlo.copy")) is not None:
        value = change.operands[0]
    return value


def _integer(value: mlir.Value) -> int | None:
    """The integer that a value is in each run; None if it is not known."""
    constant = mlir.made_by(_same(value), "stablehlo.constant")
    if constant is None or str(mlir.element_type(value)) not in ("i32", "i64"):
        return None
    elements = ir.DenseIntElementsAttr(constant.attributes["value"])
    return int(elements[0]) if len(elements) == 1 else None


def _end(block: ir.Block) -> ir.Operation:
    """The operation that ends a block. It is asked for each value of a loop, so no list of the operations is made."""
    operations = block.operations
    return operations[len(operations) - 1].operation
