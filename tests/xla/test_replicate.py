"""What goes into a replicated function, and what comes out: a list over replicas, structure for structure."""

import numpy as np
import pytest
import tensorflow as tf
from helpers.host_work import Point, values

from replica_engine import xla
from replica_engine.errors import InputsError, LoweringError

SIZES = (1, 4)


def both(*args):
    """The same arguments for two replicas."""
    return [list(args), list(args)]


@pytest.mark.parametrize("n", SIZES)
def test_inputs_and_results_are_lists_over_replicas(n):
    inputs = [[tf.constant([float(i)]), tf.constant(10.0 * i)] for i in range(n)]
    results = xla.replicate(lambda x, y: x + y, inputs)
    assert isinstance(results, list)
    assert values(results) == [[11.0 * i] for i in range(n)]


@pytest.mark.parametrize("n", SIZES)
def test_replicas_know_who_they_are_and_how_many(n):
    results = xla.replicate(lambda: (xla.replica_id(), xla.num_replicas()), num_replicas=n)
    assert values(results) == [(i, n) for i in range(n)]
    assert all(result[0].dtype == tf.int32 for result in results)


def test_without_inputs_and_a_number_it_runs_on_all_devices():
    assert len(xla.replicate(xla.replica_id)) == xla.PjrtClusterResolver().devices.size


def test_the_number_of_replicas_may_be_given_as_well():
    assert values(xla.replicate(lambda x: x + 1.0, [[1.0], [2.0]], num_replicas=2)) == [2.0, 3.0]


def test_more_replicas_than_cores_meet():
    results = xla.replicate(xla.all_gather, [[float(i)] for i in range(16)])
    assert values(results) == [[float(i) for i in range(16)]] * 16


def test_inputs_may_be_tuples():
    assert values(xla.replicate(lambda x: x, (([1, 2],), ([3, 4],)))) == [[1, 2], [3, 4]]


@pytest.mark.parametrize("n", SIZES)
def test_a_function_without_results_gives_none_for_each_replica(n):
    assert xla.replicate(lambda: None, num_replicas=n) == [None] * n


def test_a_function_without_results_still_does_its_work():
    total = tf.Variable(0.0)

    def add(x):
        total.assign_add(xla.cross_replica_sum(x))

    assert xla.replicate(add, [[1.0], [2.0]]) == [None, None]
    assert float(total) == 3.0


def test_structure_out_is_what_the_function_returned():
    fn = lambda x: {"a": [x, (x + 1,)], "none": None, "empty": [[], {}, ()], "point": Point(x, "label"), "number": 3}  # noqa: E731
    expected = [
        {"a": [x, (x + 1,)], "none": None, "empty": [[], {}, ()], "point": Point(x, "label"), "number": 3}
        for x in (1, 2)
    ]
    results = xla.replicate(fn, [[1], [2]])
    assert values(results) == expected
    assert isinstance(results[0]["point"], Point)


def test_structure_in_is_what_the_function_gets():
    seen = []

    def fn(batch, extra):
        seen.append((batch, extra))
        return batch["x"] + batch["nested"][0][1]

    inputs = [[{"x": tf.constant(x), "nested": [(None, 10 * x)], "none": None}, [[], {}]] for x in (1, 2)]
    assert values(xla.replicate(fn, inputs)) == [11, 22]
    ((batch, extra),) = seen
    assert batch["none"] is None
    assert batch["nested"][0][0] is None
    assert extra == [[], {}]


def test_what_is_the_same_python_value_everywhere_is_that_value():
    """So it can be a shape, choose a branch in Python, or name a thing."""

    def fn(x, count, mode, flag):
        assert isinstance(count, int)
        assert flag is True
        return tf.repeat(x, count) if mode == "repeat" else x

    assert values(xla.replicate(fn, [[[1.0], 3, "repeat", True], [[2.0], 3, "repeat", True]])) == [[1.0] * 3, [2.0] * 3]
    assert values(xla.replicate(fn, [[[1.0], 3, "same", True], [[2.0], 3, "same", True]])) == [[1.0], [2.0]]


def test_python_values_keep_their_type():
    for value in (1, True, 1.0, "1", b"1", 1j, tf.float32):
        results = xla.replicate(lambda x: (x, type(x).__name__), both(value))
        assert results == [(value, type(value).__name__)] * 2


@pytest.mark.parametrize(("parts", "dtype"), [((1, 2), tf.int32), ((1.5, 2.5), tf.float32), ((True, False), tf.bool)])
def test_python_scalars_that_differ_are_tensors(parts, dtype):
    results = xla.replicate(lambda x: x, [[part] for part in parts])
    assert values(results) == list(parts)
    assert [result.dtype for result in results] == [dtype] * 2


def test_arrays_of_numpy_come_in_whatever_their_layout():
    parts = [np.arange(6).reshape(2, 3).T, np.arange(6, 12).reshape(2, 3).T, np.arange(24).reshape(6, 4)[::2, 1:3]]
    for part in parts:
        results = xla.replicate(lambda x: x + 0, both(part))
        assert values(results) == [part.tolist()] * 2
        assert results[0].dtype == tf.int64
    different = xla.replicate(lambda x: x + 0, [[parts[0]], [parts[1]]])
    assert values(different) == [parts[0].tolist(), parts[1].tolist()]


def test_scalars_of_numpy_come_in():
    results = xla.replicate(lambda x: x * 2, [[np.float64(1.5)], [np.float64(2.5)]])
    assert values(results) == [3.0, 5.0]
    assert results[0].dtype == tf.float64


def test_an_array_is_taken_as_it_was_at_the_call():
    array = np.ones([1000], np.float32)
    (first, _) = xla.replicate(lambda x: x * 2, both(array))
    array[:] = 5.0
    (second, _) = xla.replicate(lambda x: x * 2, both(array))
    assert (float(first[-1]), float(second[-1])) == (2.0, 10.0)


def test_results_are_not_changed_by_the_next_run():
    fn = lambda x: x * 2.0  # noqa: E731
    first = xla.replicate(fn, [[tf.fill([1000], 1.0)], [tf.fill([1000], 2.0)]])
    xla.replicate(fn, [[tf.fill([1000], 7.0)], [tf.fill([1000], 8.0)]])
    assert [float(result[0]) for result in first] == [2.0, 4.0]


def test_ragged_tensors_go_in_and_come_out():
    rows = [tf.ragged.constant([[1, 2], [3]]), tf.ragged.constant([[4], [5, 6]])]
    results = xla.replicate(lambda x: x * 2, [[row] for row in rows])
    assert all(isinstance(result, tf.RaggedTensor) for result in results)
    assert [result.to_list() for result in results] == [[[2, 4], [6]], [[8], [10, 12]]]


def test_sparse_tensors_go_in_and_come_out():
    parts = [tf.sparse.from_dense([[0.0, 1.0], [2.0, 0.0]]), tf.sparse.from_dense([[3.0, 0.0], [0.0, 4.0]])]
    twice = lambda x: tf.sparse.SparseTensor(x.indices, x.values * 2, x.dense_shape)  # noqa: E731
    results = xla.replicate(twice, [[part] for part in parts])
    assert all(isinstance(result, tf.sparse.SparseTensor) for result in results)
    dense = [tf.sparse.to_dense(result).numpy().tolist() for result in results]
    assert dense == [[[0, 2], [4, 0]], [[6, 0], [0, 8]]]


def test_indexed_slices_go_in_and_come_out():
    parts = [
        tf.IndexedSlices(tf.constant([[1.0]]), tf.constant([0])),
        tf.IndexedSlices(tf.constant([[2.0]]), tf.constant([1])),
    ]
    results = xla.replicate(lambda x: tf.IndexedSlices(x.values * 10.0, x.indices + 1), [[part] for part in parts])
    assert all(isinstance(result, tf.IndexedSlices) for result in results)
    assert [(result.values.numpy().tolist(), result.indices.numpy().tolist()) for result in results] == [
        ([[10.0]], [1]),
        ([[20.0]], [2]),
    ]


def test_a_variable_as_an_argument_can_be_written():
    variable = tf.Variable([1.0, 2.0])

    def add(variable, x):
        assert isinstance(variable, tf.Variable)
        return variable.assign_add([x, x])

    results = xla.replicate(add, [[variable, 10.0], [variable, 20.0]])
    assert values(results) == [[11.0, 12.0], [21.0, 22.0]]
    assert variable.numpy().tolist() == [11.0, 12.0]  # replica 0's


def test_variables_inside_structures_can_be_read():
    variables = {"w": tf.Variable(2.0), "b": [tf.Variable(3.0)]}
    results = xla.replicate(lambda v, x: v["w"] * x + v["b"][0], [[variables, 1.0], [variables, 10.0]])
    assert values(results) == [5.0, 23.0]


def test_random_numbers_differ_from_run_to_run():
    draw = lambda: tf.random.normal([8])  # noqa: E731
    first, second = (xla.replicate(draw, num_replicas=2)[0].numpy() for _ in range(2))
    assert not np.array_equal(first, second)


@pytest.mark.parametrize("form", ["tf.function", "jit_compile", "method", "callable object"])
def test_any_callable_can_be_replicated(form):
    class Model:
        def __init__(self):
            self.w = tf.Variable(3.0)

        def method(self, x):
            return xla.cross_replica_sum(x) * self.w

        __call__ = method

    model = Model()
    fn = {
        "tf.function": tf.function(lambda x: xla.cross_replica_sum(x) * model.w),
        "jit_compile": tf.function(lambda x: xla.cross_replica_sum(x) * model.w, jit_compile=True),
        "method": model.method,
        "callable object": model,
    }[form]
    assert values(xla.replicate(fn, [[1.0], [2.0]])) == [9.0, 9.0]


def test_python_control_flow_on_tensors_is_converted():
    def fn(x):
        if x > 1.5:
            return x * 10.0
        while x < 1.0:
            x += 0.25
        return x

    assert values(xla.replicate(fn, [[0.1], [2.0]])) == pytest.approx([1.1, 20.0])


@pytest.mark.parametrize("loop", ["while", "tf.range"])
def test_a_loop_may_run_as_often_as_a_tensor_says(loop):
    def with_while(x, count):
        step = 0
        while step < count:
            x *= 2.0
            step += 1
        return x

    def with_range(x, count):
        for _ in tf.range(count):
            x *= 2.0
        return x

    fn = with_while if loop == "while" else with_range
    inputs = [[1.0, tf.constant(3)], [3.0, tf.constant(3)]]
    assert values(xla.replicate(fn, inputs)) == [8.0, 24.0]


def test_a_replicated_body_cannot_be_replicated_again():
    inner = lambda: 1  # noqa: E731
    with pytest.raises(InputsError, match="cannot be replicated again"):
        xla.replicate(lambda: xla.replicate(inner, num_replicas=2), num_replicas=2)
    nested = tf.function(lambda: xla.replicate(inner, num_replicas=2))
    with pytest.raises(InputsError, match="groups"):
        xla.replicate(lambda: nested(), num_replicas=2)
    assert xla.replicate(inner, num_replicas=2) == [1, 1]


def test_after_an_error_the_same_function_works_with_other_arguments():
    x = tf.constant([1.0, -1.0])
    fn = lambda x, cut: tf.boolean_mask(x, x > 0) if cut else tf.nn.relu(x)  # noqa: E731
    for _ in range(2):
        with pytest.raises(LoweringError):
            xla.replicate(fn, both(x, True))
        assert values(xla.replicate(fn, both(x, False))) == [[1.0, 0.0]] * 2


def test_what_ops_return_as_lists_are_lists_in_a_body():
    """The gradient of a concatenation of many tensors, and Keras' recurrence, change such a list."""

    def body(x):
        parts = tf.split(x, 2)
        assert isinstance(parts, list)
        assert isinstance(tf.unstack(x), list)
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = tf.reduce_sum(tf.concat([x] * 17, 0) ** 2)
        return [*parts, tape.gradient(y, x)]

    results = xla.replicate(body, [[tf.constant([1.0, 2.0])], [tf.constant([3.0, 4.0])]])
    found = [[each.numpy().tolist() for each in result] for result in results]
    assert found == [[[1.0], [2.0], [34.0, 68.0]], [[3.0], [4.0], [102.0, 136.0]]]
