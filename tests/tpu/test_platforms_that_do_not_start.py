"""A TPU or GPU that cannot start: the reason is in the error, and in a warning where other devices are taken.

In processes of their own, since jax starts its platforms once.
"""

import os
import subprocess
import sys

import pytest

PLUGIN = """
from jax._src import xla_bridge

def start():
    raise RuntimeError("the devices are in use by process 4711")

def initialize():
    xla_bridge.register_backend_factory("rocm", start, priority=200, fail_quietly={quietly})
"""
PROGRAM = """
import sys

sys.path[:0] = sys.argv[2:]
from replica_engine import TPUStrategy, xla
from replica_engine.errors import DeviceError

try:
    xla.PjrtClusterResolver(sys.argv[1])
except DeviceError as error:
    print("error:", error)
for _ in range(2):
    strategy = TPUStrategy()
    sums = strategy.experimental_local_results(strategy.run(lambda: xla.cross_replica_sum(1.0)))
    print(xla.PjrtClusterResolver().platform, float(sums[0]) == strategy.num_replicas_in_sync)
"""


def alone(program, *arguments, env):
    """Runs a program in an interpreter of its own: jax looks for plugins when it is imported, and finds them there."""
    command = [sys.executable, "-c", program, *map(str, arguments)]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=300, check=False)


def outcome(run, *arguments, **variables):
    """What the program prints, and its warnings of a platform."""
    env = {name: value for name, value in os.environ.items() if name != "JAX_PLATFORMS"}
    process = run(PROGRAM, *arguments, env=env | variables)
    assert process.returncode == 0, process.stderr
    return process.stdout, [line for line in process.stderr.split("\n") if "could not start" in line]


@pytest.mark.parametrize(
    "quietly",
    [False, pytest.param(True, marks=pytest.mark.full("jax says the same in another place"))],
    ids=["jax raises", "jax does not raise"],
)
def test_a_gpu_that_is_in_use(tmp_path, quietly):
    folder = tmp_path / "jax_plugins" / "broken"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text(PLUGIN.format(quietly=quietly))
    printed, warnings = outcome(alone, "gpu", tmp_path)
    reason = "jax could not start the GPU platform: the devices are in use by process 4711\n"
    assert printed.startswith(f"error: {reason}")
    assert printed.endswith("This process has: cpu.\ncpu True\ncpu True\n")
    assert warnings[-1] == (
        "jax could not start the GPU platform, so this process runs on CPU devices: the devices are in use by "
        "process 4711"
    )
    assert len(warnings) == 1


@pytest.mark.full("as the GPU, with the library of TPUs")
def test_a_tpu_whose_library_cannot_be_opened(programs):
    printed, warnings = outcome(programs.run, "tpu", TPU_LIBRARY_PATH="/nowhere/libtpu.so")
    assert printed.startswith("error: jax could not start the TPU platform: ")
    assert "libtpu.so" in printed.split("\n")[0]
    assert len(warnings) == 1
    assert "libtpu.so" in warnings[0]


def test_a_machine_without_accelerators_gets_no_warning(programs):
    printed, warnings = outcome(programs.run, "tpu")
    assert printed.startswith("error: jax finds no TPU device.")
    assert warnings == []
