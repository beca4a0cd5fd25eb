"""What a replicated model writes down is that of a plain Keras model, which needs nothing of this library."""

import io
import json
import textwrap

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers.keras_models import OneLayer, built, classifier, crossentropy

from replica_engine.keras import replicate_model

pytestmark = pytest.mark.on("mirrored")

RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(16, 4)).astype("float32")
Y = RANDOM.integers(0, 3, size=16)
BATCHES = tf.data.Dataset.from_tensor_slices((X, Y)).batch(8)

ELSEWHERE = """
    import json, pathlib, sys
    import keras, numpy as np

    folder = pathlib.Path(sys.argv[1])
    data = np.load(folder / "data.npz")
    report = {}
    for kind in sys.argv[2:]:
        model = keras.models.load_model(folder / f"{kind}.keras")
        model.run_eagerly = True  # which saves the time to trace it
        found = {"class": type(model).__name__, "outputs": model.predict(data["x"], verbose=0).tolist()}
        found["iterations"] = int(model.optimizer.iterations.numpy())
        found["history"] = model.fit(data["x"], data["y"], 8, shuffle=False, verbose=0).history
        found["kernel"] = model.get_weights()[0].tolist()
        other = keras.models.model_from_json((folder / f"{kind}.json").read_text())
        other.load_weights(folder / f"{kind}.weights.h5")
        found["from weights"] = np.asarray(other(data["x"])).tolist()
        report[kind] = found
    report["imported"] = any(name.startswith("replica_engine") for name in sys.modules)
    print(json.dumps(report))
"""


def with_momentum():
    return classifier(keras.optimizers.SGD(0.05, momentum=0.9))


def fit(model, epochs=1):
    return model.fit(BATCHES, epochs=epochs, shuffle=False, verbose=0).history


@pytest.fixture(scope="module")
def two(make_pair):
    return make_pair(with_momentum, 2)


@pytest.fixture
def elsewhere(tmp_path, programs):
    """`elsewhere()`: what another process, which does not know this library, makes of the files."""

    def elsewhere(*kinds):
        np.savez(tmp_path / "data.npz", x=X, y=Y)
        result = programs.run(textwrap.dedent(ELSEWHERE), tmp_path, *kinds)
        assert result.returncode == 0, result.stderr
        return json.loads(result.stdout.splitlines()[-1])

    return elsewhere


def test_another_process_loads_it_without_this_library(pair, tmp_path, elsewhere, alike):
    """Written by the replicated model, and by the original after the replicated one was trained."""
    fit(pair.replicated)
    outputs = pair.original(X).numpy()
    for kind, model in (("replicated", pair.replicated), ("original", pair.original)):
        model.save(tmp_path / f"{kind}.keras")
        model.save_weights(tmp_path / f"{kind}.weights.h5")
        (tmp_path / f"{kind}.json").write_text(model.to_json())
    report = elsewhere("replicated", "original")
    history = fit(pair.replicated)
    assert report["imported"] is False
    for kind in ("replicated", "original"):
        found = report[kind]
        assert found["class"] == "Sequential"
        assert found["iterations"] == 2
        for key in ("outputs", "from weights"):
            alike(np.float32(found[key]), outputs)
        alike(found["history"], history)
        alike(np.float32(found["kernel"]), pair.original.get_weights()[0])


def test_a_loaded_model_is_replicated_again_and_trains_on_as_if_never_stopped(pair, both, tmp_path, alike):
    fit(pair.replicated)
    pair.replicated.save(tmp_path / "model.keras")
    expected = fit(pair.replicated, 2)
    loaded = keras.models.load_model(tmp_path / "model.keras")
    again = replicate_model(loaded, strategy=both(2))
    alike(fit(again, 2), expected)
    alike(loaded.get_weights(), pair.original.get_weights())
    found, kept = ([variable.numpy() for variable in model.optimizer.variables] for model in (again, pair.replicated))
    alike(found, kept)


def test_configurations_and_summaries_are_those_of_the_original(pair):
    for name in ("get_config", "to_json", "get_build_config", "get_compile_config"):
        assert getattr(pair.replicated, name)() == getattr(pair.original, name)()
    texts = []
    for model in (pair.original, pair.replicated):
        stream = io.StringIO()
        model.summary(print_fn=lambda line, stream=stream: stream.write(line))
        texts.append(stream.getvalue())
    assert texts[0] == texts[1]
    assert "dense" in texts[0].lower()
    made = keras.Sequential.from_config(pair.replicated.get_config())
    assert type(made) is keras.Sequential
    serialized = keras.saving.serialize_keras_object(pair.replicated)
    assert serialized == keras.saving.serialize_keras_object(pair.original)
    assert type(keras.saving.deserialize_keras_object(serialized)) is keras.Sequential


def test_keras_functions_save_it_as_its_methods_do(pair, tmp_path, alike):
    fit(pair.replicated)
    keras.models.save_model(pair.replicated, tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert type(loaded) is keras.Sequential
    alike(loaded.get_weights(), pair.original.get_weights())
    assert int(loaded.optimizer.iterations.numpy()) == 2


def test_a_file_in_the_old_format_is_written_too(both, tmp_path, alike):
    """With a model of its own: Keras forgets what it was compiled with when it writes one."""
    replicated = replicate_model(with_momentum(), strategy=both(2))
    replicated.save(tmp_path / "model.h5")
    loaded = keras.models.load_model(tmp_path / "model.h5")
    assert type(loaded) is keras.Sequential
    alike(np.asarray(loaded(X)), np.asarray(replicated(X)))


def test_an_exported_model_serves(pair, tmp_path, alike):
    fit(pair.replicated)
    pair.replicated.export(tmp_path / "exported", verbose=False)
    loaded = tf.saved_model.load(str(tmp_path / "exported"))
    alike(loaded.serve(X).numpy(), pair.original(X).numpy())


def test_a_tensorflow_checkpoint_takes_both(pair, tmp_path):
    fit(pair.replicated)
    kernel = pair.original.get_weights()[0]
    path = tf.train.Checkpoint(model=pair.replicated).save(str(tmp_path / "checkpoint"))
    pair.replicated.set_weights([weight * 0 for weight in pair.original.get_weights()])
    tf.train.Checkpoint(model=pair.original).restore(path)
    assert np.array_equal(pair.replicated.get_weights()[0], kernel)


@keras.saving.register_keras_serializable(package="tests")
class Subclassed(OneLayer):
    def get_config(self):
        return {"units": self.layer.units}


def test_a_subclassed_model_is_saved_as_its_class(both, tmp_path, alike):
    model = built(Subclassed(3), X[:2], "sgd", crossentropy())
    replicated = replicate_model(model, strategy=both(2))
    fit(replicated)
    replicated.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert type(loaded) is Subclassed
    alike(loaded(X).numpy(), model(X).numpy())
