"""The gradient of an all-reduce in a graph, for those who are not on a replica themselves."""

import contextlib

import pytest
import tensorflow as tf
from helpers.devices import DEVICES
from helpers.on_mirrored import index

from replica_engine import MirroredStrategy


@pytest.fixture(params=[1, 2, 4])
def size(request):
    return request.param


@pytest.fixture
def mirrored(size):
    return MirroredStrategy(DEVICES[:size])


def all_reduce(op, value):
    return tf.distribute.get_replica_context().all_reduce(op, value)


def step_of(strategy, weight, op="SUM"):
    """Each of N replicas has the sum, or mean, of N weights; it returns the sum of these."""
    step = tf.function(lambda: strategy.reduce("SUM", strategy.run(lambda: all_reduce(op, 1.0 * weight)), axis=None))
    return step


@pytest.mark.parametrize("inside", [False, True], ids=["outside", "in the scope"])
@pytest.mark.parametrize("op", ["SUM", "MEAN"])
def test_a_tape_around_a_function_sees_all_replicas(mirrored, size, op, inside):
    weight = tf.Variable(3.0)
    step = step_of(mirrored, weight, op)
    with mirrored.scope() if inside else contextlib.nullcontext(), tf.GradientTape() as tape:
        result = step()
    slope = float(size**2 if op == "SUM" else size)
    assert float(result) == 3.0 * slope
    assert float(tape.gradient(result, weight)) == slope


def test_a_tape_around_the_run_of_a_function_sees_all_replicas(mirrored, size):
    """As people write it who do not know that the tape belongs into the function."""
    weight = tf.Variable(3.0)
    with tf.GradientTape() as tape:
        per_replica = mirrored.run(tf.function(lambda: all_reduce("SUM", 1.0 * weight)))
        result = tf.add_n(mirrored.experimental_local_results(per_replica))
    assert float(tape.gradient(result, weight)) == size**2


def test_tf_gradients_after_the_run(mirrored, size):
    @tf.function
    def slope(x):
        result = mirrored.reduce("SUM", mirrored.run(lambda: all_reduce("SUM", 1.0 * x)), axis=None)
        return tf.gradients(result, x)[0]

    assert float(slope(tf.constant(3.0))) == size**2


def test_tf_gradients_of_one_of_several(mirrored, size):
    """For an integer, which has no gradient, nobody asks."""

    @tf.function
    def fn(x):
        total, _ = all_reduce("SUM", [x, tf.constant(1)])
        return tf.gradients(total, x)[0]

    slopes = mirrored.experimental_local_results(mirrored.run(fn, args=(tf.constant(3.0),)))
    assert [float(slope) for slope in slopes] == [size] * size


def test_a_saved_model_has_the_gradients(mirrored, size, tmp_path):
    """Of several all-reduces, each of another shape."""
    module = tf.Module()
    module.weight = tf.Variable([3.0, 4.0])

    def replica_step():
        return tf.reduce_sum(all_reduce("SUM", 1.0 * module.weight)) + all_reduce("SUM", module.weight[0])

    module.step = tf.function(lambda: mirrored.reduce("SUM", mirrored.run(replica_step), axis=None), input_signature=[])
    tf.saved_model.save(module, str(tmp_path))
    loaded = tf.saved_model.load(str(tmp_path))
    with tf.GradientTape() as tape:
        tape.watch(loaded.weight)
        result = loaded.step()
    assert tape.gradient(result, loaded.weight).numpy().tolist() == [2.0 * size**2, float(size**2)]


def test_what_is_known_while_a_graph_is_built_is_reduced_in_the_graph(mirrored, size):
    parts = mirrored.experimental_local_results(mirrored.run(lambda: tf.constant([1.0]) + 0.0))
    symbolic = []

    @tf.function
    def step():
        def fn():
            result = all_reduce("SUM", parts[index()])
            symbolic.append(tf.is_symbolic_tensor(result))
            return result

        return mirrored.run(fn)

    results = mirrored.experimental_local_results(step())
    assert [result.numpy().tolist() for result in results] == [[float(size)]] * size
    assert symbolic == [True] * size
