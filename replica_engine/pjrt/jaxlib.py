"""Every name of jax and jaxlib that the library uses, each with its reason. Checked on jax and jaxlib 0.8.0 to 0.12.0.

jax is an extra (`pip install replica-engine[xla]`). Importing this module without jax, or with a version that lacks
one of these names, raises BackendMissingError, an ImportError that names the install command.
"""

from __future__ import annotations

import functools
import gc
import importlib.metadata
import logging
import operator
import os
import re
from collections.abc import Callable
from typing import Any

import numpy as np

from replica_engine.errors import BackendMissingError
from replica_engine.errors.device_errors import untested_version

OLDEST = (0, 8, 0)
"""The oldest version that serves: the limit below could not be set before, so XLA ended the process after 40 s."""

TESTED = (0, 12)
"""The newest minor version that this was checked on."""

try:
    import jax
except ImportError as error:
    raise BackendMissingError(
        "TPUStrategy, replica_engine.xla and a MultiWorkerMirroredStrategy of several workers on CPUs run programs "
        "through jax, which is not installed. Install it with\n"
        '    pip install "replica-engine[xla]"     # CPU; [cuda] for GPUs, [tpu] for TPUs'
    ) from error


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", version)[:3]))


VERSION = _numbers(jax.__version__)
"""The version of jax, without what follows its numbers."""

if VERSION < OLDEST:
    raise BackendMissingError(
        f"jax {jax.__version__} is installed; replica_engine needs {'.'.join(map(str, OLDEST))} or newer. Install it "
        'with\n    pip install --upgrade "replica-engine[xla]"'
    )

if VERSION[:2] > TESTED:
    oldest, newest = ".".join(map(str, OLDEST[:2])), ".".join(map(str, TESTED))
    logging.getLogger("replica_engine").warning(untested_version("jax", jax.__version__, oldest, newest))

try:
    # global_state: what jax knows of the other processes when it makes clients of GPUs and TPUs.
    # ShapedArray: the shape and dtype of an array, needed to make one.
    # JaxIrContext, upstream_dialects, global_thread_pool, chlo, mhlo: a context that knows the dialects of programs.
    # xla_bridge: has the reasons why platforms did not start (`_backend_errors`), which jax does not always tell.
    # hardware_utils: whether the machine has TPUs, without starting them.
    from jax._src import hardware_utils, xla_bridge
    from jax._src.distributed import global_state
    from jax._src.interpreters.mlir import JaxIrContext, global_thread_pool, upstream_dialects
    from jax.core import ShapedArray
    from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

    # ir: reading and rewriting programs. CompileOptions, DeviceAssignment: replicas and their devices.
    # make_cpu_client: a client with any number of CPU devices; jax's own client has the number that was set before
    # jax started.
    # hlo: the operations that programs consist of, to build them.
    # passmanager, sdy: asking Shardy how it will divide a program.
    # Shape: what a client must be told of a value that it receives or sends.
    # xla_client, _jax: compile for chips that are not there, and count the work of a program.
    from jaxlib import _jax, xla_client
    from jaxlib._jax import (
        ArrayImpl,  # the class of arrays, to make one from parts without checks
        DeviceList,  # the devices a program is compiled for
        array_result_handler,  # makes arrays from a program's results without Python code for each shard
        batched_device_put,  # makes one array from N host buffers, also on devices that jax.devices() does not list
        buffer_to_dlpack_managed_tensor,  # a view of an array, for TensorFlow; `__dlpack__` takes six times as long
        collect_garbage,  # frees the arrays whose views are gone; jax does so at each collection of Python's
        get_distributed_runtime_client,  # a process's connection to the service, which clients of PJRT need
        get_distributed_runtime_service,  # what tells the clients of several processes of each other
        make_gloo_tcp_collectives,  # collectives between the CPU clients of several processes
    )
    from jaxlib.mlir import ir, passmanager
    from jaxlib.mlir.dialects import chlo, mhlo, sdy
    from jaxlib.mlir.dialects import stablehlo as hlo
    from jaxlib.xla_client import CompileOptions, DeviceAssignment, Shape, make_cpu_client
except ImportError as error:
    raise BackendMissingError(
        f"jax {jax.__version__} lacks a name that replica_engine uses ({error}). Install a version that "
        'replica_engine was tested with:\n    pip install "jax<0.13" "jaxlib<0.13"'
    ) from None

# XLA aborts the process when a replica waits in a collective for longer than 40 s. A loaded machine may well take that
# long, and nothing here may end the process. The limit is a flag that jaxlib reads once, when it first needs a flag.
_FLAGS = {
    "xla_cpu_collective_call_warn_stuck_timeout_seconds": 600,
    "xla_cpu_collective_call_terminate_timeout_seconds": 1_000_000,
}


def program_context() -> ir.Context:
    """An MLIR context for programs.

    It loads a dialect when a program has it. jax's own context loads all of them first, which takes 4 ms rather than
    0.5, for each program several times.
    """
    context = JaxIrContext()
    context.append_dialect_registry(upstream_dialects)
    context.set_thread_pool(global_thread_pool)
    for dialect in (sdy, chlo, hlo):
        dialect.register_dialect(context)
    mhlo.register_mhlo_dialect(context)
    context.dialects["func"]  # loaded: programs are built with it
    return context


def serialized_executable(client: Any, executable: Any) -> bytes:
    """A compiled program as bytes. In jaxlib 0.8 its client writes it."""
    return executable.serialize() if hasattr(executable, "serialize") else client.serialize_executable(executable)


def serialized_for_others(module: str) -> bytes:
    """A module of StableHLO as bytes for a reader of an older version, such as TensorFlow, if any such can have it."""
    for age in ("MAX", "WEEK_12", "WEEK_4"):  # the oldest first: in jax's own export a top_k is too new for TensorFlow
        version = hlo.get_version_from_compatibility_requirement(getattr(hlo.StablehloCompatibilityRequirement, age))
        try:
            return _jax.mlir.serialize_portable_artifact(module, version)
        except RUNTIME_ERRORS as error:
            failed = error
    raise failed


def compile_options(grid: np.ndarray, divided: bool) -> CompileOptions:
    """The options with which a program is compiled.

    Args:
        grid: the ids of its devices: a row for each replica that XLA knows of, a column for each part.
        divided: whether the program is divided over the devices of replicas.
    """
    options = CompileOptions()
    options.num_replicas, options.num_partitions = grid.shape
    options.device_assignment = DeviceAssignment.create(grid)
    if divided:
        options.executable_build_options.use_spmd_partitioning = True
        options.executable_build_options.use_shardy_partitioner = True
    return options


def _lift_limits() -> None:
    """Makes jaxlib read its flags with these added. TensorFlow has separate flags, which stay as they are."""
    given = os.environ.get("XLA_FLAGS")
    added = [f"--{name}={value}" for name, value in _FLAGS.items() if name not in (given or "")]
    os.environ["XLA_FLAGS"] = " ".join([*([given] if given else []), *added])
    try:
        CompileOptions()
    finally:
        if given is None:
            del os.environ["XLA_FLAGS"]
        else:
            os.environ["XLA_FLAGS"] = given


_lift_limits()


class _Garbage:
    """Frees the arrays of jaxlib when an attribute is read that is named as a phase of Python's collector."""

    def __init__(self) -> None:
        self.collect = collect_garbage

    start = stop = property(operator.methodcaller("collect"))


def collect_without_python() -> None:
    """Replaces the function of jax that Python's collector calls, by one without an instruction of Python, once.

    Python calls the handlers of signals between instructions, so also inside such a function, and does not pass on what
    it raises. So a Ctrl-C that arrived during a collection was lost.
    """
    for index, callback in enumerate(gc.callbacks):
        if getattr(callback, "__name__", "") == "_xla_gc_callback" and callback.__module__.startswith("jax."):
            gc.callbacks[index] = functools.partial(getattr, _Garbage())


# The scheduler that saves memory is also faster for convolutions (0.7 to 0.9 of the time), and no slower for matrix
# products.
CPU_OPTIONS = (
    (("xla_cpu_scheduler_type", "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"),)
    if VERSION >= (0, 9, 1)
    else (("xla_cpu_enable_concurrency_optimized_scheduler", False),)
)
"""Options of XLA with which programs for CPU devices are compiled."""

_WITHOUT_CHECKS: dict[str, bool] = {} if xla_client._version >= 489 else {"_skip_checks": True}
"""From this extension version on, shortly before jaxlib 0.11.2, handlers of results never check."""


def result_handler(aval: ShapedArray, sharding: NamedSharding) -> Callable[..., ArrayImpl]:
    """What makes an array of a program's result on all devices of `sharding`."""
    return array_result_handler(aval, sharding, committed=True, **_WITHOUT_CHECKS)


APART = ("xla_disable_hlo_passes", "cpu-all-reduce-combiner")
"""The option for programs whose all-reduces stay apart: otherwise all operands are in memory until the last one is."""

RUNTIME_ERRORS = (jax.errors.JaxRuntimeError,)
"""The errors that jaxlib raises for a program that fails while it runs."""

DYNAMIC = "Shardy propagation only supports ranked tensors with a static shape"
"""What the error of a program says that has a value of a size that depends on data, and is divided over devices."""

JAXLIB_VERSION = importlib.metadata.version("jaxlib")

READS_HOST_CALLS = _numbers(JAXLIB_VERSION) >= (0, 9)
"""Whether a program that calls the host can be read from bytes; jaxlib 0.8 does not take the functions."""

FOLDS_DIVISIONS = _numbers(JAXLIB_VERSION) >= (0, 11, 2)
"""Whether XLA can divide integers by 0 while it compiles; in jaxlib 0.10.2 and 0.11.0 it ends the process."""


def cache_limit() -> int:
    """The most bytes of programs in a cache folder, as jax's configuration has it; -1 for no limit."""
    config: Any = jax.config  # jax declares no types for its options
    return int(config.jax_compilation_cache_max_size)


def attention_on_tpus() -> Any:
    """The module with Pallas' attention for TPUs. Pallas is imported when a kernel is traced."""
    from jax.experimental.pallas.ops.tpu import splash_attention

    return splash_attention


def attention_on_gpus() -> Any:
    """The module with Pallas' attention for GPUs."""
    from jax.experimental.pallas.ops.gpu import attention

    return attention


def cost_of_module(module: object) -> dict[str, float]:
    """The flops and bytes of a compiled module, as XLA counts them on every platform."""
    return _jax.hlo_module_cost_analysis(make_cpu_client(num_devices=1), module)


def absent_tpus(topology: str, **options: str | list[int]) -> list[jax.Device]:
    """Devices to compile for, which need not be there. libtpu, which compiles, may end the process."""
    from jax.experimental import topologies

    return list(topologies.get_topology_desc(topology, platform="tpu", **options).devices)


def absent_gpus(library: str, target: str, topology: str) -> list[jax.Device]:
    """Like `absent_tpus`, for GPUs that a text describes.

    Args:
        library: the file of XLA's plugin.
        target: the GPU, as a `GpuTargetConfigProto` in text form.
        topology: the number of partitions, of hosts in each, and of devices of each host: "1x1x8".
    """
    _load_cuda(library)
    options = {"target_config": target, "topology": topology}
    return list(_jax.get_default_c_api_topology("cuda", "absent", options)._make_compile_only_devices())


@functools.cache  # a plugin can be loaded once
def _load_cuda(library: str) -> None:
    xla_client.load_pjrt_plugin_dynamically("cuda", library)
    xla_client.initialize_pjrt_plugin("cuda")


BY_TRANSFERS = "replica_engine_host_call"
"""The custom call in whose place transfers come, see `stablehlo.markers`."""

HOST_CALL_TARGETS = {"cpu": "xla_ffi_python_cpu_callback", "gpu": "xla_ffi_python_gpu_callback", "tpu": BY_TRANSFERS}
"""By platform, the custom call by which a program calls a Python function it was compiled with."""
