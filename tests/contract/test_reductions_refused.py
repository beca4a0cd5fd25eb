"""Values that `reduce`, `reduce_to` and `batch_reduce_to` cannot reduce: the same error under all strategies."""

import numpy as np
import pytest
import tensorflow as tf

from replica_engine.errors import ReplicaValueError, ScopeError

pytestmark = pytest.mark.replicas(2)

VALUES = {
    "scalars": lambda per_replica: per_replica(float),
    "rows": lambda per_replica: per_replica(lambda i: [float(i), 1.0]),
    "lengths": lambda per_replica: per_replica(lambda i: [1.0] * (1 + i)),
    "bools": lambda per_replica: per_replica(lambda i: i == 0),
    "texts": lambda per_replica: per_replica(str),
    "number": lambda per_replica: 3.0,
    "array": lambda per_replica: np.ones(2),
    "list": lambda per_replica: [1.0, 2.0],
    "tensor": lambda per_replica: tf.ones([2]),
}
REFUSED = {
    ("bools", None): "dtype bool have no sum.*tf.cast",
    ("bools", 0): "dtype bool have no sum.*tf.cast",
    ("texts", None): "dtype string have no sum.*experimental_local_results",
    ("scalars", 0): r"along axis 0.*shape \(\).*axis=None reduces over replicas only",
    ("rows", 1): r"along axis 1.*shape \(2,\)",
    ("rows", (0, -2)): r"along axis -2.*shape \(2,\)",
    ("lengths", None): r"\(1,\) and \(2,\).*strategy.gather",
    ("number", None): "3.0 is not defined.*one value for all replicas",
    ("number", 0): "along axis 0",
    ("array", None): "one value for all replicas",
    ("array", 1): "along axis 1",
    ("list", None): "one value for all replicas",
    ("list", 1): "along axis 1",
    ("tensor", None): "one value for all replicas",
}


@pytest.mark.parametrize("how", ["eager", "function"])
@pytest.mark.parametrize(("value", "axis"), REFUSED)
def test_a_sum_that_cannot_be_says_why(strategy, per_replica, value, axis, how):
    value, words = VALUES[value](per_replica), REFUSED[value, axis]

    def total():
        return strategy.reduce("SUM", value, axis=axis)

    with pytest.raises(ReplicaValueError, match=words):
        total() if how == "eager" else tf.function(total)()


def test_one_number_that_all_replicas_return_has_a_mean_and_no_sum(strategy):
    result = strategy.run(lambda: 2.0)
    assert strategy.reduce("MEAN", result, axis=None) == 2.0
    with pytest.raises(ReplicaValueError, match=r"tf\.constant\(x\)"):
        strategy.reduce("SUM", result, axis=None)


def test_an_unknown_reduction_outside_replicas(strategy, per_replica):
    extended, value = strategy.extended, per_replica(float)
    with pytest.raises(ReplicaValueError, match=r"got str .AVG.\. Write .MEAN"):
        extended.reduce_to("AVG", value, "CPU:0")
    with pytest.raises(ReplicaValueError, match=r"Write tf\.reduce_max"):
        extended.batch_reduce_to("MAX", [(value, "CPU:0")])
    assert float(extended.reduce_to("mean", value, "CPU:0")) == 0.5


@pytest.mark.parametrize("name", ["reduce_to", "batch_reduce_to"])
def test_reductions_of_merge_functions_in_a_replica(strategy, name):
    arguments = (1.0, "CPU:0") if name == "reduce_to" else ([(1.0, "CPU:0")],)
    with pytest.raises(ScopeError, match=rf"strategy\.extended\.{name}\(\).*all_reduce"):
        strategy.run(lambda: getattr(strategy.extended, name)("SUM", *arguments))


def test_a_number_in_a_batch_is_reduced_as_alone(strategy, per_replica):
    with strategy.scope():
        weight = tf.Variable(0.0)
    value = per_replica(float)
    pairs = [(value, weight), (3.0, weight), (0.0, weight)]
    sums = strategy.extended.batch_reduce_to("SUM", pairs)
    means = strategy.extended.batch_reduce_to("MEAN", pairs)
    assert [float(tf.nest.flatten(strategy.experimental_local_results(each))[0]) for each in sums] == [1.0, 6.0, 0.0]
    assert [float(tf.nest.flatten(strategy.experimental_local_results(each))[0]) for each in means] == [0.5, 3.0, 0.0]
    with pytest.raises(ReplicaValueError, match="one value for all replicas"):
        strategy.extended.batch_reduce_to("SUM", [(value, "CPU:0"), (3.0, "CPU:0")])


def test_a_merge_call_reduces_a_value_of_several_replicas_from_outside(strategy, per_replica, local):
    value = per_replica(lambda i: 1.0 + i)

    def merged(strategy, one):
        return strategy.extended.reduce_to("SUM", value, one)

    def step():
        return tf.distribute.get_replica_context().merge_call(merged, args=(tf.constant(1.0),)) + 0.0

    assert local(strategy.run(step)) == [3.0, 3.0]


@pytest.mark.parametrize("axis", ["0", 0.0, None, (0,)])
def test_an_axis_that_is_no_int_is_refused_before_any_work(strategy, per_replica, axis):
    rows = per_replica(lambda i: [float(i)])
    with pytest.raises(ReplicaValueError, match=r"strategy\.gather: `axis` must be an int, as in axis=0; got "):
        strategy.gather(rows, axis)
    collectives = {
        "all_gather": lambda context, x: context.all_gather(x, axis),
        "reduce_scatter": lambda context, x: context.reduce_scatter(x, axis),
        "all_to_all": lambda context, x: context.all_to_all(x, axis, 0),
    }
    for name, collective in collectives.items():
        with pytest.raises(ReplicaValueError, match=rf"{name}: `axis` must be an int"):
            strategy.run(lambda collective=collective: collective(tf.distribute.get_replica_context(), tf.ones([2])))
    assert strategy.gather(rows, np.int64(0)).numpy().tolist() == [0.0, 1.0]
    gathered = strategy.run(lambda: tf.distribute.get_replica_context().all_gather(tf.ones([1]), np.int64(0)))
    assert strategy.experimental_local_results(gathered)[0].numpy().tolist() == [1.0, 1.0]
