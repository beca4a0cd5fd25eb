"""Keras' attention in bodies: the numbers of kernels, which are interpreted here, and when there is none."""

import contextlib
import functools
import itertools
import types

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest
import tensorflow as tf

import replica_engine
from replica_engine import xla
from replica_engine.errors import InputsError
from replica_engine.pjrt import accelerators
from replica_engine.upstream.keras import keras_hooks
from replica_engine.xla import attention
from replica_engine.xla.body import tracing_for

SIZE, LENGTH = 64, 256
# In bfloat16 also 2e-2 of a number: the next one of 4 is 3.1e-2 away.
CLOSE = {"float32": {"rtol": 0, "atol": 1e-5}, "bfloat16": {"rtol": 2e-2, "atol": 2e-2}}
MASKS = {  # whether it is causal, whether queries and keys are masked, heads of keys, numbers of queries and keys
    "full": (False, False, False, 2, LENGTH, LENGTH),
    "causal": (True, False, False, 2, LENGTH, LENGTH),
    "keys, grouped": (False, False, True, 1, LENGTH, LENGTH),
    "causal and keys": (True, False, True, 2, LENGTH, LENGTH),
    "both": (False, True, True, 2, LENGTH, LENGTH),
    "causal and both, grouped": (True, True, True, 1, LENGTH, LENGTH),
    "few queries, causal": (True, False, True, 2, LENGTH // 2, LENGTH),
    "few keys, causal": (True, False, True, 2, LENGTH, LENGTH // 2),
}
ON_GPUS = ("full", "causal", "both", "causal and both, grouped")
CASES = [("tpu", name) for name in MASKS] + [("gpu", name) for name in ON_GPUS]


def padded(length):
    """Masks of three samples: one that ends early, one of nothing, and one that begins late."""
    seen = np.ones([3, length], bool)
    seen[0, length // 3 :] = seen[1] = False
    seen[2, : length // 4] = False
    return seen


def with_gradients(fn, arrays, weight):
    results, pull = jax.vjp(fn, *arrays)
    return [np.asarray(each, np.float32) for each in (results, *pull(weight))]


def case(platform, name, dtype):
    """A kernel and plain attention, as functions of queries, keys and values; these, and a weight of the results."""
    causal, of_queries, of_keys, heads, queries, keys = MASKS[name]
    draw = np.random.default_rng(0).standard_normal
    shapes = (3, queries, 2, SIZE), (3, keys, heads, SIZE), (3, keys, heads, SIZE)
    *arrays, weight = (jnp.asarray(draw(shape), dtype) for shape in (*shapes, shapes[0]))
    seen = {"queries": padded(queries) if of_queries else None, "keys": padded(keys) if of_keys else None}

    def plain(query, key, value):
        key, value = (jnp.repeat(each, 2 // heads, axis=2) for each in (key, value))
        scores = jnp.einsum("btnh,bsnh->bnts", query, key).astype("float32") * SIZE**-0.5
        mask = np.tri(queries, keys, dtype=bool)[None, None] if causal else np.ones([1, 1, 1, 1], bool)
        mask = mask if seen["queries"] is None else mask & seen["queries"][:, None, :, None]
        mask = mask if seen["keys"] is None else mask & seen["keys"][:, None, None, :]
        weights = jax.nn.softmax(jnp.where(mask, scores, -1e30), axis=-1)
        return jnp.einsum("bnts,bsnh->btnh", weights.astype(dtype), value)

    options = {"platform": platform, "causal": causal, "scale": SIZE**-0.5, "interpret": True}
    return functools.partial(attention.attention, **seen, **options), plain, arrays, weight


@pytest.mark.parametrize("dtype", CLOSE)
@pytest.mark.parametrize(("platform", "name"), CASES)
def test_values_and_gradients_of_kernels_are_those_of_plain_attention(platform, name, dtype):
    kernel, plain, arrays, weight = case(platform, name, dtype)
    expected = with_gradients(plain, arrays, weight)
    for got, want in zip(with_gradients(kernel, arrays, weight), expected, strict=True):
        np.testing.assert_allclose(got, want, **CLOSE[dtype])


@pytest.mark.parametrize(("platform", "name"), [("tpu", "causal and both, grouped"), ("gpu", "both")])
def test_gradients_of_gradients_are_those_of_plain_attention(platform, name):
    kernel, plain, arrays, weight = case(platform, name, "float32")

    def gradients(fn):
        def penalty(query, key, value, weight):
            return sum(jnp.mean(each**2) for each in jax.vjp(fn, query, key, value)[1](weight))

        return jax.jit(lambda *given: jax.vjp(jax.grad(penalty, (0, 1, 2, 3)), *given)[1](given))(*arrays, weight)

    # The third order, by way of the second.
    for got, want in zip(gradients(kernel), gradients(plain), strict=True):
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-5 * max(1, np.abs(want).max()))


@pytest.fixture
def interpreted(monkeypatch):
    """Kernels are interpreted on CPUs, and taken for short sequences; the list has the calls of them."""
    calls = []

    def made():
        call = xla.from_jax(functools.partial(attention.attention, interpret=True))
        return lambda *args, **constants: calls.append(constants) or call(*args, **constants)

    monkeypatch.setattr(attention, "_kernel", made)
    monkeypatch.setattr(attention, "LONG", 128)
    return calls


@pytest.mark.parametrize(
    ("kind", "capability", "expected"),
    [
        ("cpu", None, ""),
        ("TPU v3", None, ""),
        ("TPU v5 lite", None, "tpu"),
        ("NVIDIA A100-SXM4-40GB", "8.0", "gpu"),
        ("Tesla V100-SXM2-16GB", "7.0", ""),
        ("AMD Instinct MI300X", "gfx942", ""),
    ],
)
def test_which_devices_have_kernels(kind, capability, expected):
    given = {"device_kind": kind} | ({} if capability is None else {"compute_capability": capability})
    assert accelerators.kernels_for(types.SimpleNamespace(**given)) == expected


def layer_of(strategy, flash_attention=None, grouped=False, dtype="bfloat16"):
    with strategy.scope():
        keras.utils.set_random_seed(0)
        options = {"flash_attention": flash_attention, "dtype": dtype}
        if grouped:
            layer = keras.layers.GroupQueryAttention(SIZE, 2, 1, **options)
        else:
            layer = keras.layers.MultiHeadAttention(2, SIZE, **options)
        layer.build((None, LENGTH, 32), (None, LENGTH, 32))
    return layer


def stepped(layer, **options):
    """What a layer makes of sequences with Keras' masks, and the gradients of its weights."""

    def step(x, seen):
        with tf.GradientTape() as tape:
            options_now = {name: seen if value is ... else value for name, value in options.items()}
            if "query_mask" in options_now:
                keras.src.backend.set_keras_mask(x, options_now.pop("query_mask"))
            results = layer(x, x, **options_now)
            loss = tf.reduce_mean(tf.cast(results, tf.float32) ** 2)
        return results, tape.gradient(loss, layer.trainable_variables)

    return step


@pytest.fixture(scope="module")
def one():
    return replica_engine.TPUStrategy(num_cores=1)


def inputs(dtype=tf.bfloat16):
    x = tf.cast(tf.random.stateless_normal([3, LENGTH, 32], [1, 2]), dtype)
    return x, tf.constant(padded(LENGTH))


BOTH = {"query_mask": ..., "value_mask": ...}


@pytest.mark.parametrize(
    ("chip", "grouped", "options", "causal"),
    [
        ("v5e", False, {}, False),
        ("v5e", True, {"use_causal_mask": True}, True),
        ("v5e", False, {"value_mask": ..., "key_mask": ...}, False),
        ("v5e", True, {**BOTH, "use_causal_mask": True}, True),
        ("h100", False, BOTH, False),
        ("h100", True, {"use_causal_mask": True}, True),
    ],
)
def test_layers_have_the_numbers_of_keras(one, interpreted, chip, grouped, options, causal):
    with tracing_for(accelerators.CHIPS[chip]):
        got = one.run(stepped(layer_of(one, None, grouped), **options), args=inputs())
    assert {each["causal"] for each in interpreted} == {causal}
    assert all(each["platform"] == accelerators.CHIPS[chip].platform for each in interpreted)
    del interpreted[:]
    want = one.run(stepped(layer_of(one, False, grouped), **options), args=inputs())
    assert not interpreted
    for mine, theirs in zip(tf.nest.flatten(got), tf.nest.flatten(want), strict=True):
        mine, theirs = (np.asarray(tf.cast(each, tf.float32)) for each in (mine, theirs))
        np.testing.assert_allclose(mine, theirs, rtol=0, atol=2e-2 * max(1e-3, np.abs(theirs).max()))


def test_a_step_has_gradients_of_gradients(one, interpreted):
    def penalties(flash_attention):
        layer = layer_of(one, flash_attention)

        def step(x):
            with tf.GradientTape() as outer:
                outer.watch(x)
                with tf.GradientTape() as tape:
                    tape.watch(x)
                    results = layer(x, x, use_causal_mask=True)
                    loss = tf.reduce_sum(tf.cast(results, tf.float32) ** 2)
                penalty = tf.reduce_sum(tf.cast(tape.gradient(loss, x), tf.float32) ** 2)
            return penalty, outer.gradient(penalty, x)

        return [np.asarray(tf.cast(each, tf.float32)) for each in one.run(step, args=inputs()[:1])]

    with tracing_for(accelerators.CHIPS["v5e"]):
        got = penalties(None)
    assert interpreted
    for mine, theirs in zip(got, penalties(False), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=0, atol=2e-2 * np.abs(theirs).max())


@pytest.mark.parametrize(
    ("words", "changed"),
    [
        ("a bias or a soft cap", {"bias": tf.zeros([1, 1, 1, LENGTH])}),
        ("its mask is not made of", {"mask": tf.ones([1, 1, LENGTH, LENGTH], tf.bool)}),
        ("its mask is not made of", {"mask": tf.ones([1, 2, 1, LENGTH], tf.bool)}),
        ("the values are float32", {"dtype": tf.float32}),
        ("the head size is 48", {"size": 48}),
        ("the lengths are 100 and 100", {"length": 100}),
        ("keys are masked, and their queries are not", {"mask": tf.ones([3, 1, 1, LENGTH], tf.bool), "chip": "h100"}),
    ],
)
def test_what_no_kernel_serves_is_as_before_or_an_error_if_it_is_asked_for(one, interpreted, words, changed):
    layer_of(one)  # Keras is in use
    options = {"dtype": tf.bfloat16, "size": SIZE, "length": LENGTH, "chip": "v5e", **changed}
    dtype, size, length, chip = (options.pop(name) for name in ("dtype", "size", "length", "chip"))
    x = tf.cast(tf.random.stateless_normal([3, length, 2, size], [1, 2]), dtype)

    def attended(x, flash_attention):
        return keras.ops.dot_product_attention(x, x, x, flash_attention=flash_attention, **options)

    with tracing_for(accelerators.CHIPS[chip]):
        got = one.run(functools.partial(attended, flash_attention=None), args=(x,))
        with pytest.raises(InputsError, match=words):
            one.run(functools.partial(attended, flash_attention=True), args=(x,))
    assert not interpreted
    want = one.run(functools.partial(attended, flash_attention=False), args=(x,))
    np.testing.assert_array_equal(*(tf.cast(each, tf.float32) for each in (got, want)))


@pytest.mark.parametrize(
    ("taken", "options"),
    [
        (False, {"use_causal_mask": True, "return_attention_scores": True}),
        (False, {"attention_mask": tf.constant(np.random.default_rng(0).random([1, LENGTH, LENGTH]) > 0.5)}),
        (True, {"attention_mask": tf.constant(padded(LENGTH)[:, None])}),
    ],
)
def test_scores_and_other_masks_are_computed_by_keras(one, interpreted, taken, options):
    layer = layer_of(one)
    with tracing_for(accelerators.CHIPS["v5e"]):
        one.run(lambda x: layer(x, x, **options), args=inputs()[:1])
    assert bool(interpreted) == taken


def test_dropout_short_sequences_and_the_setting_of_keras_are_obeyed(one, interpreted, monkeypatch):
    with one.scope():
        layers = {
            "dropout": keras.layers.MultiHeadAttention(2, SIZE, dropout=0.1, dtype="bfloat16"),
            "plain": keras.layers.MultiHeadAttention(2, SIZE, dtype="bfloat16"),
            "wanted": keras.layers.MultiHeadAttention(2, SIZE, dtype="bfloat16", flash_attention=True),
        }
        for layer in layers.values():
            layer.build((None, LENGTH, 32), (None, LENGTH, 32))

    def taken(name):
        del interpreted[:]
        new = object()  # for another trace
        with tracing_for(accelerators.CHIPS["v5e"]):
            one.run(lambda x: (layers[name](x, x), new)[0], args=inputs()[:1])
        return bool(interpreted)

    assert [taken("dropout"), taken("plain")] == [False, True]
    keras.config.disable_flash_attention()
    try:
        assert [taken("plain"), taken("wanted")] == [False, True]
    finally:
        keras.config.enable_flash_attention()
    monkeypatch.setattr(attention, "LONG", 1024)
    assert [taken("plain"), taken("wanted")] == [False, True]


@pytest.mark.parametrize(("grouped", "given"), [*itertools.product([False, True], [None, True, False])])
def test_layers_know_what_they_were_told(one, grouped, given):
    assert layer_of(one, given, grouped)._flash_attention is given


def test_the_layers_of_keras_still_know_their_arguments(one):
    with one.scope():
        layer = keras.layers.MultiHeadAttention(2, 8, 4, name="mine")
    assert layer.name == "mine"
    assert keras.layers.MultiHeadAttention.from_config(layer.get_config()).value_dim == 4


def test_a_step_is_traced_for_each_kind_of_chip(one, interpreted):
    layer = layer_of(one)
    inner = tf.function(lambda x: layer(x, x))
    x, _ = inputs()
    body = functools.partial(inner, x)
    for chip, kernels in (("v5e", 1), (None, 0), ("h100", 1), ("v3", 0), ("v5e", 0)):  # the last one again
        del interpreted[:]
        with contextlib.nullcontext() if chip is None else tracing_for(accelerators.CHIPS[chip]):
            one.run(body)
        assert len(interpreted) == kernels, chip


def test_programs_for_cpus_have_the_text_that_they_have_without_the_hook(one, monkeypatch):
    layer = layer_of(one)

    def text():
        with one.scope():
            return xla.lower(lambda x: layer(x, x, use_causal_mask=True), [[inputs()[0]]]).as_text()

    with_hook = text()
    place = keras_hooks.ATTENTION._place
    monkeypatch.setattr(place._cell, "cell_contents", place.original)
    assert text() == with_hook


@pytest.mark.parametrize("make", ["TPUStrategy", "MirroredStrategy"])
def test_flash_attention_is_keras_own_on_cpus(make):
    strategy = replica_engine.TPUStrategy(num_cores=2) if make == "TPUStrategy" else replica_engine.MirroredStrategy()
    fitted = []
    for flash_attention in (True, None):
        keras.utils.set_random_seed(0)
        with strategy.scope():
            given = keras.Input([6, 8])
            layer = keras.layers.MultiHeadAttention(2, 4, flash_attention=flash_attention)
            model = keras.Model(given, keras.layers.Dense(1)(layer(given, given)))
            model.compile("sgd", "mse")
        x = np.random.default_rng(0).standard_normal([4, 6, 8]).astype("float32")
        model.fit(x, x[..., :1], batch_size=4, epochs=1, verbose=0)
        fitted.append([*model.get_weights(), model.predict(x, verbose=0)])
    for with_flash, without in zip(*fitted, strict=True):
        np.testing.assert_array_equal(with_flash, without)
