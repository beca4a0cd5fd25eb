"""What a user is told: which strategy was chosen, what is compiled, how long it takes, which layer is to blame."""

import threading

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers.warned import when_warned

import replica_engine
from replica_engine.errors import LoweringError
from replica_engine.keras import replicate_model, train_function

X = np.random.default_rng(0).normal(size=(24, 4)).astype("float32")
BATCHES, SHORT = (tf.data.Dataset.from_tensor_slices((X[:count], X[:count, :1])).batch(8) for count in (24, 20))


def small(*layers):
    model = keras.Sequential([keras.Input((4,)), *layers, keras.layers.Dense(1)], name="small")
    model.compile("sgd", "mse")
    return model


def of_level(caplog, level):
    """What this library has logged; TensorFlow warns of functions that it traces often, by what ran before."""
    own = [record for record in caplog.records if record.name == "replica_engine"]
    return [record.getMessage() for record in own if record.levelname == level]


def test_each_program_is_a_message_with_its_time_and_compiled_once(both, is_tpu, caplog):
    model = replicate_model(small(), strategy=both(2))
    with caplog.at_level("INFO", "replica_engine"):
        model.fit(BATCHES, epochs=2, verbose=0)
        model.fit(BATCHES, verbose=0)
    (message,) = of_level(caplog, "INFO")
    made = "compiled" if is_tpu else "traced"
    assert message.startswith(f"{made} train_step of 'small' for 2 replicas, batches of ")
    assert message.endswith(" s")
    caplog.clear()
    with caplog.at_level("INFO", "replica_engine"):
        model.fit(SHORT, verbose=0)  # its last batch has 4 samples
        model.predict(X, 8, verbose=0)
        model.predict(X[:6], 8, verbose=0)  # padded to 8
    assert len(of_level(caplog, "INFO")) == (2 if is_tpu else 1)


@pytest.mark.on("tpu")
def test_a_program_of_the_cache_folder_is_read_and_not_compiled(both, caplog, tmp_path):
    pytest.importorskip("jax")
    from replica_engine import xla

    model = small()
    xla.set_cache_dir(tmp_path)
    with caplog.at_level("INFO", "replica_engine"):
        for _ in range(2):
            replicate_model(model, strategy=both(2)).train_on_batch(X[:8], X[:8, :1])
    first, second = (text for text in of_level(caplog, "INFO") if "ran it once" in text)
    batch = "train_step of 'small' for 2 replicas, batches of 8 samples, and ran it once"
    assert first.startswith(f"compiled {batch}")
    assert second.startswith(f"read the program for {batch}")


def test_a_traced_step_that_does_not_come_back_is_warned_of():
    """The engine sees a step on threads only while it is traced."""
    told = threading.Event()
    slow = threading.Event()

    def wait(x):
        return x if not slow.is_set() or told.wait(60) else np.full_like(x, np.nan)

    class Waits(keras.layers.Layer):
        def call(self, x):
            return tf.ensure_shape(tf.numpy_function(wait, [x], tf.float32), x.shape)

    strategy = replica_engine.MirroredStrategy(["CPU:0", "CPU:1"], warn_after=0.05)
    model = replicate_model(small(Waits()), strategy=strategy)
    model.test_on_batch(X[:8], X[:8, :1])
    with when_warned(lambda text: "The tf.function `test_step` has not returned" in text and told.set()):
        slow.set()
        model.test_on_batch(X[:8], X[:8, :1])
    assert told.is_set()


def test_a_long_compilation_says_that_it_goes_on(both, is_tpu, caplog, monkeypatch):
    """The layer is traced until somebody has been told that it takes long."""
    told = threading.Event()

    class Slow(keras.layers.Layer):
        def call(self, x):
            if tf.distribute.has_strategy():
                assert told.wait(300)
            return x

    model = replicate_model(small(Slow()), strategy=both(2))
    monkeypatch.setattr(train_function, "PROGRESS_EVERY", 0.1)
    with when_warned(lambda _: told.set()), caplog.at_level("WARNING", "replica_engine"):
        model.fit(BATCHES, verbose=0)
    doing = "compiling" if is_tpu else "tracing"  # threads compile nothing
    assert f"still {doing} train_step of 'small' for 2 replicas" in of_level(caplog, "WARNING")[0]


def test_a_layer_that_xla_cannot_compile_is_named_and_runs_on_threads(both, is_tpu):
    class Drawn(keras.layers.Layer):
        def call(self, x):
            return x + tf.cast(next(iter(tf.data.Dataset.range(3))), tf.float32)

    model = replicate_model(small(Drawn(name="drawn")), strategy=both(2))
    if not is_tpu:
        assert model.predict(X, verbose=0).shape == (24, 1)
        return
    with pytest.raises(LoweringError, match=r"RangeDataset at .*test_messages\.py:\d+ in call") as raised:
        model.predict(X, verbose=0)
    more, note = raised.value.__notes__
    assert more.startswith("more: errors/LoweringError.html in the site")
    assert "in the layer 'drawn' (Drawn) of the model 'small'" in note
    assert "replicate_model(model, strategy=replica_engine.MirroredStrategy())" in note


@pytest.fixture
def reason(caplog):
    """`reason(model, replicas)`: the kind of strategy that is chosen, and why."""

    def reason(model, replicas=2):
        caplog.clear()
        with caplog.at_level("INFO", "replica_engine"):
            made = replicate_model(model, replicas)
        assert made.strategy.num_replicas_in_sync == replicas
        return type(made.strategy), of_level(caplog, "INFO")[0]

    return reason


def of_words():
    words = keras.layers.StringLookup(vocabulary=["a", "b"], name="words")
    return keras.Sequential([keras.Input((1,), dtype="string"), words, keras.layers.Embedding(4, 2)])


def convolutional():
    edges = keras.layers.Conv1D(2, 2, name="edges")
    return small(keras.layers.Reshape((4, 1)), edges, keras.layers.Flatten())


MIRRORED, TPU = replica_engine.MirroredStrategy, replica_engine.TPUStrategy
CHOSEN = {
    "recurrent layers": (
        lambda: small(keras.layers.Reshape((4, 1)), keras.layers.LSTM(2, name="memory")),
        TPU,
        "replicate_model: 'small' on TPUStrategy(2 replicas: CPU:0, CPU:1): XLA is fast at layers such as 'memory'",
    ),
    "matrix products": (small, MIRRORED, "XLA wins nothing on CPU"),
    "convolutions": (convolutional, MIRRORED, "XLA is slow at convolutions on CPU, such as 'edges'"),
    "what XLA cannot compile": (of_words, MIRRORED, "XLA cannot compile the layer 'words'"),
}


@pytest.mark.parametrize(("make", "kind", "words"), CHOSEN.values(), ids=CHOSEN)
def test_the_default_is_chosen_by_the_layers(reason, make, kind, words):
    chosen, message = reason(make())
    assert chosen is kind
    assert words in message


def test_the_default_is_xla_where_tensorflow_has_too_few_devices(reason):
    kind, message = reason(small(), replicas=9)
    assert kind is TPU
    assert "it makes its own CPU devices" in message


def test_the_default_takes_all_devices_and_is_printed_where_nobody_said_how_many(capsys):
    made = replicate_model(small())
    assert f"replicate_model: 'small' on {made.strategy!r}: XLA wins nothing on CPU" in capsys.readouterr().out
    assert made.strategy.num_replicas_in_sync == len(tf.config.list_logical_devices("CPU"))
    replicate_model(small(), replicas=2)
    assert capsys.readouterr().out == ""


class Printing(keras.Model):
    """A model whose step has an op that runs on the host, of which the library tells by the name of the step."""

    def train_step(self, data):
        tf.print("a step of", tf.shape(data[0])[0], output_stream="file:///dev/null")
        return super().train_step(data)


@pytest.mark.parametrize("rows", [8, 9], ids=["even", "uneven"])
def test_a_compiled_step_is_called_as_the_method_of_the_model(rows, caplog):
    inputs = keras.Input((4,))
    model = Printing(inputs, keras.layers.Dense(1)(inputs), name="printing")
    model.compile("sgd", "mse")
    replicated = replicate_model(model, strategy=replica_engine.TPUStrategy(num_cores=2))
    with caplog.at_level("INFO", "replica_engine"):
        replicated.train_on_batch(X[:rows], X[:rows, :1])
    (message,) = [text for text in of_level(caplog, "INFO") if "XLA cannot compile all of" in text]
    assert message.startswith("XLA cannot compile all of `train_step`.")
