"""A random training for each seed.

A seed draws one spec, always the same. What the docs say is not the same as on one device is not drawn: a batch
normalization of each shard, a `train_step` of the model's own in a scope.
"""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

from soak.trainings import heads, layers
from soak.trainings.spec import COMPILED, FEEDS, REPLICATE, SCOPE, THREADS, Part, Spec

INPUTS = ("vector", "vector", "sequence", "sequence", "image", "image", "volume", "tokens", "tokens", "several", "text")

OPTIMIZERS: dict[str, tuple[dict[str, Any], ...]] = {
    "SGD": ({}, {"momentum": 0.9}, {"momentum": 0.9, "nesterov": True}),
    "RMSprop": ({}, {"centered": True}, {"momentum": 0.5, "rho": 0.8}),
    "Adam": ({}, {"amsgrad": True}),
    **dict.fromkeys(("AdamW", "Adadelta", "Adagrad", "Adamax", "Adafactor", "Nadam", "Ftrl", "Lion", "Lamb"), ({},)),
}
CLIPS: tuple[dict[str, float], ...] = ({"clipnorm": 0.5}, {"global_clipnorm": 0.5}, {"clipvalue": 0.1})
SCHEDULES = (
    Part("ExponentialDecay", {"decay_steps": 3, "decay_rate": 0.7}),
    Part("CosineDecay", {"decay_steps": 7}),
    Part("PolynomialDecay", {"decay_steps": 6, "end_learning_rate": 0.001}),
)
CALLBACKS = ("each_batch", "schedule", "plateau", "early_stopping", "checkpoint", "set_rate", "set_weights", "swap_ema")
SUSPECTS = 0.05  # the part of all trainings that are like one that went wrong

BETWEEN = ("save", "weights", "checkpoint", "recompile", "freeze", "original")
"""The last one trains the original of a replicated model; in a scope there is none."""

STYLES = ("functional", "functional", "functional", "subclass", "own_train_step")
"""The last one has means over samples, where in a scope a step divides a sum by the batch of all replicas."""


def drawn(seed: int) -> Spec:
    """The training of a seed."""
    draw = random.Random(seed)
    inputs = draw.choice(INPUTS)
    api = draw.choice((SCOPE, REPLICATE, REPLICATE))
    replicas = draw.choice((1, 2, 2, 3, 3, 4, 4))
    mask_zero = inputs == "several" or (inputs == "tokens" and draw.random() < 0.6)
    feed = draw.choice(("arrays", "arrays", *FEEDS, "dataset"))
    callbacks = tuple(draw.sample(CALLBACKS, draw.choice((0, 0, 1, 1, 2))))
    dtype = draw.choice(("float32", "float32", "float64"))
    outputs = heads.drawn(draw, dtype)
    optimizer = _optimizer(draw)
    if inputs == "text" and optimizer.name == "Adadelta":  # a LoweringError, as docs/host_work.md says
        optimizer = optimizer._replace(name="Adagrad")
    spec = Spec(
        seed=seed,
        strategy=draw.choice((THREADS, COMPILED)),
        replicas=replicas,
        api=api,
        inputs=inputs,
        heads=outputs,
        body=layers.drawn(draw, inputs, mask_zero),
        optimizer=optimizer,
        sizes=_sizes(draw),
        feed=feed,
        dtype=dtype,
        mask_zero=mask_zero,
        shared=inputs == "vector" and draw.random() < 0.2,
        rate=draw.choice((0.01, 0.05, 0.1)),
        schedule=draw.choice((None, None, *SCHEDULES))
        if not {"schedule", "plateau", "set_rate"} & {*callbacks}
        else None,
        loss_weights=len(outputs) > 1 and draw.random() < 0.5,
        epochs=draw.choice((1, 2, 2)),
        limit=draw.choice((None, None, None, 2)) if feed == "arrays" else None,
        steps_per_execution=draw.choice((1, 1, 1, 2, 3)),
        validation=draw.choice((None, None, "data")),
        callbacks=callbacks,
        jit_compile=draw.choice((False, False, "auto")),
    )
    if draw.random() < SUSPECTS:
        return _suspect(draw, spec)
    return _with_more(draw, spec)


def _suspect(draw: random.Random, spec: Spec) -> Spec:
    """What once went wrong: sparse gradients and slots, when a dataset ends whose length nobody knows."""
    body = tuple(part for part in layers.drawn(draw, "vector", False) if part.name != "Dense")
    names = draw.choice((("RMSprop", {"momentum": 0.5, "rho": 0.8}), ("SGD", {"momentum": 0.9}), ("Adam", {})))
    return replace(
        spec,
        api=SCOPE,
        inputs="tokens",
        feed="dataset",
        mask_zero=draw.random() < 0.5,
        shared=False,
        heads=(*heads.drawn(draw, spec.dtype), *heads.drawn(draw, spec.dtype))[:2],
        body=(Part("GlobalAveragePooling1D"), *body),
        optimizer=Part(*names),
        sizes=(2 * spec.replicas,) * 3,
        limit=None,
        epochs=2,
    )


def _with_more(draw: random.Random, spec: Spec) -> Spec:
    """Weights, other styles of models, and what happens between two calls of `fit`."""
    head, in_scope = spec.heads[0], spec.api == SCOPE
    classes = len(spec.heads) == 1 and head.labels != "numbers" and "ignore_class" not in head.loss.options
    classes = classes and spec.feed in ("arrays", "dataset")
    weighted = draw.random() < 0.3
    return replace(
        spec,
        sample_weight=weighted,
        class_weight=classes and not weighted and draw.random() < 0.3,
        style=draw.choice(STYLES[: -1 if in_scope else None]),
        run_eagerly=spec.strategy == THREADS and draw.random() < 0.07,
        between=draw.choice(BETWEEN[: -1 if in_scope else None]) if draw.random() < 0.3 else None,
        loss_scale=spec.dtype == "float32"
        and "gradient_accumulation_steps" not in spec.optimizer.options
        and draw.random() < 0.1,
        validation=draw.choice((spec.validation, spec.validation, "split"))
        if spec.feed == "arrays"
        else spec.validation,
    )


def _optimizer(draw: random.Random) -> Part:
    name = draw.choice((*OPTIMIZERS, "SGD", "RMSprop", "Adam"))
    options = dict(draw.choice(OPTIMIZERS[name]))
    if draw.random() < 0.35:
        options |= draw.choice(CLIPS)
    if draw.random() < 0.2:
        options["weight_decay"] = 0.01
    if draw.random() < 0.2:
        options |= {"use_ema": True, "ema_momentum": 0.8, "ema_overwrite_frequency": draw.choice((None, 2, 3))}
    if draw.random() < 0.2:
        options["gradient_accumulation_steps"] = draw.choice((2, 3))
    return Part(name, options)


def _sizes(draw: random.Random) -> tuple[int, ...]:
    """The rows of the batches."""
    batches = draw.randint(2, 4)
    some = (draw.randint(1, 8), draw.randint(1, 8))  # each size is a program of its own under TPUStrategy
    return tuple(draw.choice(some) for _ in range(batches))
