"""Convolutions that XLA:CPU runs with its plain loop, as matrix products or as sums of shifted products.

All of them begin with the padded input: padding around it, and zeros between its elements where the input is dilated,
as it is in the gradient of a strided convolution. Then each element of the kernel meets a slice of that input, which
has one element for each element of the result.
"""

from __future__ import annotations

import functools
import itertools
import math
import operator
from collections.abc import Iterator, Sequence

from replica_engine.pjrt.jaxlib import hlo, ir
from replica_engine.pjrt.stablehlo import mlir

MOST_SLICES = 49
"""The most elements of a kernel (7x7), and so slices of the input: each is an operation of its own to compile."""

MOST_BYTES = 16 * 2**20
"""What a form may always keep between its operations, in bytes."""

MOST_TIMES = 4
"""How many times the bytes of the operands and of the result a form may keep, where that is more than `MOST_BYTES`."""


class Convolution:
    """A convolution, with names for its dimensions.

    Attributes:
        input, kernel: the operands.
        batch, features, space: dimensions of the input.
        inputs, outputs, window: dimensions of the kernel: features of the input, features of the result, space.
        result_batch, result_features, result_space: dimensions of the result.
        shape: the shape of the result.
        strides, low, high, input_dilation, kernel_dilation: numbers for each dimension of space.
        reverse: for each dimension of space, whether the kernel is read backwards.
        groups, batch_groups: in how many parts the features, or the batch, are convolved apart.
    """

    def __init__(self, operation: hlo.ConvolutionOp):
        numbers = hlo.ConvDimensionNumbers(operation.dimension_numbers)
        self.input, self.kernel = operation.lhs, operation.rhs
        self.batch, self.features = numbers.input_batch_dimension, numbers.input_feature_dimension
        self.space = list(numbers.input_spatial_dimensions)
        self.inputs, self.outputs = numbers.kernel_input_feature_dimension, numbers.kernel_output_feature_dimension
        self.window = list(numbers.kernel_spatial_dimensions)
        self.result_batch, self.result_features = numbers.output_batch_dimension, numbers.output_feature_dimension
        self.result_space = list(numbers.output_spatial_dimensions)
        self.shape = mlir.shape(operation.result)
        ones = [1] * len(self.space)
        self.strides = mlir.numbers(operation.window_strides, ones)
        self.low, self.high = mlir.padding(operation, len(ones))
        self.input_dilation = mlir.numbers(operation.lhs_dilation, ones)
        self.kernel_dilation = mlir.numbers(operation.rhs_dilation, ones)
        self.reverse = mlir.numbers(operation.window_reversal, [False] * len(ones))
        self.groups = ir.IntegerAttr(operation.feature_group_count).value
        self.batch_groups = ir.IntegerAttr(operation.batch_group_count).value

    @property
    def input_size(self) -> list[int]:
        """The size of the input in space."""
        return [mlir.shape(self.input)[dimension] for dimension in self.space]

    @property
    def window_size(self) -> list[int]:
        """The size of the kernel in space."""
        return [mlir.shape(self.kernel)[dimension] for dimension in self.window]

    @property
    def result_size(self) -> list[int]:
        """The size of the result in space."""
        return [self.shape[dimension] for dimension in self.result_space]

    def padded(self) -> mlir.Value:
        """The input with its padding and dilation."""
        return self.spread(self.input, self.space)

    def spread(self, value: mlir.Value, space: list[int]) -> mlir.Value:
        """A value with the padding and dilation of the input, whose dimensions of space are these."""
        low, high, interior = ([0] * len(self.shape) for _ in range(3))
        for index, dimension in enumerate(space):
            low[dimension], high[dimension] = self.low[index], self.high[index]
            interior[dimension] = self.input_dilation[index] - 1
        return mlir.pad(value, low, high, interior)

    def forward_kernel(self) -> mlir.Value:
        """The kernel, to be read forwards."""
        backwards = [dimension for dimension, reverse in zip(self.window, self.reverse, strict=True) if reverse]
        return hlo.reverse(self.kernel, backwards) if backwards else self.kernel

    def product(self, value: mlir.Value, kernel: mlir.Value) -> mlir.Value:
        """A product over the features of a value, which lie as those of the input, and the rows of a kernel.

        The rows are the pixels of the kernel, with the features of each; the columns are the features of the result,
        whose dimensions are in the order of the result.
        """
        rows = mlir.transpose(kernel, [*self.window, self.inputs, self.outputs])
        *of_row, count = mlir.shape(rows)
        flat = mlir.reshape(rows, [math.prod(of_row), count])
        found = mlir.product(value, flat, ([self.features], [0]))
        # The product has the dimensions of the value without the features, and then the columns.
        left = [dimension for dimension in range(len(self.shape)) if dimension != self.features]
        return mlir.transpose(found, _order(self, [left.index(self.batch), len(left), *map(left.index, self.space)]))


def rewritten(operation: hlo.ConvolutionOp) -> mlir.Value | None:
    """The result of a convolution in a faster form; None if its own is the fastest."""
    if not mlir.is_static_float(operation.lhs, operation.rhs, operation.result):
        return None
    each = Convolution(operation)
    slices, positions = math.prod(each.window_size), math.prod(each.result_size)
    kernel = mlir.shape(each.kernel)
    # Each form begins with the padded input.
    if not _fits(each, _padded_elements(each)):
        return None
    # In the gradient of a depthwise kernel each feature is a group of the batch.
    if each.batch_groups > 1:
        one_a_group = mlir.shape(each.input)[each.batch] == kernel[each.outputs] == each.batch_groups
        return _depthwise_kernel(each) if one_a_group and positions <= MOST_SLICES else None
    if each.groups > 1:
        is_depthwise = kernel[each.inputs] == 1 and kernel[each.outputs] == each.groups
        return _depthwise(each) if is_depthwise and slices <= MOST_SLICES else None
    if slices == 1:  # with strides, to cut out the pixels that count takes longer than the product saves
        return _multiply_pixels(each) if max(each.strides, default=1) == 1 else None
    if positions == 1:
        return _to_one_pixel(each)
    if slices > MOST_SLICES or not is_slow(each) or not _fits(each, slices * positions * _elements_a_position(each)):
        return None
    return _patches(each)


def is_slow(each: Convolution) -> bool:
    """Whether the kernel has more pixels than the input.

    XLA then lets the two change places, and no fast code of XLA:CPU takes such a convolution. In any
    other shape XLA:CPU's own code is as fast as patches, or up to ten times faster.
    """
    return math.prod(each.window_size) > math.prod(each.input_size)


def _fits(each: Convolution, elements: int) -> bool:
    """Whether a form may keep this many elements: speed must not cost the memory of the machine."""
    bytes_of_one = 8 if str(mlir.element_type(each.input)) == "f64" else 4
    given = sum(math.prod(sizes) for sizes in (mlir.shape(each.input), mlir.shape(each.kernel), each.shape))
    return bytes_of_one * elements <= max(MOST_BYTES, MOST_TIMES * bytes_of_one * given)


def _padded_elements(each: Convolution) -> int:
    """The size of `Convolution.padded`."""
    sizes = zip(each.input_size, each.low, each.high, each.input_dilation, strict=True)
    return _elements_a_position(each) * math.prod(
        (size - 1) * dilation + 1 + low + high for size, low, high, dilation in sizes
    )


def _elements_a_position(each: Convolution) -> int:
    """How many elements one position in space has in the input."""
    return mlir.shape(each.input)[each.batch] * mlir.shape(each.input)[each.features]


def _patches(each: Convolution) -> mlir.Value:
    """Slices side by side, one for each element of the kernel, and a product with all of the kernel."""
    padded = each.padded()
    slices = [_slice(each, padded, offset) for offset in _offsets(each.window_size)]
    return each.product(mlir.join(slices, each.features), each.forward_kernel())


def _multiply_pixels(each: Convolution) -> mlir.Value:
    """The kernel has one pixel, and no strides: a product. Zeros between pixels are put into the result, not before."""
    if max(each.input_dilation) == 1:
        return each.product(each.padded(), each.kernel)
    return each.spread(each.product(each.input, each.kernel), each.result_space)


def _to_one_pixel(each: Convolution) -> mlir.Value:
    """The result has one pixel: a product over space and features."""
    taken = _cut(each.space, each.padded(), [0] * len(each.space), each.window_size, each.kernel_dilation)
    found = mlir.product(taken, each.forward_kernel(), ([*each.space, each.features], [*each.window, each.inputs]))
    return mlir.reshape(
        found if each.result_batch < each.result_features else mlir.transpose(found, [1, 0]), each.shape
    )


def _depthwise(each: Convolution) -> mlir.Value:
    """Each feature is convolved alone: a sum of slices, each times one element of the kernel for each feature."""
    padded, kernel = each.padded(), each.forward_kernel()
    terms = []
    for offset in _offsets(each.window_size):
        taken = _slice(each, padded, offset)
        ones = [1] * len(offset)
        element = mlir.reshape(_cut(each.window, kernel, offset, ones, ones), [each.groups])
        terms.append(hlo.multiply(taken, mlir.broadcast(element, mlir.shape(taken), [each.features])))
    order = _order(each, [each.batch, each.features, *each.space])
    return mlir.transpose(functools.reduce(hlo.add, terms), order)


def _depthwise_kernel(each: Convolution) -> mlir.Value:
    """The gradient of a depthwise kernel: for each of its few elements, the sum of a slice times the whole "kernel"."""
    other = [0] * len(each.shape)
    other[each.batch], other[each.features] = each.outputs, each.inputs
    for ours, theirs in zip(each.space, each.window, strict=True):
        other[ours] = theirs
    kernel, padded = mlir.transpose(each.forward_kernel(), other), each.padded()
    summed = [dimension for dimension in range(len(each.shape)) if dimension != each.batch]
    columns = []
    for position in _offsets(each.result_size):
        start = list(map(operator.mul, position, each.strides))
        taken = _cut(each.space, padded, start, each.window_size, each.kernel_dilation)
        found = mlir.reduced_over(hlo.multiply(taken, kernel), summed, 0.0, hlo.add)
        columns.append(mlir.reshape(found, [1, each.batch_groups]))
    table = mlir.reshape(mlir.join(columns, 0), [*each.result_size, 1, each.batch_groups])
    places = [*each.result_space, each.result_batch, each.result_features]
    return mlir.transpose(table, [places.index(dimension) for dimension in range(len(each.shape))])


def _slice(each: Convolution, padded: mlir.Value, offset: Sequence[int]) -> mlir.Value:
    """The elements of the padded input that one element of the kernel is multiplied with, one for each result."""
    start = list(map(operator.mul, offset, each.kernel_dilation))
    return _cut(each.space, padded, start, each.result_size, each.strides)


def _cut(
    space: Sequence[int], value: mlir.Value, start: Sequence[int], counts: Sequence[int], strides: Sequence[int]
) -> mlir.Value:
    """So many elements of each dimension of space, from a start, with a stride; all of the other dimensions."""
    starts, sizes, steps = [0] * len(mlir.shape(value)), mlir.shape(value), [1] * len(mlir.shape(value))
    for index, dimension in enumerate(space):
        starts[dimension], sizes[dimension], steps[dimension] = start[index], counts[index], strides[index]
    return mlir.cut(value, starts, sizes, steps)


def _order(each: Convolution, where: Sequence[int]) -> list[int]:
    """The order of dimensions in the result, for a value that has batch, features and space `where` it says."""
    order = [0] * len(each.shape)
    for target, source in zip([each.result_batch, each.result_features, *each.result_space], where, strict=True):
        order[target] = source
    return order


def _offsets(size: Sequence[int]) -> Iterator[tuple[int, ...]]:
    return itertools.product(*map(range, size))
