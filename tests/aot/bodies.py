"""Bodies that use each kind of operation, for compilers of chips that are not there."""

import keras
import numpy as np
import tensorflow as tf

from replica_engine import xla

GROUPS = {}
"""By group, the bodies: by name, a function and the specs of its arguments."""


def body(group, *specs):
    def add(fn):
        GROUPS.setdefault(group, {})[fn.__name__] = fn, specs
        return fn

    return add


def spec(*shape, dtype=tf.float32):
    return tf.TensorSpec(shape, dtype)


MATRIX = spec(128, 128)
IMAGES = spec(4, 16, 16, 8)


def gradient(fn, x):
    """The gradient, for bodies that need one."""
    with tf.GradientTape() as tape:
        tape.watch(x)
        value = tf.reduce_sum(fn(x))
    return tape.gradient(value, x)


# Arithmetic, in each type of number.

for _dtype in (tf.float64, tf.float32, tf.bfloat16, tf.float16):

    @body("numbers", spec(128, 128, dtype=_dtype))
    def product(x):
        return gradient(lambda x: tf.nn.softmax(tf.tanh(x) @ x), x)

    GROUPS["numbers"][f"product, {_dtype.name}"] = GROUPS["numbers"].pop("product")

for _dtype in (tf.int8, tf.uint8, tf.int16, tf.int32, tf.int64, tf.uint32):

    @body("numbers", spec(64, dtype=_dtype))
    def integers(x):
        return tf.reduce_sum(x * x + x // tf.constant(3, x.dtype)), tf.reduce_max(x)

    GROUPS["numbers"][f"integers, {_dtype.name}"] = GROUPS["numbers"].pop("integers")


@body("numbers", spec(64), spec(64))
def complex_numbers(x, y):
    z = tf.complex(x, y)
    return tf.abs(tf.exp(z) * tf.math.conj(z))


@body("numbers", spec(16, 16))
def truth_values(x):
    mask = tf.constant(np.random.default_rng(0).random([16, 16]) < 0.5)
    return tf.where(mask, x, 0.0), tf.reduce_any(mask & (x > 0))


@body("numbers", spec(64))
def special_functions(x):
    return tf.math.lgamma(x) + tf.math.erf(x) + tf.math.digamma(x) + tf.math.bessel_i0e(x) + tf.math.erfinv(x)


# Linear algebra, FFT, sorting.


@body("linear algebra", MATRIX)
def cholesky(x):
    return gradient(tf.linalg.cholesky, x @ tf.transpose(x) + tf.eye(128))


@body("linear algebra", MATRIX, MATRIX)
def triangular_solve(x, y):
    return tf.linalg.triangular_solve(x, y)


@body("linear algebra", MATRIX)
def qr(x):
    return tf.linalg.qr(x)


@body("linear algebra", MATRIX)
def svd(x):
    return tf.linalg.svd(x)


@body("linear algebra", MATRIX)
def eigh(x):
    return tf.linalg.eigh(x + tf.transpose(x))


@body("linear algebra", MATRIX)
def inverse_and_determinant(x):
    return tf.linalg.inv(x), tf.linalg.det(x)


@body("linear algebra", spec(4, 32, 16), spec(4, 16, 8))
def einsum(x, y):
    return tf.einsum("bij,bjk->bki", x, y)


@body("linear algebra", spec(64))
def fft(x):
    return tf.abs(tf.signal.ifft(tf.signal.fft(tf.cast(x, tf.complex64))))


@body("linear algebra", spec(32, 32))
def rfft(x):
    return tf.signal.irfft2d(tf.signal.rfft2d(x))


@body("sorting and indexing", spec(8, 100))
def top_k(x):
    return tf.math.top_k(x, 5)


@body("sorting and indexing", spec(8, 100))
def sort(x):
    return tf.sort(x), tf.argsort(x), tf.argmax(x, axis=-1)


@body("sorting and indexing", spec(8, 100))
def cumulative(x):
    return gradient(tf.cumsum, x), tf.math.cumulative_logsumexp(x)


@body("sorting and indexing", spec(100, 16), spec(30, dtype=tf.int64))
def gather_and_scatter(x, indices):
    rows = tf.gather(x, indices)
    return tf.tensor_scatter_nd_add(x, indices[:, None], rows), tf.math.unsorted_segment_sum(rows, indices, 100)


@body("sorting and indexing", spec(100, 16), spec(30, dtype=tf.int32))
def gradient_of_an_embedding(x, indices):
    return tf.convert_to_tensor(gradient(lambda x: tf.gather(x, indices) ** 2, x))


@body("sorting and indexing", spec(4, 10, 10))
def slices(x):
    return tf.roll(tf.reverse(x[:, 2:-1:2, ::-1], [1]), 1, 0), tf.pad(x, [[0, 0], [1, 1], [2, 0]], "REFLECT")


# Convolutions.


def convolution(group, name, fn, *specs):
    def both(*args):
        with tf.GradientTape() as tape:
            tape.watch(args)
            value = tf.reduce_sum(fn(*args) ** 2)
        return tape.gradient(value, args)

    both.__name__ = name
    body(group, *specs)(both)


_FILTER = spec(3, 3, 8, 16)
for _name, _fn, *_specs in (
    ("conv1d", lambda x, w: tf.nn.conv1d(x, w, 1, "SAME"), spec(4, 32, 8), spec(3, 8, 16)),
    ("conv2d", lambda x, w: tf.nn.conv2d(x, w, 1, "SAME"), IMAGES, _FILTER),
    ("conv2d, strides", lambda x, w: tf.nn.conv2d(x, w, 2, "VALID"), IMAGES, _FILTER),
    ("conv2d, dilated", lambda x, w: tf.nn.conv2d(x, w, 1, "SAME", dilations=2), IMAGES, _FILTER),
    ("conv2d, groups", lambda x, w: tf.nn.conv2d(x, w, 1, "SAME"), IMAGES, spec(3, 3, 2, 16)),
    ("depthwise", lambda x, w: tf.nn.depthwise_conv2d(x, w, [1, 1, 1, 1], "SAME"), IMAGES, spec(3, 3, 8, 2)),
    ("conv3d", lambda x, w: tf.nn.conv3d(x, w, [1] * 5, "SAME"), spec(2, 8, 8, 8, 4), spec(3, 3, 3, 4, 8)),
    ("transposed", lambda x, w: tf.nn.conv2d_transpose(x, w, [4, 32, 32, 16], 2), IMAGES, spec(3, 3, 16, 8)),
    ("max pool", lambda x: tf.nn.max_pool2d(x, 2, 2, "SAME"), IMAGES),
    ("average pool", lambda x: tf.nn.avg_pool2d(x, 3, 2, "SAME"), IMAGES),
    ("batch normalization", lambda x: tf.nn.batch_normalization(x, *tf.nn.moments(x, [0, 1, 2]), 0, 1, 1e-3), IMAGES),
    ("resize", lambda x: tf.image.resize(x, [32, 32]), IMAGES),
):
    convolution("convolutions", _name, _fn, *_specs)


# Random numbers.


@body("random numbers")
def stateless():
    seed = tf.constant([1, 2])
    return tf.random.stateless_normal([64], seed), tf.random.stateless_uniform([64], seed, 0, 10, tf.int32)


@body("random numbers")
def stateful():
    return tf.random.normal([64]), tf.random.uniform([64], 0, 10, tf.int32), tf.random.truncated_normal([64])


@body("random numbers", spec(64, 64))
def dropout(x):
    return gradient(lambda x: tf.nn.dropout(x, 0.5), x)


@body("random numbers", spec(64))
def shuffle(x):
    return tf.random.shuffle(x)


# Control flow.


@body("control flow", spec(8))
def branch(x):
    return gradient(lambda x: tf.cond(tf.reduce_sum(x) > 0, lambda: x * x, lambda: tf.tanh(x)), x)


@body("control flow", spec(8), spec(dtype=tf.int32))
def switch(x, index):
    return tf.switch_case(index, [lambda: x, lambda: 2 * x, lambda: tf.exp(x)])


@body("control flow", spec(8))
def loop(x):
    return tf.while_loop(lambda i, x: i < 5, lambda i, x: (i + 1, tf.tanh(x) + 1), (0, x), maximum_iterations=5)[1]


@body("control flow", spec(8))
def gradient_of_a_loop(x):
    def run(x):
        return tf.while_loop(lambda i, x: i < 5, lambda i, x: (i + 1, tf.tanh(x)), (0, x), maximum_iterations=5)[1]

    return gradient(run, x)


@body("control flow", spec(8))
def loop_of_unknown_length(x):
    return tf.while_loop(lambda x: tf.reduce_sum(x) < 100.0, lambda x: (2 * x + 1,), (x,))[0]


@body("control flow", spec(10, 8))
def arrays(x):
    array = tf.TensorArray(tf.float32, 10).unstack(x)
    return tf.map_fn(lambda row: row * 2, x), tf.scan(lambda a, row: a + row, x), array.stack()


# Operations between replicas.


def between(fn):
    body("between replicas", spec(16, 8))(fn)
    return fn


@between
def all_reduces(x):
    return [xla.all_reduce(x, op) for op in ("SUM", "MEAN", "MIN", "MAX")]


@between
def all_reduce_of_other_types(x):
    return [xla.all_reduce(tf.cast(x, dtype), "SUM") for dtype in (tf.bfloat16, tf.int32, tf.float64)]


@between
def gradient_of_an_all_reduce(x):
    return gradient(lambda x: xla.all_reduce(x, "SUM") ** 2, x)


@between
def in_groups(x):
    size = xla.num_replicas()
    return xla.cross_replica_sum(x, groups=[list(range(0, size, 2)), list(range(1, size, 2))] if size > 1 else None)


@between
def all_gather(x):
    return gradient(lambda x: xla.all_gather(x, axis=0) ** 2, x)


@between
def reduce_scatter(x):
    return gradient(lambda x: xla.reduce_scatter(x, axis=0) ** 2, x)


@between
def all_to_all(x):
    return xla.all_to_all(x, 0, 1)


@between
def ring(x):
    size = xla.num_replicas()
    return xla.ppermute(x, [(replica, (replica + 1) % size) for replica in range(size)])


@between
def in_a_loop(x):
    return tf.while_loop(
        lambda i, x: i < 3, lambda i, x: (i + 1, xla.all_reduce(x, "MEAN") + 1), (0, x), maximum_iterations=3
    )[1]


@between
def by_replica(x):
    return x * tf.cast(xla.replica_id(), tf.float32)


# Training steps of Keras, by name: a model and the specs of a batch.

NUMBERS = spec(8, dtype=tf.int32)


def _classifier(*layers, policy="float32"):
    keras.config.set_dtype_policy(policy)
    try:
        model = keras.Sequential([*layers, keras.layers.Dense(10, dtype="float32")])
    finally:
        keras.config.set_dtype_policy("float32")
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
    return model


def _convolutional(policy="float32"):
    layers = keras.layers
    return _classifier(
        keras.Input([16, 16, 3]),
        *(layers.Conv2D(8, 3, dtype=policy), layers.BatchNormalization(dtype=policy), layers.ReLU()),
        *(layers.MaxPooling2D(), layers.Flatten(), layers.Dropout(0.2)),
    )


def _transformer():
    inputs = keras.Input([12], dtype="int32")
    x = keras.layers.Embedding(512, 64)(inputs)
    x = keras.layers.LayerNormalization()(x + keras.layers.MultiHeadAttention(2, 32)(x, x, use_causal_mask=True))
    x = keras.layers.Dense(10)(x[:, -1])
    model = keras.Model(inputs, x)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.AdamW(global_clipnorm=1.0), loss)
    return model


MODELS = {
    "dense": (lambda: _classifier(keras.Input([32]), keras.layers.Dense(64, "gelu")), (spec(8, 32), NUMBERS)),
    "convolutional": (_convolutional, (spec(8, 16, 16, 3), NUMBERS)),
    "convolutional, mixed_bfloat16": (lambda: _convolutional("mixed_bfloat16"), (spec(8, 16, 16, 3), NUMBERS)),
    "LSTM": (lambda: _classifier(keras.Input([10, 8]), keras.layers.LSTM(16)), (spec(8, 10, 8), NUMBERS)),
    "GRU": (lambda: _classifier(keras.Input([10, 8]), keras.layers.GRU(16)), (spec(8, 10, 8), NUMBERS)),
    "transformer": (_transformer, (spec(8, 12, dtype=tf.int32), NUMBERS)),
}
