"""Training steps compiled for eight chips of TPU v5e that are not there, beside Keras on JAX by the same compiler.

    python -m benchmarks.aot [--models resnet,transformer,bert,lstm] [--policies float32,mixed_bfloat16]
        [--topology v5e:2x4] [--quick] [--json out.json]

Nothing runs: the figures are libtpu's, so they are the same on every machine and in every repeat. It needs
`pip install "replica-engine[aot]"`, and minutes for a large model. Cycles are the compiler's estimates, and what is in
a loop counts once. Memory is that of each chip; values in the chip's fast memory do not count.

Both steps are written by hand, with the layers, losses and optimizers of Keras: gradients, their mean over the chips,
and the optimizer. Each is traced in a process of its own, because Keras has one backend in a process.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
from collections.abc import Callable, Iterator
from typing import Any

from benchmarks import command, keras_models
from benchmarks.fresh import in_fresh_process
from benchmarks.measure import Row

OURS, THEIRS = "TPUStrategy", "Keras on JAX"

TARGET = 1.0

CHIPS = 8

POLICIES = ("float32", "mixed_bfloat16")


@dataclasses.dataclass(frozen=True)
class Case:
    """A model and the batch of one chip.

    Attributes:
        title: the name in the table.
        build: makes the model; its outputs are logits.
        example: the shape of a batch, and its dtype.
        labels: the shape of the labels.
        optimizer: makes the optimizer.
    """

    title: str
    build: Callable[[], Any]
    example: tuple[tuple[int, ...], str]
    labels: tuple[int, ...]
    optimizer: Callable[[], Any]


def resnet() -> Any:
    """ResNet-50 for images of 224x224 pixels."""
    from keras import applications

    return applications.ResNet50(weights=None, input_shape=(224, 224, 3), classes=1000, classifier_activation=None)


def transformer(words: int = 32000, length: int = 512, width: int = 512, heads: int = 8, blocks: int = 6) -> Any:
    """A decoder: embeddings of tokens and positions, causal attention, layer normalization first."""
    import keras
    from keras import layers

    tokens = keras.Input((length,), dtype="int32")
    x = layers.Embedding(words, width)(tokens) + layers.Embedding(length, width)(keras.ops.arange(length))
    for _ in range(blocks):
        y = layers.LayerNormalization()(x)
        attention = layers.MultiHeadAttention(heads, width // heads, flash_attention=False)
        x = x + attention(y, y, use_causal_mask=True)
        y = layers.Dense(4 * width, "gelu")(layers.LayerNormalization()(x))
        x = x + layers.Dense(width)(y)
    return keras.Model(tokens, layers.Dense(words)(layers.LayerNormalization()(x)))


def bert() -> Any:
    """`small_bert_L-4_H-512_A-8`."""
    return keras_models.bert(width=512, layers_=4, heads=8)


def momentum() -> Any:
    """The optimizer of ResNet-50."""
    from keras import optimizers

    return optimizers.SGD(0.1, momentum=0.9)


def adam() -> Any:
    """The optimizer of the others."""
    from keras import optimizers

    return optimizers.Adam(1e-3)


MODELS = {
    "lstm": Case("LSTM language model", keras_models.MODELS["lstm"].build, ((32, 20), "int32"), (32, 20), adam),
    "bert": Case("BERT small", bert, ((32, 128), "int32"), (32,), adam),
    "transformer": Case("transformer", transformer, ((16, 512), "int32"), (16, 512), adam),
    "resnet": Case("ResNet-50, 224x224", resnet, ((32, 224, 224, 3), "float32"), (32,), momentum),
}
"""The models, by the name on the command line. A chip has the batch that is given here."""


@dataclasses.dataclass(frozen=True)
class Figures:
    """What the compiler says of a step, on each chip: cycles, bytes and counts."""

    cycles: int
    bytes: float
    temporary: int
    all_reduces: int


def ours(name: str, policy: str, topology: str) -> Figures:
    """The figures of `TPUStrategy`. Runs in a process of its own."""
    os.environ["KERAS_BACKEND"] = "tensorflow"
    import keras
    import tensorflow as tf

    from replica_engine import TPUStrategy

    keras.config.set_dtype_policy(policy)
    case = MODELS[name]
    strategy = TPUStrategy(num_cores=CHIPS)
    with strategy.scope():
        model, optimizer = case.build(), case.optimizer()
        optimizer.build(model.trainable_variables)
    compute_loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    def step(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = compute_loss(y, model(x, training=True))
        gradients = map(tf.convert_to_tensor, tape.gradient(loss, model.trainable_variables))
        gradients = tf.distribute.get_replica_context().all_reduce("MEAN", list(gradients))
        optimizer.apply(gradients, model.trainable_variables)
        return loss

    specs = tf.TensorSpec(*case.example), tf.TensorSpec(case.labels, tf.int32)
    return _figures(strategy.plan(step, specs, topology=topology))


def theirs(name: str, policy: str, topology: str) -> Figures:
    """The figures of Keras on JAX. Runs in a process of its own, which libtpu may end."""
    os.environ["KERAS_BACKEND"] = "jax"
    from replica_engine.pjrt import absent_chips

    os.environ.update(absent_chips._ENVIRONMENT)
    import jax
    import keras
    import numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    from replica_engine.pjrt.jaxlib import absent_tpus
    from replica_engine.pjrt.plan import make_plan, slice_named

    keras.config.set_dtype_policy(policy)
    case = MODELS[name]
    model, optimizer = case.build(), case.optimizer()
    optimizer.build(model.trainable_variables)
    compute_loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    def loss(trained: Any, other: Any, x: Any, y: Any) -> Any:
        outputs, other = model.stateless_call(trained, other, x, training=True)
        return compute_loss(y, outputs), other

    def step(trained: Any, other: Any, state: Any, x: Any, y: Any) -> Any:
        (value, other), gradients = jax.value_and_grad(loss, has_aux=True)(trained, other, x, y)
        trained, state = optimizer.stateless_apply(state, jax.lax.pmean(gradients, "chips"), trained)
        return value[None], trained, other, state

    mesh = Mesh(np.array(absent_tpus(topology)[:CHIPS]), ("chips",))
    whole, divided = PartitionSpec(), PartitionSpec("chips")

    def like(variables: Any) -> list[Any]:
        return [jax.ShapeDtypeStruct(each.shape, each.dtype, sharding=NamedSharding(mesh, whole)) for each in variables]

    def batch(shape: tuple[int, ...], dtype: str) -> Any:
        shape = CHIPS * shape[0], *shape[1:]
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, divided))

    mapped = jax.shard_map(
        step,
        mesh=mesh,
        in_specs=(whole, whole, whole, divided, divided),
        out_specs=(divided, whole, whole, whole),
        check_vma=False,
    )
    parameters = map(like, (model.trainable_variables, model.non_trainable_variables, optimizer.variables))
    lowered = jax.jit(mapped, donate_argnums=(0, 1, 2)).lower(
        *parameters, batch(*case.example), batch(case.labels, "int32")
    )
    compiled = lowered.compile().runtime_executable()
    memory = slice_named(topology).chip.memory
    return _figures(make_plan(compiled, name, CHIPS, topology, memory, 0.0))


def _figures(plan: Any) -> Figures:
    count = sum(each.kind == "all-reduce" for each in plan.cost.collectives)
    return Figures(plan.cost.cycles, plan.cost.bytes, plan.memory.temporary, count)


def measure(flags: argparse.Namespace) -> Iterator[Row]:
    """Yields the rows of each model and policy."""
    for policy in flags.policies:
        for name in flags.models:
            made = {
                contender: in_fresh_process(step, name, policy, flags.topology)
                for contender, step in ((OURS, ours), (THEIRS, theirs))
            }
            title = f"{MODELS[name].title}, {policy.removeprefix('mixed_')}"
            for what, unit, scale in (
                ("cycles", "million", 1e6),
                ("bytes", "GiB", 2**30),
                ("temporary", "MiB", 2**20),
                ("all_reduces", "count", 1),
            ):
                values = {contender: getattr(figures, what) for contender, figures in made.items()}
                if not values[THEIRS]:  # no ratio: all of it is in the fast memory of the chip
                    values, note = {OURS: values[OURS]}, f"{THEIRS}: none"
                else:
                    note = ""
                figures = {contender: [value / scale] for contender, value in values.items()}
                targets = {THEIRS: TARGET} if THEIRS in figures else {}
                said = what.replace("_", "-")
                yield Row("aot", f"{title}: {said}", figures, unit, CHIPS, targets, note=note)


if __name__ == "__main__":
    command.main(
        __doc__,
        measure,
        command.Option("models", ",".join(MODELS), "lstm", "models", command.choose_some(*MODELS)),
        command.Option("policies", ",".join(POLICIES), "float32", "dtype policies", command.choose_some(*POLICIES)),
        command.Option("topology", "v5e:2x4", "v5e:2x4", "the slice", str),
    )
