"""`replica-engine env`: what a report of a fault needs to say of the machine and of the programs on it."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import platform
import sys
from collections.abc import Iterator

import tensorflow as tf

from replica_engine import errors
from replica_engine._version import __version__
from replica_engine.upstream.hook import hooks
from replica_engine.workers.cluster import find_cluster

_PACKAGES = ("tensorflow", "tensorflow-cpu", "keras", "tf-keras", "jax", "jaxlib", "libtpu", "numpy", "ml-dtypes")
_PREFIXES = ("REPLICA_ENGINE_", "TF_", "XLA_", "JAX_", "KERAS_", "CUDA_VISIBLE", "TPU_", "OMP_")
_SECRET = "TOKEN"


def report() -> int:
    """Prints versions, devices, what strategies would take, what is set in the environment, and the hooks.

    Returns:
        The exit status, 0.
    """
    for title, lines in (
        ("versions", _versions()),
        ("devices", _devices()),
        ("environment", _environment()),
        ("hooks that are installed", _hooks()),
    ):
        print(f"{title}:")
        for line in lines:
            print(f"  {line}")
    return 0


def _versions() -> Iterator[str]:
    yield f"replica_engine {__version__}, Python {platform.python_version()}, {platform.platform()}"
    for package in _PACKAGES:
        try:
            yield f"{package} {importlib.metadata.version(package)}"
        except importlib.metadata.PackageNotFoundError:
            continue


def _devices() -> Iterator[str]:
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    yield f"{cpus} cores that this process may use"
    names = [each.name.removeprefix("/physical_device:") for each in tf.config.list_physical_devices()]
    yield f"TensorFlow: {', '.join(names)}"
    try:
        cluster = find_cluster()
    except errors.ClusterConfigError as error:
        yield f"the place in a job cannot be read: {error}"
        return
    if cluster.num_processes > 1:
        yield f"worker {cluster.process_id} of {cluster.num_processes}, coordinator at {cluster.coordinator}"
        return  # to make a strategy would be to join the job
    for name in ("mirrored.MirroredStrategy", "tpu.TPUStrategy"):
        module, _, strategy = name.partition(".")
        try:
            made = getattr(importlib.import_module(f"replica_engine.strategies.{module}"), strategy)()
        except errors.ReplicaEngineError as error:
            yield f"{strategy}(): {type(error).__name__}: {error}"
        else:
            yield f"{strategy}() is {made}"


def _environment() -> Iterator[str]:
    for name, value in sorted(os.environ.items()):
        if name.startswith(_PREFIXES):
            yield f"{name}={'(hidden)' if _SECRET in name else value}"


def _hooks() -> Iterator[str]:
    if "keras" in sys.modules:
        importlib.import_module("replica_engine.strategies.keras_scopes").install_keras_hooks()
    yield from dict.fromkeys(f"{hook.owner}.{hook.name}" for hook in hooks() if hook.call is not None)
