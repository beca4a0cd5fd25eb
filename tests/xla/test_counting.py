"""`tf.math.bincount` and what counts with it, in compiled bodies.

Where both limits are one number, that many places are counted on the devices; where the largest value decides, the host
counts.
"""

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers.versions import TENSORFLOW

from replica_engine import TPUStrategy, xla

NUMBERS = tf.constant([1, 2, 2, 5])
WEIGHTS = tf.constant([0.5, 1.0, 2.0, 3.0])
SIX = tf.constant(6)


def layer(kind, *args, **options):
    return lambda x: getattr(keras.layers, kind)(*args, **options)(x[None])


ON_DEVICES = {
    "of all": lambda x: tf.math.bincount(x, minlength=6, maxlength=6),
    "of rows": lambda x: tf.math.bincount(tf.stack([x, x + 1]), minlength=6, maxlength=6, axis=-1) * 2,
    "fewer places than values": lambda x: tf.math.bincount(x, minlength=3, maxlength=3),
    "weighted": lambda x: tf.math.bincount(x, weights=WEIGHTS, minlength=6, maxlength=6),
    "whether": lambda x: tf.math.bincount(x[None], minlength=6, maxlength=6, axis=-1, binary_output=True),
    "captured limits": lambda x: tf.math.bincount(x, minlength=SIX, maxlength=SIX),
    "in a branch": lambda x: tf.cond(
        x[0] > 0, lambda: tf.math.bincount(x, minlength=6, maxlength=6), lambda: tf.zeros([6], tf.int32)
    ),
    "in a loop": lambda x: tf.while_loop(
        lambda i, _: i < 3,
        lambda i, y: (i + 1, y + tf.math.bincount(x, minlength=6, maxlength=6)),
        [0, tf.zeros([6], tf.int32)],
    )[1],
    "CategoryEncoding": layer("CategoryEncoding", 6, output_mode="count"),
    "multi-hot": layer("CategoryEncoding", 6, output_mode="multi_hot"),
}
if TENSORFLOW < (2, 22):  # an error later
    ON_DEVICES["crossed limits"] = lambda x: tf.math.bincount(x, minlength=8, maxlength=4)
BY_HOST = {
    "of all": tf.math.bincount,
    "at least": lambda x: tf.math.bincount(x, minlength=3) + 1,
    "at most": lambda x: tf.reduce_sum(tf.math.bincount(x, maxlength=4)),
    "keras.ops": lambda x: keras.ops.bincount(x, weights=WEIGHTS, minlength=6),
    "IntegerLookup": layer("IntegerLookup", vocabulary=[1, 2, 5], output_mode="count"),
    "in a branch": lambda x: tf.cond(x[0] > 0, lambda: tf.reduce_max(tf.math.bincount(x)), lambda: 0),
    "histogram": lambda x: tf.histogram_fixed_width(tf.cast(x, tf.float32), [0.0, 5.0], nbins=5),
}


@pytest.fixture(scope="module")
def compiled():
    return TPUStrategy(num_cores=1)


@pytest.mark.parametrize("bodies", [ON_DEVICES, BY_HOST], ids=["on devices", "by the host"])
def test_counts_are_those_of_tensorflow(compiled, bodies):
    all_of = lambda x: {name: body(x) for name, body in bodies.items()}  # noqa: E731
    run = tf.function(
        lambda x: compiled.run(all_of, args=(x,)), input_signature=[tf.TensorSpec([None], tf.int32)], autograph=False
    )
    found, expected = run(NUMBERS), all_of(NUMBERS)
    for name, value in expected.items():
        np.testing.assert_array_equal(found[name], value, err_msg=name)


def test_equal_limits_need_no_host():
    assert not xla.lower(lambda x: [body(x) for body in ON_DEVICES.values()], [[NUMBERS]]).host_calls
