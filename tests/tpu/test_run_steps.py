"""Device loops: many steps in one launch come to what the same steps come to one at a time.

What goes into the steps is in test_step_inputs.py.
"""

import concurrent.futures
import contextlib
import gc
import itertools
import signal
import threading
import time
import types
import weakref

import keras
import numpy as np
import pytest
import tensorflow as tf

from replica_engine import xla
from replica_engine.errors import LoweringError, VariableCreationError
from replica_engine.pjrt.executable import Executable
from replica_engine.testing import no_leaked_threads

SUM = tf.VariableAggregation.SUM
MEAN = tf.VariableAggregation.MEAN
FIRST = tf.VariableAggregation.ONLY_FIRST_REPLICA
SCALAR = tf.TensorSpec([], tf.float32)


@pytest.fixture(autouse=True)
def _feeding_threads_go():
    with no_leaked_threads(grace=2.0, prefix="replica_engine: inputs"):
        yield


def numbers(count, start=0):
    """That many batches, 0.0, 1.0, ..., each the same on all replicas."""
    return [np.float32(start + number) for number in range(count)]


def for_ever():
    """Batches without end, the same on all replicas."""
    return itertools.repeat(np.float32(1.0))


def total_of(replicas):
    """A variable, and a step that adds its input to it."""
    total = replicas.variable(0.0, SUM)

    def step(context, x):
        total.assign_add(x)
        context.set_last_step_output("x", x)

    return total, step


def replica_context():
    return tf.distribute.get_replica_context()


# One launch.


def test_steps_run_in_one_launch_and_are_compiled_once(two, launched):
    """For any number of them, and a step that is defined anew each time."""
    total = two.variable(0.0, SUM)
    before = xla.counts()
    for iterations in (1, 5, 3):

        def step(context, x):
            total.assign_add(x)

        two.strategy.run_steps(step, numbers(iterations), iterations)
    assert total.numpy() == 2 * (0 + 0 + 1 + 2 + 3 + 4 + 0 + 1 + 2)
    assert launched() == 3
    counts = xla.counts() - before
    assert (counts.traces, counts.lowerings, counts.compiles) == (1, 1, 1)


def test_steps_per_run_is_how_many_steps_if_it_is_not_said(replicas):
    some = replicas(2, steps_per_run=3)
    total, step = total_of(some)
    batches = iter(numbers(10))
    extended = some.strategy.extended
    assert some.strategy.run_steps(step, batches).steps == 3
    assert extended.experimental_run_steps_on_iterator(lambda context, x: None, batches).steps == 3
    assert some.strategy.run_steps(step, batches, 2).steps == 2
    assert total.numpy() == 2 * (0 + 1 + 2 + 6 + 7)


def test_a_step_may_do_nothing_and_take_nothing(two, launched):
    assert two.strategy.run_steps(lambda context: None, itertools.repeat(()), 4).steps == 4
    assert two.strategy.run_steps(lambda context, x: None, itertools.repeat(None), 4).steps == 4
    assert launched() == 2


def test_control_flow_of_a_step_is_converted_as_it_is_by_run(two):
    def collatz(x):
        steps = 0
        while x > 1.0:
            if x % 2.0 == 0.0:
                x /= 2.0
            else:
                x = 3.0 * x + 1.0
            steps += 1
        return steps

    def step(context, x):
        context.set_last_step_output("steps", collatz(x))

    assert two.each(two.strategy.run(collatz, args=(tf.constant(27.0),))) == [111, 111]
    for fn in (step, tf.function(step)):
        context = two.strategy.run_steps(fn, [np.float32(27.0)], 1)
        assert two.each(context.last_step_outputs["steps"]) == [111, 111]


# The same numbers.


class Training:
    """A training loop with its own optimizer, counters of all kinds and collectives."""

    def __init__(self, replicas):
        self.weight = replicas.variable([[0.1], [-0.2], [0.3]])
        self.velocity = replicas.variable(tf.zeros([3, 1]))
        self.seen = replicas.variable(0, SUM)
        self.largest = replicas.variable(0.0, FIRST)
        self.loss = replicas.variable(0.0, SUM, on_read=True)
        self.average = replicas.variable(0.0, MEAN, on_read=True)
        self.gathered = replicas.variable(tf.zeros([replicas.size, 3]))
        self.state = {}

    def step(self, features, labels):
        if not self.state:
            self.state["steps"] = tf.Variable(0, aggregation=FIRST)
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((tf.tanh(features @ self.weight) - labels) ** 2)
        gradient = replica_context().all_reduce("MEAN", tape.gradient(loss, self.weight))
        self.velocity.assign(0.9 * self.velocity + gradient)
        self.weight.assign_sub(0.1 * self.velocity)
        self.seen.assign_add(tf.shape(features)[0])
        self.largest.assign(tf.maximum(self.largest, replica_context().all_reduce("MAX", loss)))
        self.loss.assign_add(loss)
        self.average.assign(0.5 * self.average + 0.5 * loss)
        self.gathered.assign(replica_context().all_gather(features[:1], axis=0))
        self.state["steps"].assign_add(1)

    def variables(self, replicas):
        """Their values on each replica."""
        every = [*vars(self).values(), *self.state.values()]
        return {v.name: replicas.components(v) for v in every if isinstance(v, tf.Variable)}


def shares(replicas, steps):
    """An iterator with a share of each batch for each replica."""
    random = np.random.default_rng(0)
    x = random.normal(size=(steps * 4 * replicas.size, 3)).astype("float32")
    y = random.normal(size=(steps * 4 * replicas.size, 1)).astype("float32")
    dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(4 * replicas.size, drop_remainder=True)
    return iter(replicas.strategy.experimental_distribute_dataset(dataset))


@pytest.mark.parametrize("size", [1, 4])
def test_a_training_loop_comes_to_the_same_numbers_as_step_by_step(replicas, size, launched):
    one_by_one, looped = replicas(size), replicas(size)
    expected, found = Training(one_by_one), Training(looped)
    for batch in shares(one_by_one, 7):
        one_by_one.strategy.run(expected.step, args=batch)
    assert launched() == 7

    batches = shares(looped, 7)
    for iterations in (4, 3):
        looped.strategy.run_steps(lambda context, *batch: found.step(*batch), batches, iterations)
    assert launched() == 9
    wanted, values = expected.variables(one_by_one), found.variables(looped)
    assert len(values) == len(wanted)
    for one, other in zip(values.values(), wanted.values(), strict=True):
        # XLA may fuse a loop's body in another way: a few units in the last place (6e-8) a step.
        np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-7)


def test_a_keras_optimizer_that_is_built_in_the_first_step_trains_as_step_by_step(two, replicas):
    def build(some):
        keras.utils.set_random_seed(1)
        with some.strategy.scope():
            model = keras.Sequential([keras.Input((3,)), keras.layers.Dropout(0.3), keras.layers.Dense(1)])
            optimizer = keras.optimizers.SGD(0.05, momentum=0.9)

        def train(x, y):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((model(x, training=True) - y) ** 2) / some.size
            gradients = tape.gradient(loss, model.trainable_variables)
            optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
            return loss

        return model, optimizer, train

    model, optimizer, train = build(two)
    for batch in shares(two, 5):
        loss = two.strategy.run(train, args=batch)

    other = replicas(2)
    looped_model, looped_optimizer, looped_train = build(other)

    def step(context, x, y):
        context.set_last_step_output("loss", looped_train(x, y))

    context = other.strategy.run_steps(step, shares(other, 5), 5)
    np.testing.assert_allclose(other.each(context.last_step_outputs["loss"]), two.each(loss), rtol=1e-5)
    assert int(looped_optimizer.iterations.numpy()) == int(optimizer.iterations.numpy()) == 5
    for one, expected in zip(looped_optimizer.variables, optimizer.variables, strict=True):
        np.testing.assert_allclose(one.numpy(), expected.numpy(), rtol=1e-5, atol=1e-7)
    for one, expected in zip(looped_model.get_weights(), model.get_weights(), strict=True):
        np.testing.assert_allclose(one, expected, rtol=1e-5, atol=1e-7)


def test_random_ops_draw_what_they_draw_step_by_step(two):
    """To the bit; and steps of both kinds take turns in one stream."""
    draws = two.variable(tf.zeros([6, 12]), on_read=True, aggregation=SUM)
    count = two.variable(0, FIRST)

    def draw():
        drawn = [tf.random.uniform([4]), tf.nn.dropout(tf.ones([4]), 0.5)]
        drawn.append(tf.cast(tf.random.uniform([4], 0, 1000, tf.int32), tf.float32))
        draws.assign(tf.tensor_scatter_nd_update(draws, [[count]], [tf.concat(drawn, 0)]))
        count.assign_add(1)

    def drawn():
        count.assign(0)
        return [one.copy() for one in two.components(draws)]

    tf.random.set_seed(3)
    for _ in range(6):
        two.strategy.run(draw)
    expected = drawn()

    def loop(iterations):
        two.strategy.run_steps(lambda context: draw(), itertools.repeat(()), iterations)

    tf.random.set_seed(3)
    loop(6)
    assert drawn() == expected
    tf.random.set_seed(3)
    loop(2)
    two.strategy.run(draw)
    loop(3)
    assert drawn() == expected
    rows = [tuple(row) for one in expected for row in one]
    assert len(set(rows)) == 12


def test_variables_that_the_first_step_creates_are_there_in_the_next_ones(two):
    made = types.SimpleNamespace(mirrored=None)

    def step(context, x):
        if made.mirrored is None:
            made.mirrored = tf.Variable(tf.ones([2]))
            made.own = tf.Variable(0.0, synchronization=tf.VariableSynchronization.ON_READ, aggregation=SUM)
        made.mirrored.assign_add(x + made.mirrored)
        made.own.assign_add(tf.cast(replica_context().replica_id_in_sync_group, tf.float32))

    before = xla.counts()
    two.strategy.run_steps(step, [tf.ones([2])] * 3, 3)
    two.strategy.run_steps(step, [tf.ones([2])] * 2, 2)
    assert (xla.counts() - before).compiles == 1
    assert made.mirrored.numpy().tolist() == [63.0, 63.0]  # 2 * (1 + x) - 1 each time
    assert two.components(made.own) == [0.0, 5.0]


def test_a_step_that_creates_variables_each_time_is_refused(two):
    with pytest.raises(VariableCreationError, match="each time it runs"):
        two.strategy.run_steps(lambda context, x: tf.Variable(1.0).assign_add(x), numbers(2), 2)


def test_what_the_host_assigns_between_loops_counts(two):
    total, step = total_of(two)
    two.strategy.run_steps(step, numbers(3), 3)
    total.assign(100.0)
    two.strategy.run_steps(step, numbers(3), 3)
    two.strategy.run(lambda: total.assign_add(total * 0.0 + 1.0))
    assert total.numpy() == 108.0


# What steps pass out.

BOTH = pytest.mark.parametrize("context", ["replica", "cross-replica"])


def looped(replicas, context, step, batches):
    """Runs a step for each batch, in one of the contexts."""
    if context == "replica":
        return replicas.strategy.run_steps(step, batches, len(batches))
    return replicas.strategy.extended.experimental_run_steps_on_iterator(step, batches, len(batches))


@BOTH
@pytest.mark.parametrize(
    ("reduce_op", "expected"),
    [
        ("SUM", 21.0),
        ("sum", 21.0),
        ("MEAN", 10.5),
        (tf.distribute.ReduceOp.SUM, 21.0),
        (tf.distribute.ReduceOp.MEAN, 10.5),
    ],
)
def test_an_output_is_reduced_over_replicas_and_of_the_last_step(two, context, reduce_op, expected):
    def step(context, x):
        context.set_last_step_output("x", x, reduce_op)

    batches = [two.spread(lambda i, step=step: 10.0 * (i + step)) for step in (5, 3)]
    batches.append(two.spread(lambda i: 10.0 + i))
    output = looped(two, context, step, batches).last_step_outputs["x"]
    assert tf.is_tensor(output)
    assert float(output) == expected


@BOTH
def test_an_output_that_is_not_reduced_has_a_value_for_each_replica(two, context):
    def step(context, x):
        context.set_last_step_output("x", x)

    output = looped(two, context, step, [two.spread(lambda i: 5.0), two.spread(lambda i: 10.0 + i)])
    value = output.last_step_outputs["x"]
    assert isinstance(value, tf.distribute.DistributedValues)
    assert two.each(value) == [10.0, 11.0]


@BOTH
def test_outputs_may_be_structures_and_numbers(two, context):
    def step(context, x):
        context.set_last_step_output("sums", {"x": x, "more": [x + 1.0, (x * 2.0,)]}, "SUM")
        context.set_last_step_output("each", {"x": x, "more": [x + 1.0, (x * 2.0,)]})
        context.set_last_step_output("ints", tf.cast(x, tf.int32), "SUM")
        context.set_last_step_output("mean of ints", tf.cast(x, tf.int32), "MEAN")
        context.set_last_step_output("constants", [3, 0, 0.5], "SUM")
        context.set_last_step_output("constant", 7)

    outputs = looped(two, context, step, [two.spread(lambda i: i + 1.0)]).last_step_outputs
    plain = {
        name: tf.nest.map_structure(lambda each: each.numpy().item(), outputs[name])
        for name in outputs
        if "each" not in name and name != "constant"
    }
    assert plain == {
        "sums": {"x": 3.0, "more": [5.0, (6.0,)]},
        "ints": 3,
        "mean of ints": 1.5,
        "constants": [6, 0, 1.0],
    }
    assert two.each(outputs["each"]["x"]) == [1.0, 2.0]
    assert two.each(outputs["each"]["more"][1][0]) == [2.0, 4.0]
    assert two.each(outputs["constant"]) == [7, 7]


def test_an_output_that_is_set_twice_is_what_was_set_last(two):
    def step(context, x):
        context.set_last_step_output("x", x, "SUM")
        context.set_last_step_output("x", x + 1.0)

    outputs = two.strategy.run_steps(step, numbers(2), 2).last_step_outputs
    assert two.each(outputs["x"]) == [2.0, 2.0]


def test_an_output_of_an_unknown_shape_says_so(two):
    def step(context, x):
        context.set_last_step_output("found", tf.where(x > 0.0))

    with pytest.raises(LoweringError, match=r"shape that depends on data"):
        two.strategy.run_steps(step, [np.ones(3, np.float32)], 1)


def test_an_output_that_is_a_string_says_so(two):
    def step(context, x):
        context.set_last_step_output("text", tf.strings.as_string(x))

    with pytest.raises(LoweringError, match=r"string"):
        two.strategy.run_steps(step, numbers(1), 1)


def test_any_object_can_be_passed_out_while_tracing_and_comes_again_from_later_calls(two, launched):
    thing = object()

    def in_replica(context, x):
        context.set_non_tensor_output("thing", thing)
        context.set_non_tensor_output("name", "step")

    def across(context, x):
        context.set_non_tensor_output("thing", thing)
        context.set_non_tensor_output("names", ["a", "b"])

    before = xla.counts()
    for iterations in (2, 3):
        outputs = two.strategy.run_steps(in_replica, numbers(3), iterations).non_tensor_outputs
        assert outputs == {"thing": (thing, thing), "name": ("step", "step")}
        outputs = looped(two, "cross-replica", across, numbers(iterations)).non_tensor_outputs
        assert outputs == {"thing": thing, "names": ["a", "b"]}
    assert (xla.counts() - before).traces == 2
    assert launched() == 4


def test_what_is_done_to_a_context_is_not_seen_in_the_next_one(two):
    def step(context, x):
        context.set_non_tensor_output("name", "step")
        context.set_last_step_output("x", x)

    first = two.strategy.run_steps(step, numbers(1), 1)
    first.non_tensor_outputs["more"] = first.last_step_outputs["more"] = 1
    del first.non_tensor_outputs["name"]
    second = two.strategy.run_steps(step, numbers(1), 1)
    assert second.non_tensor_outputs == {"name": ("step", "step")}
    assert list(second.last_step_outputs) == ["x"]


def test_a_context_has_the_number_of_steps_and_an_operation_for_old_programs(two):
    context = two.strategy.run_steps(lambda context, x: None, numbers(5), 3)
    assert context.steps == 3
    assert context.run_op is None
    assert context.last_step_outputs == context.non_tensor_outputs == {}


def test_initial_values_give_way_to_what_steps_pass_out(two):
    _, step = total_of(two)
    initial = {"x": tf.constant(-1.0)}
    context = two.strategy.run_steps(step, numbers(2), 2, initial_loop_values=initial)
    assert two.each(context.last_step_outputs["x"]) == [1.0, 1.0]
    with pytest.raises(tf.errors.OutOfRangeError) as raised:
        two.strategy.run_steps(step, [], 2, initial_loop_values=initial)
    assert raised.value.context.last_step_outputs == initial
    with pytest.raises(tf.errors.OutOfRangeError) as raised:
        two.strategy.extended.experimental_run_steps_on_iterator(step, iter([]), 2, initial)
    assert raised.value.context.last_step_outputs == initial


# The contexts of steps.


def test_a_step_is_in_replica_context_and_may_do_what_programs_do_with_a_strategy(two):
    strategy = two.strategy
    kinds = []

    def step(context, x):
        kinds.append((tf.distribute.in_cross_replica_context(), tf.distribute.get_strategy() is strategy))
        outputs = {
            "id": replica_context().replica_id_in_sync_group,
            "all": replica_context().all_reduce("SUM", x),
            "merged": replica_context().merge_call(lambda s, x: s.extended.reduce_to("MEAN", x, "CPU:0"), (x,)),
            "run": strategy.run(lambda x: replica_context().all_reduce("SUM", x) + x, args=(x,)),
            "called": strategy.extended.call_for_each_replica(lambda x: x * 3.0, args=(x,)),
            "reduced": strategy.reduce("SUM", strategy.run(lambda x: x * 2.0, args=(x,)), axis=None),
            "reduced along": strategy.reduce("MEAN", tf.stack([x, x + 1.0]), axis=0),
            "local": strategy.experimental_local_results(x)[1],
        }
        context.set_last_step_output("all", outputs)

    x = two.spread(lambda i: i + 1.0)
    outputs = strategy.run_steps(step, [x, x], 2).last_step_outputs["all"]
    assert kinds == [(False, True)]
    assert {name: two.each(value) for name, value in outputs.items()} == {
        "id": [0, 1],
        "all": [3.0, 3.0],
        "merged": [1.5, 1.5],
        "run": [4.0, 5.0],
        "called": [3.0, 6.0],
        "reduced": [6.0, 6.0],
        "reduced along": [2.0, 2.0],
        "local": [2.0, 2.0],
    }


def test_a_step_of_extended_is_in_cross_replica_context_as_tensorflow_documents(two):
    strategy = two.strategy
    total = two.variable(0.0, SUM)
    kinds = []

    def replica_fn(x, y):
        total.assign_add(x)
        return x + y

    def step(context, inputs):
        kinds.append((tf.distribute.in_cross_replica_context(), tf.distribute.get_strategy() is strategy, type(inputs)))
        both = strategy.extended.call_for_each_replica(replica_fn, args=inputs)
        again = strategy.run(replica_fn, args=inputs)
        context.set_last_step_output("sum", both, tf.distribute.ReduceOp.SUM)
        context.set_last_step_output("each", again)
        context.set_last_step_output("reduced", strategy.reduce("MEAN", both, axis=None))
        context.set_last_step_output("local", strategy.experimental_local_results(both)[1])

    x = two.spread(lambda i: i + 1.0)
    context = strategy.extended.experimental_run_steps_on_iterator(step, [(x, x)] * 3, 3)
    assert kinds == [(True, True, tuple)]
    outputs = context.last_step_outputs
    assert float(outputs["sum"]) == 6.0
    assert two.each(outputs["each"]) == [2.0, 4.0]
    assert two.each(outputs["reduced"]) == [3.0, 3.0]
    assert two.each(outputs["local"]) == [4.0, 4.0]
    assert total.numpy() == 3 * 2 * 3.0


# Failures of a step.


class CustomError(Exception):
    def __init__(self, code, *, reason):
        super().__init__(f"code {code}")
        self.code, self.reason = code, reason


@pytest.mark.parametrize("error", [CustomError(7, reason="own"), ValueError("bad"), StopIteration("no more")], ids=repr)
def test_what_a_step_raises_while_it_is_traced_is_raised(two, launched, error):
    total, good = total_of(two)

    def step(context, x):
        total.assign_add(x)
        raise error

    with pytest.raises(type(error)) as raised:
        two.strategy.run_steps(step, numbers(3), 3)
    assert raised.value is error
    assert launched() == 0
    two.strategy.run_steps(good, numbers(3), 3)
    assert total.numpy() == 6.0


def test_what_xla_cannot_compile_is_named_with_the_line_of_the_step(two):
    def step(context, x):
        total.assign_add(tf.strings.to_number(tf.strings.as_string(x)))

    total = two.variable(0.0, SUM)
    with pytest.raises(LoweringError, match=r"`step` uses \w+ at .*test_run_steps.py:\d+ in step") as raised:
        two.strategy.run_steps(step, numbers(3), 3)
    line = step.__code__.co_firstlineno + 1
    assert f"test_run_steps.py:{line}" in str(raised.value)


# Host calls in steps.


def hosted(fn, returns=None):
    """`outside_compilation` of a function whose results are known."""
    return lambda *args: xla.outside_compilation(xla.returns(returns)(fn), *args)


def test_host_calls_run_in_each_step_in_order(two):
    seen = [[], []]

    def note(x):
        seen[int(xla.replica_id())].append(float(x))
        return x * 10.0

    def step(context, x):
        first = hosted(note, SCALAR)(x)
        second = hosted(note, SCALAR)(first + 0.5)
        context.set_last_step_output("second", second)

    for _ in range(2):
        batches = [two.spread(lambda i, n=n: float(n + i)) for n in range(4)]
        context = two.strategy.run_steps(step, batches, 4)
        assert two.each(context.last_step_outputs["second"]) == [305.0, 405.0]
    for replica in range(2):
        steps = [float(n + replica) for n in range(4)]
        assert seen[replica] == [value for x in steps for value in (x, x * 10.0 + 0.5)] * 2


def test_gradients_go_through_host_calls_of_each_step(two):
    def host_square(x):
        return x * x

    def train(weight, x):
        with tf.GradientTape() as tape:
            loss = xla.outside_compilation(host_square, weight * x)
        gradient = replica_context().all_reduce("MEAN", tape.gradient(loss, weight))
        weight.assign_sub(0.01 * gradient)
        return loss

    one_by_one, looped = two.variable(1.0), two.variable(1.0)
    batches = [two.spread(lambda i, n=n: n + i + 1.0) for n in range(4)]
    for batch in batches:
        loss = two.strategy.run(lambda x: train(one_by_one, x), args=(batch,))

    def step(context, x):
        context.set_last_step_output("loss", train(looped, x))

    context = two.strategy.run_steps(step, batches, 4)
    weight = 1.0
    for n in range(4):
        weight -= 0.01 * (2 * weight * (n + 1) ** 2 + 2 * weight * (n + 2) ** 2) / 2
    np.testing.assert_allclose([looped.numpy(), one_by_one.numpy()], weight, rtol=1e-5)
    np.testing.assert_allclose(two.each(context.last_step_outputs["loss"]), two.each(loss), rtol=1e-6)


@pytest.mark.parametrize(("step_number", "replica"), [(0, 0), (3, 1), (9, 0)])
def test_a_host_call_that_fails_leaves_no_step_and_says_where_it_was(two, step_number, replica):
    total, own = two.variable(1.0, SUM), two.variable(2.0, SUM, on_read=True)
    error = CustomError(7, reason="own")
    state = types.SimpleNamespace(fails=True)

    def host(x):
        if state.fails and float(x) == step_number and int(xla.replica_id()) == replica:
            raise error

    def step(context, x):
        total.assign_add(x)
        own.assign_add(x)
        hosted(host)(x)
        replica_context().all_reduce("SUM", x)

    batches = map(np.float32, itertools.count())
    with pytest.raises(CustomError) as raised:
        two.strategy.run_steps(step, batches, 10**9)
    assert raised.value is error
    assert next(batches) <= step_number + 6  # one in use, one where a replica is ahead, and those fetched ahead
    (note,) = [note for note in error.__notes__ if "replica" in note]
    for part in (f"replica {replica} of 2", f"CPU:{replica}", f"iteration {step_number} ", "test_run_steps.py"):
        assert part in note
    assert total.numpy() == 1.0
    assert two.components(own) == [2.0, 2.0]

    state.fails = False
    assert two.strategy.run_steps(step, numbers(3), 3).steps == 3
    assert total.numpy() == 1.0 + 2 * 3.0
    assert two.components(own) == [5.0, 5.0]


@pytest.mark.parametrize("kind", [OSError, KeyboardInterrupt, StopIteration, tf.errors.OutOfRangeError])
def test_a_host_calls_exception_is_raised_whatever_its_type(two, kind):
    error = kind(None, None, "mine") if kind is tf.errors.OutOfRangeError else kind("mine")

    def host(x):
        if float(x) == 2.0:
            raise error

    with pytest.raises(kind) as raised:
        two.strategy.run_steps(lambda context, x: hosted(host)(x), numbers(5), 5)
    assert raised.value is error
    assert not hasattr(error, "context")  # no step is kept


def test_steps_that_are_not_kept_draw_no_random_numbers(two):
    drawn = two.variable(0.0, SUM, on_read=True)
    state = types.SimpleNamespace(fails=False)

    def host():
        if state.fails:
            raise OSError("the disk is full")

    def step(context):
        hosted(host)()
        drawn.assign(tf.random.uniform([]))

    def loop(iterations):
        two.strategy.run_steps(step, itertools.repeat(()), iterations)

    tf.random.set_seed(1)
    loop(4)
    expected = two.components(drawn)
    tf.random.set_seed(1)
    loop(2)
    state.fails = True
    with pytest.raises(OSError, match="full"):
        loop(3)
    state.fails = False
    loop(2)
    assert two.components(drawn) == expected


def test_a_replica_that_is_a_step_ahead_when_another_fails_is_not_left_alone(two):
    """Replica 1 fails at the end of step 2, when replica 0 is in step 3 already and waits there for replica 1."""
    ahead = threading.Event()

    def begin(x):
        if int(xla.replica_id()) == 0 and float(x) == 3.0:
            ahead.set()
        return x

    def end(x, _):
        if int(xla.replica_id()) == 1 and float(x) == 2.0:
            assert ahead.wait(20)
            raise OSError("late")

    def step(context, x):
        hosted(end)(x, replica_context().all_reduce("SUM", hosted(begin, SCALAR)(x)))

    for _ in range(20):
        ahead.clear()
        with pytest.raises(OSError, match="late") as raised:
            two.strategy.run_steps(step, numbers(10), 10)
        assert any("replica 1 of 2" in note and "iteration 2 " in note for note in raised.value.__notes__)


def test_replicas_apart_by_chance_stop_together(replicas):
    """Whoever is ahead of whom when one fails, or the inputs end: none waits for another for ever."""
    four = replicas(4)
    total = four.variable(0.0, SUM)
    random = np.random.default_rng(1)
    state = types.SimpleNamespace()

    def host(x):
        if state.failing.get(int(xla.replica_id())) == int(x):
            raise OSError("by chance")

    def step(context, x):
        hosted(host)(x)
        total.assign_add(x * 0.0 + 1.0)

    kept = 0
    for _ in range(60):
        chosen = random.permutation(4)[: random.integers(0, 3)]
        state.failing = {int(replica): int(random.integers(0, 12)) for replica in chosen}
        count = int(random.integers(1, 10))
        fails = any(number < count for number in state.failing.values())
        kept += 0 if fails else count
        with pytest.raises(OSError if fails else tf.errors.OutOfRangeError):
            four.strategy.run_steps(step, numbers(count), 10, prefetch=int(random.integers(1, 4)))
        assert total.numpy() == 4.0 * kept


# Ctrl-C.


@pytest.fixture
def ctrl_c():
    """Presses it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield lambda: signal.raise_signal(signal.SIGINT)
    signal.signal(signal.SIGINT, before)


def interrupted(run):
    """Runs what somebody interrupts; how long it took to end then."""
    times = []

    def pressed(press):
        times.append(time.monotonic())
        press()

    with pytest.raises(KeyboardInterrupt):
        run(pressed)
    return time.monotonic() - times[0]


@pytest.mark.parametrize(
    ("owner", "name"), [(threading.Thread, "start"), (Executable, "launch")], ids=["the thread", "the program"]
)
def test_ctrl_c_while_a_loop_is_set_going_leaves_whole_steps_and_no_thread(two, ctrl_c, monkeypatch, owner, name):
    """Signals that come while a call runs are raised as it returns, and its result is gone."""
    total, step = total_of(two)
    two.strategy.run_steps(step, numbers(1, start=1), 1)
    original = getattr(owner, name)

    def and_ctrl_c(*args):
        result = original(*args)
        if threading.current_thread() is threading.main_thread():
            ctrl_c()
        return result

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, and_ctrl_c)
        with pytest.raises(KeyboardInterrupt):
            two.strategy.run_steps(step, for_ever(), 10**9)
    before = total.numpy()
    assert before >= 2.0
    assert before % 2.0 == 0.0
    two.strategy.run_steps(step, for_ever(), 3)
    assert total.numpy() == before + 6.0


@pytest.mark.parametrize("after", [1, 5, 300])
def test_ctrl_c_ends_a_loop_between_steps(two, ctrl_c, after):
    own = two.variable(0.0)
    total, step = total_of(two)

    def both(context, x):
        step(context, x)
        own.assign_add(x)

    def run(pressed):
        def batches():
            for number in itertools.count():
                if number == after:
                    pressed(ctrl_c)
                yield np.float32(1.0)

        two.strategy.run_steps(both, batches(), 10**9)

    two.strategy.run_steps(both, numbers(1, start=1), 1)
    assert interrupted(run) < 5.0
    first, second = two.components(own)
    assert first == second == int(first)
    assert total.numpy() == 2 * first
    two.strategy.run_steps(both, for_ever(), 3)
    assert two.components(own) == [first + 3] * 2


def test_ctrl_c_in_a_loop_with_host_calls_keeps_no_step(two, ctrl_c):
    total, step = total_of(two)
    calls = []

    def run(pressed):
        def host(x):
            calls.append(x)
            if len(calls) == 50:
                pressed(ctrl_c)

        def both(context, x):
            step(context, x)
            hosted(host)(x)

        two.strategy.run_steps(both, for_ever(), 10**9)

    assert interrupted(run) < 5.0
    assert total.numpy() == 0.0
    two.strategy.run_steps(step, for_ever(), 3)
    assert total.numpy() == 6.0


def test_ctrl_c_while_replicas_wait_for_an_iterator_that_is_stuck(two, ctrl_c):
    total, step = total_of(two)
    release = threading.Event()

    def run(pressed):
        def batches():
            yield np.float32(1.0)
            yield np.float32(1.0)
            pressed(ctrl_c)
            release.wait(20)

        two.strategy.run_steps(step, batches(), 10**9)

    assert interrupted(run) < 5.0
    release.set()
    before = total.numpy()
    assert before in (0.0, 2.0, 4.0)
    two.strategy.run_steps(step, for_ever(), 3)
    assert total.numpy() == before + 6.0


# Several at once.


def at_once(*functions):
    """Calls functions on threads of their own that start together; their results, or the first error."""
    start = threading.Barrier(len(functions))

    def call(fn):
        start.wait(60)
        return fn()

    with concurrent.futures.ThreadPoolExecutor(len(functions)) as pool:
        return [each.result(timeout=100) for each in [pool.submit(call, fn) for fn in functions]]


def test_loops_of_two_strategies_on_two_threads_do_not_mix(replicas):
    strategies = [replicas(2), replicas(3)]
    loops = []
    for some in strategies:
        total, step = total_of(some)

        def loop(some=some, step=step):
            batches = iter(numbers(100))
            return [some.each(some.strategy.run_steps(step, batches, 10).last_step_outputs["x"])[0] for _ in range(10)]

        loops.append((total, loop))
    for found in at_once(*(loop for _, loop in loops)):
        assert found == [9.0 + 10 * each for each in range(10)]
    assert [total.numpy() for total, _ in loops] == [2 * 4950.0, 3 * 4950.0]


def test_loops_of_one_strategy_on_three_threads_lose_no_step(two):
    total, step = total_of(two)
    before = xla.counts()

    def loop():
        for _ in range(8):
            assert two.strategy.run_steps(step, numbers(10), 10).steps == 10

    def steps():
        for _ in range(20):
            two.strategy.run(lambda: total.assign_add(total * 0.0 + 1.0))

    at_once(loop, loop, loop, steps)
    assert total.numpy() == 2 * (24 * 45.0) + 2 * 20.0
    counts = xla.counts() - before
    assert (counts.launches, counts.compiles) == (44, 2)


@pytest.mark.parametrize("fails", [False, True])
def test_a_strategy_whose_loops_have_run_is_freed(replicas, fails):
    def once():
        some = replicas(2)
        total, step = total_of(some)

        def host(x):
            if fails:
                raise OSError("gone")

        def both(context, x):
            step(context, x)
            hosted(host)(x)

        some.strategy.run_steps(step, numbers(3), 3)
        with pytest.raises(OSError, match="gone") if fails else contextlib.nullcontext():
            some.strategy.run_steps(both, numbers(3), 3)
        return weakref.ref(some.strategy), weakref.ref(total)

    alive = once()
    gc.collect()
    assert [each() for each in alive] == [None, None]
