"""TPUs and GPUs as jax finds them, and why a platform did not start.

jax starts all platforms at once, when it is first asked for devices. A plugin may fail: its devices are in use by
another process, the driver is too old, a lock file is left. jax then leaves the platform out, and notes the reason
under the plugin's name, or raises it once and has forgotten it at the next question. So the reasons are kept here.
"""

from __future__ import annotations

import glob
import importlib.metadata
import importlib.util
import logging
import os
import pkgutil
import re
from collections.abc import Callable

from replica_engine.errors import DeviceError, base
from replica_engine.pjrt.jaxlib import hardware_utils, jax, xla_bridge

_CUDA = ("cuda12", "cuda13")
_PLUGINS = {"tpu": ("tpu",), "gpu": ("cuda", "rocm", "oneapi")}
_RAISED = re.compile(r"Unable to initialize backend '(\w+)': (.*?)(?: \([^()]*JAX_PLATFORMS[^()]*\))?", re.DOTALL)

LIBTPU = "TPU_LIBRARY_PATH"
"""The environment variable that names the library of TPUs, where the package libtpu is not installed."""

_OF_TPUS = ("TPU_NAME", "TPU_WORKER_ID", "TPU_ACCELERATOR_TYPE", "JAX_FORCE_TPU_INIT")  # jax itself sets other ones

_raised: dict[str, str] = {}  # by plugin: what jax has raised
_told: set[str] = set()
_logger = logging.getLogger("replica_engine")
_CAUSES = (
    "Another process may use the devices, the driver may not fit the installed package, or a lock file of an earlier "
    "process may be left. Mend that, and start the process again."
)


def local(platform: str) -> tuple[jax.Device, ...]:
    """This process' devices of a platform, "tpu" or "gpu"; none if it has no such devices, or could not start them."""
    return _found(lambda: jax.local_devices(backend=platform))


def may_be_there() -> bool:
    """Whether something is installed that could give jax TPUs or GPUs.

    Where it could not, jax is not asked: that would start it, after which its own CPU devices could not be configured.
    Packages that are installed to compile for chips elsewhere (`absent_chips`) do not count.
    """
    package = importlib.util.find_spec("libtpu")
    folders = [*(package.submodule_search_locations or ())] if package is not None else []
    library = os.environ.get(LIBTPU)  # jax sets it to the library in the package
    if library is not None and os.path.dirname(library) not in folders:
        return True
    if package is not None and _may_have_tpus():
        return True
    plugins = {each.value.partition(":")[0] for each in importlib.metadata.entry_points(group="jax_plugins")}
    package = importlib.util.find_spec("jax_plugins")
    if package is not None:
        paths = package.submodule_search_locations or ()
        plugins.update(f"jax_plugins.{each.name}" for each in pkgutil.iter_modules(paths))
    # jax-cuda12-pjrt alone compiles; with jax-cuda12-plugin, its programs run.
    compiling = {f"jax_plugins.xla_{each}" for each in _CUDA if importlib.util.find_spec(f"jax_{each}_plugin") is None}
    return bool(plugins - compiling)


def _may_have_tpus() -> bool:
    """Whether this may be a machine with TPUs: it has their devices, or its environment speaks of them."""
    there = any(glob.glob(pattern) for pattern in ("/dev/accel*", "/dev/vfio/[0-9]*"))
    return (
        there
        or any(name in os.environ for name in _OF_TPUS)
        or hardware_utils.num_available_tpu_chips_and_device_id()[0] > 0
    )


def list_job_devices(platform: str) -> tuple[jax.Device, ...]:
    """Like `local`, in a job: the devices of all workers."""
    return _found(lambda: jax.devices(platform))


def make_missing_error(platform: str, present: list[str]) -> DeviceError:
    """The error for a platform that was asked for and has no devices; `present` are those that have."""
    reason = _reason(platform)
    if reason:
        return DeviceError(
            f"jax could not start the {platform.upper()} platform: {reason.strip()}\n{_CAUSES} This process has: "
            f"{', '.join(present)}."
        )
    return DeviceError(
        f"jax finds no {platform.upper()} device. This process has: {', '.join(present)}. For GPUs install "
        '"replica-engine[cuda]", for TPUs "replica-engine[tpu]".'
    )


def warn_of_fallback(platform: str, instead: str) -> None:
    """Warns, once, if a platform could not start and another one is taken instead."""
    reason = _reason(platform)
    if reason and platform not in _told:
        _told.add(platform)
        text = (
            f"jax could not start the {platform.upper()} platform, so this process runs on {instead.upper()} devices: "
            f"{reason.strip()}\n{_CAUSES} To make it an error, ask for it: xla.PjrtClusterResolver({platform!r}). "
            f"To take {instead.upper()} devices without this warning, ask for those: "
            f"xla.PjrtClusterResolver({instead!r})."
        )
        _logger.warning(base.warning("warn_not_started", text))


def _found(devices: Callable[[], list[jax.Device]]) -> tuple[jax.Device, ...]:
    try:
        return tuple(devices())
    except RuntimeError as error:  # raised by jax if it finds no such device, and if any plugin fails
        raised = _RAISED.fullmatch(str(error))
        if raised is None:
            return ()
        _raised[raised[1]] = raised[2]
    try:
        return tuple(devices())  # of another plugin than the one that has failed
    except RuntimeError:
        return ()


def _reason(platform: str) -> str:
    """Why a platform could not start; "" if it was not tried, or nothing is installed for it."""
    if platform == "tpu" and importlib.util.find_spec("libtpu") is None and LIBTPU not in os.environ:
        return ""  # jax tries TPUs in any case
    failed = {**xla_bridge._backend_errors, **_raised}
    return next((failed[name] for name in _PLUGINS[platform] if name in failed), "")
