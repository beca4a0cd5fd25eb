"""Values of variables live on the devices between steps, and nobody on the host ever sees an old one."""

import gc
import weakref

import numpy as np
import pytest
import tensorflow as tf

SUM = tf.VariableAggregation.SUM


@pytest.fixture
def counter(two):
    """A variable that `two.add(counter)` counts up; 0.0 on both sides."""
    return two.variable(0.0)


# Ways to read in eager mode.

READERS = {
    "numpy": lambda v: v.numpy(),
    "read_value": lambda v: v.read_value(),
    "value": lambda v: v.value(),
    "convert_to_tensor": tf.convert_to_tensor,
    "array": np.asarray,
    "add": lambda v: v + 0.0,
    "reversed add": lambda v: 0.0 + v,
    "op": tf.identity,
    "compare": lambda v: tf.where(v == v + 0.0, v, -1.0),
    "slice": lambda v: v[...],
    "format": lambda v: float(str(v).split("numpy=")[1].split(",")[0].split(">")[0].rstrip(")}\n ")),
    "handle": lambda v: tf.raw_ops.ReadVariableOp(resource=v.handle, dtype=tf.float32),
    "component": lambda v: v.values[1].numpy(),
    "primary": lambda v: v._primary.read_value(),
}


@pytest.mark.parametrize("read", READERS.values(), ids=READERS.keys())
def test_eager_code_reads_what_the_last_step_wrote(two, counter, read):
    for step in range(1, 4):
        two.add(counter)
        assert float(read(counter)) == step


def test_rows_are_read_as_the_last_step_wrote_them(two):
    table = two.variable(np.arange(6.0).reshape(3, 2))
    two.add(table, 10.0)
    assert tf.gather(table, [2, 0]).numpy().tolist() == [[14.0, 15.0], [10.0, 11.0]]
    two.add(table, 10.0)
    assert tf.nn.embedding_lookup(table, [1]).numpy().tolist() == [[22.0, 23.0]]
    two.add(table, 10.0)
    assert tf.gather_nd(table, [[2, 1]]).numpy().tolist() == [35.0]
    two.add(table, 10.0)
    assert table[1, 0].numpy() == 42.0


def test_what_an_assignment_returned_is_the_variable_as_it_is_now(two, counter):
    """As with plain variables of TensorFlow."""
    kept = counter.assign(5.0)
    two.add(counter)
    assert float(kept.numpy()) == 6.0


def test_a_component_that_a_step_returns_is_its_variable(two, counter):
    assert two.strategy.run(lambda: counter.values[0]) is counter


def test_a_value_once_read_stays_as_it_was(two, counter):
    """It is not a view of the memory that the next step writes to."""
    large = two.variable(tf.zeros([1 << 16]))
    two.add(large)
    tensor, array = tf.convert_to_tensor(large), large.numpy()
    two.add(large)
    assert float(tf.reduce_max(tensor)) == array.max() == 1.0
    assert large.numpy().min() == 2.0


@pytest.mark.parametrize("form", ["eager", "function"])
def test_a_tape_around_a_read_sees_the_last_step(two, counter, form):
    square = lambda: counter * counter  # noqa: E731
    square = tf.function(square) if form == "function" else square
    for step in range(1, 4):
        two.add(counter)
        with tf.GradientTape() as tape:
            loss = square()
        assert float(tape.gradient(loss, counter)) == 2.0 * step


# Host functions: they run without Python, so nothing could look after a read in them.


@pytest.mark.parametrize("traced", ["before", "after"])
@pytest.mark.parametrize("jit", [False, True])
def test_a_host_function_reads_what_the_last_step_wrote(two, counter, traced, jit):
    read = tf.function(lambda: counter * 10.0, jit_compile=jit)
    if traced == "before":
        assert float(read()) == 0.0
    for step in range(1, 4):
        two.add(counter)
        assert float(read()) == 10.0 * step


def test_steps_see_what_a_host_function_wrote(two, counter):
    write = tf.function(lambda: counter.assign(100.0).read_value())
    write()
    two.add(counter)
    assert float(counter.numpy()) == 101.0
    assert float(write()) == 100.0
    two.add(counter)
    assert float(counter.numpy()) == 101.0


def test_a_host_function_writes_on_top_of_the_last_step(two, counter):
    @tf.function
    def double():
        counter.assign(counter * 2.0)
        return counter.read_value()

    expected = 0.0
    for _ in range(3):
        two.add(counter)
        expected = 2.0 * (expected + 1.0)
        assert float(double()) == expected


def test_functions_in_functions_read_and_write(two, counter):
    @tf.function
    def read():
        return counter.read_value()

    @tf.function
    def add():
        counter.assign_add(10.0)

    @tf.function
    def outer():
        before = read()
        add()
        return before, read()

    two.add(counter)
    assert [float(each) for each in outer()] == [1.0, 11.0]
    two.add(counter)
    assert [float(each) for each in outer()] == [12.0, 22.0]
    two.add(counter)
    assert float(read()) == 23.0
    add()
    two.add(counter)
    assert float(counter.numpy()) == 34.0


def test_a_variable_as_the_argument_of_a_function(two, counter):
    @tf.function
    def add(variable):
        variable.assign_add(10.0)
        return variable.read_value()

    two.add(counter)
    assert float(add(counter)) == 11.0
    two.add(counter)
    assert float(add(counter)) == 22.0


@pytest.mark.parametrize("taken", [True, False])
def test_branches_and_loops_on_the_host_read_and_write(two, counter, taken):
    @tf.function
    def branch(taken):
        return tf.cond(taken, lambda: counter.assign_add(10.0).read_value(), lambda: counter * 100.0)

    @tf.function
    def loop(n):
        total = 0.0
        for _ in tf.range(n):
            counter.assign_add(1.0)
            total += counter
        return total

    for _ in range(2):
        before = float(counter.numpy())
        two.add(counter)
        assert float(branch(tf.constant(taken))) == (before + 11.0 if taken else (before + 1.0) * 100.0)
        before = float(counter.numpy())
        two.add(counter)
        assert float(loop(3)) == 3 * before + 1.0 * 3 + 6.0
        assert float(counter.numpy()) == before + 4.0


def test_a_tape_in_a_host_function_sees_the_last_step(two, counter):
    @tf.function
    def gradient():
        with tf.GradientTape() as tape:
            loss = counter * counter * counter
        return tape.gradient(loss, counter)

    for step in range(1, 4):
        two.add(counter)
        assert float(gradient()) == 3.0 * step**2


def test_variables_of_two_kinds_in_one_function(two, counter):
    """On-read variables have a value for each replica on the host, a plain variable has nothing to do with us."""
    own, plain = two.variable(0.0, SUM, on_read=True), tf.Variable(0.0)

    @tf.function
    def both():
        plain.assign_add(1.0)
        return counter + own + plain

    for step in range(1, 4):
        two.strategy.run(lambda x: own.assign_add(x), args=(two.spread(lambda i: 10.0 * (i + 1)),))
        two.add(counter)
        assert float(both()) == step * (1.0 + 30.0 + 1.0)


# What the host writes is there in the next step.

WRITERS = {
    "assign": (lambda v: v.assign([5.0, 6.0, 7.0]), [5.0, 6.0, 7.0]),
    "assign_add": (lambda v: v.assign_add([1.0, 0.0, 0.0]), [2.0, 1.0, 1.0]),
    "assign_sub": (lambda v: v.assign_sub([1.0, 0.0, 0.0]), [0.0, 1.0, 1.0]),
    "scatter_add": (lambda v: v.scatter_add(tf.IndexedSlices([5.0], [1])), [1.0, 6.0, 1.0]),
    "scatter_update": (lambda v: v.scatter_update(tf.IndexedSlices([5.0], [2])), [1.0, 1.0, 5.0]),
    "scatter_min": (lambda v: v.scatter_min(tf.IndexedSlices([-5.0], [2])), [1.0, 1.0, -5.0]),
    "slice": (lambda v: v[1:].assign([8.0, 9.0]), [1.0, 8.0, 9.0]),
    "component": (lambda v: v._primary.assign([3.0, 3.0, 3.0]), [3.0, 3.0, 3.0]),
    "handle": (
        lambda v: tf.raw_ops.AssignVariableOp(resource=v.handle, value=tf.constant([4.0, 4.0, 4.0])),
        [4.0, 4.0, 4.0],
    ),
    "function": (tf.function(lambda v: v.scatter_add(tf.IndexedSlices([5.0], [1]))), [1.0, 6.0, 1.0]),
}


@pytest.mark.parametrize(("write", "expected"), WRITERS.values(), ids=WRITERS.keys())
def test_the_next_step_sees_what_the_host_wrote(two, write, expected):
    variable = two.variable([0.0, 0.0, 0.0])
    two.add(variable)
    write(variable)
    assert two.each(two.strategy.run(lambda: variable.read_value())) == [expected] * 2
    two.add(variable)
    assert two.components(variable) == [[each + 1.0 for each in expected]] * 2


@pytest.mark.parametrize("size", [1, 1000, 1 << 18])
def test_steps_write_to_memory_of_their_own(replicas, size):
    """What the host wrote goes to all devices at once, perhaps without a copy; steps update in place."""
    four = replicas(4)
    variable = four.variable(tf.zeros([size]))
    value = np.full([size], 5.0, np.float32)
    for _ in range(2):
        variable.assign(value)
        four.strategy.run(lambda x: variable.assign_add(x * variable), args=(four.spread(lambda i: i + 1.0),))
        found = [one.numpy() for one in four.strategy.experimental_local_results(variable)]
        assert [(one.min(), one.max()) for one in found] == [(5.0 * (i + 2),) * 2 for i in range(4)]
    assert value.min() == value.max() == 5.0


# Variables made in the first run.


class Lazy:
    """Makes its variables when first called, as layers and optimizers do."""

    def __init__(self):
        self.weight = self.slot = None

    def __call__(self, x):
        if self.weight is None:
            self.weight = tf.Variable(tf.fill([3], 2.0), name="weight")
            self.slot = tf.Variable(tf.zeros_like(self.weight), name="slot", trainable=False)
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(self.weight * x)
        gradient = tf.distribute.get_replica_context().all_reduce("SUM", tape.gradient(loss, self.weight))
        self.slot.assign(0.5 * self.slot + gradient)
        self.weight.assign_sub(self.slot)
        return loss


@pytest.mark.parametrize("form", ["eager", "function"])
def test_variables_made_in_the_first_run_are_on_the_devices(two, form):
    lazy = Lazy()
    step = lambda x: two.strategy.run(lazy, args=(x,))  # noqa: E731
    if form == "function":
        step = tf.function(step)
    weight, slot = 2.0, 0.0
    x = two.spread(lambda i: [i + 1.0] * 3)
    for _ in range(3):
        losses = two.each(step(x))
        assert losses == [3 * weight, 6 * weight]
        slot = 0.5 * slot + 3.0
        weight -= slot
        assert lazy.weight.numpy().tolist() == [weight] * 3
        assert two.components(lazy.slot) == [[slot] * 3] * 2
    lazy.weight.assign([1.0, 1.0, 1.0])
    assert two.each(step(x)) == [3.0, 6.0]


def test_a_dropped_variable_is_freed(two):
    two.add(variable := two.variable(tf.zeros([10])))
    gone = weakref.ref(variable._primary)
    del variable
    two.strategy = None  # its programs know the functions that they were made of, and those the variable
    gc.collect()
    assert gone() is None
