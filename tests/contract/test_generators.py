"""Generators made outside the scope: each replica draws its own numbers, the next of the one state; both strategies."""

import numpy as np
import pytest
import tensorflow as tf

from replica_engine import MirroredStrategy, TPUStrategy

pytestmark = pytest.mark.replicas(3)


DRAWS = {
    "normal": lambda generator, x: generator.normal([2]) * x,
    "truncated": lambda generator, x: generator.truncated_normal([3]),
    "integers": lambda generator, x: generator.uniform([2], maxval=1000, dtype=tf.int32),
    "in a branch": lambda generator, x: tf.cond(x > 0.0, lambda: generator.normal([2]), lambda: tf.zeros([2])),
    "in a function": lambda generator, x: tf.function(lambda: generator.normal([2]) * x)(),
}


def _in_turn(draw, size, steps):
    """What replicas draw that take turns, as one device does it."""
    generator = tf.random.Generator.from_seed(7)
    rows = [[draw(generator, tf.constant(1.0)).numpy().tolist() for _ in range(size)] for _ in range(steps)]
    return rows, generator.state.numpy().tolist()


@pytest.mark.parametrize("name", DRAWS)
def test_each_replica_draws_the_next_numbers(n, run, local, name, request):
    size, generator = n, tf.random.Generator.from_seed(7)
    drawn = [local(run(lambda x: DRAWS[name](generator, x), (tf.constant(1.0),))) for _ in range(2)]
    rows, state = _in_turn(DRAWS[name], size, 2)
    if "concurrent" in request.node.callspec.id:  # the order in which replicas draw is not fixed
        drawn, rows = [sorted(row) for row in drawn], [sorted(row) for row in rows]
    np.testing.assert_allclose(drawn, rows, rtol=1e-6)
    assert generator.state.numpy().tolist() == state


def test_the_global_generator(n, run, local):
    before = tf.random.get_global_generator()
    try:
        tf.random.set_global_generator(tf.random.Generator.from_seed(7))
        drawn = local(run(lambda: tf.random.get_global_generator().uniform([2])))
        rows, state = _in_turn(lambda generator, _: generator.uniform([2]), n, 1)
        np.testing.assert_allclose(np.sort(drawn, None), np.sort(rows, None), rtol=1e-6)
        assert tf.random.get_global_generator().state.numpy().tolist() == state
    finally:
        tf.random.set_global_generator(before)


def test_several_draws_in_a_step_and_in_a_loop_differ(n, run, local):
    generator = tf.random.Generator.from_seed(7)

    def step():
        drawn = tf.TensorArray(tf.float32, 3)
        for index in tf.range(3):
            drawn = drawn.write(index, generator.normal([2]))
        return tf.concat([drawn.concat(), generator.normal([2])], 0)

    size = n
    drawn = np.concatenate(local(run(tf.autograph.to_graph(step))))
    expected, state = _in_turn(lambda generator, _: generator.normal([2]), size, 4)
    np.testing.assert_allclose(np.sort(drawn), np.sort(np.ravel(expected)), rtol=1e-6)
    assert generator.state.numpy().tolist() == state


def test_a_checkpoint_of_the_generator_continues(strategy, run, local, tmp_path):
    generator = tf.random.Generator.from_seed(7)
    saved = tf.train.Checkpoint(generator=generator)
    run(lambda: generator.normal([2]))
    path = saved.write(str(tmp_path / "saved"))
    first = sorted(local(run(lambda: generator.normal([2]))))
    saved.read(path).assert_consumed()
    assert sorted(local(run(lambda: generator.normal([2])))) == first
    generator.reset_from_seed(7)
    assert sorted(local(run(lambda: generator.normal([2])))) != first


def test_steps_draw_on_in_the_loop_of_a_device_too(strategy, n):
    generator, size = tf.random.Generator.from_seed(7), n

    def step(context, x):
        context.set_last_step_output("drawn", generator.normal([2]) * x)

    if isinstance(strategy, TPUStrategy):
        drawn = strategy.run_steps(step, [tf.constant(1.0)] * 3, iterations=3).last_step_outputs["drawn"]
    else:
        drawn = [strategy.run(lambda: generator.normal([2])) for _ in range(3)][-1]
    rows, state = _in_turn(DRAWS["normal"], size, 3)
    drawn = strategy.experimental_local_results(drawn)
    np.testing.assert_allclose(sorted(map(list, drawn)), sorted(map(list, rows[-1])), rtol=1e-6)  # threads: any order
    assert generator.state.numpy().tolist() == state


def test_the_same_random_numbers_stay_the_same():
    strategy = TPUStrategy(num_cores=2, same_random_numbers=True)
    generator = tf.random.Generator.from_seed(7)
    first, second = strategy.experimental_local_results(strategy.run(lambda: generator.normal([2])))
    assert first.numpy().tolist() == second.numpy().tolist()


def test_both_strategies_leave_the_same_state():
    states = []
    for strategy in (MirroredStrategy(["CPU:0", "CPU:1"]), TPUStrategy(num_cores=2)):
        generator = tf.random.Generator.from_non_deterministic_state()
        generator.reset_from_seed(3)
        for _ in range(3):
            strategy.run(lambda generator=generator: generator.skip(5))
        states.append(generator.state.numpy().tolist())
    assert states[0] == states[1]
