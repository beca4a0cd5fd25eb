"""Collectives of complex numbers: what is added over replicas is added as real numbers.

A sum over replicas of an array of complex constants ended the process inside XLA; these inputs are no constants.
"""

from __future__ import annotations

import re

import numpy as np
import pytest
import tensorflow as tf

from replica_engine import xla

DTYPES = ("complex64", "complex128")
_ADDED = re.compile(r'(?:all_reduce|reduce_scatter)["(@].*?: \((.*?)\) ->', re.DOTALL)


def inputs(dtype, size=4):
    random = np.random.default_rng(0)
    return [[tf.constant(random.normal(size=(size, 2)) + 1j * random.normal(size=(size, 2)), dtype)] for _ in range(4)]


def added_types(fn, of_replicas):
    """The types of what a body adds over replicas."""
    return _ADDED.findall(xla.lower(fn, of_replicas).as_text())


def gradient(fn):
    def of(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = fn(x)
        return tape.gradient(y, x, output_gradients=tf.cast(tf.complex(1.0, 2.0), x.dtype) * y)

    return of


SUMS = {
    "sum": xla.cross_replica_sum,
    "mean": lambda x: xla.all_reduce(x, "MEAN"),
    "mean of groups": lambda x: xla.all_reduce(x, "MEAN", [[0, 2], [1, 3]]),
    "sum of uneven groups": lambda x: xla.all_reduce(x, "SUM", [[0, 1, 2], [3]]),
    "reduce-scatter": xla.reduce_scatter,
    "reduce-scatter of columns": lambda x: xla.reduce_scatter(x, 1, [[0, 1], [2, 3]]),
    "gradient of a sum": gradient(xla.cross_replica_sum),
    "gradient of a gather": gradient(xla.all_gather),
    "gradient of a reduce-scatter": gradient(xla.reduce_scatter),
    "sum in a branch": lambda x: tf.cond(tf.shape(x)[0] > 1, lambda: xla.cross_replica_sum(x), lambda: x),
}


def right(name, values):
    """What each replica gets, by NumPy, of the values of all."""
    total, factor = sum(values), 1 + 2j
    return {
        "sum": [total] * 4,
        "mean": [total / 4] * 4,
        "mean of groups": [(values[i % 2] + values[i % 2 + 2]) / 2 for i in range(4)],
        "sum of uneven groups": [*[sum(values[:3])] * 3, values[3]],
        "reduce-scatter": list(np.split(total, 4)),
        "reduce-scatter of columns": [
            np.split(sum(values[i // 2 * 2 : i // 2 * 2 + 2]), 2, axis=1)[i % 2] for i in range(4)
        ],
        "gradient of a sum": [4 * factor * total] * 4,
        "gradient of a gather": [4 * factor * value for value in values],
        "gradient of a reduce-scatter": [factor * total] * 4,
        "sum in a branch": [total] * 4,
    }[name]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", SUMS)
def test_they_are_added_as_real_numbers(name, dtype):
    of_replicas = inputs(dtype)
    types = added_types(SUMS[name], of_replicas)
    assert types
    assert not any("complex" in each for each in types)
    found = xla.replicate(SUMS[name], of_replicas)
    for one, other in zip(found, right(name, [x.numpy() for (x,) in of_replicas]), strict=True):
        assert one.dtype == dtype
        np.testing.assert_allclose(one, other, rtol=1e-5 if dtype == "complex64" else 1e-12)


@pytest.mark.parametrize("dtype", DTYPES)
def test_they_are_moved_as_they_are(dtype):
    """NaN and negative zeros too."""
    of_replicas = [[tf.constant(np.array([complex(-0.0, np.nan), i], dtype))] for i in range(4)]
    ring = [(i, (i + 1) % 4) for i in range(4)]
    found = xla.replicate(lambda x: (xla.all_gather(x), xla.collective_permute(x, ring)), of_replicas)
    joined = np.concatenate([x.numpy() for (x,) in of_replicas])
    for replica, (gathered, received) in enumerate(found):
        assert gathered.numpy().tobytes() == joined.tobytes()
        assert received.numpy().tobytes() == of_replicas[replica - 1][0].numpy().tobytes()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("in_function", [False, True], ids=["eager", "function of any batch"])
def test_variables_and_batches_of_unknown_size(two, dtype, in_function):
    with two.scope():
        assigned, total = (tf.Variable(tf.zeros([2], dtype), aggregation=tf.VariableAggregation.SUM) for _ in range(2))

    def step(x):
        i = tf.distribute.get_replica_context().replica_id_in_sync_group
        own = tf.complex(tf.cast(i, x.dtype.real_dtype), tf.reduce_sum(tf.math.real(x)))
        assigned.assign(tf.stack([own, own * 2]))
        total.assign_add(tf.stack([own, own]))
        return tf.distribute.get_replica_context().all_reduce("SUM", x)

    run = lambda x: two.run(step, args=(x,))  # noqa: E731
    if in_function:
        run = tf.function(run, input_signature=[tf.TensorSpec([None, 2], dtype)])
    x = tf.constant(np.arange(6).reshape(3, 2) * (1 + 1j), dtype)
    result = two.experimental_local_results(run(x))
    np.testing.assert_allclose(result[1], 2 * x)
    np.testing.assert_allclose(assigned, [1 + 30j, 2 + 60j])
    np.testing.assert_allclose(total, [1 + 30j, 1 + 30j])
