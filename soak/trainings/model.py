"""The model of a spec, built and compiled."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf

from soak.trainings import data
from soak.trainings.data import SHAPES, TOKENS, WORDS
from soak.trainings.spec import SCOPE, THREADS, Head, Part, Spec


def built(spec: Spec) -> keras.Model:
    """The model, with its initial weights, not yet compiled. Weights depend on the seed alone."""
    keras.utils.set_random_seed(spec.seed)
    inputs, x = _inputs(spec)
    if spec.shared:
        layer = keras.layers.Dense(x.shape[-1], activation="tanh")
        x = layer(layer(x))
    for part in spec.body:
        x = _applied(part, x)
    if len(x.shape) > 2:
        x = keras.layers.Flatten()(x)
    outputs = [_output(head, index, x) for index, head in enumerate(spec.heads)]
    kind = OwnTrainStep if spec.style == "own_train_step" else keras.Model
    model = kind(inputs, outputs if len(outputs) > 1 else outputs[0])
    if spec.style != "subclass":
        return model
    wrapped = Subclass(model)
    wrapped(data.inputs(spec, 1, 0))
    return wrapped


def compile_model(model: keras.Model, spec: Spec, one_device: bool) -> None:
    """Compiles the model with the optimizer, the losses and the metrics of the spec."""
    single = len(spec.heads) == 1
    on_threads_in_scope = spec.strategy == THREADS and spec.api == SCOPE

    def of_heads(made: list[Any]) -> Any:
        return made[0] if single else made

    model.compile(
        optimizer(spec),
        of_heads([_loss(head.loss) for head in spec.heads]),
        metrics=of_heads([[_metric(part) for part in head.metrics] for head in spec.heads]),
        weighted_metrics=of_heads([[_metric(part) for part in head.weighted] for head in spec.heads]),
        loss_weights=[0.3, 2.0][: len(spec.heads)] if spec.loss_weights and not single else None,
        steps_per_execution=spec.steps_per_execution,
        run_eagerly=spec.run_eagerly,
        # It changes nothing under a strategy, except that TensorFlow compiles no step of threads in a scope.
        jit_compile=spec.jit_compile if not one_device and not on_threads_in_scope else False,
    )


def optimizer(spec: Spec) -> keras.optimizers.Optimizer:
    """The optimizer of a spec."""
    rate: Any = spec.rate
    if spec.schedule is not None:
        schedule = getattr(keras.optimizers.schedules, spec.schedule.name)
        rate = schedule(spec.rate, **spec.schedule.options)
    made = getattr(keras.optimizers, spec.optimizer.name)(learning_rate=rate, **spec.optimizer.options)
    if spec.loss_scale:
        made = keras.optimizers.LossScaleOptimizer(made, initial_scale=16.0, dynamic_growth_steps=2)
    return made


def _inputs(spec: Spec) -> tuple[Any, Any]:
    """The inputs of the model, and the first tensor."""
    if spec.inputs == "several":
        vector, tokens = (keras.Input(SHAPES[kind], name=kind, dtype=data.dtype(kind)) for kind in ("vector", "tokens"))
        read = keras.layers.GRU(3)(_embedding(spec)(tokens))
        return {"vector": vector, "tokens": tokens}, keras.layers.Concatenate()([vector, read])
    made = keras.Input(SHAPES[spec.inputs], dtype=data.dtype(spec.inputs))
    if spec.inputs == "text":
        split = keras.layers.TextVectorization(vocabulary=list(WORDS), output_sequence_length=5)
        embedded = keras.layers.Embedding(len(WORDS) + 2, 3)(split(made))
        return made, keras.layers.GlobalAveragePooling1D()(embedded)
    return made, _embedding(spec)(made) if spec.inputs == "tokens" else made


def _embedding(spec: Spec) -> keras.layers.Layer:
    return keras.layers.Embedding(TOKENS, 4, mask_zero=spec.mask_zero)


def _applied(part: Part, x: Any) -> Any:
    layer = _layer(part)
    if part.name in ("MultiHeadAttention", "GroupQueryAttention"):
        return layer(x, x)
    return layer([x, x] if part.name == "Attention" else x)


def _layer(part: Part) -> keras.layers.Layer:
    options = {key: _layer(value) if isinstance(value, Part) else value for key, value in part.options.items()}
    return getattr(keras.layers, part.name)(**options)


def _output(head: Head, index: int, x: Any) -> Any:
    units = {"numbers": 2, "binary": 1, "one_hot": 3, "classes": 3}[head.labels]
    activations = {"numbers": None, "binary": "sigmoid", "one_hot": "softmax", "classes": "softmax"}
    activation = "softplus" if head.positive else None if head.logits else activations[head.labels]
    return keras.layers.Dense(units, activation=activation, name=f"head_{index}")(x)


def own_loss(labels: Any, outputs: Any) -> Any:
    """A loss of the user's own: one number for each sample."""
    return keras.ops.mean((labels - outputs) ** 2 + keras.ops.abs(outputs), axis=-1)


def own_metric(labels: Any, outputs: Any) -> Any:
    """A metric of the user's own: one number for each sample."""
    return keras.ops.max(keras.ops.abs(labels - outputs), axis=-1)


class LargestError(keras.metrics.Metric):
    """A metric of the user's own that is no sum."""

    def __init__(self, name: str = "largest_error"):
        super().__init__(name=name)
        self.largest = self.add_weight(initializer="zeros", name="largest")

    def update_state(self, labels: Any, outputs: Any, sample_weight: Any = None) -> None:
        """Keeps the largest error so far."""
        error = keras.ops.max(keras.ops.abs(keras.ops.cast(labels, outputs.dtype) - outputs))
        self.largest.assign(keras.ops.maximum(self.largest, keras.ops.cast(error, self.largest.dtype)))

    def result(self) -> Any:
        """The largest error."""
        return self.largest.value


def _loss(part: Part) -> Any:
    return own_loss if part.name == "own_loss" else getattr(keras.losses, part.name)(**part.options)


def _metric(part: Part) -> Any:
    if part.name == "own_metric":
        return keras.metrics.MeanMetricWrapper(own_metric)
    return LargestError() if part.name == "largest_error" else getattr(keras.metrics, part.name)(**part.options)


class OwnTrainStep(keras.Model):
    """A model whose `train_step` the user wrote."""

    def train_step(self, batch: Any) -> Any:
        """One step, as in Keras' guide."""
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(batch)
        with tf.GradientTape() as tape:
            outputs = self(x, training=True)
            loss = self.compute_loss(x=x, y=y, y_pred=outputs, sample_weight=sample_weight)
            scaled = self.optimizer.scale_loss(loss)
        gradients = tape.gradient(scaled, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        rows = tf.shape(tf.nest.flatten(x)[0])[0]
        next(metric for metric in self.metrics if metric.name == "loss").update_state(loss, sample_weight=rows)
        return self.compute_metrics(x, y, outputs, sample_weight)


class Subclass(keras.Model):
    """A model whose `call` the user wrote."""

    def __init__(self, inner: keras.Model):
        super().__init__()
        self.inner = inner

    def call(self, x: Any, training: bool = False) -> Any:
        """Calls the inner model."""
        return self.inner(x, training=training)


def nudged(model: keras.Model, seed: int) -> None:
    """Changes each trainable weight by about one unit in the last place, up or down.

    A weight of 0, such as a bias at the beginning, changes by that of 1: what it is added to is about that large, and
    is rounded there. Two terms that cancel to 0 exactly on one device, do not where XLA adds them in another way.
    """
    draw = np.random.default_rng(seed)
    for variable in model.trainable_variables:
        value = np.asarray(variable)
        step = np.finfo(value.dtype).eps * draw.choice((-1.0, 1.0), value.shape).astype(value.dtype)
        variable.assign(value + step * np.where(value == 0, 1, value))
