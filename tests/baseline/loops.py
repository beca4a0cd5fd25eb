"""Training loops of the user's own: a step, its loss, its update, its metrics, and batches of any size."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

import replica_engine
from replica_engine.keras import CrossReplicaOptimizer
from tests.baseline.start import COMPILED, THREADS, Numbers, Start, in_floats, local, make_shared_strategy

FORMS = ("eager", "run in function", "function in run")
MODELS = ("weights", "layers", "table", "convolution", "masked", "normalized")
BY_HAND = ("sum and assign", "mean of means", "clipped", "in a branch", "merged", "parts of a batch")
OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "momentum": lambda: keras.optimizers.SGD(0.05, momentum=0.9),
    "adam": lambda: keras.optimizers.Adam(0.05),
    "rmsprop": lambda: keras.optimizers.RMSprop(0.02, centered=True),
    "ema": lambda: keras.optimizers.SGD(0.05, use_ema=True, ema_momentum=0.8, ema_overwrite_frequency=2),
    "accumulation": lambda: keras.optimizers.Adam(0.05, gradient_accumulation_steps=2),
    "clipped sum": lambda: CrossReplicaOptimizer(keras.optimizers.Adam(0.05, global_clipnorm=0.3), reduction="sum"),
    "scaled loss": lambda: keras.optimizers.LossScaleOptimizer(
        keras.optimizers.SGD(0.05), initial_scale=16.0, dynamic_growth_steps=2
    ),
    "decay": lambda: keras.optimizers.AdamW(
        keras.optimizers.schedules.ExponentialDecay(0.05, 2, 0.5), weight_decay=0.01
    ),
}
BATCHES = ("even", "even", "uneven", "tiny", "dataset", "dataset with a rest", "of each replica")
"""How batches reach replicas. `split_batch` fills even, uneven and tiny ones up with copies that have no weight."""

WORDS, WIDTH = 7, 4


class Loop(NamedTuple):
    """A loop.

    Attributes:
        strategy: the name of the strategy.
        replicas: the number of replicas.
        form: where the tf.function is.
        model: one of `MODELS`.
        update: one of `BY_HAND`, or an optimizer.
        batches: one of `BATCHES`.
        weights: whether rows have weights.
        dtype: of weights and data.
    """

    strategy: str
    replicas: int
    form: str
    model: str
    update: str
    batches: str
    weights: bool
    dtype: str


def drawn(draw: random.Random, index: int) -> Loop:
    """A loop; updates take turns, so that each comes under both strategies."""
    updates = (*BY_HAND, *OPTIMIZERS)
    strategy = (THREADS, COMPILED)[index % 2]
    update = updates[index // 2 % len(updates)]
    batches = draw.choice([each for each in BATCHES if strategy == THREADS or each != "dataset with a rest"])
    return Loop(
        strategy,
        draw.choice((1, 2, 2, 3, 4)),
        draw.choice(FORMS),
        draw.choice(MODELS),
        update,
        batches,
        draw.random() < 0.5,
        "float32" if update == "scaled loss" or index % 6 == 5 else "float64",
    )


def run(loop: Loop, start: Start) -> Numbers:
    """Trains three steps, and says the losses, the outputs of the last step, all variables and the metrics."""
    with in_floats(loop.dtype):
        return _run(loop, start, make_shared_strategy(loop.strategy, loop.replicas))


def _run(loop: Loop, start: Start, strategy: Any) -> Numbers:
    with strategy.scope():
        model, variables = _model(loop, start)
        optimizer = OPTIMIZERS[loop.update]() if loop.update in OPTIMIZERS else None
        error = keras.metrics.MeanSquaredError()
        rows = tf.Variable(
            tf.zeros([], loop.dtype),
            trainable=False,
            synchronization=tf.VariableSynchronization.ON_READ,
            aggregation=tf.VariableAggregation.SUM,
        )
        largest = tf.Variable(tf.zeros([], loop.dtype), trainable=False, aggregation=tf.VariableAggregation.MEAN)

    def gradients(x, y, weights):
        with tf.GradientTape() as tape:
            outputs = model(x)
            loss = tf.reduce_sum(tf.reduce_mean((outputs - y) ** 2, axis=-1) * weights)
            scaled = optimizer.scale_loss(loss) if loop.update == "scaled loss" else loss
        return tape.gradient(scaled, [each.value for each in variables]), loss, outputs

    def replica_step(x, y, weights):
        if loop.update == "parts of a batch":
            outputs = model(x)
            of_batch, loss = replica_engine.accumulate(
                lambda *part: gradients(*part)[:2], (x, y, weights), steps=2, reduction="sum"
            )
        else:
            of_batch, loss, outputs = gradients(x, y, weights)
        if optimizer is None:
            _by_hand(loop.update, of_batch, [each.value for each in variables])
        else:
            optimizer.apply(of_batch, variables)
        error.update_state(y, outputs, sample_weight=tf.cast(weights > 0, loop.dtype))
        rows.assign_add(tf.reduce_sum(tf.cast(weights > 0, loop.dtype)))
        largest.assign(tf.reduce_max(tf.abs(outputs)))
        return loss, outputs

    step = _formed(loop.form, strategy, replica_step)
    numbers: Numbers = {}
    outputs = None
    for number, batch in enumerate(_batches(loop, start, strategy)):
        losses, outputs = step(*batch)
        numbers[f"loss {number}"] = np.asarray(strategy.reduce("SUM", losses, axis=None))
    numbers |= local(strategy, "outputs", outputs)
    numbers |= {f"weight {index}": each.numpy() for index, each in enumerate(variables)}
    numbers |= local(strategy, "first weight", variables[0].value)
    if optimizer is not None:
        numbers |= {f"optimizer {index} {each.name}": each.numpy() for index, each in enumerate(optimizer.variables)}
    return numbers | {"error": error.result().numpy(), "rows": rows.numpy(), "largest": largest.numpy()}


def _formed(form: str, strategy: Any, replica_step: Callable) -> Callable:
    if form == "function in run":
        inner = tf.function(replica_step)
        return lambda *batch: strategy.run(inner, args=batch)
    if form == "eager":
        return lambda *batch: strategy.run(replica_step, args=batch)
    return tf.function(lambda *batch: strategy.run(replica_step, args=batch))


def _model(loop: Loop, start: Start) -> tuple[Callable, list[Any]]:
    """A function from inputs to outputs of two numbers, and its variables."""
    if loop.model == "weights":
        first = keras.Variable(start.normal(WIDTH, 3, dtype=loop.dtype), name="first")
        second = keras.Variable(start.normal(3, 2, dtype=loop.dtype), name="second")
        return lambda x: tf.tanh(x @ first.value) @ second.value, [first, second]
    layers = {
        "layers": lambda: [keras.layers.Dense(3, "gelu"), keras.layers.LayerNormalization()],
        "table": lambda: [keras.layers.Embedding(WORDS, 3), keras.layers.Flatten()],
        "convolution": lambda: [
            keras.layers.Reshape((WIDTH, 1)),
            keras.layers.Conv1D(3, 2, activation="tanh"),
            keras.layers.MaxPooling1D(2),
            keras.layers.Flatten(),
        ],
        "masked": lambda: [keras.layers.Embedding(WORDS, 3, mask_zero=True), keras.layers.GlobalAveragePooling1D()],
        "normalized": lambda: [keras.layers.Dense(3), keras.layers.BatchNormalization(synchronized=True)],
    }[loop.model]()
    model = keras.Sequential([keras.Input((WIDTH,), dtype=_input_dtype(loop)), *layers, keras.layers.Dense(2)])
    model.set_weights([_like(weight, start) for weight in model.get_weights()])
    return lambda x: model(x, training=True), model.trainable_variables


def _like(weight: np.ndarray, start: Start) -> np.ndarray:
    drawn_weight = start.normal(*weight.shape, dtype=weight.dtype)
    return weight if np.all(weight == 1) else drawn_weight


def _input_dtype(loop: Loop) -> str:
    return "int32" if loop.model in ("table", "masked") else loop.dtype


def _by_hand(update: str, gradients: Any, variables: list[tf.Variable]) -> None:
    context = tf.distribute.get_replica_context()
    if update == "merged":
        context.merge_call(_update_in_merge, args=(gradients, variables))
        return
    reduced = context.all_reduce("MEAN" if update == "mean of means" else "SUM", gradients)
    if update == "clipped":
        reduced, _ = tf.clip_by_global_norm(reduced, 0.3)
    if update == "in a branch":
        norm = tf.linalg.global_norm(reduced)
        rate = tf.cond(norm > 0.2, lambda: 0.1 * context.all_reduce("MEAN", norm), lambda: norm * 0.0)
    else:
        rate = 0.1
    for variable, gradient in zip(variables, reduced, strict=True):
        variable.assign_sub(rate * tf.convert_to_tensor(gradient))


def _update_in_merge(strategy: Any, gradients: list[Any], variables: list[tf.Variable]) -> None:
    reduced = strategy.extended.batch_reduce_to("SUM", list(zip(gradients, variables, strict=True)))
    for variable, gradient in zip(variables, reduced, strict=True):
        strategy.extended.update(variable, lambda own, of: own.assign_sub(0.1 * tf.convert_to_tensor(of)), (gradient,))


def _batches(loop: Loop, start: Start, strategy: Any) -> list[tuple[Any, ...]]:
    """Inputs, labels and weights of the rows, on replicas."""
    n = strategy.num_replicas_in_sync
    sizes = {
        "uneven": (2 * n + 1, 3 * n - 1, 2 * n),
        "tiny": (1, max(1, n - 1), 1),
        "dataset with a rest": (2 * n, 2 * n, n + 1),
    }
    made = [_rows(loop, start, size) for size in sizes.get(loop.batches, (2 * n,) * 3)]
    if loop.batches == "of each replica":
        return [
            tuple(
                strategy.experimental_distribute_values_from_function(
                    lambda context, each=each: tf.constant(np.split(each, n)[context.replica_id_in_sync_group])
                )
                for each in batch
            )
            for batch in made
        ]
    if loop.batches.startswith("dataset"):
        whole = tuple(np.concatenate(each) for each in zip(*made, strict=True))
        dataset = tf.data.Dataset.from_tensor_slices(whole).batch(2 * n, drop_remainder=loop.batches == "dataset")
        return list(strategy.experimental_distribute_dataset(dataset))
    shares = []
    for x, y, weights in made:
        (x_shares, y_shares, own), of_rows = replica_engine.split_batch(strategy, (x, y, weights), batch_size=3 * n)
        real = strategy.run(lambda own, of_rows: own * tf.cast(of_rows > 0, own.dtype), args=(own, of_rows))
        shares.append((x_shares, y_shares, real))
    return shares


def _rows(loop: Loop, start: Start, size: int) -> tuple[np.ndarray, ...]:
    if loop.model in ("table", "masked"):
        x = start.whole(WORDS, size, WIDTH).astype("int32")
        x[:, 0] = 1  # no row is masked completely
    else:
        x = start.normal(size, WIDTH, dtype=loop.dtype)
    weights = np.abs(start.normal(size, dtype=loop.dtype)) + 0.1 if loop.weights else np.ones(size, loop.dtype)
    return x, start.normal(size, 2, dtype=loop.dtype), (weights / size).astype(loop.dtype)
