"""A user's program, in a process of its own: a Keras model, an SGD optimizer, and training steps by one contender.

All contenders compute the mean loss of the same batch and its gradient, and update the same initial weights. Replicas
get equal parts of the batch. Each contender has its best settings on CPUs: tf.distribute its fastest all-reduce, and
Keras on JAX a jitted step that is given its weights, sharded over the devices.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import tempfile
import time
from collections.abc import Callable
from typing import Any

from benchmarks.fresh import peak
from benchmarks.keras_models import MODELS, initial

THREADS, FULL, XLA = "MirroredStrategy", 'MirroredStrategy, graph_optimizer="full"', "TPUStrategy"

THEIRS, JAX, JIT = "tf.distribute", "Keras on JAX", "TensorFlow jit_compile"
"""`JIT` runs on one device, whatever the number of replicas."""

WARM_UP = 2
"""The number of steps that are not counted as steps: the first, and the one after it."""

STAGES = ("trace", "lower", "compile")


@dataclasses.dataclass(frozen=True)
class Took:
    """What something took: seconds of time, and of the processors."""

    seconds: float
    processor: float


@dataclasses.dataclass(frozen=True)
class Trained:
    """What one process measured.

    Attributes:
        built: making the strategy, the model and the optimizer.
        first: the first step, from the call to its loss.
        step: one later step, on average; nothing if no step was timed.
        peak: the largest resident set of the process, in bytes.
        losses: the losses of the steps of the warm-up.
        stages: seconds of the first step in tracing, lowering and compiling; only of `TPUStrategy`.
    """

    built: Took
    first: Took
    step: Took
    peak: int
    losses: list[float]
    stages: dict[str, float]


def train(who: str, name: str, replicas: int, batch: int, steps: int = 0, cache: str = "") -> Trained:
    """Trains a model. Call it in a new process.

    Args:
        who: the contender.
        name: the model, of `MODELS`.
        replicas: the number of replicas.
        batch: the number of examples of all replicas together.
        steps: the number of steps to time, after the warm-up.
        cache: the folder in which XLA programs are kept for later processes; empty for none.

    Returns:
        What it took.
    """
    if cache:
        variable = "JAX_COMPILATION_CACHE_DIR" if who == JAX else "REPLICA_ENGINE_CACHE_DIR"
        # jax keeps only what takes a second to compile, if it is not told otherwise.
        os.environ |= {variable: cache, "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    if who == JAX:
        os.environ |= {"KERAS_BACKEND": "jax", "JAX_PLATFORMS": "cpu"}
        make: Callable[[str, str, int, int], Callable[[], float]] = _jax
    else:
        make = _jit_compiled if who == JIT else _replicated
    _load(who, replicas)
    begin = _clock()
    step = make(who, name, replicas, batch)
    built = _since(begin)
    stages: dict[str, float] = {}
    losses = []
    begin = _clock()
    losses.append(_with_stages(step, stages) if who == XLA else step())
    first = _since(begin)
    losses += [step() for _ in range(WARM_UP - 1)]
    begin = _clock()
    for _ in range(steps):
        step()
    took = _since(begin)
    return Trained(
        built, first, Took(took.seconds / max(1, steps), took.processor / max(1, steps)), peak(), losses, stages
    )


def _load(who: str, replicas: int) -> None:
    """Imports the libraries and makes the devices: not part of any figure."""
    if who == JAX:
        # More threads than devices, so that no replica waits for the thread of another.
        os.environ.setdefault("NPROC", str(2 * replicas))
        import jax
        import keras

        jax.config.update("jax_num_cpu_devices", replicas)
        assert len(jax.devices()) == replicas, "jax had started"
        assert keras.backend.backend() == "jax", "Keras had started"
    else:
        import replica_engine

        replica_engine.logical_devices(replicas)


def _replicated(who: str, name: str, replicas: int, batch: int) -> Callable[[], float]:
    """A step of a strategy of this library, or of tf.distribute."""
    import numpy as np
    import tensorflow as tf

    strategy = _strategy(who, replicas)
    with strategy.scope():
        model, optimizer, compute_loss = _built(name)

    def replica_step(x: Any, labels: Any) -> Any:
        with tf.GradientTape() as tape:
            # The optimizer sums over replicas.
            loss = compute_loss(labels, model(x, training=True)) / replicas
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    def run(x: Any, labels: Any) -> Any:
        return strategy.run(replica_step, args=(x, labels))

    if who != XLA:
        run = tf.function(run)

    parts = [np.split(values, replicas) for values in MODELS[name].data(batch)]
    batches = [
        strategy.experimental_distribute_values_from_function(
            lambda context, part=part: tf.constant(part[context.replica_id_in_sync_group])
        )
        for part in parts
    ]
    return lambda: float(sum(loss.numpy() for loss in strategy.experimental_local_results(run(*batches))))


def _strategy(who: str, replicas: int) -> Any:
    import tensorflow as tf

    import replica_engine

    if who == XLA:
        return replica_engine.TPUStrategy(num_cores=replicas)
    devices = replica_engine.logical_devices(replicas)
    if who == THEIRS:
        return tf.distribute.MirroredStrategy(devices, tf.distribute.ReductionToOneDevice())
    return replica_engine.MirroredStrategy(devices, graph_optimizer="full" if who == FULL else None)


def _jit_compiled(who: str, name: str, replicas: int, batch: int) -> Callable[[], float]:
    """A step of TensorFlow on one device."""
    import tensorflow as tf

    model, optimizer, compute_loss = _built(name)

    @tf.function(jit_compile=True)
    def run(x: Any, labels: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = compute_loss(labels, model(x, training=True))
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    batches = [tf.constant(values) for values in MODELS[name].data(batch)]
    return lambda: float(run(*batches))


def _jax(who: str, name: str, replicas: int, batch: int) -> Callable[[], float]:
    """A step of Keras on JAX: one program, whose batch is split over the devices."""
    import jax
    import numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    mesh = Mesh(np.array(jax.devices()), ("replica",))
    split, same = (NamedSharding(mesh, PartitionSpec(*axes)) for axes in (("replica",), ()))
    step = jax_step(*_built(name), MODELS[name].data(batch), same, split)
    return lambda: float(step())


def jax_step(
    model: Any, optimizer: Any, compute_loss: Callable[[Any, Any], Any], data: Any, weights_on: Any, data_on: Any
) -> Callable[[], Any]:
    """A training step of Keras on JAX.

    Args:
        model: the model.
        optimizer: its optimizer, built.
        compute_loss: the mean loss of labels and logits.
        data: a batch and its labels.
        weights_on: the device or the sharding of weights and slots.
        data_on: the device or the sharding of the data.

    Returns:
        A function that returns the loss, which may still be computed.
    """
    import jax
    import numpy as np

    def loss_and_state(trained: Any, others: Any, x: Any, labels: Any) -> Any:
        logits, others = model.stateless_call(trained, others, x, training=True)
        return compute_loss(labels, logits), others

    def replica_step(state: Any, x: Any, labels: Any) -> Any:
        trained, others, slots = state
        (loss, others), gradients = jax.value_and_grad(loss_and_state, has_aux=True)(trained, others, x, labels)
        trained, slots = optimizer.stateless_apply(slots, gradients, trained)
        return loss, (trained, others, slots)

    run = jax.jit(replica_step, donate_argnums=0)
    lists = (model.trainable_variables, model.non_trainable_variables, optimizer.variables)
    # Copies: the step takes the memory of what it is given, and the model still has its own.
    state = jax.device_put([[np.array(variable) for variable in each] for each in lists], weights_on)
    batches = jax.device_put(data, data_on)

    def step() -> Any:
        nonlocal state
        loss, state = run(state, *batches)
        return loss

    return step


def _built(name: str) -> tuple[Any, Any, Callable[[Any, Any], Any]]:
    """The model with its initial weights, its optimizer, and the mean loss of labels and logits."""
    import keras

    model = MODELS[name].build()
    model.set_weights(initial(model.get_weights()))
    optimizer = keras.optimizers.SGD(MODELS[name].rate)
    optimizer.build(model.trainable_variables)

    def compute_loss(labels: Any, logits: Any) -> Any:
        return keras.ops.mean(keras.losses.sparse_categorical_crossentropy(labels, logits, from_logits=True))

    return model, optimizer, compute_loss


def _with_stages(step: Callable[[], float], stages: dict[str, float]) -> float:
    """The result of a step, whose stages are recorded: seconds by stage."""
    import replica_engine

    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder, "timeline.json")
        with replica_engine.timeline(path):
            result = step()
        for event in json.loads(path.read_text())["traceEvents"]:
            stage = event["name"].partition(" ")[0]
            if event.get("cat") == "compile" and stage in STAGES:
                stages[stage] = stages.get(stage, 0.0) + event["dur"] / 1e6
    return result


def _clock() -> Took:
    return Took(time.perf_counter(), time.process_time())


def _since(begin: Took) -> Took:
    end = _clock()
    return Took(end.seconds - begin.seconds, end.processor - begin.processor)
