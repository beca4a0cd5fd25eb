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


def outputs(programs, made: Job, program: str, local: int = 1, **environment: str) -> list[dict]:
    """Runs a program in all workers of a job; returns what each has found."""
    text = HEAD + program + TAIL
    started = [
        programs.start(text, env=made.environment(worker, LOCAL=str(local), **environment))
        for worker in range(made.size)
    ]
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
