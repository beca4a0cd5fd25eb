"""Checkpoints and saved models of several workers in one shared folder."""

import threading

import pytest
from helpers.jobs import LONGER, job
from helpers.workers import HEAD, TAIL, alone, files, outputs

from replica_engine.strategies.multi_worker.launches import Launches
from replica_engine.strategies.multi_worker.saving import Saving

pytestmark = pytest.mark.timeout(360)

SAVING = """
import keras

folder = os.environ["FOLDER"]
strategy = KIND()
with strategy.scope():
    w = tf.Variable(2.0)
    seen = tf.Variable(
        0.0, synchronization=tf.VariableSynchronization.ON_READ, aggregation=tf.VariableAggregation.SUM, trainable=False
    )
checkpoint = tf.train.Checkpoint(w=w, seen=seen)
manager = tf.train.CheckpointManager(checkpoint, f"{folder}/managed", max_to_keep=2)
for step in range(3):
    strategy.run(lambda: seen.assign_add(1.0 + tf.cast(context().replica_id_in_sync_group, tf.float32)))
    w.assign(float(step))
    manager.save()
found["checkpoints"] = [os.path.basename(path) for path in manager.checkpoints]
found["latest"] = os.path.basename(tf.train.latest_checkpoint(f"{folder}/managed"))
found["written"] = os.path.relpath(checkpoint.write(f"{folder}/written/here"), folder)
found["saved"] = os.path.relpath(checkpoint.save(f"{folder}/saved/ckpt"), folder)
w.assign(9.0)
strategy.run(lambda: seen.assign(50.0))
checkpoint.restore(tf.train.latest_checkpoint(f"{folder}/managed")).assert_consumed()
found["restored"] = [float(w), float(seen)]
keras.utils.set_random_seed(1)
with strategy.scope():
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile("adam", "mse", metrics=["mae"])
data = tf.data.Dataset.from_tensor_slices((np.ones([16, 3], "float32"), np.ones([16, 1], "float32"))).batch(8)
model.fit(data, verbose=0)
model.save(f"{folder}/model.keras")
found["loaded"] = keras.saving.load_model(f"{folder}/model.keras").predict(np.ones([2, 3]), verbose=0).tolist()
found["own"] = model.predict(np.ones([2, 3]), verbose=0).tolist()
tf.train.Checkpoint(model=model).write(f"{folder}/of model")
model.export(f"{folder}/exported", verbose=False)
served = tf.saved_model.load(f"{folder}/exported")
found["served"] = served.serve(tf.ones([2, 3])).numpy().tolist()


class Module(tf.Module):
    def __init__(self):
        self.w, self.seen = w, seen

    @tf.function(input_signature=[tf.TensorSpec([])])
    def __call__(self, x):
        return x * self.w


tf.saved_model.save(Module(), f"{folder}/module")
module = tf.saved_model.load(f"{folder}/module")
found["module"] = float(module(tf.constant(3.0)))
tf.train.Checkpoint(plain=tf.Variable(1.0)).write(f"{folder}/of worker {me}")  # of no strategy: each writes its own
"""

DIFFERENT = """
strategy = KIND()
with strategy.scope():
    w = tf.Variable(2.0)
checkpoint = tf.train.Checkpoint(w=w)
if me == 0:
    checkpoint.write(os.environ["FOLDER"] + "/ckpt")
else:
    strategy.run(lambda: context().all_reduce("SUM", 1.0))
"""

PARTS = """
import keras

folder = os.environ["FOLDER"]
strategy = KIND()
with strategy.scope():
    w = tf.Variable(1.0)
step = lambda: context().all_reduce("SUM", w)
checkpoint = tf.train.Checkpoint(w=w)
options = tf.train.CheckpointOptions(experimental_enable_async_checkpoint=True)
for _ in range(3):
    path = checkpoint.save(f"{folder}/asynchronous/ckpt", options)
    found["is there"] = os.path.exists(path + ".index")
    for _ in range(10):
        strategy.run(step)
plain = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
plain.compile("adam", "mse")
model = replica_engine.keras.replicate_model(plain, strategy=strategy)
model.fit(np.ones([8, 3], "float32"), np.ones([8, 1], "float32"), batch_size=4, verbose=0, shuffle=False)
parts = {"model": plain, "layer": plain.layers[0], "optimizer": plain.optimizer, "variable": plain.variables[0].value}
for name, part in parts.items():
    tf.train.Checkpoint(part=part, step=tf.Variable(me)).write(f"{folder}/{name}")
    found[name] = int(tf.train.load_variable(f"{folder}/{name}", "step/.ATTRIBUTES/VARIABLE_VALUE"))
own = f"{folder}/own {me}"
tf.train.Checkpoint(step=tf.Variable(me)).write(own)
found["own"] = os.path.exists(own + ".index")
"""


def test_the_chief_writes_and_all_restore(programs, tmp_path):
    shared, theirs = tmp_path / "shared", tmp_path / "one"
    shared.mkdir()
    theirs.mkdir()
    with job(join=LONGER) as made:
        first, second = outputs(programs, made, SAVING, FOLDER=str(shared))
    reference = alone(programs, SAVING, 2, FOLDER=str(theirs))
    assert first == second
    assert first["restored"] == [2.0, 9.0]
    assert first["checkpoints"] == ["ckpt-2", "ckpt-3"]
    assert (first["latest"], first["module"]) == ("ckpt-3", 6.0)
    assert first["loaded"] == first["own"] == first["served"]
    assert first == reference
    assert [each for each in files(shared) if not each.startswith("of worker 1")] == files(theirs)


def test_the_chief_writes_parts_of_replicated_models_and_asynchronous_checkpoints(programs, tmp_path):
    with job(join=LONGER) as made:
        first, second = outputs(programs, made, PARTS, FOLDER=str(tmp_path))
    chiefs = dict.fromkeys(("model", "layer", "optimizer", "variable"), 0)
    assert first == second == {"is there": True, **chiefs, "own": True}
    assert [name for name in files(tmp_path / "asynchronous") if name.endswith(".index")] == [
        f"ckpt-{number}.index" for number in (1, 2, 3)
    ]


def test_each_thread_meets_for_what_it_saves():
    met = []
    saving = Saving(True, lambda name, limited: met.append((name, limited)))

    def save(what):
        with saving.saving(what), saving.saving("its weights"):
            pass

    with saving.saving("a model"):
        thread = threading.Thread(target=save, args=("a checkpoint",))
        thread.start()
        thread.join()
    begin, end = "the saving of {}", "the end of saving {}"
    assert [name for name, _ in met] == [
        begin.format("a model"),
        *(each.format("a checkpoint") for each in (begin, end)),
        end.format("a model"),
    ]


def test_the_timeout_does_not_bound_how_long_the_chief_writes():
    timeouts = {}

    class Member:
        def progress(self, step, name):
            pass

        def meet(self, name, timeout, warn_after):
            timeouts[name] = timeout, warn_after

    saving = Saving(False, Launches(Member(), timeout=4.0, warn_after=1.0).meet)
    with saving.saving("a model"):
        pass
    assert timeouts == {"the saving of a model": (4.0, 1.0), "the end of saving a model": (None, 1.0)}


def test_a_checkpoint_of_the_chief_alone_is_found(programs, tmp_path):
    with job(join=LONGER) as made:
        started = [
            programs.start(HEAD + DIFFERENT + TAIL, env=made.environment(worker, LOCAL="1", FOLDER=str(tmp_path)))
            for worker in range(2)
        ]
        for process in started:
            _, err = process.communicate(LONGER)
            assert process.returncode == 1
            assert "ProgramDisagreementError: After" in err
            assert "wait at the saving of a checkpoint" in err
    assert files(tmp_path) == []
