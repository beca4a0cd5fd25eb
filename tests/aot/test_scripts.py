"""`replica-engine plan --topology` of scripts whose steps are device loops, which call no host there."""

import subprocess
import sys

import pytest

OWN = """
import tensorflow as tf
import replica_engine
from replica_engine import xla

strategy = replica_engine.TPUStrategy(xla.PjrtClusterResolver("tpu"))
assert strategy.num_replicas_in_sync == 8
with strategy.scope():
    weights = tf.Variable(tf.ones([64, 64]))


def step(context, x):
    total = tf.distribute.get_replica_context().all_reduce("SUM", tf.transpose(x) @ x)
    weights.assign_sub(total)
    context.set_last_step_output("mean", tf.reduce_mean(x), "MEAN")


data = tf.data.Dataset.from_tensors(tf.ones([64, 64])).repeat(20)
batches = iter(strategy.experimental_distribute_dataset(data.unbatch().batch(64, drop_remainder=True)))
for _ in range(2):
    print(strategy.run_steps(step, batches, iterations=10).steps, "steps")
"""

KERAS = """
import keras
import numpy as np
import replica_engine

with replica_engine.TPUStrategy().scope():
    model = keras.Sequential([keras.Input([4]), keras.layers.Dense(3)])
    model.compile("adam", "mse", steps_per_execution=4)
x, y = np.ones([128, 4], "float32"), np.ones([128, 3], "float32")
model.fit(x, y, batch_size=16, verbose=0)
print("this is too far")
"""

HOST = """
import tensorflow as tf
import replica_engine
from replica_engine import xla

strategy = replica_engine.TPUStrategy(xla.PjrtClusterResolver("tpu"))
with strategy.scope():
    weights = tf.Variable(tf.ones([64, 64]))


def step(context, x):
    tf.print("step", tf.reduce_sum(x))
    rows = xla.outside_compilation(lambda x: tf.gather(x, tf.random.shuffle(tf.range(64))), x)
    weights.assign_sub(tf.distribute.get_replica_context().all_reduce("SUM", tf.transpose(rows) @ x))


data = tf.data.Dataset.from_tensors(tf.ones([512, 64])).repeat(10)
strategy.run_steps(step, iter(strategy.experimental_distribute_dataset(data)), iterations=10)
print("this is too far")
"""


def planned(tmp_path, script, topology="v5e:2x4"):
    file = tmp_path / "train.py"
    file.write_text(script)
    command = [sys.executable, "-m", "replica_engine", "plan", "--topology", topology, str(file)]
    return subprocess.run(command, capture_output=True, text=True, timeout=200)


@pytest.mark.parametrize("topology", ["v5e:2x4", "h100:8"])
def test_run_steps(tmp_path, topology):
    done = planned(tmp_path, OWN, topology)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"step: 8 replicas on {topology}, each device:" in done.stdout
    assert "all-reduce" in done.stdout
    assert "10 steps\n" in done.stdout
    assert "planned 1 step;" in done.stdout


@pytest.mark.parametrize("topology", ["v5e:2x4", "h100:8"])
def test_a_loop_whose_steps_call_the_host(tmp_path, topology):
    """The script ends at the launch: what the host does in it does not happen."""
    done = planned(tmp_path, HOST, topology)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"step: 8 replicas on {topology}, each device:" in done.stdout
    assert "this is too far" not in done.stdout


def test_steps_per_execution(tmp_path):
    done = planned(tmp_path, KERAS)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("8 replicas on v5e:2x4, each device:") == 1
    assert "this is too far" not in done.stdout
