"""The operations of the sweep over values in parts: what Keras' layers and `tf.*` lower to.

Each is a function of some `Values`; a result may have any shape and dtype. All of them have fixed shapes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import keras
import tensorflow as tf


class Values(NamedTuple):
    """What an operation works on."""

    x: Any  # numbers (batch, length, channels)
    image: Any  # numbers (batch, length, length, channels)
    table: Any  # numbers (rows, channels)
    kernel: Any  # numbers (channels, channels)
    i: Any  # indices (batch, length) of rows, int32 or int64

    @property
    def rows(self) -> Any:
        """The numbers of all places, as a matrix."""
        return tf.reshape(self.x, [-1, self.x.shape[-1]])

    @property
    def ids(self) -> Any:
        """All indices, as a vector."""
        return tf.reshape(self.i, [-1])

    @property
    def count(self) -> int:
        """The number of rows of the table."""
        return int(self.table.shape[0])

    @property
    def places(self) -> Any:
        """Indices of places in the length."""
        return self.i % self.x.shape[1]

    @property
    def columns(self) -> Any:
        """Indices of channels."""
        return self.i % self.x.shape[2]

    @property
    def samples(self) -> Any:
        """Indices of the batch."""
        return self.i[:, 0] % self.x.shape[0]

    @property
    def volume(self) -> Any:
        """Numbers (batch, 3, length, length, channels)."""
        return tf.stack([self.image, self.image * 2.0, -self.image], 1)

    @property
    def square(self) -> Any:
        """For each sample a positive definite matrix (channels, channels)."""
        return tf.matmul(self.x, self.x, transpose_a=True) / self.x.shape[1] + tf.eye(self.x.shape[2])

    def filters(self, rank: int, size: int = 3) -> Any:
        """A kernel of convolutions (size, ..., channels, channels)."""
        found = self.kernel
        for _ in range(rank):
            found = tf.stack([found * (1.0 - 0.5 * each) for each in range(size)])
        return found

    def each_channel(self, rank: int) -> Any:
        """A kernel of depthwise convolutions (3, ..., channels, 1)."""
        return tf.reduce_sum(self.filters(rank), -1, keepdims=True)


Operation = Callable[[Values], Any]


def _complex(value: Any) -> Any:
    return tf.complex(value, value * 0.5)


def _with_nan(value: Any) -> Any:
    """Numbers of which some are NaN."""
    return tf.where(value > 1.2, value * float("nan"), value)


def _groups(value: Any, size: int = 2) -> Any:
    """Group normalization."""
    *shape, channels = value.shape
    apart = tf.reshape(value, [*shape, channels // size, size])
    mean, variance = tf.nn.moments(apart, [*range(1, len(shape)), len(shape) + 1], keepdims=True)
    return tf.reshape((apart - mean) * tf.math.rsqrt(variance + 1e-3), value.shape)


def _attention(v: Values, mask: Any = None) -> Any:
    query, key = v.x @ v.kernel, v.x @ tf.transpose(v.kernel)
    scores = tf.einsum("btc,bsc->bts", query, key) / 4.0
    if mask is not None:
        scores += mask
    return tf.nn.softmax(scores) @ v.x


def _causal(v: Values) -> Any:
    length = v.x.shape[1]
    return _attention(v, (tf.linalg.band_part(tf.ones([length, length]), -1, 0) - 1.0) * 1e9)


def _heads(v: Values) -> Any:
    """Attention with two heads, as in Keras' layer."""
    kernel = tf.reshape(v.kernel, [v.kernel.shape[0], 2, -1])
    query = tf.einsum("btc,chd->bthd", v.x, kernel)
    scores = tf.nn.softmax(tf.einsum("bthd,bshd->bhts", query, query))
    return tf.einsum("bhts,bshd->bthd", scores, query)


def _lstm(v: Values) -> Any:
    def step(states: Any, inputs: Any) -> Any:
        hidden, carry = states
        gates = inputs @ v.kernel + hidden @ tf.transpose(v.kernel)
        carry = tf.sigmoid(gates + 1.0) * carry + tf.sigmoid(gates) * tf.tanh(gates * 0.5)
        return tf.sigmoid(gates - 1.0) * tf.tanh(carry), carry

    start = tf.zeros_like(v.x[:, 0])
    return tf.scan(step, tf.transpose(v.x, [1, 0, 2]), (start, start))


def _gru(v: Values) -> Any:
    def step(hidden: Any, inputs: Any) -> Any:
        gate = tf.sigmoid(inputs @ v.kernel + hidden)
        return gate * hidden + (1.0 - gate) * tf.tanh((gate * hidden) @ v.kernel + inputs)

    return tf.scan(step, tf.transpose(v.x, [1, 0, 2]), tf.zeros_like(v.x[:, 0]))


def _while(v: Values) -> Any:
    def turn(step: Any, value: Any) -> Any:
        return step + 1, tf.tanh(value @ v.kernel)

    return tf.while_loop(lambda step, value: step < 3, turn, (0, v.x), maximum_iterations=3)[1]


def _rows_written(v: Values) -> Any:
    """A loop that writes a row of an array in each turn."""
    array = tf.TensorArray(tf.float32, v.x.shape[0])
    return tf.while_loop(
        lambda step, array: step < v.x.shape[0],
        lambda step, array: (step + 1, array.write(step, v.x[step] * 2.0)),
        (0, array),
        maximum_iterations=v.x.shape[0],
    )[1].stack()


def _segments(reduce: Callable[..., Any]) -> Operation:
    return lambda v: reduce(v.rows, v.ids, v.count)


def _scattered(scatter: Callable[..., Any]) -> Operation:
    return lambda v: scatter(v.table, v.ids[:, tf.newaxis], v.rows)


ELEMENTWISE: dict[str, Operation] = {
    "exp, log, square root": lambda v: tf.sqrt(tf.math.log1p(tf.exp(v.x))),
    "powers": lambda v: tf.pow(tf.abs(v.x) + 0.5, v.table[0]),
    "quotient without NaN": lambda v: tf.math.divide_no_nan(v.x, tf.nn.relu(v.x)),
    "tanh and erf": lambda v: tf.tanh(v.x) * tf.math.erf(v.x),
    "clip by value": lambda v: tf.clip_by_value(v.x, -0.5, 0.5),
    "round, floor, mod": lambda v: tf.round(v.x) + tf.floor(v.x) * tf.math.floormod(v.x, 0.7),
    "activations": lambda v: tf.nn.elu(v.x) + tf.nn.gelu(v.x) * tf.nn.selu(v.x) + tf.nn.leaky_relu(v.x),
    "gamma functions": lambda v: tf.math.lgamma(tf.abs(v.x) + 1.0) + tf.math.digamma(tf.abs(v.x) + 1.0),
    "choice": lambda v: tf.where(v.x > v.table[0], v.x, v.table[1] * 2.0),
    "atan2 and hypot": lambda v: tf.atan2(v.x, v.table[0]),
    "half precision": lambda v: tf.cast(tf.cast(v.x, tf.bfloat16) * 0.5, tf.float32),
    "complex numbers": lambda v: tf.math.real(_complex(v.x) * tf.math.conj(_complex(v.x * v.table[0]))),
    "squared differences": lambda v: tf.math.squared_difference(v.x, v.table[0]),
    "sum of several": lambda v: tf.add_n([v.x, v.x * 2.0, tf.broadcast_to(v.table[0], v.x.shape)]),
    "clip by norm": lambda v: tf.clip_by_norm(v.x, 1.0),
    "clip by global norm": lambda v: tf.clip_by_global_norm([v.x, v.table], 2.0)[0],
    "is it NaN": lambda v: tf.cast(tf.math.is_nan(_with_nan(v.x)), tf.float32) + v.x,
    "NaN in place": lambda v: tf.where(tf.math.is_nan(_with_nan(v.x)), 0.0, v.x),
}

REDUCTIONS: dict[str, Operation] = {
    "sum over the batch": lambda v: tf.reduce_sum(v.x, 0),
    "mean over the length": lambda v: tf.reduce_mean(v.x, 1),
    "sum of all": lambda v: tf.reduce_sum(v.x * v.x),
    "product over the length": lambda v: tf.reduce_prod(v.x, 1),
    "product of all but channels": lambda v: tf.reduce_prod(1.0 + 0.1 * v.x, [0, 1]),
    "largest over the batch": lambda v: tf.reduce_max(v.x, 0),
    "smallest over the length": lambda v: tf.reduce_min(v.x, 1),
    "largest of all": lambda v: tf.reduce_max(v.x),
    "largest channel": lambda v: tf.reduce_max(v.x, -1),
    "largest with NaN": lambda v: tf.reduce_max(_with_nan(v.x), [0, 1]),
    "smallest of all with NaN": lambda v: tf.reduce_min(_with_nan(v.x)),
    "sum with NaN": lambda v: tf.reduce_sum(_with_nan(v.x), 1),
    "any and all": lambda v: (tf.reduce_any(v.x > 1.0, [0, 2]), tf.reduce_all(v.x > -1.0, 1)),
    "any NaN": lambda v: tf.reduce_any(tf.math.is_nan(_with_nan(v.x)), [0, 1]),
    "deviation": lambda v: tf.math.reduce_std(v.x, [0, 1]),
    "moments": lambda v: tf.nn.moments(v.image, [0, 1, 2]),
    "logsumexp": lambda v: tf.reduce_logsumexp(v.x, [0, 1]),
    "norm": lambda v: tf.norm(v.x),
    "norm of ones": lambda v: tf.norm(v.x, 1, 1),
    "infinite norm": lambda v: tf.norm(v.x, float("inf"), 1),
    "count of what is not zero": lambda v: tf.math.count_nonzero(tf.nn.relu(v.x), [0, 1]),
    "place of the largest in the batch": lambda v: tf.argmax(v.x, 0),
    "place of the smallest in the length": lambda v: tf.argmin(v.x, 1, tf.int32),
    "place of the largest channel": lambda v: tf.argmax(v.x, -1),
    "place of the largest of all": lambda v: tf.argmax(tf.reshape(v.x, [-1]), output_type=tf.int32),
    "range of integers": lambda v: tf.reduce_max(tf.cast(v.x * 100.0, tf.int64), 0),
}

ORDER: dict[str, Operation] = {
    "top k": lambda v: tf.math.top_k(v.x, 2),
    "top k of the length": lambda v: tf.math.top_k(tf.transpose(v.x, [0, 2, 1]), 2)[0],
    "sorted along the length": lambda v: tf.sort(v.x, 1),
    "sorted along the batch": lambda v: tf.sort(v.x, 0, "DESCENDING"),
    "order of channels": lambda v: tf.argsort(v.x, -1),
    "median": lambda v: tf.sort(tf.reshape(v.x, [-1]))[v.x.shape[1] * v.x.shape[2] // 2],
    "cumulative sum": lambda v: tf.cumsum(v.x, 1),
    "cumulative sum of the batch, backwards": lambda v: tf.cumsum(v.x, 0, exclusive=True, reverse=True),
    "cumulative sum of channels": lambda v: tf.cumsum(v.x, -1),
    "cumulative product": lambda v: tf.math.cumprod(v.x, 1),
    "cumulative product of the batch": lambda v: tf.math.cumprod(v.x + 2.0, 0, reverse=True),
    "cumulative logsumexp": lambda v: tf.math.cumulative_logsumexp(v.x, 1),
    "places of the largest": lambda v: tf.cast(
        tf.math.in_top_k(tf.argmax(v.rows, -1, tf.int32), v.rows, 1), tf.float32
    ),
}

INDEXED: dict[str, Operation] = {
    "lookup": lambda v: tf.gather(v.table, v.i),
    "lookup of one": lambda v: v.table[v.i[0, 0]],
    "lookup of columns": lambda v: tf.gather(v.table, v.columns, axis=1),
    "lookup of elements": lambda v: tf.gather_nd(v.table, tf.stack([v.i, v.columns], -1)),
    "lookup in what was computed": lambda v: tf.gather(v.table @ v.kernel, v.i) @ v.kernel,
    "lookup of samples": lambda v: tf.gather(v.x, v.samples),
    "lookup of places": lambda v: tf.gather(v.x, v.places[0], axis=1),
    "lookup of channels": lambda v: tf.gather(v.x, v.columns[0], axis=2),
    "lookup of places of each sample": lambda v: tf.gather(v.x, v.places, batch_dims=1),
    "lookup of a number of each place": lambda v: tf.gather(v.x, v.columns, batch_dims=2),
    "lookup along an axis": lambda v: keras.ops.take_along_axis(v.x, v.columns[..., tf.newaxis], 2),
    "lookup of places and channels": lambda v: tf.gather_nd(v.x, tf.stack([v.places, v.columns], -1), batch_dims=1),
    "lookup of elements of samples": lambda v: tf.gather_nd(
        v.x, tf.stack([tf.range(v.x.shape[0], dtype=v.i.dtype), v.places[:, 0], v.columns[:, 0]], 1)
    ),
    "mean of an embedding": lambda v: tf.reduce_mean(tf.nn.embedding_lookup(v.table, v.i), 1),
    "embedding with a mask": lambda v: tf.gather(v.table, v.i) * tf.cast(v.i != 0, tf.float32)[..., tf.newaxis],
    "tied embedding": lambda v: tf.gather(v.table, v.i) @ tf.transpose(v.table),
    "one hot": lambda v: tf.one_hot(v.i, v.count) @ v.table,
    "one hot of the batch": lambda v: tf.one_hot(v.i, v.count, axis=0),
    "sums of segments": _segments(tf.math.unsorted_segment_sum),
    "means of segments": _segments(tf.math.unsorted_segment_mean),
    "largest of segments": _segments(tf.math.unsorted_segment_max),
    "smallest of segments": _segments(tf.math.unsorted_segment_min),
    "products of segments": _segments(tf.math.unsorted_segment_prod),
    "sums of sorted segments": lambda v: tf.math.unsorted_segment_sum(v.rows, tf.sort(v.ids), v.count),
    "sums of segments of numbers": lambda v: tf.math.unsorted_segment_sum(v.x[..., 0], v.i, v.count),
    "scattered": lambda v: tf.scatter_nd(v.ids[:, tf.newaxis], v.rows, tf.constant(list(v.table.shape), v.i.dtype)),
    "scattered into samples": lambda v: tf.tensor_scatter_nd_add(v.x, v.samples[:, tf.newaxis], v.x * 2.0),
    "added to a table": _scattered(tf.tensor_scatter_nd_add),
    "taken from a table": _scattered(tf.tensor_scatter_nd_sub),
    "largest in a table": _scattered(tf.tensor_scatter_nd_max),
    "smallest in a table": _scattered(tf.tensor_scatter_nd_min),
    "one row set": lambda v: tf.tensor_scatter_nd_update(v.table, v.i[:1, :1], v.x[0, :1]),
    "one element set": lambda v: tf.tensor_scatter_nd_update(
        v.x, tf.stack([v.samples[:1], v.places[0, :1], v.columns[0, :1]], 1), [7.0]
    ),
    "last element set": lambda v: tf.tensor_scatter_nd_update(
        v.x, tf.constant([[each - 1 for each in v.x.shape]], v.i.dtype), [7.0]
    ),
    "elements added": lambda v: tf.tensor_scatter_nd_add(
        v.table, tf.stack([v.ids, v.ids % v.table.shape[1]], 1), v.rows[:, 0]
    ),
    "confusion matrix": lambda v: tf.math.confusion_matrix(v.ids, v.ids[::-1], v.count, dtype=tf.float32),
    "weighted confusion matrix": lambda v: tf.math.confusion_matrix(v.ids, v.ids[::-1], v.count, v.rows[:, 0]),
    "counts": lambda v: tf.math.bincount(tf.cast(v.ids, tf.int32), minlength=v.count, maxlength=v.count),
    "slice at a place": lambda v: tf.slice(
        v.x,
        tf.stack([0 * v.i[0, 0], v.places[0, 0] % 2, 0 * v.i[0, 0]]),
        [v.x.shape[0], v.x.shape[1] - 1, v.x.shape[2]],
    ),
    "sample at a place": lambda v: v.x[v.samples[0]],
    "slice updated": lambda v: keras.ops.slice_update(
        tf.stop_gradient(v.x), [v.samples[0], 0 * v.samples[0], 0 * v.samples[0]], tf.stop_gradient(v.x[:1])
    ),
    "last rows updated": lambda v: keras.ops.slice_update(
        tf.stop_gradient(v.table), [v.count - 1, 0], tf.stop_gradient(v.x[0, :2])
    ),
    "rolled": lambda v: tf.roll(v.x, tf.cast(v.i[0, 0], tf.int32), 1),
    "reversed sequences": lambda v: tf.reverse_sequence(v.x, v.places[:, 0] + 1, 1, 0),
    "sequence mask": lambda v: v.x * tf.sequence_mask(v.places[:, 0], v.x.shape[1], tf.float32)[..., tf.newaxis],
    "mask of fixed size": lambda v: tf.where(v.i[..., tf.newaxis] % 2 == 0, v.x, 0.0),
    "searched": lambda v: tf.searchsorted(tf.sort(v.table[:, 0]), v.rows[:, 0], out_type=v.i.dtype),
    "sparse cross entropy": lambda v: tf.nn.sparse_softmax_cross_entropy_with_logits(v.columns, v.x),
    "sparse accuracy": lambda v: keras.metrics.sparse_categorical_accuracy(v.columns, v.x),
    "positions in order": lambda v: tf.argsort(v.i, 1, stable=True),
    "sums of integers": lambda v: tf.reduce_sum(v.i, 0),
    "largest integers": lambda v: (tf.reduce_max(v.i, 1), tf.reduce_min(v.i)),
    "cumulative sum of integers": lambda v: tf.cumsum(v.i, 1),
    "division of integers": lambda v: v.i // 3 + v.i % 3 * 2,
}

CONVOLUTIONS: dict[str, Operation] = {
    "conv1d": lambda v: tf.nn.conv1d(v.x, v.filters(1), 1, "SAME"),
    "conv1d, valid": lambda v: tf.nn.conv1d(v.x, v.filters(1), 1, "VALID"),
    "conv1d in strides": lambda v: tf.nn.conv1d(v.x, v.filters(1), 2, "SAME"),
    "conv1d, dilated": lambda v: tf.nn.conv1d(v.x, v.filters(1, 2), 1, "SAME", dilations=2),
    "conv1d, causal": lambda v: keras.ops.conv(tf.pad(v.x, [[0, 0], [2, 0], [0, 0]]), v.filters(1)),
    "conv1d, even kernel": lambda v: tf.nn.conv1d(v.x, v.filters(1, 2), 1, "SAME"),
    "conv1d, transposed": lambda v: keras.ops.conv_transpose(v.x, v.filters(1), 2, "same"),
    "conv2d": lambda v: tf.nn.conv2d(v.image, v.filters(2), 1, "SAME"),
    "conv2d, valid": lambda v: tf.nn.conv2d(v.image, v.filters(2), 1, "VALID"),
    "conv2d of points": lambda v: tf.nn.conv2d(v.image, v.filters(2, 1), 1, "SAME"),
    "conv2d in strides": lambda v: tf.nn.conv2d(v.image, v.filters(2), 2, "SAME"),
    "conv2d of patches": lambda v: tf.nn.conv2d(v.image, v.filters(2, 2), 2, "VALID"),
    "conv2d, dilated": lambda v: tf.nn.conv2d(v.image, v.filters(2, 2), 1, "SAME", dilations=2),
    "conv2d in groups": lambda v: tf.nn.conv2d(v.image, v.filters(2)[..., : v.x.shape[2] // 2, :], 1, "SAME"),
    "conv2d in groups and strides": lambda v: tf.nn.conv2d(
        v.image, v.filters(2)[..., : v.x.shape[2] // 2, :], 2, "SAME"
    ),
    "conv2d, transposed": lambda v: tf.nn.conv2d_transpose(
        v.image, v.filters(2), [v.image.shape[0], *[2 * each for each in v.image.shape[1:3]], v.image.shape[3]], 2
    ),
    "depthwise": lambda v: tf.nn.depthwise_conv2d(v.image, v.each_channel(2), [1, 1, 1, 1], "SAME"),
    "depthwise in strides": lambda v: tf.nn.depthwise_conv2d(v.image, v.each_channel(2), [1, 2, 2, 1], "SAME"),
    "depthwise1d": lambda v: keras.ops.depthwise_conv(v.x, v.each_channel(1), 1, "same"),
    "separable": lambda v: tf.nn.separable_conv2d(
        v.image, v.each_channel(2), v.kernel[tf.newaxis, tf.newaxis], [1, 1, 1, 1], "SAME"
    ),
    "conv3d": lambda v: tf.nn.conv3d(v.volume, v.filters(3, 2), [1] * 5, "SAME"),
    "conv3d in strides": lambda v: tf.nn.conv3d(v.volume, v.filters(3, 2), [1, 1, 2, 2, 1], "SAME"),
    "convolution of one axis": lambda v: tf.nn.conv1d(v.x[..., :1], v.filters(1)[:, :1], 1, "SAME"),
}

IMAGES: dict[str, Operation] = {
    "max pooling 1d": lambda v: tf.nn.max_pool1d(v.x, 2, 2, "SAME"),
    "average pooling 1d": lambda v: tf.nn.avg_pool1d(v.x, 3, 2, "SAME"),
    "max pooling": lambda v: tf.nn.max_pool2d(v.image, 3, 2, "SAME"),
    "max pooling, valid": lambda v: tf.nn.max_pool2d(v.image, 2, 2, "VALID"),
    "max pooling step by step": lambda v: tf.nn.max_pool2d(v.image, 2, 1, "SAME"),
    "average pooling": lambda v: tf.nn.avg_pool2d(v.image, 2, 2, "VALID"),
    "average pooling step by step": lambda v: tf.nn.avg_pool2d(v.image, 3, 1, "SAME"),
    "pooling 3d": lambda v: tf.nn.avg_pool3d(v.volume, 2, 2, "SAME"),
    "global pooling": lambda v: (tf.reduce_mean(v.image, [1, 2]), tf.reduce_max(v.image, [1, 2])),
    "resize, bilinear": lambda v: tf.image.resize(v.image, [2 * each for each in v.image.shape[1:3]]),
    "resize, smaller": lambda v: tf.image.resize(v.image, [2, 2]),
    "resize, nearest": lambda v: tf.image.resize(v.image, [2 * each for each in v.image.shape[1:3]], "nearest"),
    "upsampling": lambda v: tf.repeat(tf.repeat(v.image, 2, 1), 2, 2),
    "extract patches": lambda v: tf.image.extract_patches(v.image, [1, 2, 2, 1], [1, 1, 1, 1], [1, 1, 1, 1], "SAME"),
    "space to depth": lambda v: tf.nn.space_to_depth(tf.tile(v.image, [1, 2, 2, 1]), 2),
    "depth to space": lambda v: tf.nn.depth_to_space(tf.tile(v.image, [1, 1, 1, 4]), 2),
    "space to batch": lambda v: tf.space_to_batch(tf.tile(v.image, [1, 2, 2, 1]), [2, 2], [[0, 0], [0, 0]]),
    "flips": lambda v: tf.image.flip_left_right(v.image) + tf.image.flip_up_down(v.image),
    "quarter turn": lambda v: tf.image.rot90(v.image),
    "contrast": lambda v: tf.image.adjust_contrast(tf.stop_gradient(v.image), 1.5),
    "brightness and gamma": lambda v: tf.image.adjust_brightness(tf.image.adjust_gamma(tf.abs(v.image), 0.7), 0.1),
    "colours": lambda v: tf.image.adjust_saturation(
        tf.stop_gradient(tf.abs(tf.tile(v.image, [1, 1, 1, 3])[..., :3])), 0.5
    ),
    "grey": lambda v: tf.image.rgb_to_grayscale(tf.tile(v.image, [1, 1, 1, 3])[..., :3]),
    "standard image": lambda v: tf.image.per_image_standardization(v.image),
    "edges": lambda v: tf.image.sobel_edges(v.image),
    "differences of images": lambda v: tf.image.image_gradients(v.image),
    "total variation": lambda v: tf.image.total_variation(v.image),
    "cropped and padded": lambda v: tf.image.resize_with_crop_or_pad(v.image, 4, 4),
    "local response": lambda v: tf.nn.local_response_normalization(v.image, 2),
}

TRANSFORMS: dict[str, Operation] = {
    "fft of channels": lambda v: tf.abs(tf.signal.fft(_complex(v.x))),
    "fft of the length": lambda v: tf.math.real(tf.signal.fft(_complex(tf.transpose(v.x, [0, 2, 1])))),
    "fft of the batch": lambda v: tf.math.imag(tf.signal.fft(_complex(tf.transpose(v.x, [1, 2, 0])))),
    "ifft": lambda v: tf.abs(tf.signal.ifft(_complex(v.x))),
    "rfft and back": lambda v: tf.signal.irfft(tf.signal.rfft(tf.transpose(v.x, [0, 2, 1])) * 2.0),
    "fft2d": lambda v: tf.abs(tf.signal.fft2d(_complex(v.x))),
    "rfft2d": lambda v: tf.abs(tf.signal.rfft2d(v.x)),
    "frames": lambda v: tf.signal.frame(tf.transpose(v.x, [0, 2, 1]), 2, 1),
    "short transforms": lambda v: tf.abs(tf.signal.stft(tf.tile(tf.transpose(v.x, [0, 2, 1]), [1, 1, 4]), 8, 4)),
    "overlap and add": lambda v: tf.signal.overlap_and_add(v.x, 1),
    "cosine transform": lambda v: tf.signal.dct(v.x),
}

SHAPES: dict[str, Operation] = {
    "pad": lambda v: tf.pad(v.x, [[0, 0], [1, 2], [0, 1]]),
    "pad of the batch": lambda v: tf.pad(v.x, [[1, 2], [0, 0], [0, 0]], constant_values=3.0),
    "pad, reflected": lambda v: tf.pad(v.x, [[0, 0], [1, 1], [0, 0]], "REFLECT"),
    "pad, symmetric": lambda v: tf.pad(v.x, [[0, 0], [1, 2], [1, 1]], "SYMMETRIC"),
    "slice": lambda v: v.x[:, 1:, :-1],
    "first samples": lambda v: v.x[: (v.x.shape[0] + 1) // 2],
    "each second": lambda v: v.x[:, ::2],
    "each second, backwards": lambda v: v.x[::-2, ::-1],
    "strides of channels": lambda v: v.x[..., 1::2],
    "shifted": lambda v: v.x[:, 1:] - v.x[:, :-1],
    "concat of the batch": lambda v: tf.concat([v.x, v.x * 2.0, v.x[:1]], 0),
    "concat of the length": lambda v: tf.concat([v.x, v.x[:, :1]], 1),
    "concat of channels": lambda v: tf.concat([v.x, v.x * 2.0], -1),
    "concat with a table": lambda v: tf.concat([v.rows, v.table], 0),
    "split": lambda v: (tf.split(v.x, 2, -1)[1], tf.split(v.x, [1, v.x.shape[1] - 1], 1)[0]),
    "stack": lambda v: tf.stack([v.x, v.x * 2.0], 1),
    "unstack": lambda v: tf.unstack(v.x, axis=1)[-1],
    "tile": lambda v: tf.tile(v.x, [2, 3, 1]),
    "repeat": lambda v: tf.repeat(v.x, 2, 0) + tf.repeat(v.x, 2, 0)[::-1],
    "roll": lambda v: tf.roll(v.x, [1, -2], [0, 1]),
    "reverse": lambda v: tf.reverse(v.x, [0, 1]),
    "transpose": lambda v: tf.transpose(v.x, [2, 0, 1]),
    "reshape": lambda v: tf.reshape(v.x, [v.x.shape[1], v.x.shape[0], -1]) * 2.0,
    "flat": lambda v: tf.reshape(v.x, [v.x.shape[0], -1]),
    "flat of all": lambda v: tf.reshape(v.x, [-1])[1:],
    "broadcast": lambda v: v.x[:, tf.newaxis] * v.x[:, :, tf.newaxis],
    "outer sum": lambda v: v.x[:, 0][:, tf.newaxis] + v.x[:, 0][tf.newaxis],
    "mesh": lambda v: tf.meshgrid(v.x[:, 0, 0], v.x[0, :, 0]),
    "diagonal": lambda v: tf.linalg.diag_part(v.square),
    "diagonal set": lambda v: tf.linalg.set_diag(v.square, v.x[:, 0]),
    "matrix of a diagonal": lambda v: tf.linalg.diag(v.x[:, 0]),
    "triangle": lambda v: tf.linalg.band_part(v.x, -1, 0),
}

LINEAR: dict[str, Operation] = {
    "matmul": lambda v: v.x @ v.kernel,
    "matmul with a table": lambda v: v.x @ tf.transpose(v.table),
    "matmul of batches": lambda v: tf.matmul(v.x, v.x, transpose_b=True),
    "matmul over the batch": lambda v: tf.matmul(v.rows, v.rows, transpose_a=True),
    "matmul of halves": lambda v: (
        tf.cast(tf.cast(v.x, tf.bfloat16) @ tf.cast(v.kernel, tf.bfloat16), tf.float32) * 0.001
    ),
    "einsum over the length": lambda v: tf.einsum("btc,bsc,cd->tsd", v.x, v.x, v.kernel),
    "einsum of a diagonal": lambda v: tf.einsum("bii->bi", v.square),
    "tensordot": lambda v: tf.tensordot(v.x, v.kernel, [[2], [0]]) + tf.tensordot(v.x, v.x, [[0, 1], [0, 1]])[0],
    "matvec": lambda v: tf.linalg.matvec(v.kernel, v.x),
    "trace": lambda v: tf.linalg.trace(v.square),
    "cholesky": lambda v: tf.linalg.cholesky(v.square),
    "triangular solve": lambda v: tf.linalg.triangular_solve(
        tf.linalg.band_part(v.square, -1, 0), tf.transpose(v.x, [0, 2, 1])
    ),
    "solve": lambda v: tf.linalg.solve(v.square, tf.transpose(v.x, [0, 2, 1])),
    "inverse": lambda v: tf.linalg.inv(v.square),
    "qr": lambda v: tf.abs(tf.linalg.qr(v.square)[1]),
    "determinant": lambda v: tf.linalg.slogdet(v.square)[1],
    "eigenvalues": lambda v: tf.linalg.eigvalsh(tf.stop_gradient(v.square)),
    "normalized": lambda v: tf.linalg.normalize(v.x, axis=1)[0],
    "bilinear": lambda v: tf.einsum("btc,cd,bsd->bts", v.x, v.kernel, v.x),
}

NETWORKS: dict[str, Operation] = {
    "softmax": lambda v: tf.nn.softmax(v.x @ v.kernel),
    "softmax over the length": lambda v: tf.nn.softmax(v.x, 1),
    "log softmax": lambda v: tf.nn.log_softmax(v.x),
    "layer normalization": lambda v: keras.ops.layer_normalization(v.x, v.table[0], v.table[1]),
    "root mean square": lambda v: keras.ops.rms_normalization(v.x, v.table[0]),
    "group normalization": lambda v: _groups(v.x),
    "group normalization of images": lambda v: _groups(v.image),
    "batch normalization": lambda v: tf.nn.batch_normalization(
        v.x, *tf.nn.moments(v.x, [0, 1]), v.table[0], v.table[1], 1e-3
    ),
    "fused batch normalization": lambda v: tf.compat.v1.nn.fused_batch_norm(v.image, v.table[0], v.table[1])[:3],
    "fused batch normalization, not training": lambda v: tf.compat.v1.nn.fused_batch_norm(
        v.image, v.table[0], v.table[1], v.table[1], tf.abs(v.table[0]) + 1.0, is_training=False
    )[0],
    "unit vectors": lambda v: tf.nn.l2_normalize(v.x, -1),
    "attention": _attention,
    "causal attention": _causal,
    "attention of heads": _heads,
    "dot product attention": lambda v: keras.ops.dot_product_attention(
        *[v.x[:, :, tf.newaxis] * each for each in (1.0, 0.5, 2.0)]
    ),
    "dropout of a fixed mask": lambda v: (
        v.x * tf.cast(tf.random.stateless_uniform(v.x.shape, [1, 2]) > 0.3, tf.float32)
    ),
    "LSTM": _lstm,
    "GRU": _gru,
    "LSTM backwards": lambda v: _lstm(v._replace(x=v.x[:, ::-1])),
    "while loop": _while,
    "rows written in a loop": _rows_written,
    "map": lambda v: tf.map_fn(lambda row: tf.tanh(row) * 2.0, v.x),
    "vectorized map": lambda v: tf.vectorized_map(lambda row: row @ v.kernel, v.x),
    "cond": lambda v: tf.cond(tf.reduce_sum(v.table) > 0.0, lambda: v.x @ v.kernel, lambda: v.x * 2.0),
    "switch": lambda v: tf.switch_case(
        tf.cast(tf.reduce_sum(v.table) > 0.0, tf.int32), [lambda: tf.cumsum(v.x, 1), lambda: tf.sort(v.x, 1)]
    ),
    "computed again": lambda v: tf.recompute_grad(lambda x: tf.tanh(x @ tf.stop_gradient(v.kernel)))(v.x),
    "position embedding": lambda v: v.x + v.table[: v.x.shape[1]] if v.count >= v.x.shape[1] else v.x,
}

LOSSES: dict[str, Operation] = {
    "cross entropy": lambda v: tf.nn.softmax_cross_entropy_with_logits(tf.nn.softmax(v.x * 2.0), v.x),
    "binary cross entropy": lambda v: tf.nn.sigmoid_cross_entropy_with_logits(tf.sigmoid(v.x * 2.0), v.x),
    "mean squared error": lambda v: tf.reduce_mean(keras.losses.mean_squared_error(v.x * 2.0, v.x @ v.kernel)),
    "Huber": lambda v: keras.losses.huber(v.x * 2.0, v.x @ v.kernel),
    "hinge": lambda v: keras.losses.hinge(tf.sign(v.x), v.x @ v.kernel),
    "divergence": lambda v: keras.losses.kl_divergence(tf.nn.softmax(v.x), tf.nn.softmax(v.x @ v.kernel)),
    "cosine": lambda v: keras.losses.cosine_similarity(v.x, v.x @ v.kernel),
    "dice": lambda v: keras.losses.dice(tf.sigmoid(v.image), tf.sigmoid(v.image * 2.0)),
    "focal": lambda v: keras.losses.binary_focal_crossentropy(tf.sigmoid(v.x * 2.0), tf.sigmoid(v.x)),
    "poisson": lambda v: tf.nn.log_poisson_loss(tf.abs(v.x), v.x),
    "accuracy": lambda v: keras.metrics.categorical_accuracy(v.x, v.x @ v.kernel),
    "peak signal to noise": lambda v: tf.image.psnr(v.image, v.image * 0.9, 1.0),
}

OPERATIONS: dict[str, tuple[Operation, Any]] = {
    **{
        name: (operation, tf.int32)
        for table in (
            ELEMENTWISE,
            REDUCTIONS,
            ORDER,
            CONVOLUTIONS,
            IMAGES,
            TRANSFORMS,
            SHAPES,
            LINEAR,
            NETWORKS,
            LOSSES,
        )
        for name, operation in table.items()
    },
    **{
        f"{name}, {dtype.name}": (operation, dtype)
        for dtype in (tf.int32, tf.int64)
        for name, operation in INDEXED.items()
    },
}
"""Each operation, and the dtype of the indices."""
