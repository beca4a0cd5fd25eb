"""Host calls in the steps of a device loop: in order, and a failing one leaves the steps before it."""

import itertools
import types

import numpy as np
import pytest
import tensorflow as tf
from helpers.host_work import Failing
from helpers.loop_steps import SUM, hosted, numbers, replica_context

from replica_engine import xla

SCALAR = tf.TensorSpec([], tf.float32)


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


def test_a_step_that_calls_the_host_and_sums_its_batch_runs_again(two):
    def step(context, x):
        hosted(lambda value: value, SCALAR)(x)
        total = replica_context().merge_call(lambda strategy, value: strategy.reduce("SUM", value, axis=None), (x,))
        context.set_last_step_output("total", total)

    for _ in range(3):
        batches = [two.spread(lambda i, n=n: float(n + i)) for n in range(2)]
        context = two.strategy.run_steps(step, batches, 2)
        assert two.each(context.last_step_outputs["total"]) == [3.0, 3.0]


def test_gradients_go_through_host_calls_of_each_step(two):
    host_square = lambda x: x * x  # noqa: E731

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


@pytest.mark.parametrize(("step_number", "replica"), [(0, 0), (4, 1)])
def test_a_host_call_that_fails_leaves_the_steps_before_and_says_where_it_was(two, step_number, replica):
    total, own = two.variable(1.0, SUM), two.variable(2.0, SUM, on_read=True)
    error = Failing(7)
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
    with pytest.raises(Failing) as raised:
        two.strategy.run_steps(step, batches, 10**9)
    assert raised.value is error
    assert next(batches) <= step_number + 4  # one in use, two that were fetched ahead, and one that is being fetched
    (note,) = [note for note in error.__notes__ if "replica" in note]
    for part in (f"replica {replica} of 2", f"CPU:{replica}", f"iteration {step_number} ", "test_step_host_calls.py"):
        assert part in note
    kept = float(sum(range(step_number)))
    assert total.numpy() == 1.0 + 2 * kept
    assert two.components(own) == [2.0 + kept] * 2
    assert getattr(error, "context", None) is None if not step_number else error.context.steps == step_number
    assert any("the values that they wrote are kept" in note for note in error.__notes__) == (step_number > 0)

    state.fails = False
    assert two.strategy.run_steps(step, numbers(3), 3).steps == 3
    assert total.numpy() == 1.0 + 2 * (kept + 3.0)
    assert two.components(own) == [5.0 + kept] * 2


@pytest.mark.parametrize("kind", [KeyboardInterrupt, StopIteration, tf.errors.OutOfRangeError])
def test_a_host_calls_exception_is_raised_whatever_its_type(two, kind):
    error = kind(None, None, "mine") if kind is tf.errors.OutOfRangeError else kind("mine")

    def host(x):
        if float(x) == 2.0:
            raise error

    with pytest.raises(kind) as raised:
        two.strategy.run_steps(lambda context, x: hosted(host)(x), numbers(5), 5)
    assert raised.value is error
    if kind is not KeyboardInterrupt:  # like Ctrl-C, which has none
        assert error.context.steps == 2


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


def test_replicas_apart_by_chance_stop_together(replicas):
    """Replicas that are ahead of others when one fails, or when the inputs end, do not wait for ever."""
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
    for _ in range(10):
        chosen = random.permutation(4)[: random.integers(0, 3)]
        state.failing = {int(replica): int(random.integers(0, 12)) for replica in chosen}
        count = int(random.integers(1, 10))
        last = min([count, *state.failing.values()])
        fails = last < count
        kept += last
        with pytest.raises(OSError if fails else tf.errors.OutOfRangeError):
            four.strategy.run_steps(step, numbers(count), 10, prefetch=int(random.integers(1, 4)))
        assert total.numpy() == 4.0 * kept
