"""Large variables: on the devices alone until somebody on the host looks at them, and always what they should be."""

import os
import threading

import numpy as np
import pytest
import tensorflow as tf
from helpers import weights

import replica_engine

MANY = 1 << 15  # floats: enough for a variable to count as large


@pytest.fixture
def two():
    return replica_engine.TPUStrategy(num_cores=2)


def made(two, size=MANY, **kwargs):
    with two.scope():
        return tf.Variable(tf.ones([size]), **kwargs)


def add_one(variable):
    variable.assign_add(tf.ones_like(variable))


@pytest.mark.parametrize("pool", ["as on this machine", "in use"])
def test_nobody_pays_for_a_copy_on_the_host_but_who_looks(pool, programs):
    """One copy on each device. TensorFlow's pool, where it has one, keeps what a variable or two take while made."""
    env = dict(os.environ)
    if pool == "in use":
        env.pop("TF_ONEDNN_USE_SYSTEM_ALLOCATOR", None)
        env["TF_ENABLE_ONEDNN_OPTS"] = "1"
    *unseen, seen = programs.value(weights.copies, env=env)
    assert all(weights.REPLICAS - 0.5 < copies < weights.REPLICAS + 0.5 for copies in unseen)
    assert weights.REPLICAS + 0.5 < seen < weights.REPLICAS + 1.5


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64", "bool", "int8", "uint16", "complex64"])
def test_what_the_host_writes_arrives_whatever_its_dtype(two, dtype):
    first, second = (tf.cast(tf.range(2 * MANY) % 3 == rest, dtype) for rest in (0, 1))
    with two.scope():
        variable = tf.Variable(first)
    for value in (first, second):
        variable.assign(value)
        for found in (*on_devices(two, variable), variable):
            np.testing.assert_array_equal(tf.cast(found, tf.complex128), tf.cast(value, tf.complex128))


def on_devices(two, variable):
    return two.experimental_local_results(two.run(variable.read_value))


@pytest.mark.parametrize("value", [tf.ones([MANY]), np.ones([MANY], np.float32)], ids=["tensor", "array"])
def test_a_value_and_the_variable_that_has_it_are_two(two, value):
    variable = made(two)
    variable.assign(value)
    variable.assign_add(tf.ones([MANY]))
    variable.scatter_add(tf.IndexedSlices(tf.ones([1]), tf.constant([0])))
    assert variable.numpy()[:2].tolist() == on_devices(two, variable)[1].numpy()[:2].tolist() == [3.0, 2.0]
    assert np.all(np.asarray(value) == 1.0)


def test_variables_of_several_replicas_that_begin_with_one_value_part(two):
    variable = made(two, synchronization=tf.VariableSynchronization.ON_READ, aggregation=tf.VariableAggregation.SUM)
    first, second = two.experimental_local_results(variable)
    first.assign_add(tf.ones([MANY]))
    assert (first.numpy()[0], second.numpy()[0]) == (2.0, 1.0)
    two.run(add_one, args=(variable,))
    assert (first.numpy()[0], second.numpy()[0]) == (3.0, 2.0)


@pytest.mark.parametrize("looks_first", [False, True])
@pytest.mark.parametrize("by_replica", [False, True])
def test_what_the_host_sees_is_the_newest(two, looks_first, by_replica):
    spread = {"synchronization": tf.VariableSynchronization.ON_READ} if by_replica else {}
    variable = made(two, aggregation=tf.VariableAggregation.MEAN, **spread)
    if looks_first:
        assert variable.numpy()[0] == 1.0
    for steps in (1, 2, 3):
        two.run(add_one, args=(variable,))
        if steps == 2:
            assert variable.numpy()[0] == 3.0
    np.testing.assert_array_equal(variable.numpy(), np.full([MANY], 4.0, np.float32))


def test_another_function_is_compiled_while_the_host_has_nothing(two):
    variable = made(two)
    two.run(add_one, args=(variable,))
    total = two.run(lambda: tf.reduce_sum(variable))
    assert [float(each) for each in two.experimental_local_results(total)] == [2.0 * MANY] * 2
    assert variable.shape == tf.shape(variable) == [MANY]
    assert variable.numpy()[0] == 2.0


@pytest.mark.parametrize("value", ["assign", "checkpoint"])
def test_another_value_takes_the_place_of_one_that_nobody_saw(two, value, tmp_path):
    variable = made(two)
    path = tf.train.Checkpoint(variable=variable).write(str(tmp_path / "one"))
    two.run(add_one, args=(variable,))
    if value == "assign":
        variable.assign(tf.fill([MANY], 5.0))
    else:
        tf.train.Checkpoint(variable=variable).read(path).assert_consumed()
    two.run(add_one, args=(variable,))
    assert variable.numpy()[-1] == (6.0 if value == "assign" else 2.0)


@pytest.mark.parametrize("use", ["tf.function", "handle", "dataset"])
def test_every_way_to_look_sees_it(two, use):
    variable = made(two)
    two.run(add_one, args=(variable,))
    if use == "tf.function":
        seen = tf.function(lambda: tf.reduce_max(variable))()
    elif use == "handle":
        component = two.experimental_local_results(variable)[0]
        seen = tf.reduce_max(tf.raw_ops.ReadVariableOp(resource=component.handle, dtype=tf.float32))
    else:
        seen = next(iter(tf.data.Dataset.range(1).map(lambda _: tf.reduce_max(variable))))
    assert float(seen) == 2.0
    two.run(add_one, args=(variable,))
    assert variable.numpy()[0] == 3.0


def test_one_thread_reads_while_another_runs_steps(two):
    """It sees whole values, of one step or the next."""
    variable = made(two)
    over, seen = threading.Event(), []

    def look():
        while not over.is_set():
            seen.append(variable.numpy())

    reader = threading.Thread(target=look)
    two.run(add_one, args=(variable,))
    reader.start()
    try:
        for _ in range(100):
            two.run(add_one, args=(variable,))
    finally:
        over.set()
        reader.join()
    assert variable.numpy()[0] == 102.0
    assert all(value.shape == (MANY,) and value.min() == value.max() for value in seen)
    firsts = [value[0] for value in seen]
    assert firsts == sorted(firsts)


def test_one_thread_compiles_while_another_runs_steps(two):
    """TensorFlow takes the shapes of variables from the host, where steps free the values."""
    variables = [made(two) for _ in range(20)]
    over, results = threading.Event(), []

    def step():
        for variable in variables:
            add_one(variable)

    def compile_more():
        try:
            for number in range(8):
                total = two.run(lambda n=number: tf.add_n([tf.reduce_max(each) for each in variables]) * 0.0 + n)
                results.append(float(two.experimental_local_results(total)[0]))
        finally:
            over.set()

    two.run(step)
    compiling = threading.Thread(target=compile_more)
    compiling.start()
    steps = 1
    while not over.is_set():
        two.run(step)
        steps += 1
    compiling.join()
    assert results == list(range(8))
    assert all(variable.numpy()[-1] == 1.0 + steps for variable in variables)


def test_the_value_of_the_last_variable_is_let_go_of_too(programs):
    """TensorFlow keeps the memory of an array until it converts another one, which may never come."""
    assert programs.value(weights.grown_by_one_variable) < weights.REPLICAS - 0.5  # its value on the host is gone


def test_values_go_back_also_where_something_lies_behind_them(programs):
    """In the heap of the process they would stay with it: it keeps what is freed for the next launch."""
    assert programs.value(weights.grown_with_something_behind) < weights.REPLICAS + 0.3
