"""A table that is divided, and its gradient: each device has its part of both, and never the whole."""

import pytest
import tensorflow as tf
from helpers.divided import model_parallel

import replica_engine

ROWS, COLUMNS = 4096, 64
WHOLE = 4 * ROWS * COLUMNS


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("batch", [8, 5])
@pytest.mark.parametrize(
    ("mesh", "axes", "parts"),
    [((4, 1), ("batch", None), 4), ((2, 2), ("model", None), 2), ((2, 2), ("model", "batch"), 4)],
)
def test_a_step_has_a_part_of_the_table_and_of_its_gradient_on_each_device(mesh, axes, parts, batch, replicas):
    distribution = model_parallel({"table": axes}, mesh)
    strategy = replica_engine.TPUStrategy(num_cores=4 * replicas, distribution=distribution)
    with strategy.scope():
        table = tf.Variable(tf.random.stateless_uniform([ROWS, COLUMNS], [0, 1]), name="table")

    def step(ids):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.gather(table, ids) ** 2)
        gradient = tf.convert_to_tensor(tape.gradient(loss, table))
        table.assign_sub(0.1 * tf.tanh(gradient))
        return loss

    part, little = WHOLE // parts, WHOLE // 16  # the rows that the batch asks for, and its indices
    assert strategy.memory().variables == [part] * 4 * replicas
    plan = strategy.plan(step, (tf.TensorSpec([batch, 12], tf.int32),))
    assert part <= plan.memory.arguments <= part + little
    assert plan.memory.temporary <= 2 * part + little  # the gradient, and what is made of it
    assert f"f32[{ROWS},{COLUMNS}]" not in plan.as_text()


def test_each_device_looks_up_in_its_own_samples():
    strategy = replica_engine.TPUStrategy(num_cores=4, cores_per_replica=4, distribution="fsdp")

    def step(x, places):
        with tf.GradientTape() as tape:
            tape.watch(x)
            found = tf.gather(x, places, batch_dims=1)
            loss = tf.reduce_sum(found**2)
        return found, tape.gradient(loss, x)

    plan = strategy.plan(step, (tf.TensorSpec([64, 16, 8]), tf.TensorSpec([64, 5], tf.int32)))
    assert "f32[16,5,8]" in plan.as_text()
    assert "f32[64," not in plan.as_text()
