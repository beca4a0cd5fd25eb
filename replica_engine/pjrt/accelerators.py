"""TPUs and GPUs as jax finds them, and why a platform did not start.

jax starts all platforms at once, when it is first asked for devices. A plugin may fail: its devices are in use by
another process, the driver is too old, a lock file is left. jax then leaves the platform out, and notes the reason
under the plugin's name, or raises it once and has forgotten it at the next question. So the reasons are kept here.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import re
from collections.abc import Callable
from typing import Any

from replica_engine.errors import DeviceError
from replica_engine.errors.base import warning
from replica_engine.pjrt.jaxlib import jax, xla_bridge

_PLUGINS = {"tpu": ("tpu",), "gpu": ("cuda", "rocm", "oneapi")}
_RAISED = re.compile(r"Unable to initialize backend '(\w+)': (.*?)(?: \([^()]*JAX_PLATFORMS[^()]*\))?", re.DOTALL)

LIBTPU = "TPU_LIBRARY_PATH"
"""The environment variable that names the library of TPUs, where the package libtpu is not installed."""

_raised: dict[str, str] = {}  # by plugin: what jax has raised
_told: set[str] = set()
_logger = logging.getLogger("replica_engine")
_CAUSES = (
    "Another process may use the devices, the driver may not fit the installed package, or a lock file of an earlier "
    "process may be left. Mend that, and start the process again."
)


def local(platform: str) -> tuple[Any, ...]:
    """This process' devices of a platform, "tpu" or "gpu"; none if it has no such devices, or could not start them."""
    return _found(lambda: jax.local_devices(backend=platform))


def of_all_workers(platform: str) -> tuple[Any, ...]:
    """Like `local`, in a job: the devices of all workers."""
    return _found(lambda: jax.devices(platform))


def none_of(platform: str, present: list[str]) -> DeviceError:
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
        _logger.warning(warning("warn_not_started", text))


def _found(devices: Callable[[], list[Any]]) -> tuple[Any, ...]:
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
