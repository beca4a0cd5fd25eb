"""Programs of the strategies of several workers, run in real processes.

Processes that start TensorFlow are expensive. So a job checks many things, and prints what it found as JSON.
"""

import json
from typing import Any

from helpers.jobs import LONGER, Job

HEAD = """
import json, os, signal, sys, threading
import numpy as np
import tensorflow as tf
import replica_engine

me, local = int(os.environ.get("REPLICA_ENGINE_PROCESS_ID", 0)), int(os.environ["LOCAL"])
replica_engine.logical_devices(local)
KIND = replica_engine.MirroredStrategy if os.environ.get("ALONE") else replica_engine.MultiWorkerMirroredStrategy
context = tf.distribute.get_replica_context
found = {}
"""
TAIL = "print(json.dumps(found), flush=True)"

TPU_HEAD = """
import json, os, signal, sys
import numpy as np
import tensorflow as tf
import replica_engine
from replica_engine import xla

me = int(os.environ.get("REPLICA_ENGINE_PROCESS_ID", 0))
context = tf.distribute.get_replica_context
found, parts = {}, {}  # equal on all workers; of each worker's replicas
"""
TPU_TAIL = """
print(json.dumps([found, parts]), flush=True)
"""

IN_A_LOOP = """
@tf.function
def in_a_loop(dataset):
    result, steps = 0.0, 0
    for batch in dataset:
        result += strategy.reduce("SUM", strategy.run(tf.reduce_sum, args=(batch,)), axis=None)
        steps += 1
    return result, steps
"""

IN_ANOTHER_ORDER = """
# Worker 1 runs the two functions in `both` the other way round, at once or after both have run.
if os.environ["LATER"] == "1":
    for step in both:
        strategy.run(step, args=(tf.ones([4]),))
while True:
    for step in reversed(both) if me else both:
        strategy.run(step, args=(tf.ones([4]),))
        if os.environ["LATER"] == "0":
            print("a number", flush=True)
"""

UNEVEN_KERAS = """
import keras


def keras_on(dataset, rows):
    # Trains on a dataset whose ends are uneven: how many steps there were, and the loss beside that of all rows.
    steps = []
    with strategy.scope():
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, kernel_initializer="ones")])
        model.compile(keras.optimizers.SGD(1e-4), "mse")
    count = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: steps.append(batch))
    logs = model.fit(dataset, epochs=2, verbose=0, callbacks=[count]).history["loss"]
    kernel, bias = (float(each.ravel()[0]) for each in model.get_weights())
    rows = np.array(rows)
    of_rows = np.mean((rows * kernel + bias - rows / 2) ** 2)
    return [len(steps), logs, kernel, model.evaluate(dataset, verbose=0), of_rows]


def pairs(dataset):
    return dataset.map(lambda x: (x[:, tf.newaxis], x[:, tf.newaxis] / 2))
"""

SCOPED_KERAS = """
import keras


class Biggest(keras.metrics.Metric):  # no sum: every replica computes whole batches
    def __init__(self):
        super().__init__(name="biggest")
        self.value = self.add_weight(name="value", initializer="zeros")

    def update_state(self, y, outputs, sample_weight=None):
        self.value.assign(tf.maximum(self.value, tf.reduce_max(tf.abs(y - outputs))))

    def result(self):
        return self.value


class Summed(keras.Sequential):  # its gradients are summed
    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum((self(x) - y) ** 2) / 16
        weights = self.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights))
        return {"loss": loss}


def scoped(metrics, kind=keras.Sequential, **options):
    with strategy.scope():
        model = kind([keras.Input((8,)), keras.layers.Dense(1, kernel_initializer="ones")])
        model.compile(keras.optimizers.Adam(0.05, global_clipnorm=0.1), "mse", metrics=metrics(), **options)
    return model


def in_a_scope(x, y):
    # Trains on batches of 16, 16 and 5 samples; the last one leaves no sample for one of four replicas.
    data = tf.data.Dataset.from_tensor_slices((x[:37], y[:37])).batch(16)
    models = scoped(lambda: ["mae"]), scoped(lambda: ["mae"], steps_per_execution=3), scoped(lambda: [Biggest()])
    logs = [model.fit(data, epochs=2, verbose=0, validation_data=data).history for model in models]
    own = scoped(list, Summed)
    try:
        own.fit(data.skip(2), verbose=0)
    except replica_engine.errors.BatchError as error:
        logs.append(str(error))
    logs.append(own.fit(data.take(2), verbose=0).history)  # all workers go on
    return logs, [[model.evaluate(data, verbose=0), model.get_weights()[0].tolist()] for model in models]
"""


def outputs(programs, made: Job, program: str, local: int = 1, **environment: str) -> list[dict]:
    """Runs a program in all workers of a job; returns what each has found."""
    text = HEAD + program + TAIL
    started = made.start_all(programs, text, LOCAL=str(local), **environment)
    return [read(each) for each in started]


def alone(programs, program: str, replicas: int, **environment: str) -> dict:
    """Runs a program in one process, with MirroredStrategy."""
    return read(programs.start(HEAD + program + TAIL, env={"LOCAL": str(replicas), "ALONE": "1", **environment}))


def read(process, limit: float = LONGER) -> Any:
    """What a program has printed last, as JSON; it fails if the program does, or takes longer than the limit."""
    try:
        out, err = process.communicate(limit)
    finally:
        process.kill()
    assert process.returncode == 0, err[-4000:]
    return json.loads(out.splitlines()[-1])


def files(folder) -> list[str]:
    """What there is in a folder, without the parts of names that differ from process to process."""
    return sorted(str(path.relative_to(folder)).partition(".tfevents")[0] for path in folder.rglob("*"))


def flat(value) -> list:
    if isinstance(value, dict):
        return flat([value[name] for name in sorted(value)])
    return [leaf for each in value for leaf in flat(each)] if isinstance(value, list) else [value]


def failing(process: Any) -> str:
    """What a worker writes that fails before it has found anything."""
    try:
        out, err = process.communicate(LONGER)
    finally:
        process.kill()
    assert (out, process.returncode) == ("", 1), err[-4000:]
    return err
