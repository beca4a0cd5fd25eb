"""What runs on real GPUs: `make test-gpu`. A part whose GPUs are missing is skipped by name; no CPU stands in for one.

Each part is a program of its own, since TensorFlow divides a GPU only before it starts. TensorFlow and jaxlib share the
card: neither may take all of its memory at once, which both do unless they are told.
"""

import os
import pathlib
import subprocess
import sys
import textwrap

import pytest
import tensorflow as tf
from helpers.versions import HAS_XLA, WHY_NO_XLA

if HAS_XLA:
    from gpu.programs import PROGRAMS
else:
    PROGRAMS = ["of compiled replicas"]

ROOT = pathlib.Path(__file__).parents[2]
PROGRAM_FILE = pathlib.Path(__file__).with_name("programs.py")
SHARED = {"TF_FORCE_GPU_ALLOW_GROWTH": "true", "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
os.environ.update(SHARED)  # before this process looks for GPUs itself
CONTRACT = [f"tests/contract/test_{name}.py" for name in ("run", "merge_call", "collectives", "variables", "keras")]

BEGIN = """
    import _thread, json, pathlib, tempfile, threading
    import keras
    import numpy as np
    import tensorflow as tf
    import replica_engine.testing
    from replica_engine.keras import replicate_model
    devices = DEVICES
    strategy = replica_engine.MirroredStrategy(devices)
    began = threading.Event()

    def endless():
        x = tf.ones([64, 64])
        while True:
            x = tf.linalg.matmul(x, x) / 64.0
            began.set()
"""

OF_THREADS = {
    "threads": """
    with strategy.scope():
        weight = tf.Variable(1.0, aggregation=tf.VariableAggregation.MEAN)

    def step(x):
        total = tf.distribute.get_replica_context().all_reduce("SUM", tf.fill([1000], x))
        weight.assign_add(total[0])
        return total[-1]

    expected = float(len(devices))
    for run in (strategy.run, tf.function(strategy.run)):
        results = strategy.experimental_local_results(run(step, args=(tf.constant(1.0),)))
        assert [float(each) for each in results] == [expected] * len(devices), results
        assert all("GPU" in each.device for each in results), [each.device for each in results]
    copies = strategy.experimental_local_results(weight)
    assert [float(each) for each in copies] == [1.0 + 2 * expected] * len(devices), copies
    """,
    "replicate_model": """
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(32, "relu"), keras.layers.Dense(1)])
    model.compile("adam", "mse")
    fast = replicate_model(model, strategy=strategy)
    x = np.random.default_rng(0).normal(size=(100, 8)).astype("float32")
    losses = fast.fit(x, x.sum(axis=1, keepdims=True), batch_size=30, epochs=5, verbose=0).history["loss"]
    assert losses[-1] < losses[0], losses
    """,
    "timeline": """
    path = pathlib.Path(tempfile.mkdtemp(), "run.json")
    with replica_engine.timeline(str(path)):
        strategy.run(lambda: tf.distribute.get_replica_context().all_reduce("SUM", tf.ones([10])))
    text = path.read_text()
    assert json.loads(text) and all(f"({device})" in text for device in devices), text[:2000]
    """,
    "watchdog": """
    try:
        replica_engine.MirroredStrategy(devices, timeout=3.0).run(endless)
    except replica_engine.errors.ReplicaTimeoutError as error:
        assert "GPU:0" in str(error), error
    else:
        raise AssertionError("no timeout")
    """,
    "Ctrl-C": """
    threading.Thread(target=lambda: (began.wait(), _thread.interrupt_main()), daemon=True).start()
    try:
        strategy.run(endless)
    except KeyboardInterrupt:
        pass
    else:
        raise AssertionError("not interrupted")
    """,
}


def needs_gpus(count):
    """Skips a part on a machine with fewer GPUs that TensorFlow can use."""
    found = len(tf.config.list_physical_devices("GPU"))
    return pytest.mark.skipif(found < count, reason=f"needs {count} GPUs, and TensorFlow sees {found}")


def needs_gpus_of_jax(count):
    """Skips a part on a machine with fewer GPUs that jax can use."""
    if not HAS_XLA:
        return pytest.mark.skipif(True, reason=WHY_NO_XLA)
    from replica_engine.pjrt.devices import device_group, has_accelerators

    found = device_group("gpu").size if has_accelerators("gpu") else 0
    return pytest.mark.skipif(found < count, reason=f"needs {count} GPUs, and jax sees {found}")


def passes(command, **more):
    environment = {**os.environ, **more, "PYTHONPATH": str(ROOT), "XLA_FLAGS": ""}  # compiled as users' are
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, (done.stdout + done.stderr)[-5000:]


def runs(program, devices):
    passes([sys.executable, "-c", textwrap.dedent(BEGIN.replace("DEVICES", str(devices)) + program)])


@needs_gpus(1)
@pytest.mark.parametrize("name", OF_THREADS)
def test_on_one_gpu(name):
    runs(OF_THREADS[name], ["GPU:0"])


@needs_gpus(1)
@pytest.mark.parametrize("name", OF_THREADS)
def test_on_two_logical_gpus(name):
    runs(OF_THREADS[name], 'replica_engine.logical_devices(2, "GPU")')


@needs_gpus(2)
@pytest.mark.parametrize("name", OF_THREADS)
def test_on_two_gpus_with_nccl(name):
    runs(OF_THREADS[name], ["GPU:0", "GPU:1"])


@needs_gpus_of_jax(1)
@pytest.mark.parametrize("name", PROGRAMS)
def test_compiled(name):
    passes([sys.executable, str(PROGRAM_FILE), name])


@needs_gpus(1)
@pytest.mark.parametrize("size", [1, 2])
def test_the_contract_suite_of_threads(size):
    """Two replicas on one card are two logical GPUs."""
    check_contract("mirrored", size)


@pytest.mark.parametrize("size", [pytest.param(count, marks=needs_gpus_of_jax(count)) for count in (1, 2)])
def test_the_contract_suite_of_compiled_replicas(size):
    check_contract("tpu", size)


def check_contract(row, size):
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", f"--replicas={size}"]
    passes([*command, "-k", f"{row}-{size}", *CONTRACT], REPLICA_ENGINE_TEST_GPUS=str(size))
