"""Replicas whose devices are those of several workers: the numbers and files of one process."""

import json

import numpy as np
import pytest
from helpers.jobs import LONGER, is_stopped, job, until
from helpers.workers import TPU_HEAD, TPU_TAIL, read

PROGRAM = """
import keras

how = json.loads(os.environ["HOW"])
strategy = replica_engine.TPUStrategy(num_cores=4, **how)
x = np.random.default_rng(0).normal(size=(40, 20)).astype("f")
y = np.random.default_rng(1).integers(0, 3, 40)
keras.utils.set_random_seed(me)  # the chief's values count
with strategy.scope():
    model = keras.Sequential([keras.Input([20]), keras.layers.Dense(64, "relu"),
                              keras.layers.Dense(3)])
    model.compile(keras.optimizers.Adam(0.01), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
fitted = model.fit(x, y, batch_size=10, epochs=2, shuffle=False, verbose=0)
found["loss"] = fitted.history["loss"]
found["weights"] = [float(np.abs(each).sum()) for each in model.get_weights()]
found["predicted"] = model.predict(x, batch_size=10, verbose=0)[:5, 0].tolist()
found["replicas"] = strategy.num_replicas_in_sync
found["hosts"] = strategy.num_hosts
parts["bytes"] = strategy.memory().variables
found["saved"] = None
path = os.path.join(os.environ["FOLDER"], "model.keras")
model.save(path)
again = keras.models.load_model(path)
found["saved"] = [float(np.abs(each).sum()) for each in again.get_weights()]
model.compile("adam", "mse", steps_per_execution=3)
fitted = model.fit(x, x[:, :3], batch_size=10, epochs=2, shuffle=False, verbose=0)
found["several steps at a time"] = fitted.history["loss"]
with strategy.scope():
    total = tf.Variable(tf.zeros([4]))
batches = [tf.fill([4], float(1 + number)) for number in range(150 + 7 * me)]  # all end with the shortest
try:
    strategy.run_steps(lambda context, x: total.assign_add(x), iter(batches), 200)
except tf.errors.OutOfRangeError as error:
    found["loop"] = [error.message, total.numpy().tolist()]
strategy.run(lambda: tf.print("once a replica"))

def with_host(context, x, words):
    doubled = tf.ensure_shape(tf.numpy_function(lambda x: 2 * x, [x], tf.float32), x.shape)
    total.assign_add(doubled + tf.cast(tf.strings.length(words)[0], tf.float32))
    context.set_last_step_output("mean", tf.reduce_mean(x))

try:
    texts = [(batch, tf.constant(["word", "and", "more", "words"])) for batch in batches[: 9 + me]]
    strategy.run_steps(with_host, iter(texts), 20)
except tf.errors.OutOfRangeError as error:
    found["loop with the host"] = [error.message, total.numpy().tolist()]
"""


@pytest.mark.parametrize(
    ("workers", "how"),
    [
        (2, '{"distribution": "fsdp"}'),  # one replica over both
        pytest.param(  # two replicas, each over two workers
            4, '{"distribution": "fsdp", "cores_per_replica": 2}', marks=pytest.mark.full("four processes")
        ),
    ],
)
def test_numbers_and_files_are_those_of_one_process(programs, tmp_path, workers, how):
    with job(workers, join=LONGER) as made:
        text, folder = TPU_HEAD + PROGRAM + TPU_TAIL, str(tmp_path)
        started = [
            programs.start(text, env=made.environment(worker, HOW=how, FOLDER=folder)) for worker in range(workers)
        ]
        each = [read(one, LONGER) for one in started]
    alone = programs.start(TPU_HEAD + PROGRAM + TPU_TAIL, env={"HOW": how, "FOLDER": folder})
    expected, whole = read(alone, LONGER)
    for found, parts in each:
        assert found.pop("hosts") == workers
        assert parts["bytes"] == whole["bytes"][: 4 // workers]
        assert found["replicas"] == expected["replicas"]
        for name in ("loss", "weights", "predicted", "saved", "several steps at a time"):
            np.testing.assert_allclose(found[name], expected[name], rtol=1e-4)
        assert found["loop"] == expected["loop"]
        assert found["loop with the host"] == expected["loop with the host"]
        assert found == each[0][0], "workers differ"


SHARES = """
strategy = replica_engine.TPUStrategy(num_cores=8, cores_per_replica=2)
shares = strategy.experimental_distribute_values_from_function(
    lambda context: tf.fill([2], 10.0 ** context.replica_id_in_sync_group)
)
own = strategy.run(lambda x: 2.0 * x, args=(shares,))
parts["own"] = [each.numpy().tolist() for each in strategy.experimental_local_results(own)]
total = strategy.run(lambda x: context().all_reduce("SUM", x), args=(shares,))
found["sum"] = strategy.experimental_local_results(total)[0].numpy().tolist()
"""


def test_each_of_a_workers_replicas_of_several_devices_has_its_own_share(programs):
    text = TPU_HEAD + SHARES + TPU_TAIL
    with job(2, join=LONGER) as made:
        started = made.start_all(programs, text)
        each = [read(one, LONGER) for one in started]
    assert [parts["own"] for _, parts in each] == [[[2.0] * 2, [20.0] * 2], [[200.0] * 2, [2000.0] * 2]]
    assert [found["sum"] for found, _ in each] == [[1111.0] * 2] * 2


FAILS = """
strategy = replica_engine.TPUStrategy(num_cores=4, distribution="fsdp")
with strategy.scope():
    total = tf.Variable(tf.zeros([4]))

def fails(x):
    if x[0] == 3:
        raise ValueError("at the third")
    return x

def step(context, x):
    total.assign_add(tf.ensure_shape(tf.numpy_function(fails, [x], tf.float32), x.shape))
    context.set_last_step_output("x", tf.reduce_mean(x))

try:
    strategy.run_steps(step, iter([tf.fill([4], float(1 + number)) for number in range(5)]), 5)
except ValueError as error:
    found["notes"] = " ".join(error.__notes__)
    found["kept"] = [error.context.steps, float(error.context.last_step_outputs["x"]), total.numpy().tolist()]
except replica_engine.errors.WorkerLostError as error:
    found["other"] = str(error)
"""


def test_a_host_call_that_fails_in_a_loop_leaves_the_steps_before_and_ends_the_loops_of_others(programs):
    with job(join=LONGER) as made:
        started = made.start_all(programs, TPU_HEAD + FAILS + TPU_TAIL)
        (failed, _), (other, _) = (read(each, LONGER) for each in started)
    assert "2 of 5 steps of the device loop ran; the values that they wrote are kept" in failed["notes"]
    assert failed["kept"] == [2, 2.0, [3.0] * 4]
    assert "worker 1 goes on with the wait at the next steps of `step`" in other["other"]


STOPS = """
from replica_engine.pjrt import worker_exchange as exchange

strategy = replica_engine.TPUStrategy(num_cores=4, distribution="fsdp")
with strategy.scope():
    weight = tf.Variable(tf.ones([1024, 64]))
strategy.run(lambda: weight.assign_add(tf.ones([1024, 64])))
turn = exchange._wait_for_turn

def stop(*given):
    turn(*given)
    os.kill(os.getpid(), signal.SIGSTOP)

if me == 1:  # after all have come to launch the exchange: the devices of the other worker wait for this one's
    exchange._wait_for_turn = stop
try:
    weight.numpy()
except replica_engine.errors.WorkerLostError as error:
    found["lost"] = str(error)
"""


def test_a_worker_that_stops_while_a_value_is_read_is_named(programs):
    with job(join=LONGER) as made:
        reads, stops = made.start_all(programs, TPU_HEAD + STOPS + TPU_TAIL)
        try:
            until(lambda: is_stopped(stops.pid), LONGER)
            made.limit(heartbeat=8.0)
            found, _ = read(reads, LONGER)
        finally:
            stops.kill()
            reads.kill()
    assert "worker 1 of 2" in found["lost"]


INITIAL = """
import keras, pathlib

def peak():
    lines = pathlib.Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM"))

keras.utils.set_random_seed(me)  # the chief's seeds count
strategies = [replica_engine.TPUStrategy(num_cores=4, cores_per_replica=each, distribution="fsdp") for each in (4, 2)]
counted = keras.initializers.HeNormal(keras.random.SeedGenerator(me))
for strategy in strategies:
    for initializer in ("glorot_uniform", "ones", "truncated_normal", counted):
        before = replica_engine.xla.counts()
        with strategy.scope():
            value = keras.Variable(keras.initializers.get(initializer), shape=(1024, 4096))
        in_parts = (replica_engine.xla.counts() - before).launches
        array = value.numpy()
        found[f"{strategy.num_replicas_in_sync} {initializer if isinstance(initializer, str) else 'counted'}"] = [
            *map(float, array.ravel()[::500_000]), float(np.abs(array).sum(dtype="float64")), in_parts
        ]
with strategies[0].scope():
    sent = tf.Variable(lambda: tf.random.normal([(1 << 24) + 5])).numpy()  # the chief sends it in two pieces
found["sent, as the counted"] = [float(sent[-1]), float(np.abs(sent).sum(dtype="float64")), 0]
before = peak()
with strategies[0].scope():
    large = keras.Variable(keras.initializers.get("glorot_uniform"), shape=(8192, 8192))
parts["grew"] = (peak() - before) / (4 * 8192 * 8192)
"""


@pytest.mark.full("a minute; tests/sharding/test_initial_values.py makes the parts in one process")
def test_large_initial_values_are_made_in_parts_of_the_chiefs_seeds(programs):
    text = TPU_HEAD + INITIAL + TPU_TAIL
    with job(2, join=LONGER) as made:
        started = made.start_all(programs, text)
        each = [read(one, LONGER) for one in started]
    expected, _ = read(programs.start(text), LONGER)
    for found, parts in each:
        assert found.keys() == expected.keys()
        for name, values in found.items():
            np.testing.assert_allclose(values, expected[name], rtol=1e-6, atol=1e-7, err_msg=name)
            assert values[-1] == ("counted" not in name), "how many programs made it"
        assert parts["grew"] < 0.9, "in whole variables, of which a worker has half"


OTHERS = """
import keras
from keras.distribution import DeviceMesh, LayoutMap, ModelParallel


def parallel(*shape):
    layout_map = LayoutMap(DeviceMesh(shape, ["batch", "model"], [f"cpu:{index}" for index in range(4)]))
    layout_map["kernel"] = (None, "model")
    return ModelParallel(layout_map=layout_map, batch_dim_name="batch")


mine = {"rules": ["fsdp", "zero1"], "meshes": [parallel(2, 2), parallel(1, 4)]}[os.environ["CASE"]][me]
strategy = replica_engine.TPUStrategy(num_cores=4, distribution=mine)
try:
    with strategy.scope():
        keras.layers.Dense(16, use_bias=False).build([None, 64])
except replica_engine.errors.ProgramDisagreementError as error:
    print(json.dumps(str(error)), flush=True)
    raise
"""


@pytest.mark.parametrize(
    ("case", "words"),
    [
        (
            "rules",
            [
                "0: compilation of `creation of the variable kernel, float32[64, 16], divided as ('batch',)",
                "1: compilation of `creation of the variable kernel, float32[64, 16], whole on each replica ('zero1'",
            ],
        ),
        pytest.param(
            "meshes",
            ["ModelParallel, mesh 'batch'=2 x 'model'=2", "ModelParallel, mesh 'batch'=1 x 'model'=4"],
            marks=pytest.mark.full("another word of the same comparison"),
        ),
    ],
)
def test_workers_that_divide_in_other_ways_are_told_when_they_make_the_first_variable(programs, case, words):
    with job(2, join=LONGER) as made:
        started = made.start_all(programs, TPU_HEAD + OTHERS, CASE=case)
        for each in started:
            out, err = each.communicate(LONGER)
            assert each.returncode == 1, err[-4000:]
            lines = json.loads(next(line for line in out.splitlines() if "creation of" in line)).splitlines()
            assert all(word in line for word, line in zip(words, lines[1:3], strict=True)), lines
