"""Steps inside a host tf.function, between reads and writes of their variables: all in program order."""

import pytest
import tensorflow as tf
from helpers.loop_steps import SUM


@pytest.fixture
def counter(two):
    return two.variable(0.0)


@pytest.fixture
def step(two, counter):
    """`step()` puts a run into the graph that adds 1.0 to the counter, and returns nothing."""

    def add():
        counter.assign_add(1.0)

    return lambda: two.strategy.run(add)


def floats(tensors):
    return [float(tensor) for tensor in tensors]


def test_reads_see_the_steps_before_them_and_not_those_after(counter, step):
    @tf.function
    def program():
        before = counter * 1.0
        step()
        between = counter * 1.0
        step()
        step()
        return before, between, counter * 1.0

    assert floats(program()) == [0.0, 1.0, 3.0]
    assert floats(program()) == [3.0, 4.0, 6.0]
    step()
    assert floats(program()) == [7.0, 8.0, 10.0]


def test_writes_are_seen_by_the_steps_after_them_and_not_by_those_before(counter, step):
    @tf.function
    def program():
        step()
        counter.assign(counter * 10.0)
        step()
        counter.assign(counter * 10.0)
        step()
        return counter.read_value()

    assert float(program()) == 111.0
    assert float(program()) == 11211.0
    step()
    assert counter.numpy() == 11212.0


def test_a_write_that_nobody_reads_is_seen_by_the_next_step(two, counter):
    @tf.function
    def program(x):
        counter.assign(x)
        return two.strategy.run(lambda: counter * 2.0)

    for x in (3.0, 4.0):
        assert two.each(program(tf.constant(x))) == [2.0 * x] * 2


def test_a_step_takes_what_was_read_before_it(two, counter, step):
    @tf.function
    def program():
        before = counter.read_value()
        step()
        return two.strategy.run(lambda x: x + 10.0 * counter, args=(before,))

    assert two.each(program()) == [10.0] * 2
    assert two.each(program()) == [21.0] * 2


def test_loops_keep_the_order_of_each_iteration(counter, step):
    @tf.function
    def program(n):
        seen = tf.TensorArray(tf.float32, n)
        for i in tf.range(n):
            before = counter * 1.0
            step()
            after = counter * 1.0
            counter.assign(counter * 2.0)
            seen = seen.write(i, [before, after, counter])
        return seen.stack(), counter.read_value()

    expected, value = [], 0.0
    for _ in range(12):
        expected.append([value, value + 1.0, 2.0 * value + 2.0])
        value = 2.0 * value + 2.0
    seen, last = program(12)
    assert seen.numpy().tolist() == expected
    assert float(last) == value


@pytest.mark.parametrize("order", ["read first", "step first"])
def test_loops_that_read_on_one_side_of_the_step_only(counter, step, order):
    @tf.function
    def program(n):
        total = 0.0
        for _ in tf.range(n):
            if order == "read first":
                total += counter
                step()
            else:
                step()
                total += counter
        return total

    assert float(program(10)) == (45.0 if order == "read first" else 55.0)
    assert float(program(10)) == (145.0 if order == "read first" else 155.0)


def test_branches_take_their_own_steps(counter, step):
    @tf.function
    def program(taken):
        before = counter * 1.0
        if taken:
            step()
            inside = counter * 1.0
        else:
            counter.assign_sub(10.0)
            inside = counter * 1.0
        step()
        return before, inside, counter * 1.0

    assert floats(program(tf.constant(True))) == [0.0, 1.0, 2.0]
    assert floats(program(tf.constant(False))) == [2.0, -8.0, -7.0]
    assert floats(program(tf.constant(True))) == [-7.0, -6.0, -5.0]


def test_functions_in_functions_keep_the_order(counter, step):
    read = tf.function(lambda: counter * 1.0)
    inner_step = tf.function(step)

    @tf.function
    def double():
        counter.assign(counter * 2.0)

    @tf.function
    def program():
        seen = [read()]
        inner_step()
        seen.append(read())
        double()
        inner_step()
        seen.append(read())
        step()
        double()
        return [*seen, read(), counter * 1.0]

    assert floats(program()) == [0.0, 1.0, 3.0, 8.0, 8.0]
    assert floats(program()) == [8.0, 9.0, 19.0, 40.0, 40.0]


@pytest.mark.parametrize("alone", ["before", "after", "never"])
def test_a_step_function_is_the_same_alone_and_inside_another(counter, step, alone):
    """A tf.function is traced once, wherever it is first called."""
    step_function = tf.function(step)
    if alone == "before":
        step_function()
        counter.assign(0.0)

    @tf.function
    def program():
        before = counter * 1.0
        step_function()
        between = counter * 1.0
        counter.assign(counter * 10.0)
        step_function()
        return before, between, counter * 1.0

    assert floats(program()) == [0.0, 1.0, 11.0]
    if alone == "after":
        step_function()
        counter.assign_sub(1.0)
    assert floats(program()) == [11.0, 12.0, 121.0]
    assert counter.numpy() == 121.0


def test_a_step_function_serves_two_programs(counter, step):
    """The second one uses the variable on the host, the first one did not."""
    step_function = tf.function(step)
    tf.function(lambda: step_function())()

    @tf.function
    def program():
        step_function()
        return counter * 1.0

    assert float(program()) == 2.0
    assert float(program()) == 3.0


def test_a_tape_in_a_function_spans_a_step(counter, step):
    """The value that was read is the one the gradient is of."""

    @tf.function
    def program():
        with tf.GradientTape() as tape:
            loss = counter * counter
            step()
        return tape.gradient(loss, counter), counter * 1.0

    counter.assign(3.0)
    assert floats(program()) == [6.0, 4.0]
    assert floats(program()) == [8.0, 5.0]


def test_a_tape_that_reads_after_a_step(counter, step):
    @tf.function
    def program():
        step()
        with tf.GradientTape() as tape:
            loss = counter * counter
        return tape.gradient(loss, counter)

    assert float(program()) == 2.0
    assert float(program()) == 4.0


def test_a_tape_around_a_function_with_a_step(counter, step):
    @tf.function
    def program():
        step()
        return counter * counter

    for count in (1, 2):
        with tf.GradientTape() as tape:
            loss = program()
        assert float(loss) == count**2
        assert float(tape.gradient(loss, counter)) == 2.0 * count


def test_on_read_variables_in_a_function_with_steps(two):
    total = two.variable(0.0, SUM, on_read=True)

    def add(x):
        total.assign_add(x)

    @tf.function
    def program(x):
        seen = []
        for _ in range(2):
            two.strategy.run(add, args=(x,))
            seen.append(total.read_value())
        total.assign(0.0)
        two.strategy.run(add, args=(x,))
        return [*seen, total.read_value()]

    x = two.spread(lambda i: 10.0 * (i + 1))
    assert floats(program(x)) == [30.0, 60.0, 30.0]
    assert floats(program(x)) == [60.0, 90.0, 30.0]
    assert two.components(total) == [10.0, 20.0]


def test_values_that_differ_by_replica_outlive_reads_in_a_function(two):
    variable = two.variable(0.0)

    def add(x):
        variable.assign_add(x)

    @tf.function
    def program(x):
        for _ in tf.range(3):
            two.strategy.run(add, args=(x,))
            tf.debugging.assert_greater(variable, 0.0)
        return variable * 1.0

    assert float(program(two.spread(lambda i: i + 1.0))) == 3.0
    assert two.components(variable) == [3.0, 6.0]


def test_variables_of_no_strategy_in_a_function_with_steps(two, counter, step):
    plain = tf.Variable(0.0)

    def use():
        plain.assign_add(1.0)
        counter.assign_add(plain)

    @tf.function
    def program():
        plain.assign_add(10.0)
        two.strategy.run(use)
        first = plain * 1.0
        plain.assign_add(100.0)
        two.strategy.run(use)
        return first, plain * 1.0, counter * 1.0

    assert floats(program()) == [11.0, 112.0, 123.0]


def test_variables_made_in_the_first_step_of_a_function(two):
    class Lazy:
        weight = None

        def __call__(self):
            if self.weight is None:
                self.weight = tf.Variable(5.0)
            self.weight.assign_add(1.0)

    lazy = Lazy()

    @tf.function
    def program():
        two.strategy.run(lazy)
        seen = lazy.weight * 1.0
        two.strategy.run(lazy)
        return seen, lazy.weight * 1.0

    assert floats(program()) == [6.0, 7.0]
    assert floats(program()) == [8.0, 9.0]


def test_steps_of_two_strategies_in_one_function(two, counter, step, replicas):
    four = replicas(4)
    other = four.variable(0.0, SUM)

    def add(x):
        own = tf.cast(tf.distribute.get_replica_context().replica_id_in_sync_group, x.dtype)
        other.assign_add(x + 0.0 * own)  # the sum of what all replicas share is refused

    @tf.function
    def program():
        step()
        four.strategy.run(add, args=(counter * 1.0,))
        step()
        return counter * 1.0, other * 1.0

    assert floats(program()) == [2.0, 4.0]
    assert floats(program()) == [4.0, 16.0]
