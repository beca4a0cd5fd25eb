"""Ops for which XLA has other numbers than TensorFlow: a program has those of one device."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers.on_two import gradient_of

from replica_engine import TPUStrategy, xla
from replica_engine.keras import replicate_model

VALUES = [0.0, -0.0, 4.0, -2.0, 0.5, np.inf, np.nan]
UPSTREAM = [0.0, 1.0, -3.0, np.inf, np.nan]

ELEMENTWISE = {
    "sqrt": tf.sqrt,
    "rsqrt": tf.math.rsqrt,
    "reciprocal": tf.math.reciprocal,
    "a root where there is one": lambda x: tf.where(x > 0, tf.sqrt(x), 0.0),
    "a power where there is one": lambda x: tf.where(x > 0, x**-0.5, 0.0),
    "x times its root": lambda x: x * tf.sqrt(x),
    "division": lambda x: tf.where(x != 0, 1 / x, 0.0),
    "xlogy": lambda x: tf.math.xlogy(x, x),
    "xdivy": lambda x: tf.math.xdivy(x, x),
    "selu": tf.nn.selu,
    "elu": tf.nn.elu,
    "relu": tf.nn.relu,
    "relu6": tf.nn.relu6,
}
OF_ROWS = {
    "norm": lambda x: tf.norm(x, axis=1),
    "Frobenius norm": lambda x: tf.linalg.norm(x * 0, ord="fro", axis=[0, 1]),
    "std": lambda x: tf.math.reduce_std(x, 1),
    "euclidean_norm": lambda x: tf.math.reduce_euclidean_norm(x, 1),
    "normalized without epsilon": lambda x: tf.linalg.l2_normalize(x, axis=1, epsilon=0.0),
    "clip_by_norm": lambda x: tf.clip_by_norm(x, 1.0, axes=[1]),
    "distances": lambda x: tf.sqrt(tf.reduce_sum((x[:, None] - x[None]) ** 2, -1)),
    "cosine similarity": lambda x: keras.losses.CosineSimilarity(reduction=None)(tf.ones_like(x), x),
    "a normalized dot product": lambda x: keras.layers.Dot(1, normalize=True)([x, x[::-1]]),
    "the size of a spectrum": lambda x: tf.abs(tf.signal.rfft(x * 0)),
}


def in_a_program(fn, *args):
    """The results of `fn` on the first of two replicas that get the same arguments."""
    return xla.replicate(fn, [list(args)] * 2)[0]


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16"])
def test_gradients_at_zero_and_of_infinities(dtype):
    x, upstream = map(tf.constant, np.meshgrid(VALUES, UPSTREAM))
    x, upstream = tf.cast(x, dtype), tf.cast(upstream, dtype)
    gradients = lambda x, upstream: [gradient_of(fn, upstream)(x) for fn in ELEMENTWISE.values()]  # noqa: E731
    found = in_a_program(gradients, x, upstream)
    rtol = {"float32": 1e-5, "float64": 1e-12, "float16": 4e-3, "bfloat16": 2e-2}[dtype]
    for name, one, right in zip(ELEMENTWISE, found, gradients(x, upstream), strict=True):
        one, right = (np.asarray(tf.cast(each, tf.float64)) for each in (one, right))
        np.testing.assert_allclose(one, right, rtol=rtol, err_msg=name)


def test_gradients_of_rows_of_zeros():
    rows = np.random.default_rng(0).normal(size=(4, 6)).astype("float32")
    rows[1] = 0
    rows[2, 3:] = 0
    gradients = lambda x: [gradient_of(fn)(x) for fn in OF_ROWS.values()]  # noqa: E731
    found, right = in_a_program(gradients, tf.constant(rows)), gradients(tf.constant(rows))
    for name, one, other in zip(OF_ROWS, found, right, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6, err_msg=name)


@pytest.mark.parametrize("dtype", ["complex64", "complex128"])
def test_gradients_of_complex_roots_have_the_conjugate(dtype):
    x = tf.constant(np.array([0, 1, -1, 1j, 2 + 1j, -0.5 - 3j], dtype))
    upstream = tf.constant(np.array([0, 1, 1j, 1, 1 - 2j, 2], dtype))

    def gradients(x, upstream):
        return [gradient_of(fn, upstream)(x) for fn in (tf.sqrt, tf.math.rsqrt, tf.math.reciprocal)]

    for one, right in zip(in_a_program(gradients, x, upstream), gradients(x, upstream), strict=True):
        np.testing.assert_allclose(one, right, rtol=1e-5, atol=1e-6)


def test_gradients_of_gradients_are_those_of_the_ops():
    """A choice between values has another gradient than the op where the upstream gradient is 0."""

    root = lambda x: tf.reduce_sum(tf.where(x > 0, tf.sqrt(x), 0.0))  # noqa: E731

    def of_a_gradient_that_is_zero(x):
        inner = gradient_of(lambda z: tf.reduce_sum(tf.sqrt(z) * (x - 2.0)))
        return tf.reduce_sum(inner(4 * tf.ones_like(x)))

    places = {
        "twice": gradient_of(lambda x: tf.reduce_sum(gradient_of(lambda x: tf.reduce_sum(tf.sqrt(x + 1) ** 3))(x))),
        "at a gradient of zero": gradient_of(of_a_gradient_that_is_zero),
        "the same in a function": gradient_of(tf.function(of_a_gradient_that_is_zero)),
        "in a loop": gradient_of(
            lambda x: tf.while_loop(
                lambda i, total: i < 3, lambda i, total: (i + 1, total + root(x)), (0, 0.0), maximum_iterations=3
            )[1]
        ),
        "in a branch": gradient_of(lambda x: tf.cond(x[1] > 0, lambda: root(x), lambda: 0.0)),
        "vectorized": lambda x: tf.vectorized_map(gradient_of(root), tf.stack([x, x + 1])),
        "computed again": gradient_of(tf.recompute_grad(root)),
        "selu": gradient_of(lambda x: tf.reduce_sum(gradient_of(lambda x: tf.nn.selu(x - 2) ** 2)(x))),
    }
    all_places = lambda x: [fn(x) for fn in places.values()]  # noqa: E731
    x = tf.constant([0.0, 4.0, 2.0, 0.0])
    for name, one, right in zip(places, in_a_program(all_places, x), all_places(x), strict=True):
        np.testing.assert_allclose(one, right, rtol=1e-5, atol=1e-6, err_msg=name)


def test_a_model_of_a_row_of_zeros_trains():
    x, y = np.random.default_rng(0).normal(size=(2, 8, 4)).astype("float32")
    x[3] = 0

    def losses(prepare):
        keras.utils.set_random_seed(2)
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(4, activation="selu")])
        model.compile("sgd", keras.losses.CosineSimilarity())
        return prepare(model).fit(x, y, batch_size=8, epochs=2, shuffle=False, verbose=0).history["loss"]

    found = losses(lambda model: replicate_model(model, strategy=TPUStrategy(num_cores=2)))
    np.testing.assert_allclose(found, losses(lambda model: model), rtol=1e-5)


@pytest.mark.parametrize("data_format", ["NHWC", "NCHW", "NDHWC", "NCDHW"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_a_fused_batch_normalization_of_large_numbers(data_format, dtype):
    """The squares of such numbers have no digits left for their variance."""
    random = np.random.default_rng(0)
    shape = (4, *[3] * (len(data_format) - 2), 2)
    axes = [axis for axis, name in enumerate(data_format) if name != "C"]

    def of_mean(mean):
        # In a narrow dtype the numbers lie further apart, or all would be rounded to one.
        spread = 1 if dtype == "float32" else mean / 20
        x = random.normal(size=shape) * spread + mean
        return tf.cast(np.moveaxis(x, -1, 1) if data_format[1] == "C" else x, dtype)

    def normalized(*batches):
        results = []
        for x in batches:
            with tf.GradientTape() as tape:
                tape.watch(x)
                parameters = {"scale": [1.5, 2.0], "offset": [0.5, -1.0], "mean": [7.0, 8.0], "variance": [2.0, 1.0]}
                y, mean, variance, *_ = tf.raw_ops.FusedBatchNormV3(
                    x=x, **parameters, exponential_avg_factor=0.3, data_format=data_format
                )
            results += [y, mean, variance, tape.gradient(y, x, output_gradients=tf.cast(tf.sin(y), y.dtype))]
        return results

    batches = [of_mean(mean) for mean in (300.0, 3000.0, 30000.0)]
    found, right = in_a_program(normalized, *batches), normalized(*batches)
    atol = {"float32": 5e-3, "float16": 4e-3, "bfloat16": 3e-2}[dtype]  # the mean of 30000 has steps of 0.002
    for one, other in zip(found, right, strict=True):
        one, other = (np.asarray(tf.cast(each, tf.float32)) for each in (one, other))
        np.testing.assert_allclose(one, other, rtol=atol, atol=atol * np.abs(other).max())
    deviation = tf.math.reduce_std(tf.cast(found[4], tf.float32), axes)
    np.testing.assert_allclose(np.sort(deviation), [1.5, 2.0], rtol=2e-2)


def test_other_forms_of_the_fused_batch_normalization():
    """Inference; the function of version 1 of TensorFlow, whose second variance is biased; a gradient of a gradient."""
    x = tf.constant(1000 + np.random.default_rng(0).normal(size=(4, 3, 3, 2)), tf.float32)

    def results(x):
        fused = tf.compat.v1.nn.fused_batch_norm
        y, mean, variance = fused(x, tf.ones([2]), tf.zeros([2]))
        inference = fused(x, tf.ones([2]), tf.zeros([2]), mean, variance, is_training=False)[0]
        gradient = gradient_of(lambda x: fused(x, [2.0, 1.0], [0.0, 1.0])[0] ** 3)
        penalty = gradient_of(lambda x: tf.reduce_sum(gradient(x) ** 2))
        kinds = [
            kind(x=x, scale=[1.0, 2.0], offset=[0.0, 1.0], mean=[0.0, 0.0], variance=[1.0, 1.0])[0]
            for kind in (tf.raw_ops.FusedBatchNorm, tf.raw_ops.FusedBatchNormV2)
        ]
        return [y, mean, variance, inference, penalty(x), *kinds]

    for one, right in zip(in_a_program(results, x), results(x), strict=True):
        np.testing.assert_allclose(one, right, rtol=1e-3, atol=1e-3)


def test_a_fused_batch_normalization_of_a_batch_whose_rank_is_not_known_in_its_function():
    x = tf.constant(1000 + np.random.default_rng(0).normal(size=(4, 3, 3, 2)), tf.float32)

    @tf.function(input_signature=[tf.TensorSpec(None)])
    def normalized(x):
        return tf.compat.v1.nn.fused_batch_norm(x, [1.0, 2.0], [0.0, 1.0])[0]

    (found,) = in_a_program(lambda x: [normalized(x)], x)
    np.testing.assert_allclose(found, normalized(x), rtol=1e-3, atol=1e-3)


ROWS = [[np.nan, 1, 2, 3], [np.nan, 5, -np.inf, 5], [np.nan] * 4, [2, 1, 3, np.inf]]  # a NaN comes first
ANYWHERE = [[1, np.nan, 3, -2], [3, 2, 1, np.nan], [np.inf, np.nan, -np.inf, 0], [1, 1, np.nan, np.nan], *ROWS]
LIMITS = [-7.9, 300.0, 70000.0, 3e9, -3e9, 1e20, 2147483648.0, -2147483648.0, np.inf, -np.inf, np.nan]


def computed(rows, dtype):
    """Rows whose NaN are results of a program: 0 / 0, which has a sign bit on x86, and its opposite."""
    x = np.array(rows)
    is_nan = np.isnan(x)
    return [tf.cast(np.where(is_nan, 0, x), dtype), tf.cast(np.where(is_nan, 0, 1), dtype)]


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
def test_a_nan_has_the_place_that_it_has_on_one_device(dtype):
    def places(a, b, c, d):
        x, anywhere = a / b, c / d
        opposite = -x
        found = [tf.math.top_k(each, k) for each in (x, opposite, tf.abs(x)) for k in (1, 2, 4)]
        found += [tf.sort(x), tf.argsort(x, direction="DESCENDING"), tf.math.top_k(anywhere[:2], 1)]
        for each in (anywhere, tf.transpose(anywhere), -anywhere):
            found += [tf.argmax(each, 1), tf.argmin(each, 1), tf.argmax(each, 0, tf.int32), tf.argmin(each[0])]
        edges = tf.constant([[0, 1, 2, 3]] * len(ANYWHERE), x.dtype)
        found += [tf.searchsorted(edges, anywhere, side) for side in ("left", "right")]
        found.append(keras.ops.digitize(tf.cast(anywhere, tf.float32), [0.0, 1.0, 2.0]))
        found.append(keras.metrics.sparse_categorical_accuracy([0, 0, 0, 0, 3, 1, 0, 3], anywhere))
        found.append(tf.math.in_top_k([0, 0, 0, 0, 3, 1, 0, 3], tf.cast(anywhere, tf.float32), 2))
        return tf.nest.flatten(found)

    args = [*computed(ROWS, dtype), *computed(ANYWHERE, dtype)]
    for size in (1, 2) if dtype == "float32" else (2,):
        found = xla.replicate(places, [args] * size)[-1]
        for index, (one, right) in enumerate(zip(found, places(*args), strict=True)):
            one, right = (tf.cast(each, tf.float64) for each in (one, right))  # NumPy knows no NaN of bfloat16
            np.testing.assert_array_equal(one, right, err_msg=f"result {index}")


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_the_rank_of_a_nan_does_not_depend_on_its_sign(dtype):
    def ranked(a, b):
        x = a / b
        of_each_sign = [x, tf.where(tf.math.is_nan(x), -x, x), tf.where(tf.math.is_nan(x), tf.abs(x), x)]
        return [(tf.math.top_k(each, 3), tf.sort(each), tf.argsort(each)) for each in of_each_sign]

    first, *others = in_a_program(ranked, *computed(ANYWHERE, dtype))
    for other in others:
        for one, another in zip(tf.nest.flatten(first), tf.nest.flatten(other), strict=True):
            np.testing.assert_array_equal(one, another)
    assert np.isnan(first[0].values[:4, 0]).all()


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16"])
def test_a_factor_of_a_mask_keeps_a_nan(dtype):
    """XLA makes a choice of it. So a masked loss would lose its NaN, and a maximum that of its gradient."""

    def products(a, b):
        x = a / b
        mask = tf.cast(x > 1, x.dtype)
        return [
            x * mask,
            mask * x,
            tf.reduce_sum(x * mask) / tf.reduce_sum(mask),
            gradient_of(lambda x: tf.reduce_max(x, 1))(x),
            gradient_of(lambda x: tf.reduce_min(x))(x),
            gradient_of(lambda x: tf.maximum(x, x[:, ::-1] * 2))(x),
            gradient_of(lambda x: tf.where(x > 0, x, 0) * mask)(x),
            gradient_of(lambda x: tf.math.segment_max(x, [0, 0, 1, 1, 2, 2, 2, 2]))(x),
            gradient_of(lambda x: tf.clip_by_value(x, tf.cast(0, x.dtype), tf.cast(2, x.dtype)))(x),
        ]

    args = computed(ANYWHERE, dtype)
    for index, (one, right) in enumerate(zip(in_a_program(products, *args), products(*args), strict=True)):
        np.testing.assert_array_equal(tf.cast(one, tf.float64), tf.cast(right, tf.float64), err_msg=f"result {index}")


@pytest.mark.parametrize("to", ["int32", "int64"])
@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16"])
def test_numbers_that_are_no_integers_become_what_tensorflow_makes_of_them(dtype, to):
    converted = lambda x: [tf.cast(x, to), tf.cast(tf.round(x * 2), to), tf.saturate_cast(x, to)]  # noqa: E731
    x = tf.cast(tf.constant(LIMITS * 2, tf.float64), dtype)
    for one, right in zip(in_a_program(converted, x), converted(x), strict=True):
        assert one.numpy().tolist() == right.numpy().tolist()
