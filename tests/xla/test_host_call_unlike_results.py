"""Results of host work unlike what the body was compiled for."""

import numpy as np
import pytest
import tensorflow as tf

from replica_engine import xla
from replica_engine.errors import HostResultError

SCALAR = tf.TensorSpec([], tf.float32)

X = [[tf.constant(1.0)], [tf.constant(2.0)]]


def values(results):
    """Tensors as plain Python values, all else as it is."""
    plain = lambda value: value.numpy().tolist() if tf.is_tensor(value) else value  # noqa: E731
    return tf.nest.map_structure(plain, results)


def line_of(text):
    """The line of this file that ends in a comment."""
    with open(__file__) as file:
        numbers = [number for number, line in enumerate(file, 1) if line.rstrip().endswith(f"# {text}")]
    return f"{__file__}:{numbers[0]}"


@xla.returns(tf.TensorSpec([], tf.int32))
def doubled_id():
    return int(xla.replica_id()) * 2


def works():
    return xla.outside_compilation(doubled_id) + 1


def check_works():
    """The next run works."""
    assert values(xla.replicate(works, num_replicas=2)) == [1, 3]


@pytest.mark.parametrize(
    ("spec", "fn", "messages"),
    [
        (tf.TensorSpec([2], tf.float32), lambda x: np.zeros(3, np.float32), ["shape (3,)", "shape (2,)"]),
        (SCALAR, lambda x: tf.cast(x, tf.float64), ["float64", "float32"]),
        (SCALAR, lambda x: int(x), ["int32", "float32"]),
        (SCALAR, lambda x: None, ["None", "a tensor"]),
        (SCALAR, lambda x: "text", ["string"]),
        (SCALAR, lambda x: object(), ["object", "no tensor"]),
        ([SCALAR] * 2, lambda x: (x, x), ["a tuple of length 2", "a list of length 2"]),
        ({"a": {"b": SCALAR}}, lambda x: {"a": {"c": x}}, ["result['a']", "'c'", "'b'"]),
        ({"a": [SCALAR, SCALAR]}, lambda x: {"a": [x, tf.stack([x])]}, ["result['a'][1]", "shape (1,)"]),
        (None, lambda x: x if x > 1.5 else tf.stack([x, x]), ["shape (2,)"]),
        (None, lambda x: x.numpy() if x > 0.5 else 0, ["float32", "int32"]),
    ],
)
def test_other_results_than_it_was_compiled_for_are_an_error(spec, fn, messages):
    fn = fn if spec is None else xla.returns(spec)(fn)
    variable = tf.Variable(1.0)

    def body(x):
        variable.assign(5.0)
        xla.outside_compilation(fn, x)  # other results

    with pytest.raises(HostResultError) as raised:
        xla.replicate(body, X)
    for message in messages:
        assert message in str(raised.value)
    assert line_of("other results") in raised.value.__notes__[0]
    assert variable.numpy() == 1.0
    check_works()


def test_a_result_that_is_sometimes_none_is_an_error():
    def fn(x):
        if x.numpy() > 1.5:
            return x
        return None

    with pytest.raises(HostResultError, match=r"returned a tensor.* compiled for None"):
        xla.replicate(lambda x: xla.outside_compilation(fn, x), X)
