"""At the name of a checkpoint there is always a complete one, wherever a write of it ends."""

import os
import resource

import numpy as np
import pytest
import tensorflow as tf
from helpers.versions import HAS_XLA

import replica_engine
from replica_engine.checkpoints import checkpoint_files
from replica_engine.errors import CheckpointError, ReplicaValueError

ASYNCHRONOUS = tf.train.CheckpointOptions(experimental_enable_async_checkpoint=True)
CALLS = ("SaveV2", "MergeV2Checkpoints", "rename", "remove", "rmtree", "fsync")


class Killed(BaseException):
    """Stands for the end of the process: no code of the library may go on after it."""


@pytest.fixture
def calls(monkeypatch):
    """A list of the changes to the file system that a write makes; the one with the number `calls.end` is not made."""

    class Calls(list):
        end = None

    made = Calls()

    def counted(owner, name):
        original = getattr(owner, name)

        def call(*args, **kwargs):
            made.append(name)
            if made.end is not None and len(made) >= made.end:
                raise Killed
            return original(*args, **kwargs)

        monkeypatch.setattr(owner, name, call)

    for owner in (tf.raw_ops, tf.io.gfile, os):
        for name in CALLS:
            if hasattr(owner, name) and not (owner is os and name in ("rename", "remove")):
                counted(owner, name)
    return made


def trained():
    with replica_engine.MirroredStrategy(["CPU:0", "CPU:1"]).scope():
        weight = tf.Variable(np.zeros([8, 4], "f"))
    return weight, tf.train.Checkpoint(weight=weight)


def found(path):
    value = tf.train.load_variable(str(path), "weight/.ATTRIBUTES/VARIABLE_VALUE")
    assert np.ptp(value) == 0.0
    return float(value[0, 0])


@pytest.mark.parametrize("over", [False, True])
def test_a_write_may_end_before_any_change_to_the_file_system(calls, over, tmp_path):
    weight, checkpoint = trained()
    path, value = tmp_path / "ckpt", 0.0
    if over:
        checkpoint.write(path)
    calls.clear()
    checkpoint.write(tmp_path / "other")
    assert set(calls) >= {"SaveV2", "rename", "fsync", "rmtree"}
    outcomes = []
    for end in range(1, 40):
        calls.clear()
        weight.assign(tf.fill([8, 4], value + 1.0))
        calls.end = end
        try:
            checkpoint.write(path)
        except Killed:
            calls.end = None
            if value == 0.0 and not over and not tf.io.gfile.exists(f"{path}.index"):
                outcomes.append(False)
                continue
            outcomes.append(found(path) == value + 1.0)
            assert found(path) in (value, value + 1.0)
            value = found(path)
        else:
            calls.end = None
            break
    assert found(path) == value + 1.0
    assert {True, False} == set(outcomes)  # some of the ends were before the checkpoint was put in place, some after
    checkpoint.write(path)
    names = {file.name for file in tmp_path.iterdir() if file.name.startswith("ckpt")}
    assert {name[:10] for name in names} == {"ckpt.data-", "ckpt.index"}  # nothing is left of the writes that ended
    sizes = {name.partition("-of-")[2] for name in names if "data" in name}
    assert sizes == {f"{len(names) - 1:05}"}


def test_writes_in_a_row_may_end_between_their_renames(monkeypatch, tmp_path):
    """The files that they leave must not lead the next write to those of the checkpoint that is there."""
    weight, checkpoint = trained()  # two values: there are no more than two numbers
    path = tmp_path / "ckpt"
    checkpoint.write(path)
    weight.assign(tf.ones([8, 4]))
    checkpoint.write(path)
    rename = tf.io.gfile.rename

    def killed(source, target, overwrite=False):
        if target.endswith(".index"):
            raise Killed
        rename(source, target, overwrite)

    monkeypatch.setattr(tf.io.gfile, "rename", killed)
    for value in (2.0, 3.0):
        weight.assign(tf.fill([8, 4], value))
        with pytest.raises(Killed):
            checkpoint.write(path)
        assert found(path) == 1.0


@pytest.fixture
def file_limit():
    """Limits the size of files of this process; what is written beyond it fails as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)

    def limit(size):
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))

    yield limit
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_full_disk_leaves_the_last_checkpoint(asynchronous, file_limit, tmp_path):
    with replica_engine.MirroredStrategy(["CPU:0"]).scope():
        weight = tf.Variable(np.random.default_rng(0).normal(size=(256, 1024)).astype("f"))
    checkpoint = tf.train.Checkpoint(weight=weight)
    options = tf.train.CheckpointOptions(experimental_enable_async_checkpoint=asynchronous)
    manager = tf.train.CheckpointManager(checkpoint, tmp_path, max_to_keep=1)
    good, expected = manager.save(), weight.numpy()
    weight.assign_add(tf.ones_like(weight))
    file_limit(1 << 19)
    manager.save(options=options) if asynchronous else None
    with pytest.raises(CheckpointError, match=r"ckpt-2' could not be written"):
        checkpoint.sync() if asynchronous else manager.save()
    assert sorted(os.listdir(tmp_path)) == ["checkpoint", "ckpt-1.data-00000-of-00001", "ckpt-1.index"]
    with pytest.raises(CheckpointError):
        checkpoint.write(good)  # over the good one
    checkpoint.restore(tf.train.latest_checkpoint(tmp_path))
    np.testing.assert_array_equal(weight.numpy(), expected)
    file_limit(1 << 30)
    assert tf.train.latest_checkpoint(tmp_path) == good
    assert manager.save() == str(tmp_path / "ckpt-2")
    assert checkpoint_files.TEMPORARY not in str(os.listdir(tmp_path))


def test_a_folder_that_vanishes_is_made_again(tmp_path):
    weight, checkpoint = trained()
    manager = tf.train.CheckpointManager(checkpoint, tmp_path / "checkpoints", max_to_keep=2)
    manager.save()
    tf.io.gfile.rmtree(str(tmp_path / "checkpoints"))
    weight.assign(tf.ones([8, 4]))
    assert found(manager.save()) == 1.0


STRATEGIES = {
    "threads": lambda: replica_engine.MirroredStrategy(["CPU:0", "CPU:1"]),
    **({"compiled": lambda: replica_engine.TPUStrategy(num_cores=2)} if HAS_XLA else {}),
}


@pytest.mark.parametrize("how", ["write", "save", "manager", "asynchronous"])
@pytest.mark.parametrize("kind", STRATEGIES)
def test_a_variable_of_which_no_value_can_be_saved(kind, how, tmp_path):
    """It is named, also in an attribute of an object, and can be restored, as under tf.distribute."""
    on_read = {"synchronization": tf.VariableSynchronization.ON_READ}
    with STRATEGIES[kind]().scope():
        seen = tf.Variable([1.0, 2.0], name="seen", **on_read)
        total = tf.Variable([3.0, 4.0], aggregation=tf.VariableAggregation.SUM, **on_read)
    module = tf.Module()
    module.seen = seen
    checkpoint = tf.train.Checkpoint(module=module, total=total)
    save = {
        "write": lambda: checkpoint.write(tmp_path / "ckpt"),
        "save": lambda: checkpoint.save(tmp_path / "ckpt"),
        "manager": lambda: tf.train.CheckpointManager(checkpoint, tmp_path, max_to_keep=1).save(),
        "asynchronous": lambda: checkpoint.write(tmp_path / "ckpt", ASYNCHRONOUS),
    }[how]
    with pytest.raises(ReplicaValueError, match=r"'seen:0' has a value on each replica .* aggregation NONE"):
        save()
    assert os.listdir(tmp_path) == []
    plain = tf.Module()
    plain.seen = tf.Variable([5.0, 6.0])
    path = tf.train.Checkpoint(module=plain).write(str(tmp_path / "plain"))
    tf.train.Checkpoint(module=module).read(path).assert_consumed()
    assert [each.numpy().tolist() for each in seen.values] == [[5.0, 6.0]] * 2
    tf.train.Checkpoint(total=total).write(tmp_path / "others")
