"""Training steps compiled for eight chips of TPU v5e that are not there, beside Keras on JAX by the same compiler.

Nothing runs: the figures are libtpu's, so they are the same on every machine and in every repeat. It needs
`pip install "replica-engine[aot]"`, and minutes for a large model. Cycles are the compiler's estimates, and what is in
a loop counts once. Memory is that of each chip; values in the chip's fast memory do not count.

Both steps are written by hand, with the layers, losses and optimizers of Keras: gradients, their mean over the chips,
and the optimizer. Each is traced in a process of its own, because Keras has one backend in a process.

The transformer with long sequences has a further contender, the same step with `disable_flash_attention()`. It sees all
keys, and has few words, so that attention is most of what needs memory. Keras on JAX takes its kernel in the same way;
for a causal layer in a jitted step, Keras 3.15.1 has none.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
import os
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple
from unittest import mock

from benchmarks import command, keras_models
from benchmarks.fresh import in_fresh_process
from benchmarks.keras_models import BERT_LENGTH, BERT_WORDS, KerasModel
from benchmarks.keras_training import JAX as THEIRS
from benchmarks.keras_training import XLA as OURS
from benchmarks.keras_training import built, jax_replica_step, state_of
from benchmarks.measure import Row

TARGET, TARGET_OF_KERNELS = 1.0, 0.25

CHIPS, TOPOLOGY = 8, "v5e:2x4"

POLICIES = ("float32", "mixed_bfloat16")

IMAGE = (224, 224, 3)

WORDS, LENGTH = 32000, 512
"""Of the transformer."""

MANY, FEW = 4096, 256
"""The tokens of a long sequence, and the words that they are of."""

PLAIN = "TPUStrategy, no kernel"


def transformer(width: int = 512, words: int = WORDS, length: int = LENGTH, is_long: bool = False) -> Any:
    """Embeddings of tokens and positions, attention, layer normalization first; causal, if it is not for long ones."""
    import keras
    from keras import layers

    heads, blocks = 8, 6
    tokens = keras.Input((length,), dtype="int32")
    x = layers.Embedding(words, width)(tokens) + layers.Embedding(length, width)(keras.ops.arange(length))
    for _ in range(blocks):
        y = layers.LayerNormalization()(x)
        attention = layers.MultiHeadAttention(heads, width // heads, flash_attention=None if is_long else False)
        x = x + attention(y, y, use_causal_mask=not is_long)
        y = layers.Dense(4 * width, "gelu")(layers.LayerNormalization()(x))
        x = x + layers.Dense(width)(y)
    return keras.Model(tokens, layers.Dense(words)(layers.LayerNormalization()(x)))


MODELS = {
    "lstm": dataclasses.replace(keras_models.MODELS["lstm"], batch=32),
    # `small_bert_L-4_H-512_A-8`
    "bert": KerasModel("BERT small", partial(keras_models.bert, 512, 4, 8), (BERT_LENGTH,), ids=BERT_WORDS, batch=32),
    "transformer": KerasModel("transformer", transformer, (LENGTH,), (LENGTH,), WORDS, ids=WORDS, batch=16),
    "resnet": KerasModel(
        "ResNet-50, 224x224", partial(keras_models.images, "ResNet50", IMAGE, 1000), IMAGE, classes=1000, batch=32
    ),
}
"""The models, by the name on the command line. A chip has the batch that is given here."""

_LONG = partial(transformer, 1024, FEW, MANY, is_long=True)
LONG = KerasModel("transformer, 4,096 tokens", _LONG, (MANY,), (MANY,), FEW, ids=FEW, batch=4)
CASES = {**MODELS, "long": LONG}


def made(name: str, policy: str) -> tuple[Any, Any, Callable[[Any, Any], Any]]:
    """The model, its optimizer, which is SGD with momentum for ResNet-50 and Adam for the others, and its loss."""
    import keras

    keras.config.set_dtype_policy(policy)
    optimizers = keras.optimizers
    optimizer = optimizers.SGD(1e-3, momentum=0.9) if name == "resnet" else optimizers.Adam(1e-4)
    model, optimizer, _ = built(CASES[name], optimizer)
    return model, optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True)


class Figures(NamedTuple):
    """What the compiler says of a step, on each chip: cycles, bytes and counts."""

    cycles: int
    bytes: float
    temporary: int
    all_reduces: int
    peak: int


def ours(name: str, policy: str) -> Figures:
    """The figures of `TPUStrategy`. Runs in a process of its own."""
    os.environ["KERAS_BACKEND"] = "tensorflow"
    import tensorflow as tf

    from replica_engine import TPUStrategy

    strategy = TPUStrategy(num_cores=CHIPS)
    with strategy.scope():
        model, optimizer, compute_loss = made(name, policy)

    def step(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = compute_loss(y, model(x, training=True))
        gradients = map(tf.convert_to_tensor, tape.gradient(loss, model.trainable_variables))
        gradients = tf.distribute.get_replica_context().all_reduce("MEAN", list(gradients))
        optimizer.apply(gradients, model.trainable_variables)
        return loss

    specs = [tf.TensorSpec(*each) for each in _batch(name, 1)]
    return _figures(strategy.plan(step, specs, topology=TOPOLOGY))


def plain(name: str, policy: str) -> Figures:
    """The figures of `TPUStrategy` without kernels of attention. Runs in a process of its own."""
    os.environ["KERAS_BACKEND"] = "tensorflow"
    import keras

    keras.config.disable_flash_attention()
    return ours(name, policy)


def theirs(name: str, policy: str) -> Figures:
    """The figures of Keras on JAX. Runs in a process of its own, which libtpu may end."""
    os.environ["KERAS_BACKEND"] = "jax"
    from replica_engine.pjrt import absent_chips

    os.environ.update(absent_chips._ENVIRONMENT)
    import jax
    import numpy as np
    from jax.sharding import Mesh, NamedSharding

    from benchmarks.jax_programs import SAME, SPLIT, mapped
    from replica_engine.pjrt.accelerators import slice_named
    from replica_engine.pjrt.jaxlib import absent_tpus
    from replica_engine.pjrt.plan import make_plan

    model, optimizer, compute_loss = made(name, policy)
    replica_step = jax_replica_step(model, optimizer, compute_loss, "replica")

    def step(state: Any, x: Any, y: Any) -> Any:
        loss, state = replica_step(state, x, y)
        return loss[None], state

    chips = absent_tpus(TOPOLOGY)
    mesh = Mesh(np.array(chips[:CHIPS]), ("replica",))

    def like(shape: Any, dtype: Any, spec: Any) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))

    program = mapped(step, mesh, (SAME, SPLIT, SPLIT), (SPLIT, SAME), donated=0)
    state = [[like(variable.shape, variable.dtype, SAME) for variable in each] for each in state_of(model, optimizer)]
    # Keras asks for the devices before it takes a kernel.
    with mock.patch.object(jax, "devices", return_value=chips) if name == "long" else contextlib.nullcontext():
        lowered = program.lower(state, *(like(*each, SPLIT) for each in _batch(name, CHIPS)))
    compiled = lowered.compile().runtime_executable()
    memory = slice_named(TOPOLOGY).chip.memory
    return _figures(make_plan(compiled, name, CHIPS, TOPOLOGY, memory, 0.0))


def _batch(name: str, chips: int) -> list[tuple[tuple[int, ...], str]]:
    """The shapes and dtypes of a batch of so many chips and of its labels."""
    case = CASES[name]
    examples = chips * case.batch
    return [((examples, *case.example), "int32" if case.ids else "float32"), ((examples, *case.labels), "int32")]


def _figures(plan: Any) -> Figures:
    count = sum(each.kind == "all-reduce" for each in plan.cost.collectives)
    return Figures(plan.cost.cycles, plan.cost.bytes, plan.memory.temporary, count, plan.memory.peak)


def measure(flags: argparse.Namespace) -> Iterator[Row]:
    """Yields the rows of each model and policy."""
    for policy, name in itertools.product(flags.policies, flags.models):
        steps = {OURS: ours, THEIRS: theirs}
        rows = [("cycles", "million", 1e6), ("bytes", "GiB", 2**30), _TEMPORARY, ("all_reduces", "count", 1)]
        aims = {THEIRS: TARGET}
        if name == "long":
            if policy == "float32":
                continue  # there is no kernel for it
            steps = {OURS: ours, PLAIN: plain, THEIRS: theirs}
            rows, aims = [("peak", "MiB", 2**20), _TEMPORARY], {PLAIN: TARGET_OF_KERNELS, THEIRS: TARGET}
        made = {who: in_fresh_process(step, name, policy) for who, step in steps.items()}
        title = f"{CASES[name].title}, {policy.removeprefix('mixed_')}"
        for what, unit, scale in rows:
            figures = {who: [getattr(each, what) / scale] for who, each in made.items()}
            targets, note = aims, ""
            if not figures[THEIRS][0]:  # no ratio: all of it is in the fast memory of the chip
                figures, targets, note = {OURS: figures[OURS]}, {}, f"{THEIRS}: none"
            yield Row("aot", f"{title}: {what.replace('_', '-')}", figures, unit, CHIPS, targets, note=note)


_TEMPORARY = ("temporary", "MiB", 2**20)


def policies() -> command.Option:
    """The option for dtype policies."""
    return command.Option("policies", ",".join(POLICIES), "float32", "dtype policies", command.choose_some(*POLICIES))


if __name__ == "__main__":
    command.main(__doc__, measure, command.models(CASES, "lstm"), policies())
