"""A user's program, in a process of its own: a Keras model, an SGD optimizer, and training steps by one contender.

All contenders compute the mean loss of the same batch and its gradient, and update the same initial weights. Replicas
get equal parts of the batch. Each contender has its best settings on CPUs: tf.distribute its fastest all-reduce, and
Keras on JAX a jitted step that is given its weights, sharded over the devices.
"""

from __future__ import annotations

import json
import os
import pathlib
import tempfile
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from benchmarks.fresh import peak
from benchmarks.keras_models import MODELS, KerasModel, initial

THREADS, FULL, XLA = "MirroredStrategy", 'MirroredStrategy, graph_optimizer="full"', "TPUStrategy"

THEIRS, JAX, JIT = "tf.distribute", "Keras on JAX", "TensorFlow jit_compile"
"""`JIT` runs on one device, whatever the number of replicas."""

WARM_UP = 2  # the number of steps that are not counted as steps: the first, and the one after it

STAGES = ("trace", "lower", "compile")


class Took(NamedTuple):
    """What something took: seconds of time, and of the processors."""

    seconds: float
    processor: float


class Trained(NamedTuple):
    """What one process measured."""

    built: Took  # making the strategy, the model and the optimizer
    first: Took  # the first step, from the call to its loss
    step: Took  # one later step, on average; nothing if no step was timed
    peak: int  # the largest resident set of the process, in bytes
    losses: list[float]  # the losses of the steps of the warm-up
    stages: dict[str, float]  # seconds of the first step in tracing, lowering and compiling; only of `TPUStrategy`


def train(who: str, name: str, replicas: int, batch: int, steps: int = 0, cache: str = "") -> Trained:
    """Trains a model by a contender, with a batch for all replicas together. Call it in a new process.

    After the warm-up so many steps are timed. `cache` is the folder in which XLA programs are kept for later processes.
    """
    if cache:
        variable = "JAX_COMPILATION_CACHE_DIR" if who == JAX else "REPLICA_ENGINE_CACHE_DIR"
        # jax keeps only what takes a second to compile, if it is not told otherwise.
        os.environ |= {variable: cache, "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    load(who, replicas)
    make = {JAX: _jax, JIT: _jit_compiled}.get(who, _replicated)
    building, step = took(lambda: make(who, name, replicas, batch))
    first, (loss, stages) = took(lambda: with_stages(step) if who == XLA else (step(), {}))
    losses = [loss, *(step() for _ in range(WARM_UP - 1))]
    later, _ = took(lambda: [step() for _ in range(steps)])
    one = Took(later.seconds / max(1, steps), later.processor / max(1, steps))
    return Trained(building, first, one, peak(), losses, stages)


def load(who: str, replicas: int) -> None:
    """Imports the libraries and makes the devices: not part of any figure."""
    if who == JAX:
        os.environ |= {"KERAS_BACKEND": "jax", "JAX_PLATFORMS": "cpu"}
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

    import replica_engine
    from benchmarks.contenders import distributed, strategy_of

    if who == FULL:
        devices = replica_engine.logical_devices(replicas)
        strategy = replica_engine.MirroredStrategy(devices, graph_optimizer="full")
    else:
        strategy = strategy_of(who, replicas)
    with strategy.scope():
        replica_step = tensorflow_step(*_built(name), replicas)

    def run(x: Any, labels: Any) -> Any:
        return strategy.run(replica_step, args=(x, labels))

    if who != XLA:
        run = tf.function(run)

    batches = [distributed(strategy, np.split(values, replicas)) for values in MODELS[name].data(batch)]
    return lambda: float(sum(loss.numpy() for loss in strategy.experimental_local_results(run(*batches))))


def _jit_compiled(who: str, name: str, replicas: int, batch: int) -> Callable[[], float]:
    """A step of TensorFlow on one device."""
    import tensorflow as tf

    run = tf.function(tensorflow_step(*_built(name)), jit_compile=True)
    batches = [tf.constant(values) for values in MODELS[name].data(batch)]
    return lambda: float(run(*batches))


def tensorflow_step(
    model: Any, optimizer: Any, compute_loss: Callable[[Any, Any], Any], replicas: int = 1
) -> Callable[[Any, Any], Any]:
    """The training step of Keras on TensorFlow, on a replica; returns its part of the loss."""
    import tensorflow as tf

    def train(x: Any, labels: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = compute_loss(labels, model(x, training=True)) / replicas  # the optimizer sums over replicas
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
        return loss

    return train


def _jax(who: str, name: str, replicas: int, batch: int) -> Callable[[], float]:
    """A step of Keras on JAX: one program, whose batch is split over the devices."""
    from jax.sharding import NamedSharding

    from benchmarks.jax_programs import SAME, SPLIT, mesh_of

    same, split = (NamedSharding(mesh_of(replicas), spec) for spec in (SAME, SPLIT))
    step = jax_step(*_built(name), MODELS[name].data(batch), same, split)
    return lambda: float(step())


def jax_replica_step(
    model: Any, optimizer: Any, compute_loss: Callable[[Any, Any], Any], axis: str | None = None
) -> Callable[[Any, Any, Any], Any]:
    """The training step of Keras on JAX; takes the state, a batch and its labels, and returns the loss and the state.

    With an axis of a `shard_map`, gradients are averaged over it.
    """
    import jax

    def loss_and_state(trained: Any, others: Any, x: Any, labels: Any) -> Any:
        logits, others = model.stateless_call(trained, others, x, training=True)
        return compute_loss(labels, logits), others

    def replica_step(state: Any, x: Any, labels: Any) -> Any:
        trained, others, slots = state
        (loss, others), gradients = jax.value_and_grad(loss_and_state, has_aux=True)(trained, others, x, labels)
        if axis is not None:
            gradients = jax.lax.pmean(gradients, axis)
        trained, slots = optimizer.stateless_apply(slots, gradients, trained)
        return loss, (trained, others, slots)

    return replica_step


def state_of(model: Any, optimizer: Any) -> list[Any]:
    """The variables of a step of Keras on JAX."""
    return [model.trainable_variables, model.non_trainable_variables, optimizer.variables]


def jax_step(
    model: Any, optimizer: Any, compute_loss: Callable[[Any, Any], Any], data: Any, weights_on: Any, data_on: Any
) -> Callable[[], Any]:
    """A training step of Keras on JAX, on a batch and its labels; returns the loss, which may still be computed.

    Weights and slots are on the device, or in the sharding, `weights_on`, and the batch on `data_on`.
    """
    import jax
    import numpy as np

    run = jax.jit(jax_replica_step(model, optimizer, compute_loss), donate_argnums=0)
    # Copies: the step takes the memory of what it is given, and the model still has its own.
    state = jax.device_put(
        [[np.array(variable) for variable in each] for each in state_of(model, optimizer)], weights_on
    )
    batches = jax.device_put(data, data_on)

    def step() -> Any:
        nonlocal state
        loss, state = run(state, *batches)
        return loss

    return step


def _built(name: str) -> tuple[Any, Any, Callable[[Any, Any], Any]]:
    import keras

    return built(MODELS[name], keras.optimizers.SGD(MODELS[name].rate))


def built(case: KerasModel, optimizer: Any) -> tuple[Any, Any, Callable[[Any, Any], Any]]:
    """The model with its initial weights, its optimizer, and the mean loss of labels and logits."""
    import keras

    model = initial(case.build())
    optimizer.build(model.trainable_variables)

    def compute_loss(labels: Any, logits: Any) -> Any:
        return keras.ops.mean(keras.losses.sparse_categorical_crossentropy(labels, logits, from_logits=True))

    return model, optimizer, compute_loss


def with_stages(step: Callable[[], Any]) -> tuple[Any, dict[str, float]]:
    """The result of a first step of `TPUStrategy`, and the seconds of its stages."""
    import replica_engine

    stages = dict.fromkeys(STAGES, 0.0)
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder, "timeline.json")
        with replica_engine.timeline(path):
            result = step()
        for event in json.loads(path.read_text())["traceEvents"]:
            stage = event["name"].partition(" ")[0]
            if event.get("cat") == "compile" and stage in STAGES:
                stages[stage] += event["dur"] / 1e6
    return result, stages


def took(do: Callable[[], Any]) -> tuple[Took, Any]:
    """What a call takes, and its result."""
    begin, processor = time.perf_counter(), time.process_time()
    result = do()
    return Took(time.perf_counter() - begin, time.process_time() - processor), result
