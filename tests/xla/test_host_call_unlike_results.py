"""Results of host work unlike what the body was compiled for."""

import numpy as np
import pytest
import tensorflow as tf
from helpers.host_work import SCALAR, X, check_works, line_of

from replica_engine import xla
from replica_engine.errors import HostResultError


@pytest.mark.parametrize(
    ("spec", "fn", "messages"),
    [
        (tf.TensorSpec([2], tf.float32), lambda x: np.zeros(3, np.float32), ["shape (3,)", "shape (2,)"]),
        (SCALAR, lambda x: tf.cast(x, tf.float64), ["float64", "float32"]),
        (SCALAR, lambda x: int(x), ["int32", "float32"]),
        (SCALAR, lambda x: None, ["None", "a tensor"]),
        (SCALAR, lambda x: "text", ["string"]),
        (SCALAR, lambda x: object(), ["object", "not a tensor"]),
        ([SCALAR] * 2, lambda x: (x, x), ["a tuple of length 2", "a list of length 2"]),
        ({"a": {"b": SCALAR}}, lambda x: {"a": {"c": x}}, ["result['a']", "'c'", "'b'"]),
        ({"a": [SCALAR, SCALAR]}, lambda x: {"a": [x, tf.stack([x])]}, ["result['a'][1]", "shape (1,)"]),
        (SCALAR, lambda x: x if x > 1.5 else tf.stack([x, x]), ["shape (2,)"]),
        (SCALAR, lambda x: x.numpy() if x > 1.5 else 0, ["float32", "int32"]),
    ],
)
def test_other_results_than_it_was_compiled_for_are_an_error(spec, fn, messages):
    fn = xla.returns(spec)(fn)
    variable = tf.Variable(1.0)

    def body(x):
        variable.assign(5.0)
        xla.outside_compilation(fn, x)  # other results

    with pytest.raises(HostResultError) as raised:
        xla.replicate(body, X)
    for message in messages:
        assert message in str(raised.value)
    assert line_of(__file__, "other results") in raised.value.__notes__[1]
    assert variable.numpy() == 1.0
    check_works()


def test_a_result_that_is_sometimes_none_is_an_error():
    fn = xla.returns(None)(lambda x: x if x.numpy() > 1.5 else None)
    with pytest.raises(HostResultError, match=r"returned a tensor.* compiled for None"):
        xla.replicate(lambda x: xla.outside_compilation(fn, x), X)
