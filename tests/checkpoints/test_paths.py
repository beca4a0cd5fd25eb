"""A path is a path: no name is a pattern for other checkpoints, and no later change of the folder moves one."""

import json
import os
import threading

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers.versions import HAS_XLA

import replica_engine
from replica_engine.checkpoints import checkpoint_files
from replica_engine.keras import BackupAndRestore, replicate_model

ASYNCHRONOUS = tf.train.CheckpointOptions(experimental_enable_async_checkpoint=True)
PATTERNS = {  # a name, and one that it is a pattern for
    "lr[1]": "lr1",
    "[!a-z]": "Z",
    "run?*": "run10",
    "back\\slash": "backslash",
    "{a,b} \n~": "a",
    "a[1]/b[0-9]": "a1/b7",
}
KINDS = {
    "threads": lambda: replica_engine.MirroredStrategy(["CPU:0", "CPU:1"]),
    **({"compiled": lambda: replica_engine.TPUStrategy(num_cores=2, distribution="zero1")} if HAS_XLA else {}),
}


def files(folder):
    return sorted(os.path.relpath(os.path.join(at, each), folder) for at, _, names in os.walk(folder) for each in names)


def saved(number):
    return [f"ckpt-{number}.data-00000-of-00001", f"ckpt-{number}.index"]


def made(kind, value):
    with KINDS[kind]().scope():
        weight = tf.Variable(np.full([8, 4], value, "f"))
    return weight, tf.train.Checkpoint(weight=weight)


@pytest.mark.parametrize("name", PATTERNS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_name_is_no_pattern_for_others(kind, name, tmp_path):
    """All that a manager does: it saves, deletes old ones, finds the last one and reads it, and leaves others alone."""
    weight, checkpoint = made(kind, 0.0)
    beside = tf.train.CheckpointManager(checkpoint, tmp_path / PATTERNS[name], max_to_keep=2)
    for _ in range(2):
        beside.save()
    manager = tf.train.CheckpointManager(checkpoint, tmp_path / name, max_to_keep=2)
    checkpoint.save_counter.assign(0)
    for number in (1, 2, 3):
        weight.assign(np.full([8, 4], number, "f"))
        manager.save(options=ASYNCHRONOUS if number == 2 else None)
    checkpoint.sync()
    assert files(tmp_path / name) == ["checkpoint", *saved(2), *saved(3)]
    assert files(tmp_path / PATTERNS[name]) == ["checkpoint", *saved(1), *saved(2)]

    found, other = made(kind, -1.0)
    last = tf.train.latest_checkpoint(tmp_path / name)
    assert last == manager.latest_checkpoint == str(tmp_path / name / "ckpt-3")
    other.restore(last).assert_consumed()
    assert np.all(found.numpy() == 3.0)
    assert tf.train.CheckpointManager(other, tmp_path / name, max_to_keep=2).restore_or_initialize() == last


@pytest.mark.parametrize("name", ["ckpt[1]", "*", "?", "w\\", "?????"])
def test_the_prefix_itself_is_no_pattern(name, tmp_path):
    """Nor is it one when a checkpoint takes the place of one, or is read by variables that are made later."""
    weight, checkpoint = made("threads", 1.0)
    for each in ("ckpt1", "w", "12345", name):
        checkpoint.write(tmp_path / each)
    before = files(tmp_path)
    weight.assign(np.full([8, 4], 2.0, "f"))
    path = checkpoint.write(tmp_path / name)
    assert [each for each in files(tmp_path) if each not in before and not each.startswith(f"{name}.data")] == []
    later = tf.train.Checkpoint()
    later.read(path)
    later.weight = tf.Variable(np.zeros([8, 4], "f"))
    assert np.all(later.weight.numpy() == 2.0)
    for each in ("ckpt1", "w", "12345"):
        assert np.all(tf.train.load_variable(str(tmp_path / each), "weight/.ATTRIBUTES/VARIABLE_VALUE") == 1.0)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("asynchronous", [False, True])
def test_what_is_named_after_a_checkpoint_stays(kind, asynchronous, tmp_path):
    """Names that begin as the checkpoint's does, and folders that TensorFlow would name so, are the user's."""
    weight, checkpoint = made(kind, 1.0)
    others = ["run_temp/ckpt", "run_temp/run", "run-1", "run1", "run.old", "run.data", "runs/run"]
    for each in others:
        checkpoint.write(tmp_path / each)
    notes = [tmp_path / each for each in ("run_temp/notes", "run.index.bak", "run.data-00000-of-00001.bak")]
    for each in notes:
        each.write_text("mine")
    before = files(tmp_path)
    for value in (2.0, 3.0):
        weight.assign(np.full([8, 4], value, "f"))
        checkpoint.write(tmp_path / "run", options=ASYNCHRONOUS if asynchronous else None)
    checkpoint.sync()
    own = [each for each in files(tmp_path) if each not in before]
    assert {each.partition(".")[0] for each in own} == {"run"}
    assert set(before) < set(files(tmp_path))
    for each in others:
        assert np.all(tf.train.load_variable(str(tmp_path / each), "weight/.ATTRIBUTES/VARIABLE_VALUE") == 1.0)
    assert np.all(tf.train.load_variable(str(tmp_path / "run"), "weight/.ATTRIBUTES/VARIABLE_VALUE") == 3.0)


def test_an_address_is_no_pattern(tmp_path):
    _, checkpoint = made("threads", 4.0)
    path = f"file://{tmp_path}/lr[1]/ckpt"
    checkpoint.write(path)
    found, other = made("threads", 0.0)
    other.read(path).assert_consumed()
    assert np.all(found.numpy() == 4.0)


X = np.random.default_rng(0).normal(size=(16, 3)).astype("f")


class At(keras.callbacks.Callback):
    """Does something after so many batches of a training."""

    def __init__(self, **do):
        super().__init__()
        self.do = {int(name.removeprefix("batch_")): each for name, each in do.items()}

    def on_train_batch_end(self, batch, logs=None):
        self.do.get(int(self.model.optimizer.iterations.numpy()), lambda: None)()


def stop():
    raise InterruptedError


def fit(model, backup, *callbacks, data=None):
    """Trains for three epochs of four batches; returns the weights."""
    keras.utils.set_random_seed(1)
    net = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    net.compile("adam", "mse")
    trained = net if model is None else replicate_model(net, strategy=KINDS[model]())
    data = tf.data.Dataset.from_tensor_slices((X, X[:, :1])).batch(4) if data is None else data
    trained.fit(data, epochs=3, verbose=0, callbacks=[backup, *callbacks])
    return net.get_weights()


@pytest.mark.parametrize(
    "name",
    ["job[7]", *(pytest.param(name, marks=pytest.mark.full("other characters")) for name in ("a*/[!b]", "job?\\"))],
)
@pytest.mark.parametrize(
    "model",
    [
        pytest.param(kind, marks=pytest.mark.full("as on threads") if kind == "compiled" else ())
        for kind in [None, *KINDS]
    ],
)
def test_a_training_goes_on_from_a_folder_whose_name_is_a_pattern(model, name, tmp_path):
    """Its variables, and the state of the iterator of its dataset, are read."""
    with pytest.raises(InterruptedError):
        fit(model, BackupAndRestore(tmp_path / name, save_freq=2), At(batch_7=stop))
    batches = []
    count = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: batches.append(batch))
    found = fit(model, BackupAndRestore(tmp_path / name, save_freq=2), count)
    assert len(batches) in (6, 8)  # the last backup may not have been complete
    for one, other in zip(found, fit(model, BackupAndRestore(tmp_path / "undisturbed")), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.fixture
def here(tmp_path, monkeypatch):
    """The folder in which a program begins; `there` beside it is where it goes."""
    for name in ("here", "there"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "here"


@pytest.fixture
def there(here):
    return here.parent / "there"


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("model", [None, "threads"])
def test_a_training_that_changes_its_folder(model, asynchronous, here, there):
    log = keras.callbacks.CSVLogger("log.csv")
    backup = BackupAndRestore("backups", save_freq=1, asynchronous=asynchronous)
    moves = At(batch_1=lambda: os.chdir(there), batch_6=stop)
    with pytest.raises(InterruptedError):
        fit(model, backup, log, moves)
    checkpoint_files.join()
    assert files(there) == []
    assert list((here / "backups").glob("backup-*[0-9]"))
    os.chdir(here)
    steps = []
    count = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: steps.append(batch))
    again = BackupAndRestore("backups", save_freq=1, asynchronous=asynchronous)
    fit(model, again, At(batch_9=lambda: os.chdir(there)), count)
    assert len(steps) in (7, 8)
    assert files(there) == []
    assert not (here / "backups").exists()  # the training has come to its end


@pytest.mark.parametrize("how", ["write", "save", "manager"])
def test_an_asynchronous_checkpoint_is_written_where_it_was_saved(how, here, there, monkeypatch):
    """The list of checkpoints and what is deleted, too; what a callback gets is a path that leads there."""
    moved, write, told = threading.Event(), checkpoint_files.write, []

    def wait_and_write(*args):
        assert moved.wait(60)
        write(*args)

    monkeypatch.setattr(checkpoint_files, "write", wait_and_write)
    weight, checkpoint = made("threads", 1.0)
    manager = tf.train.CheckpointManager(checkpoint, "lists", max_to_keep=1)
    call = {
        "write": lambda options: checkpoint.write("written/ckpt-2", options),
        "save": lambda options: checkpoint.save("lists/ckpt", options),
        "manager": lambda options: manager.save(options=options),
    }[how]
    moved.set()
    call(None)
    moved.clear()
    options = tf.train.CheckpointOptions(
        experimental_enable_async_checkpoint=True,
        experimental_write_callbacks=[lambda path: told.append((path, os.path.exists(f"{path}.index")))],
    )
    weight.assign(np.full([8, 4], 2.0, "f"))
    call(options)
    os.chdir(there)
    moved.set()
    checkpoint.sync()
    assert files(there) == []
    folder = "written" if how == "write" else "lists"
    assert told == [(str(here / folder / "ckpt-2"), True)]
    kept = {"write": [], "save": ["checkpoint", *saved(1)], "manager": ["checkpoint"]}[how]
    assert [each for each in files(here / folder) if not each.startswith("ckpt-2")] == kept
    found, other = made("threads", 0.0)
    other.read(str(here / folder / "ckpt-2")).expect_partial()
    assert np.all(found.numpy() == 2.0)
    if how != "write":
        assert tf.train.latest_checkpoint(here / "lists") == str(here / "lists" / "ckpt-2")


def test_variables_that_are_made_in_another_folder_are_restored(here, there):
    _, checkpoint = made("threads", 5.0)
    path = checkpoint.write("ckpt")
    assert path == "ckpt"  # as TensorFlow returns it
    later = tf.train.Checkpoint()
    later.read(path)
    os.chdir(there)
    with KINDS["threads"]().scope():
        later.weight = tf.Variable(np.zeros([8, 4], "f"))
    assert np.all(later.weight.numpy() == 5.0)


def test_a_timeline_is_written_where_it_was_asked_for(here, there):
    strategy = KINDS["threads"]()
    recorded = replica_engine.timeline("run.json")
    os.chdir(there)
    with recorded:
        strategy.run(lambda: 1)
    with replica_engine.timeline("run.json"):
        os.chdir(here)
        strategy.run(lambda: 2)
    for folder in (here, there):
        assert files(folder) == ["run.json"]
        assert json.loads((folder / "run.json").read_text())["traceEvents"]
    assert "<svg" in recorded._repr_html_()
