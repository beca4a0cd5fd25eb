"""Arrays with `dynamic_size=True`: right where the final size is known while the body is traced, an error elsewhere."""

import re

import numpy as np
import pytest
import tensorflow as tf

from replica_engine import TPUStrategy, xla
from replica_engine.errors import LoweringError

X = [1.0, 2.0, 3.0]


def array(size=0, **options):
    return tf.TensorArray(tf.float32, size=size, dynamic_size=True, **options)


def over_a_range(x):
    found = array()
    for i in tf.range(3):
        found = found.write(i, x * tf.cast(i, tf.float32))
    return found.stack()


def over_a_tensor(x):
    found, i = array(), tf.constant(0)
    for value in x:
        found = found.write(i, 2.0 * value)
        i = i + 1
    return found.stack()


def while_a_counter_is_small(x):
    found, i = array(), tf.constant(0)
    while i < 3:
        found = found.write(i, x)
        i += 1
    return found.stack()


def in_a_while_loop(x):
    return tf.while_loop(lambda i, _: i < 3, lambda i, a: (i + 1, a.write(i, x)), (0, array()))[1].stack()


def with_a_maximum_that_is_not_reached(x):
    loop = tf.while_loop(lambda i, _: i < 3, lambda i, a: (i + 1, a.write(i, x)), (0, array()), maximum_iterations=7)
    return loop[1].stack()


def up_to_a_break(x):
    found = array()
    for i in tf.range(5):
        if i == 3:
            break
        found = found.write(i, x)
    return found.stack()


def in_a_branch_on_a_counter(x):
    found = array()
    for i in tf.range(4):
        if i % 2 == 0:
            found = found.write(i // 2, x)
    return found.stack()


def in_both_branches_on_data(x):
    found = array()
    for i in tf.range(3):
        found = found.write(i, x) if x[i] > 1.5 else found.write(i, -x)
    return found.stack()


def in_a_branch_on_data_but_large_enough(x):
    found = array(3)
    for i in tf.range(3):
        if x[i] > 1.5:
            found = found.write(i, x)
    return found.stack()


def beyond_a_given_size(x):
    found = array(2)
    for i in tf.range(3):
        found = found.write(i, x)
    return found.stack()


def smaller_than_a_given_size(x):
    found = array(5)
    for i in tf.range(3):
        found = found.write(i, x)
    return found.stack()


def in_python(x):
    found = array()
    for i in range(3):
        found = found.write(i, x)
    return found.stack()


def in_nested_loops(x):
    found = array()
    for i in tf.range(2):
        for j in tf.range(3):
            found = found.write(3 * i + j, x)
    return found.stack()


def in_an_array_of_each_iteration(x):
    rows = array()
    for i in tf.range(2):
        row = array()
        for j in tf.range(3):
            row = row.write(j, x * tf.cast(i + j, tf.float32))
        rows = rows.write(i, row.stack())
    return rows.stack()


def in_a_function(x):
    return tf.function(over_a_range)(x)


def in_two_arrays(x):
    one, two = array(), array()
    for i in tf.range(3):
        one, two = one.write(i, x), two.write(2 * i, x)
    return tf.concat([one.stack(), two.stack()], 0)


def concatenated(x):
    found = array()
    for i in tf.range(3):
        found = found.write(i, x)
    return found.concat()


def gathered_and_counted(x):
    found = array(clear_after_read=False)
    for i in tf.range(3):
        found = found.write(i, x)
    return found.gather([0, 2]) * tf.cast(found.size(), tf.float32)


def from_what_was_written_before(x):
    found = array(clear_after_read=False).write(0, x)
    for i in tf.range(1, 4):
        found = found.write(i, found.read(i - 1) * x)
    return found.stack()


def with_a_bound_from_outside(x):
    return while_below(x, BOUND)


def with_a_computed_bound(x):
    found = array()
    for i in tf.range(tf.add_n([tf.constant(1), tf.constant(2)])):
        found = found.write(i, x)
    return found.stack()


BOUND = tf.constant(3)


def while_below(x, bound):
    found = array()
    for i in tf.range(bound + tf.shape(x)[0]):
        found = found.write(i, x)
    return found.stack()


def with_map_and_scan_beside_it(x):
    return over_a_range(tf.map_fn(lambda each: 2.0 * each, x) + tf.scan(lambda sum_, each: sum_ + each, x))


KNOWN = [
    over_a_range,
    over_a_tensor,
    while_a_counter_is_small,
    in_a_while_loop,
    with_a_maximum_that_is_not_reached,
    up_to_a_break,
    in_a_branch_on_a_counter,
    in_both_branches_on_data,
    in_a_branch_on_data_but_large_enough,
    beyond_a_given_size,
    smaller_than_a_given_size,
    in_python,
    in_nested_loops,
    in_an_array_of_each_iteration,
    in_a_function,
    in_two_arrays,
    concatenated,
    gathered_and_counted,
    from_what_was_written_before,
    with_a_bound_from_outside,
    with_a_computed_bound,
    with_map_and_scan_beside_it,
]


@pytest.fixture(scope="module")
def one():
    return TPUStrategy(num_cores=1)


@pytest.fixture(scope="module")
def two():
    return TPUStrategy(num_cores=2)


def on_replica_0(strategy, body, x=X):
    return strategy.experimental_local_results(strategy.run(body, args=(tf.constant(x),)))[0].numpy()


@pytest.mark.parametrize("body", KNOWN, ids=lambda body: body.__name__)
def test_it_is_what_tensorflow_makes(two, body):
    np.testing.assert_array_equal(on_replica_0(two, body), body(tf.constant(X)).numpy())


@pytest.mark.parametrize("body", [over_a_range, in_a_branch_on_data_but_large_enough], ids=lambda body: body.__name__)
def test_it_is_so_on_one_replica(one, body):
    np.testing.assert_array_equal(on_replica_0(one, body), body(tf.constant(X)).numpy())


@pytest.mark.parametrize(
    ("body", "times"),
    [(over_a_range, 3), (beyond_a_given_size, 3)],
    ids=lambda each: getattr(each, "__name__", ""),
)
def test_it_has_gradients_of_two_orders(two, body, times):
    def gradients(x):
        with tf.GradientTape() as outer:
            outer.watch(x)
            with tf.GradientTape() as tape:
                tape.watch(x)
                loss = tf.reduce_sum(body(x**2))  # each element so many times
            gradient = tape.gradient(loss, x)
        return tf.stack([gradient, outer.gradient(gradient, x)])

    np.testing.assert_allclose(on_replica_0(two, gradients), times * np.array([2.0 * np.float32(X), [2.0] * 3]))


def test_the_gradients_are_right(two):
    def gradients(x):
        with tf.GradientTape() as outer:
            outer.watch(x)
            with tf.GradientTape() as tape:
                tape.watch(x)
                loss = tf.reduce_sum(from_what_was_written_before(x))  # the first four powers of each element
            gradient = tape.gradient(loss, x)
        return tf.stack([gradient, outer.gradient(gradient, x)])

    x = np.float32(X)
    expected = [1.0 + 2.0 * x + 3.0 * x**2 + 4.0 * x**3, 2.0 + 6.0 * x + 12.0 * x**2]
    np.testing.assert_allclose(on_replica_0(two, gradients), expected, rtol=1e-6)


def test_it_works_in_a_host_call(two):
    on_host = xla.returns(tf.TensorSpec([3, 3], tf.float32))(lambda x: over_a_range(x))
    found = on_replica_0(two, lambda x: xla.outside_compilation(on_host, x))
    np.testing.assert_array_equal(found, np.outer([0, 1, 2], X))


def test_it_needs_no_call_of_the_host():
    for body in (over_a_range, in_a_branch_on_a_counter):
        assert not xla.lower(body, [[tf.constant(X)]] * 2).host_calls
    without = TPUStrategy(num_cores=2, soft_placement=False)
    np.testing.assert_array_equal(on_replica_0(without, over_a_range), np.outer([0, 1, 2], X))


def test_it_works_in_a_device_loop():
    strategy = TPUStrategy(num_cores=2)
    dataset = tf.data.Dataset.from_tensors(tf.constant(X)).repeat().batch(2)

    def step(context, x):
        context.set_last_step_output("all", tf.reduce_sum(over_a_range(x[0])), "MEAN")

    context = strategy.run_steps(step, iter(strategy.experimental_distribute_dataset(dataset)), iterations=2)
    assert float(context.last_step_outputs["all"]) == 18.0


def test_a_loop_of_a_thousand_iterations(two):
    def body(x):
        found = array()
        for i in tf.range(1000):
            found = found.write(i, x[0])
        return tf.reduce_sum(found.stack())

    assert on_replica_0(two, body) == 1000.0


def test_random_numbers_differ_by_replica_and_the_body_is_traced_twice():
    traces = []

    def body():
        traces.append(1)
        found = array()
        for i in tf.range(2):
            found = found.write(i, tf.random.uniform([]))
        return found.stack()

    one, two = TPUStrategy(num_cores=2).run(body).values
    assert len({*one.numpy(), *two.numpy()}) == 4
    assert len(traces) == 2


def test_a_function_that_does_not_do_the_same_each_time_is_checked_when_it_runs(two):
    sizes = iter([3, 2])

    def body(x):
        found = array()
        for i in range(next(sizes)):
            found = found.write(i, x)
        return found.stack()

    with pytest.raises(tf.errors.InvalidArgumentError, match="Pass the largest size"):
        on_replica_0(two, body)


def while_data_is_small(x):
    found, i = array(), 0
    while tf.reduce_sum(x) < 100.0:
        found = found.write(i, x)
        i += 1
        x *= 2.0
    return found.stack()


def in_a_branch_on_data(x):
    found = array()
    for i in tf.range(3):
        if x[i] > 1.5:
            found = found.write(i, x)
    return found.stack()


def stacked_before_it_has_grown(x):
    found = array().write(0, x)
    first = found.stack()
    return tf.concat([first, found.write(1, x).stack()], 0)


UNKNOWN = [while_data_is_small, in_a_branch_on_data, stacked_before_it_has_grown]


@pytest.mark.parametrize("body", UNKNOWN, ids=lambda body: body.__name__)
def test_where_the_size_is_unknown_a_write_beyond_the_size_raises(two, body):
    with pytest.raises(tf.errors.InvalidArgumentError, match="Pass the largest size") as raised:
        on_replica_0(two, body)
    assert is_in(body, raised.value.__notes__[0])


@pytest.mark.parametrize("body", UNKNOWN, ids=lambda body: body.__name__)
def test_where_the_size_is_unknown_and_nothing_can_check_it_is_an_error_before_the_run(body):
    with pytest.raises(LoweringError, match="Pass the largest size") as raised:
        on_replica_0(TPUStrategy(num_cores=2, soft_placement=False), body)
    assert is_in(body, str(raised.value))


def is_in(body, text):
    """Whether a text names a line of a body."""
    line = int(re.search(r"test_arrays_that_grow\.py:(\d+) in", text)[1])
    return 0 < line - body.__code__.co_firstlineno < 6


def test_a_batch_of_any_size_is_checked_when_it_runs():
    strategy = TPUStrategy(num_cores=2)

    @tf.function(input_signature=[tf.TensorSpec([None], tf.float32)])
    def body(x):
        found = array(4)
        for i in tf.range(tf.shape(x)[0]):
            found = found.write(i, x[i])
        return found.stack()

    np.testing.assert_array_equal(on_replica_0(strategy, body), [1.0, 2.0, 3.0, 0.0])
    with pytest.raises(tf.errors.InvalidArgumentError, match="Pass the largest size"):
        on_replica_0(strategy, body, [1.0] * 5)


def test_appending_at_the_size_of_the_array_is_an_error(two):
    def body(x):
        found = array()
        for value in x:
            found = found.write(found.size(), value)
        return found.stack()

    with pytest.raises(LoweringError, match=r"array.size\(\) at .*test_arrays_that_grow.py.* Count the elements"):
        on_replica_0(two, body)


def of_three():
    return tf.TensorArray(tf.float32, size=3)


def full(x):
    return of_three().unstack(x)


def guarded_by_the_counter(x):
    found = full(x)
    for i in tf.range(5):
        if i < 3:
            found = found.write(i, 2.0 * x[i])
    return found.stack()


def in_a_branch_that_the_data_does_not_take(x):
    found = full(x)
    if tf.reduce_sum(x) > 100.0:
        found = found.write(7, x[0])
    return 2.0 * found.stack()


def in_a_loop_that_the_data_does_not_enter(x):
    found = full(x)
    while tf.reduce_sum(x) > 100.0:
        found = found.write(7, x[0])
    return 2.0 * found.stack()


def by_an_index_of_the_data(x):
    return 2.0 * full(x).write(tf.cast(x[0], tf.int32), x[1]).write(1, x[1]).stack()


def by_map_fn_and_scan(x):
    return tf.map_fn(lambda each: 2.0 * each, x) + 0.0 * tf.scan(lambda a, b: a + b, x)


@pytest.mark.parametrize(
    "body",
    [
        guarded_by_the_counter,
        in_a_branch_that_the_data_does_not_take,
        in_a_loop_that_the_data_does_not_enter,
        by_map_fn_and_scan,
    ],
)
def test_arrays_that_do_not_grow_are_left_alone(one, body):
    np.testing.assert_array_equal(one.run(body, args=(tf.constant(X),)), [2.0, 4.0, 6.0])


def test_a_write_to_an_unknown_index_is_not_refused(one):
    assert one.run(by_an_index_of_the_data, args=(tf.constant(X),)).shape == (3,)


def test_gradients_through_an_array_that_does_not_grow_are_right(one):
    def body(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = tf.reduce_sum(guarded_by_the_counter(x) ** 2)
        return tape.gradient(loss, x)

    np.testing.assert_array_equal(one.run(body, args=(tf.constant(X),)), [8.0, 16.0, 24.0])


def in_a_python_loop(x):
    found = of_three()
    for i in range(4):
        found = found.write(i, x[0])
    return found.stack()


def in_a_loop_of_the_program(x):
    found = of_three()
    for i in tf.range(5):
        if i != 2:
            found = found.write(i, x[0])
    return found.stack()


def in_a_nested_function(x):
    @tf.function
    def inner(x):
        return full(x).write(3, x[0]).stack()

    return inner(x)


@pytest.mark.parametrize("body", [in_a_python_loop, in_a_loop_of_the_program, in_a_nested_function])
def test_a_write_beyond_an_array_that_does_not_grow_is_an_error(one, body):
    with pytest.raises(LoweringError, match=r"Index 3 is written at .* in a tf.TensorArray of size 3"):
        one.run(body, args=(tf.constant(X),))
