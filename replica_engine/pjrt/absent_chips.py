"""Compiles programs for chips that are not there. Nothing of them runs.

For TPUs libtpu compiles, for GPUs the CUDA plugin of jax; neither needs a chip or a driver. Each compile is the work of
a child process: libtpu ends its process at some programs, and must never end this one. The child is

    python -m replica_engine.pjrt.absent_chips FOLDER ...

A folder has `request.json` and `program.mlir`. What the compiler says goes to `answer.json`. If the process dies, its
parent says so, with what was printed here.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import importlib.util
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from typing import Any

import numpy as np

from replica_engine.errors import BackendMissingError, DeviceError, ProgramError, ReplicaTimeoutError
from replica_engine.pjrt import accelerators, executable, jaxlib
from replica_engine.pjrt.plan import Collective, Cost, Memory, Plan, make_plan
from replica_engine.pjrt.stablehlo import markers
from replica_engine.process.interrupts import wait_within
from replica_engine.workers import child_process

# libtpu asks the machine which TPUs it has, and writes a log, unless it is told otherwise.
_ENVIRONMENT = {
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "JAX_PLATFORMS": "cpu",
    "TF_CPP_MIN_LOG_LEVEL": "3",
    "TPU_ACCELERATOR_TYPE": "v5litepod-8",
    "TPU_MIN_LOG_LEVEL": "3",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_STDERR_LOG_LEVEL": "3",
    "TPU_WORKER_HOSTNAMES": "localhost",
}
_PLUGIN, _LIBRARY = "jax_plugins.xla_cuda12", "xla_cuda_plugin.so"
_GPU_OPTIONS = (("xla_gpu_autotune_level", "0"),)  # to measure kernels, XLA would need the GPU

_TOO_MUCH = re.compile(r"RESOURCE_EXHAUSTED.*?([\d.]+)([KMGT]?)i?B?\)? (?:exceeds|of) ", re.DOTALL)
_SCALE = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}
_COMMAND = child_process.arguments("replica_engine.pjrt.absent_chips")
_MOST_WORDS = 3000  # of a process that died

# Without a GPU to try tiles on, XLA takes one, which does not suit all products. Then cuBLAS may have them.
_NO_TILES = "Couldn't find output tile sizes"


def compile_absent(
    text: str,
    name: str,
    replicas: int,
    topology: object,
    sizes: tuple[int, int, int],
    timeout: float | None = None,
    parts: int = 1,
) -> Plan:
    """Compiles a program for a slice that need not be there.

    Args:
        text: the program, with markers.
        name: the name of the function.
        replicas: the number of replicas.
        topology: the name of the slice.
        sizes: the bytes of the arguments, of the results, and of those results that are written over arguments. They
            are used for a program that does not fit, of which the compiler tells less.
        timeout: seconds that the compiler may take; None for no limit.
        parts: the number of devices of each replica.

    Raises:
        DeviceError: there is no such slice, or it cannot serve so many replicas.
        UntransferableError: a host call has a value that cannot be sent between such a chip and the host.
        BackendMissingError: the compiler is not installed.
        ProgramError: the compiler refused the program, or its process died.
        ReplicaTimeoutError: the compiler took too long.
    """
    slice_, request = check_absent(topology, replicas * parts)
    module = executable.prepared(text, slice_.chip.platform)
    markers.convert(module)  # for GPUs too: the compiler knows their call only where a GPU is
    request |= {"name": name, "replicas": replicas, "parts": parts, "memory": slice_.chip.memory}
    with tempfile.TemporaryDirectory(prefix="replica_engine_plan_") as folder:
        path = pathlib.Path(folder)
        (path / "program.mlir").write_text(str(module))
        (path / "request.json").write_text(json.dumps(request))
        status = _run(path, timeout)
        if status is None:
            raise ReplicaTimeoutError.not_planned(name, slice_.name, timeout or 0.0)
        answer_file = path / "answer.json"
        if not answer_file.exists():
            how = f"signal {-status}" if status < 0 else f"exit status {status}"
            raise ProgramError(
                f"The compiler for {slice_.name} ended its process ({how}) at `{name}` for {replicas} replicas, so "
                "there is no plan of it. This process goes on. It printed:\n"
                f"{_words(path / 'words') or '(nothing)'}"
            )
        answer = json.loads(answer_file.read_text())
        if "error" in answer:
            return _too_large(answer["error"], request, sizes)
        return _plan(answer["plan"])


def check_absent(topology: object, replicas: int) -> tuple[accelerators.Slice, dict[str, Any]]:
    """Checks that programs can be compiled for so many devices of a slice that need not be there.

    Returns:
        The slice, and what the child process must know of it.

    Raises:
        DeviceError: there is no such slice, or it cannot serve so many.
        BackendMissingError: the compiler is not installed, or does not fit the version of jaxlib.
    """
    slice_ = accelerators.slice_named(topology)
    slice_.check(replicas)
    return slice_, _request(slice_)


def _request(slice_: accelerators.Slice) -> dict[str, Any]:
    chip, sizes = slice_.chip, "x".join(map(str, slice_.shape))
    request: dict[str, Any] = {"platform": chip.platform, "devices": slice_.name, "options": {}, "compile_options": []}
    if chip.platform == "tpu":
        if importlib.util.find_spec("libtpu") is None and accelerators.LIBTPU not in os.environ:
            raise BackendMissingError.no_compiler("TPUs", "libtpu")
        request["topology"] = f"{'tpu' if chip.name == '7x' else ''}{chip.name}:{sizes}"
        request["options"] = dict(chip.options)
        if all(size == 1 for size in slice_.shape):
            request["options"]["chips_per_host_bounds"] = [1, 1, 1]
        return request
    found = importlib.util.find_spec(_PLUGIN) if importlib.util.find_spec("jax_plugins") else None
    if found is None or found.origin is None:
        raise BackendMissingError.no_compiler("GPUs", "jax-cuda12-pjrt")
    version, wanted = importlib.metadata.version("jax-cuda12-pjrt"), jaxlib.JAXLIB_VERSION
    if version != wanted:
        raise BackendMissingError(
            f"jax-cuda12-pjrt {version} is installed, which does not fit jaxlib {wanted}. Install it with\n"
            f"    pip install jax-cuda12-pjrt=={wanted}"
        )
    request["library"] = str(pathlib.Path(found.origin).with_name(_LIBRARY))
    request["target"] = pathlib.Path(__file__).with_name(f"{chip.name}.txtpb").read_text()
    request["topology"] = f"1x1x{sizes}"
    request["compile_options"] = _GPU_OPTIONS
    return request


def _run(folder: pathlib.Path, timeout: float | None) -> int | None:
    """Runs the child process. Returns its exit status, as `subprocess` has it; None if it took longer than allowed."""
    environment = {**child_process.environment(), **_ENVIRONMENT}
    environment.pop("XLA_FLAGS", None)  # those of this process are for its devices
    command = [sys.executable, *_COMMAND, str(folder)]
    with open(folder / "words", "wb") as words:
        process = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=words, stderr=words)
    try:
        ended = wait_within(timeout, lambda seconds: _ended(process, seconds))
        return process.returncode if ended else None
    finally:
        process.kill()  # which does nothing after its end
        process.wait()


def _ended(process: subprocess.Popen, seconds: float) -> bool:
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        return False
    return True


def _words(file: pathlib.Path) -> str:
    """What the child process printed last, without the frames of libtpu's own stack."""
    lines = file.read_text(errors="replace").splitlines()
    said = [line for line in lines if line.strip() and not re.match(r"\s*@ +0x|PC: @|\s*\*\*\*", line)]
    return "\n".join(said)[-_MOST_WORDS:]


def _plan(answer: Mapping[str, Any]) -> Plan:
    cost = dict(answer["cost"])
    cost["collectives"] = tuple(Collective(**each) for each in cost["collectives"])
    return Plan(**{**answer, "memory": Memory(**answer["memory"]), "cost": Cost(**cost)})


def _too_large(error: str, request: Mapping[str, Any], sizes: tuple[int, int, int]) -> Plan:
    """The plan of a program that the compiler refused because the chip has too little memory; raises for others."""
    name, replicas, devices = request["name"], request["replicas"], request["devices"]
    # A kernel that needs more of a core's shared memory than there is says nothing of the device's memory.
    if "RESOURCE_EXHAUSTED" not in error or "Shared memory" in error:
        if "device_count ==" in error or "replica group" in error:
            raise DeviceError(
                f"A program for {replicas} of the devices of {devices} cannot be compiled. Take all devices of a "
                f"slice. The compiler says:\n{error.strip()}"
            )
        raise ProgramError(f"`{name}` for {replicas} replicas cannot be compiled for {devices}:\n{error.strip()}")
    arguments, results, aliased = sizes
    temporary = None
    if (found := _TOO_MUCH.search(error)) is not None:
        used = int(float(found[1]) * 1024 ** _SCALE[found[2]])
        temporary = max(0, used - arguments - results + aliased)
    memory = Memory(arguments, results, temporary, aliased, request["memory"])
    return Plan(name, replicas, devices, memory, Cost(None, None, None), False, 0.0, request["parts"])


# In the child process.


def main(folder: pathlib.Path) -> None:
    """Answers the request in a folder; called in the child process."""
    request = json.loads((folder / "request.json").read_text())
    try:
        answer = _answer(request, folder)
    except jaxlib.RUNTIME_ERRORS as error:
        answer = {"error": str(error)}
    whole = folder / "answer.part"  # on a full disk, or if the process is killed now, there must be no half an answer
    whole.write_text(json.dumps(answer))
    whole.rename(folder / "answer.json")


def _answer(request: dict[str, Any], folder: pathlib.Path) -> dict[str, Any]:
    replicas, parts = request["replicas"], request["parts"]
    if request["platform"] == "tpu":
        devices = jaxlib.absent_tpus(request["topology"], **request["options"])
    else:
        devices = jaxlib.absent_gpus(request["library"], request["target"], request["topology"])
    devices = devices[: replicas * parts]
    ids = np.array([device.id for device in devices])
    options = jaxlib.compile_options(ids.reshape((replicas, 1) if parts == 1 else (1, replicas * parts)), parts > 1)
    program, on = (folder / "program.mlir").read_text(), jaxlib.DeviceList(tuple(devices))

    def compiled(extra: list[tuple[str, object]]) -> Any:
        options.env_option_overrides = [*map(tuple, request["compile_options"]), *extra]
        with jaxlib.program_context():
            module = jaxlib.ir.Module.parse(program)
            return devices[0].client.compile(module, executable_devices=on, compile_options=options)

    began = time.perf_counter()
    try:
        made = compiled([])
    except jaxlib.RUNTIME_ERRORS as error:
        if _NO_TILES not in str(error):
            raise
        made = compiled([("xla_gpu_enable_triton_gemm", False)])
    seconds = time.perf_counter() - began
    plan = make_plan(made, request["name"], replicas, request["devices"], request["memory"], seconds, parts)
    return {"plan": dataclasses.asdict(plan)}


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        main(pathlib.Path(argument))
    sys.stdout.flush()
    os._exit(0)  # libtpu takes seconds to leave, and may fail at it
