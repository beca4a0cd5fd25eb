"""Host calls of compiled bodies: how they may not be made, and what comes out of them."""

import logging

import tensorflow as tf
from helpers.golden import shows

from replica_engine import TPUStrategy, xla
from replica_engine.errors import HostAccessError, HostResultError, NestedHostCallError
from replica_engine.errors.program_errors import moved_to_host


@shows(NestedHostCallError)
def test_a_host_call_in_a_host_call():
    def save(x):
        tf.print("saving", x)

    def report(x):
        if xla.replica_id() == 0:
            xla.outside_compilation(save, x)

    def step(x):
        xla.outside_compilation(report, 2.0 * x)

    xla.replicate(step, inputs=[[tf.constant(1.0)], [tf.constant(2.0)]])


@shows(HostResultError, "no_tensor")
def test_a_host_function_that_returns_an_object():
    strategy = TPUStrategy(num_cores=1)

    @xla.returns({"mean": tf.TensorSpec([], tf.float32), "names": None})
    def describe(x):
        return {"mean": tf.reduce_mean(x), "names": {"first"}}

    def step(x):
        return xla.outside_compilation(describe, x)["mean"]

    strategy.run(step, args=(tf.constant([1.0, 2.0]),))


@shows(HostResultError, "host_only")
def test_a_host_function_that_returns_text():
    strategy = TPUStrategy(num_cores=2)

    def describe(x):
        return {"mean": tf.reduce_mean(x), "text": tf.strings.as_string(x)}

    def step(x):
        return xla.outside_compilation(describe, x)["mean"]

    strategy.run(step, args=(tf.constant([1.0, 2.0]),))


@shows(HostResultError, "unknown_shape")
def test_a_host_function_that_is_said_to_return_any_shape():
    strategy = TPUStrategy(num_cores=2)

    @xla.returns(tf.TensorSpec([None], tf.float32))
    def large(x):
        return tf.boolean_mask(x, x > 1.0)

    def step(x):
        return tf.reduce_sum(xla.outside_compilation(large, x))

    strategy.run(step, args=(tf.constant([1.0, 2.0]),))


@shows(HostResultError, "not_traced")
def test_a_host_function_that_needs_values():
    strategy = TPUStrategy(num_cores=2)

    def middle(x):
        return sorted(x.numpy())[1]

    def step(x):
        return x - xla.outside_compilation(middle, x)

    strategy.run(step, args=(tf.constant([1.0, 2.0, 3.0]),))


@shows(HostResultError, "not_traced.returned")
def test_a_host_function_without_results_whose_call_is_returned():
    losses = []

    def step(x):
        return xla.outside_compilation(lambda loss: losses.append(float(loss)), x * x)

    xla.replicate(step, inputs=[[tf.constant(1.0)], [tf.constant(2.0)]])


@shows(HostResultError, "not_fixed")
def test_a_host_function_that_returns_what_a_mask_leaves():
    def large(x):
        return tf.boolean_mask(x, x > 1.0)

    def step(x):
        return tf.reduce_sum(xla.outside_compilation(large, x))

    xla.replicate(step, inputs=[[tf.constant([0.0, 1.0])], [tf.constant([1.0, 2.0])]])


@shows(HostResultError, "other_structure")
def test_a_host_function_that_returns_something_now_and_then():
    @xla.returns(None)
    def above_one(x):
        if x.numpy() > 1.0:
            return x

    def step(x):
        xla.outside_compilation(above_one, x)

    xla.replicate(step, inputs=[[tf.constant(1.0)], [tf.constant(2.0)]])


@shows(HostResultError, "other_tensor")
def test_a_host_function_that_returns_another_dtype():
    @xla.returns(tf.TensorSpec([], tf.float32))
    def rounded(x):
        return x if xla.replica_id() == 0 else round(float(x))

    def step(x):
        return xla.outside_compilation(rounded, x) * 2.0

    xla.replicate(step, inputs=[[tf.constant(1.5)], [tf.constant(2.5)]])


@shows(HostResultError, "other_shape.declared")
def test_a_python_function_that_returns_another_shape_than_the_body_says():
    def step(x):
        large = tf.numpy_function(lambda x: x[x > 1.0], [x], tf.float32)
        return tf.reduce_sum(tf.ensure_shape(large, [1]))

    xla.replicate(step, inputs=[[tf.constant([1.0, 2.0])], [tf.constant([2.0, 3.0])]])


@shows(HostAccessError)
def test_a_host_function_that_uses_a_variable():
    strategy = TPUStrategy(num_cores=2)
    with strategy.scope():
        steps = tf.Variable(0, name="steps")

    def report(loss):
        if xla.replica_id() == 0:
            tf.print("step", steps, "loss", loss)

    def step(x):
        steps.assign_add(1)
        xla.outside_compilation(report, x * x)

    strategy.run(step, args=(tf.constant(1.0),))


@shows("note_host_failure")
def test_a_host_function_that_fails():
    def check(loss):
        if loss > 2.0:
            raise ValueError(f"a loss of {float(loss)}")

    def step(x):
        for _ in tf.range(3):
            x *= x
            xla.outside_compilation(check, x)
        return x

    xla.replicate(step, inputs=[[tf.constant(1.0)], [tf.constant(1.3)]])


@shows(moved_to_host)
def test_ops_that_run_on_the_host_by_themselves():
    logging.getLogger("replica_engine").setLevel(logging.INFO)
    strategy = TPUStrategy(num_cores=2)

    def step(x):
        for _ in tf.range(2):
            tf.print("x is", x, output_stream="file:///dev/null")
            x = x + 1.0
        return tf.strings.as_string(x)

    results = strategy.run(tf.function(step), args=(tf.constant(1.0),))
    print(strategy.experimental_local_results(results))
