"""Bodies that use each kind of operation, for compilers of chips that are not there."""

import keras
import numpy as np
import tensorflow as tf

from replica_engine import xla

FLOATS = (tf.float64, tf.float32, tf.bfloat16, tf.float16)
INTEGERS = (tf.int8, tf.uint8, tf.int16, tf.int32, tf.int64, tf.uint32)


def spec(*shape, dtype=tf.float32):
    return tf.TensorSpec(shape, dtype)


MATRIX, ROWS, IMAGES, FILTER = spec(128, 128), spec(8, 100), spec(4, 16, 16, 8), spec(3, 3, 8, 16)


def gradient(fn, x):
    """The gradient, for bodies that need one."""
    with tf.GradientTape() as tape:
        tape.watch(x)
        value = tf.reduce_sum(fn(x))
    return tape.gradient(value, x)


def gradients(fn):
    """A body that computes the gradients of all of its arguments."""

    def both(*args):
        with tf.GradientTape() as tape:
            tape.watch(args)
            value = tf.reduce_sum(fn(*args) ** 2)
        return tape.gradient(value, args)

    return both


def complex_numbers(x, y):
    z = tf.complex(x, y)
    return tf.abs(tf.exp(z) * tf.math.conj(z))


def truth_values(x):
    mask = tf.constant(np.random.default_rng(0).random([16, 16]) < 0.5)
    return tf.where(mask, x, 0.0), tf.reduce_any(mask & (x > 0))


def gather_and_scatter(x, indices):
    rows = tf.gather(x, indices)
    return tf.tensor_scatter_nd_add(x, indices[:, None], rows), tf.math.unsorted_segment_sum(rows, indices, 100)


def looped(fn, x, times=5):
    return tf.while_loop(lambda i, x: i < times, lambda i, x: (i + 1, fn(x)), (0, x), maximum_iterations=times)[1]


def stateless():
    seed = tf.constant([1, 2])
    return tf.random.stateless_normal([64], seed), tf.random.stateless_uniform([64], seed, 0, 10, tf.int32)


def arrays(x):
    array = tf.TensorArray(tf.float32, 10).unstack(x)
    return tf.map_fn(lambda row: row * 2, x), tf.scan(lambda a, row: a + row, x), array.stack()


def in_groups(x):
    size = xla.num_replicas()
    return xla.cross_replica_sum(x, groups=[list(range(0, size, 2)), list(range(1, size, 2))] if size > 1 else None)


def ring(x):
    size = xla.num_replicas()
    return xla.ppermute(x, [(replica, (replica + 1) % size) for replica in range(size)])


def product(x):
    return gradient(lambda x: tf.nn.softmax(tf.tanh(x) @ x), x)


def integers(x):
    return tf.reduce_sum(x * x + x // tf.constant(3, x.dtype)), tf.reduce_max(x)


NUMBERS = {f"product, {each.name}": (product, spec(128, 128, dtype=each)) for each in FLOATS}
NUMBERS |= {f"integers, {each.name}": (integers, spec(64, dtype=each)) for each in INTEGERS}
NUMBERS |= {
    "complex_numbers": (complex_numbers, spec(64), spec(64)),
    "truth_values": (truth_values, spec(16, 16)),
    "special_functions": (
        lambda x: tf.math.lgamma(x) + tf.math.erf(x) + tf.math.digamma(x) + tf.math.bessel_i0e(x) + tf.math.erfinv(x),
        spec(64),
    ),
}
LINEAR_ALGEBRA = {
    "cholesky": (lambda x: gradient(tf.linalg.cholesky, x @ tf.transpose(x) + tf.eye(128)), MATRIX),
    "triangular_solve": (tf.linalg.triangular_solve, MATRIX, MATRIX),
    "qr": (lambda x: tf.linalg.qr(x), MATRIX),
    "svd": (lambda x: tf.linalg.svd(x), MATRIX),
    "eigh": (lambda x: tf.linalg.eigh(x + tf.transpose(x)), MATRIX),
    "inverse_and_determinant": (lambda x: (tf.linalg.inv(x), tf.linalg.det(x)), MATRIX),
    "einsum": (lambda x, y: tf.einsum("bij,bjk->bki", x, y), spec(4, 32, 16), spec(4, 16, 8)),
    "fft": (lambda x: tf.abs(tf.signal.ifft(tf.signal.fft(tf.cast(x, tf.complex64)))), spec(64)),
    "rfft": (lambda x: tf.signal.irfft2d(tf.signal.rfft2d(x)), spec(32, 32)),
}
INDEXING = {
    "top_k": (lambda x: tf.math.top_k(x, 5), ROWS),
    "sort": (lambda x: (tf.sort(x), tf.argsort(x), tf.argmax(x, axis=-1)), ROWS),
    "cumulative": (lambda x: (gradient(tf.cumsum, x), tf.math.cumulative_logsumexp(x)), ROWS),
    "gather_and_scatter": (gather_and_scatter, spec(100, 16), spec(30, dtype=tf.int64)),
    "gradient_of_an_embedding": (
        lambda x, indices: tf.convert_to_tensor(gradient(lambda x: tf.gather(x, indices) ** 2, x)),
        *(spec(100, 16), spec(30, dtype=tf.int32)),
    ),
    "slices": (
        lambda x: (tf.roll(tf.reverse(x[:, 2:-1:2, ::-1], [1]), 1, 0), tf.pad(x, [[0, 0], [1, 1], [2, 0]], "REFLECT")),
        spec(4, 10, 10),
    ),
}
CONVOLUTIONS = {
    "conv1d": (lambda x, w: tf.nn.conv1d(x, w, 1, "SAME"), spec(4, 32, 8), spec(3, 8, 16)),
    "conv2d": (lambda x, w: tf.nn.conv2d(x, w, 1, "SAME"), IMAGES, FILTER),
    "conv2d, strides": (lambda x, w: tf.nn.conv2d(x, w, 2, "VALID"), IMAGES, FILTER),
    "conv2d, dilated": (lambda x, w: tf.nn.conv2d(x, w, 1, "SAME", dilations=2), IMAGES, FILTER),
    "conv2d, groups": (lambda x, w: tf.nn.conv2d(x, w, 1, "SAME"), IMAGES, spec(3, 3, 2, 16)),
    "depthwise": (lambda x, w: tf.nn.depthwise_conv2d(x, w, [1, 1, 1, 1], "SAME"), IMAGES, spec(3, 3, 8, 2)),
    "conv3d": (lambda x, w: tf.nn.conv3d(x, w, [1] * 5, "SAME"), spec(2, 8, 8, 8, 4), spec(3, 3, 3, 4, 8)),
    "transposed": (lambda x, w: tf.nn.conv2d_transpose(x, w, [4, 32, 32, 16], 2), IMAGES, spec(3, 3, 16, 8)),
    "max pool": (lambda x: tf.nn.max_pool2d(x, 2, 2, "SAME"), IMAGES),
    "average pool": (lambda x: tf.nn.avg_pool2d(x, 3, 2, "SAME"), IMAGES),
    "batch normalization": (lambda x: tf.nn.batch_normalization(x, *tf.nn.moments(x, [0, 1, 2]), 0, 1, 1e-3), IMAGES),
    "resize": (lambda x: tf.image.resize(x, [32, 32]), IMAGES),
}
RANDOM = {
    "stateless": (stateless,),
    "stateful": (
        lambda: (tf.random.normal([64]), tf.random.uniform([64], 0, 10, tf.int32), tf.random.truncated_normal([64])),
    ),
    "dropout": (lambda x: gradient(lambda x: tf.nn.dropout(x, 0.5), x), spec(64, 64)),
    "shuffle": (lambda x: tf.random.shuffle(x), spec(64)),
}
CONTROL_FLOW = {
    "branch": (
        lambda x: gradient(lambda x: tf.cond(tf.reduce_sum(x) > 0, lambda: x * x, lambda: tf.tanh(x)), x),
        spec(8),
    ),
    "switch": (
        lambda x, index: tf.switch_case(index, [lambda: x, lambda: 2 * x, lambda: tf.exp(x)]),
        *(spec(8), spec(dtype=tf.int32)),
    ),
    "loop": (lambda x: looped(lambda x: tf.tanh(x) + 1, x), spec(8)),
    "gradient_of_a_loop": (lambda x: gradient(lambda x: looped(tf.tanh, x), x), spec(8)),
    "loop_of_unknown_length": (
        lambda x: tf.while_loop(lambda x: tf.reduce_sum(x) < 100.0, lambda x: (2 * x + 1,), (x,))[0],
        spec(8),
    ),
    "arrays": (arrays, spec(10, 8)),
}
BETWEEN_REPLICAS = {
    "all_reduces": lambda x: [xla.all_reduce(x, op) for op in ("SUM", "MEAN", "MIN", "MAX")],
    "all_reduce_of_other_types": lambda x: [
        xla.all_reduce(tf.cast(x, dtype), "SUM") for dtype in (tf.bfloat16, tf.int32, tf.float64)
    ],
    "gradient_of_an_all_reduce": lambda x: gradient(lambda x: xla.all_reduce(x, "SUM") ** 2, x),
    "in_groups": in_groups,
    "all_gather": lambda x: gradient(lambda x: xla.all_gather(x, axis=0) ** 2, x),
    "reduce_scatter": lambda x: gradient(lambda x: xla.reduce_scatter(x, axis=0) ** 2, x),
    "all_to_all": lambda x: xla.all_to_all(x, 0, 1),
    "ring": ring,
    "in_a_loop": lambda x: looped(lambda x: xla.all_reduce(x, "MEAN") + 1, x, 3),
    "by_replica": lambda x: x * tf.cast(xla.replica_id(), tf.float32),
}

GROUPS = {
    "numbers": NUMBERS,
    "linear algebra": LINEAR_ALGEBRA,
    "sorting and indexing": INDEXING,
    "convolutions": {name: (gradients(fn), *specs) for name, (fn, *specs) in CONVOLUTIONS.items()},
    "random numbers": RANDOM,
    "control flow": CONTROL_FLOW,
    "between replicas": {name: (fn, spec(16, 8)) for name, fn in BETWEEN_REPLICAS.items()},
}
"""By group, the bodies: by name, a function and the specs of its arguments."""

# Training steps of Keras, by name: a model and the specs of a batch.

LABELS = spec(8, dtype=tf.int32)


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
    "dense": (lambda: _classifier(keras.Input([32]), keras.layers.Dense(64, "gelu")), (spec(8, 32), LABELS)),
    "convolutional": (_convolutional, (spec(8, 16, 16, 3), LABELS)),
    "convolutional, mixed_bfloat16": (lambda: _convolutional("mixed_bfloat16"), (spec(8, 16, 16, 3), LABELS)),
    "LSTM": (lambda: _classifier(keras.Input([10, 8]), keras.layers.LSTM(16)), (spec(8, 10, 8), LABELS)),
    "GRU": (lambda: _classifier(keras.Input([10, 8]), keras.layers.GRU(16)), (spec(8, 10, 8), LABELS)),
    "transformer": (_transformer, (spec(8, 12, dtype=tf.int32), LABELS)),
}
