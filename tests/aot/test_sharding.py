"""Replicas of several devices compile for chips that are not there, with the exchanges between their devices."""

import keras
import pytest
import tensorflow as tf
from helpers.divided import model_parallel

import replica_engine

CHIPS = ("v5e:2x4", "v5p:2x2x2", "h100:8")
WAYS = {
    "fsdp": {"distribution": "fsdp"},
    "zero1": {"distribution": "zero1"},
    "two replicas of four": {"distribution": "fsdp", "cores_per_replica": 4},
    "tensor parallel": {"distribution": "tensor"},
}


def tensor_parallel():
    attention = {".*(query|key|value)/kernel": (None, "model", None)}
    return model_parallel({".*up/kernel": (None, "model"), ".*down/kernel": ("model", None), **attention}, (2, 4))


def transformer():
    words = keras.Input([32], dtype="int32")
    x = keras.layers.Embedding(1024, 256)(words)
    attended = keras.layers.MultiHeadAttention(4, 64, name="attention")(x, x, use_causal_mask=True)
    x = keras.layers.LayerNormalization()(x + keras.layers.Dropout(0.1)(attended))
    hidden = keras.layers.Dense(1024, activation="gelu", name="up")(x)
    x = keras.layers.LayerNormalization()(x + keras.layers.Dense(256, name="down")(hidden))
    model = keras.Model(words, keras.layers.Dense(1024)(x))
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    model.optimizer.build(model.trainable_variables)
    return model


@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("way", WAYS)
def test_a_transformer_divided(chip, way):
    how = WAYS[way]
    if way == "tensor parallel":
        how = {"distribution": tensor_parallel()}
    strategy = replica_engine.TPUStrategy(num_cores=8, **how)
    with strategy.scope():
        model = transformer()
    batch = tf.TensorSpec([32 // strategy.num_replicas_in_sync, 32], tf.int32)
    plan = strategy.plan(lambda x, y: model.train_step((x, y))["loss"], args=(batch, batch), topology=chip)
    assert plan.fits
    assert plan.devices == chip
    whole = sum(each.numpy().nbytes for each in (*model.variables, *model.optimizer.variables))
    most = {"fsdp": 0.2, "zero1": 0.5, "two replicas of four": 0.35, "tensor parallel": 0.8}[way]
    assert plan.memory.arguments < most * whole * (2 if "v5" in chip else 1)  # a TPU pads small arrays to its tiles
    kinds = {each.kind for each in plan.cost.collectives}
    assert kinds & {"all-reduce", "reduce-scatter"}
    assert "all-gather" in kinds
