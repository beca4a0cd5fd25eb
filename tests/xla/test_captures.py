"""What a replicated function uses from outside: constants, variables, tensors of the function around it."""

import textwrap

import numpy as np
import pytest
import tensorflow as tf
from helpers.host_work import values

from replica_engine import xla
from replica_engine.errors import LoweringError


@pytest.mark.parametrize("size", [1, 1 << 18])
@pytest.mark.parametrize("kind", ["tensor", "array"])
def test_constants_are_captured_small_or_large(size, kind):
    constant = np.arange(size, dtype=np.float64)
    captured = tf.constant(constant) if kind == "tensor" else constant
    results = xla.replicate(lambda x: tf.reduce_sum(captured) + x, [[np.float64(0)], [np.float64(1)]])
    assert values(results) == [constant.sum(), constant.sum() + 1]


@pytest.mark.parametrize("n", [1, 2])
def test_a_captured_integer_can_be_a_shape_and_a_value(n):
    rows = tf.constant(3)
    results = xla.replicate(lambda x: (tf.reshape(x, [rows, -1]), rows + 1), [[tf.range(6)]] * n)
    for matrix, count in results:
        assert matrix.numpy().tolist() == [[0, 1], [2, 3], [4, 5]]
        assert int(count) == 4


def test_a_captured_integer_can_be_an_axis():
    axis = tf.constant([1])
    assert values(xla.replicate(lambda x: tf.reverse(x, axis), [[[[1, 2]]], [[[3, 4]]]])) == [[[2, 1]], [[4, 3]]]


def test_a_captured_integer_can_be_a_shape_inside_a_function():
    rows = tf.constant(3)

    @tf.function
    def step(x):
        return xla.replicate(lambda x: tf.reshape(x, [rows, -1]), [[x], [x + 1]])

    assert values(step(tf.range(6))) == [[[0, 1], [2, 3], [4, 5]], [[1, 2], [3, 4], [5, 6]]]


def test_a_captured_integer_can_be_a_shape_where_those_of_arguments_are_known_late(programs):
    # In a process of its own: a program launched with other arguments than it was compiled for ends the process.
    program = """
        import tensorflow as tf
        from replica_engine import xla

        rows = tf.constant(3)

        @tf.function(input_signature=[tf.TensorSpec([None], tf.int32)])
        def step(x):
            return xla.replicate(lambda x: tf.reshape(x, [rows, -1]), [[x], [x + 1]])

        print([step(tf.range(n))[1].numpy().tolist() for n in (6, 3)])
    """
    done = programs.run(textwrap.dedent(program))
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.strip() == "[[[1, 2], [3, 4], [5, 6]], [[1], [2], [3]]]"


def test_tensors_of_the_function_around_are_captured():
    @tf.function
    def step(x):
        doubled = x * 2.0
        return xla.replicate(lambda: doubled + tf.cast(xla.replica_id(), tf.float32), num_replicas=2)

    assert values(step(tf.constant([1.0, 2.0]))) == [[2.0, 4.0], [3.0, 5.0]]
    assert values(step(tf.constant([5.0, 6.0]))) == [[10.0, 12.0], [11.0, 13.0]]


def test_tensors_of_a_loop_around_are_captured():
    @tf.function
    def steps(x):
        total = tf.zeros_like(x)
        for i in tf.range(3):
            scaled = x * tf.cast(i, tf.float32)
            total += xla.replicate(lambda: xla.cross_replica_sum(scaled), num_replicas=2)[0]  # noqa: B023
        return total

    assert steps(tf.constant([1.0, 2.0])).numpy().tolist() == [6.0, 12.0]


def test_a_capture_and_an_argument_do_not_mix():
    """Both of one shape and dtype, so that only their order tells them apart."""
    first, second = tf.constant([1.0, 2.0]), tf.constant([10.0, 20.0])
    variable = tf.Variable([100.0, 200.0])
    arguments = [tf.constant([3.0, 4.0]), tf.constant([5.0, 6.0])]
    results = xla.replicate(lambda x, y: [first, variable + 0.0, y, second, x], [arguments] * 2)
    for result in results:
        assert values(result) == [[1.0, 2.0], [100.0, 200.0], [5.0, 6.0], [10.0, 20.0], [3.0, 4.0]]


class TestPlainVariables:
    @pytest.mark.parametrize("n", [1, 4])
    def test_all_replicas_read_the_value(self, n):
        variable = tf.Variable([1.0, 2.0])
        fn = lambda: variable + tf.cast(xla.replica_id(), tf.float32)  # noqa: E731
        assert values(xla.replicate(fn, num_replicas=n)) == [[1.0 + i, 2.0 + i] for i in range(n)]
        variable.assign([10.0, 20.0])
        assert values(xla.replicate(fn, num_replicas=n)) == [[10.0 + i, 20.0 + i] for i in range(n)]

    @pytest.mark.parametrize("n", [1, 4])
    def test_what_replica_0_wrote_stays(self, n):
        variable = tf.Variable(5.0)
        fn = lambda: variable.assign_add(tf.cast(xla.replica_id(), tf.float32) + 1.0)  # noqa: E731
        assert values(xla.replicate(fn, num_replicas=n)) == [6.0 + i for i in range(n)]
        assert float(variable) == 6.0
        xla.replicate(fn, num_replicas=n)
        assert float(variable) == 7.0

    def test_reads_and_writes_in_the_body_are_in_order(self):
        variable = tf.Variable(1.0)

        def fn():
            before = variable.read_value()
            variable.assign(before * 10.0)
            between = variable.read_value()
            variable.assign_sub(3.0)
            return [before, between, variable.read_value()]

        assert values(xla.replicate(fn, num_replicas=2)[1]) == [1.0, 10.0, 7.0]
        assert float(variable) == 7.0

    def test_writes_in_loops_and_branches_count(self):
        variable = tf.Variable(0)

        def fn(limit):
            for i in tf.range(5):
                if i < limit:
                    variable.assign_add(i)
            return variable.read_value()

        assert values(xla.replicate(fn, [[3], [5]])) == [3, 10]
        assert int(variable) == 3

    def test_writes_in_nested_functions_count(self):
        variable = tf.Variable(1.0)
        double = tf.function(lambda: variable.assign(variable * 2.0))

        def fn():
            double()
            double()
            return variable + 0.0

        assert values(xla.replicate(fn, num_replicas=2)) == [4.0, 4.0]
        assert float(variable) == 4.0
        double()  # and the same function still works on the host
        assert float(variable) == 8.0

    def test_several_variables_keep_their_own_values(self):
        a, b, c = tf.Variable(1.0), tf.Variable([2, 3]), tf.Variable(4.0)

        def fn():
            c.assign(a + 10.0)
            b.assign_add([1, 1])

        xla.replicate(fn, num_replicas=2)
        assert (float(a), b.numpy().tolist(), float(c)) == (1.0, [3, 4], 11.0)

    def test_slices_are_written(self):
        variable = tf.Variable([0.0, 0.0, 0.0])

        def fn():
            variable[1:].assign([1.0, 2.0])
            variable.scatter_add(tf.IndexedSlices(tf.constant([10.0]), tf.constant([2])))

        xla.replicate(fn, num_replicas=2)
        assert variable.numpy().tolist() == [0.0, 1.0, 12.0]

    def test_gradients_reach_them(self):
        variable = tf.Variable(3.0)

        def fn(x):
            with tf.GradientTape() as tape:
                loss = variable**2 * x
            return tape.gradient(loss, variable)

        assert values(xla.replicate(fn, [[1.0], [10.0]])) == [6.0, 60.0]

    def test_one_made_in_the_first_run_is_kept(self):
        class Counter:
            variable = None

            def __call__(self):
                if self.variable is None:
                    self.variable = tf.Variable(10.0)
                return self.variable.assign_add(1.0)

        counter = Counter()
        assert values(xla.replicate(counter, num_replicas=2)) == [11.0, 11.0]
        assert values(xla.replicate(counter, num_replicas=2)) == [12.0, 12.0]
        assert float(counter.variable) == 12.0

    def test_a_value_that_was_read_is_not_changed_by_the_next_run(self):
        variable = tf.Variable(tf.zeros([1000]))
        add = lambda: variable.assign_add(tf.ones([1000]))  # noqa: E731
        xla.replicate(add, num_replicas=2)
        seen = variable.numpy()
        xla.replicate(add, num_replicas=2)
        assert (seen[0], variable.numpy()[0]) == (1.0, 2.0)

    def test_an_error_leaves_the_value(self):
        variable = tf.Variable(1.0)

        def fn():
            variable.assign(99.0)
            return tf.where(variable > 0.0)

        with pytest.raises(LoweringError):
            xla.replicate(fn, num_replicas=2)
        assert float(variable) == 1.0
