"""Initial values of variables that a body creates: where they come from, and what they cannot come from."""

import inspect

import pytest
import tensorflow as tf

from replica_engine import xla
from replica_engine.errors import VariableCreationError


@pytest.fixture
def made(two):
    """`made(make, *args)`: the variable that `make` creates in a body's first run, on each replica."""

    def made(make, *args):
        holder = {}

        def body(*args):
            if not holder:
                holder["made"] = make(*args)
            return holder["made"] + tf.zeros([], holder["made"].dtype)

        two.strategy.run(body, args)
        values = [each.numpy().tolist() for each in two.strategy.experimental_local_results(holder["made"])]
        assert values[0] == values[1]
        return values[0]

    return made


def line_of(fn):
    return f"{__file__}:{inspect.getsourcelines(fn)[1] + 1}"


def refused(made, make, *args):
    with pytest.raises(VariableCreationError) as caught:
        made(make, *args)
    assert f"created at {line_of(make)} in make" in str(caught.value)
    return str(caught.value)


def test_a_generator_may_be_made_in_a_body(made):
    def make():
        generator = tf.random.Generator.from_seed(5)
        return generator.state

    assert made(make) == tf.random.Generator.from_seed(5).state.numpy().tolist()


def test_a_generator_moves_on(two, made):
    generator, other = tf.random.Generator.from_seed(5), tf.random.Generator.from_seed(5)
    draws = [made(lambda: tf.Variable(generator.normal([2]))) for _ in range(2)]
    assert draws == [other.normal([2]).numpy().tolist() for _ in range(2)]
    with two.strategy.scope():
        inside = tf.random.Generator.from_seed(5)
    first, second = (made(lambda: tf.Variable(inside.normal([2]))) for _ in range(2))
    assert first != second


@pytest.mark.parametrize(
    "draw",
    [
        lambda: tf.cond(tf.constant(1.0) > tf.random.uniform([]), lambda: tf.random.normal([2]), lambda: tf.ones([2])),
        lambda: tf.while_loop(lambda i, _: i < 2, lambda i, x: (i + 1, x + tf.random.normal([2])), (0, tf.zeros([2])))[
            1
        ],
        lambda: tf.map_fn(lambda x: x + tf.random.normal([]), tf.zeros([2])),
        lambda: tf.linalg.qr(tf.random.normal([2, 2]))[0],
        lambda: tf.random.shuffle(tf.range(50)),
    ],
    ids=["branch", "loop", "map", "orthogonal", "shuffle"],
)
def test_random_numbers_wherever_they_are_drawn(made, draw):
    tf.random.set_seed(3)
    first = made(lambda: tf.Variable(draw()))
    second = made(lambda: tf.Variable(draw()))  # the same trace, so the same ops
    tf.random.set_seed(3)
    assert made(lambda: tf.Variable(draw())) == first
    assert len(second) == len(first)


def test_two_variables_drawn_in_loops_differ(two):
    holder = {}

    def draw():
        return tf.while_loop(lambda i, _: i < 1, lambda i, _: (i + 1, tf.random.normal([2])), (0, tf.zeros([2])))[1]

    def body():
        if not holder:
            holder["first"], holder["second"] = tf.Variable(draw()), tf.Variable(draw())
        return holder["first"] + holder["second"]

    two.strategy.run(body)
    assert holder["first"].numpy().tolist() != holder["second"].numpy().tolist()


def test_they_do_not_move_the_replicas_own_numbers_on(two):
    def drawn(makes):
        tf.random.set_seed(3)
        holder = []

        def body():
            if makes and not holder:
                holder.append(tf.Variable(tf.random.normal([2])))
            return tf.random.normal([2], seed=1)

        return [each.numpy().tolist() for each in two.strategy.experimental_local_results(two.strategy.run(body))]

    assert drawn(True) == drawn(False)


def test_in_steps_of_a_device_loop(two):
    made = []

    def step(context, x):
        if not made:
            made.append(tf.Variable(tf.random.normal([2])))
            made.append(tf.Variable(made[0].read_value()))
        made[0].assign_add(x)

    two.strategy.run_steps(step, iter(tf.data.Dataset.from_tensors([1.0, 2.0]).repeat(3)), 3)
    assert (made[0] - made[1]).numpy().tolist() == pytest.approx([3.0, 6.0], abs=1e-5)


def test_without_a_strategy():
    made = []

    def body(x):
        if not made:
            made.append(tf.Variable(tf.random.normal([2])))
        return made[0] * x

    first, second = xla.replicate(body, [[1.0], [2.0]])
    assert first.numpy().tolist() == made[0].numpy().tolist()
    assert second.numpy().tolist() == (2.0 * made[0]).numpy().tolist()


def test_what_the_function_around_has_computed(two):
    made = []
    with two.strategy.scope():
        other = tf.Variable([1.0, 2.0])

    @tf.function
    def step():
        drawn, tripled = tf.random.normal([2]), 3.0 * other

        def body():
            if not made:
                made.extend([tf.Variable(drawn), tf.Variable(tripled)])
            return made[0] + made[1]

        return two.strategy.run(body)

    step()
    assert made[1].numpy().tolist() == [3.0, 6.0]


def test_an_argument_is_named(two, made):
    def make(batch, scale):
        return tf.Variable(tf.reduce_mean(batch["x"]), name="mean")

    text = refused(made, make, {"x": tf.ones([2])}, tf.constant(2.0))
    assert "'mean'" in text
    assert "depends on the argument `args[0]['x']` of `body`" in text

    def step(context, pixels):
        tf.Variable(tf.reduce_mean(pixels), name="mean")

    with pytest.raises(VariableCreationError, match="the argument `pixels` of `step`"):
        two.strategy.run_steps(step, iter(tf.data.Dataset.from_tensors([1.0, 2.0])), 1)


def test_a_callable_that_uses_an_argument_is_refused_too(made):
    def make(x):
        return tf.Variable(lambda: x * 2.0)

    assert "the argument `args[0]` of `body`" in refused(made, make, tf.ones([2]))


def test_the_argument_of_a_function_around_is_named(two):
    made = []

    @tf.function
    def outer(table):
        def body():
            if not made:
                made.append(tf.Variable(table * 2.0))
            return made[0] + 1.0

        return two.strategy.run(body)

    with pytest.raises(VariableCreationError, match="the argument `table` of `outer`"):
        outer(tf.ones([2]))


def test_what_replicas_bring_together_is_not_there_yet(made):
    def make():
        return tf.Variable(tf.distribute.get_replica_context().all_reduce("SUM", tf.random.normal([2])))

    assert f"depends on all_reduce at {line_of(make)}" in refused(made, make)


def test_what_the_host_is_called_for_is_not_there_yet(made):
    def make():
        return tf.Variable(xla.outside_compilation(lambda: tf.ones([2])))

    assert f"depends on a host call at {line_of(make)}" in refused(made, make)


def test_checks_around_it_are_made(made):
    def make(limit):
        drawn = tf.random.uniform([2], seed=1)
        with tf.control_dependencies([tf.debugging.assert_less(drawn, limit)]):
            return tf.Variable(tf.identity(drawn))

    assert all(0.0 <= value < 1.0 for value in made(lambda: make(tf.constant(1.0))))
    with pytest.raises(tf.errors.InvalidArgumentError):
        made(lambda: make(tf.constant(0.0)))


def test_what_an_assignment_returns_is_not_there_yet(two, made):
    other = two.variable([1.0])

    def make():
        return tf.Variable(other.assign_add([1.0]))

    assert f"depends on an assignment at {line_of(make)}" in refused(made, make)
    assert other.numpy().tolist() == [1.0]


def test_no_batch_is_taken_from_a_dataset(two):
    batches, made = iter(tf.data.Dataset.range(3)), []

    @tf.function
    def outer():
        batch = next(batches)

        def body():
            if not made:
                made.append(tf.Variable(batch))
            return made[0] + tf.constant(0, tf.int64)

        return two.strategy.run(body)

    with pytest.raises(VariableCreationError, match="depends on the next batch of a dataset"):
        outer()
    assert int(next(batches)) == 0
