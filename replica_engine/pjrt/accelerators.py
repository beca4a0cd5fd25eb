"""TPUs and GPUs: their kinds, those that jax finds, and why a platform did not start.

Programs can be compiled for slices that are not there (`absent_chips`): some chips of one kind, by name. "v5e:2x4" are
eight. The names are those of Google's cloud: a kind of chip, and how many chips the slice has along each axis. Some
chips are two devices, each with half of the chip's memory. A wrong name is an error at once, also where no compiler is
installed.

jax starts all platforms at once, when it is first asked for devices. A plugin may fail: its devices are in use by
another process, the driver is too old, a lock file is left. jax then leaves the platform out, and notes the reason
under the plugin's name, or raises it once and has forgotten it at the next question. So the reasons are kept here.
"""

from __future__ import annotations

import difflib
import glob
import importlib.metadata
import importlib.util
import logging
import math
import os
import pkgutil
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

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


# The kinds of chips, and the slices that they form.

_GIB = 2**30


@dataclass(frozen=True)
class Chip:
    """A kind of chip.

    Attributes:
        name: its name, as in the name of a slice.
        platform: "tpu" or "gpu".
        memory: bytes of memory of each device, as data sheets have it.
        axes: the number of axes of its slices; 1 for GPUs, which are counted.
        devices: the number of devices of a chip.
        kind: what PJRT calls its devices.
        options: what libtpu must be told besides the name.
        has_kernels: whether Pallas compiles kernels of bfloat16 for it.
    """

    name: str
    platform: str
    memory: int
    axes: int
    devices: int
    kind: str
    options: tuple[tuple[str, str], ...] = ()
    has_kernels: bool = True


CHIPS = {
    chip.name: chip
    for chip in (
        Chip("v2", "tpu", 8 * _GIB, 2, 2, "TPU v2", has_kernels=False),
        Chip("v3", "tpu", 16 * _GIB, 2, 2, "TPU v3", has_kernels=False),
        # Without this option, libtpu takes the two cores of a chip for two devices; jax on a real v4 has one.
        Chip("v4", "tpu", 32 * _GIB, 3, 1, "TPU v4", (("chip_config_name", "megacore"),)),
        Chip("v5e", "tpu", 16 * _GIB, 2, 1, "TPU v5 lite"),
        Chip("v5p", "tpu", 95 * _GIB, 3, 1, "TPU v5"),  # PJRT does not write the p
        Chip("v6e", "tpu", 32 * _GIB, 2, 1, "TPU v6 lite"),
        Chip("7x", "tpu", 96 * _GIB, 3, 2, "TPU7x"),
        Chip("h100", "gpu", 84_978_892_800, 1, 1, "NVIDIA H100 80GB HBM3"),
    )
}
"""The chips that programs can be compiled for without having one."""

_OTHER_NAMES = {"tpu7x": "7x", "v7x": "7x", "v5lite": "v5e", "v6lite": "v6e", "v5": "v5p"}
_MOST_GPUS = 8  # of one machine

_SHOWN = {2: ("1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16"), 3: ("1x1x1", "2x2x1", "2x2x2", "2x2x4")}
_MORE = {2: "", 3: ", 2x4x4, 4x4x4 and larger"}

_WHOLE_ONLY = {"v5e": 16}  # of larger slices of this kind, libtpu serves all chips or one


@dataclass(frozen=True)
class Slice:
    """Some chips of one kind, connected with each other.

    Attributes:
        name: its name, for messages.
        chip: the kind of its chips.
        shape: the number of chips along each axis.
    """

    name: str
    chip: Chip
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """The number of its devices."""
        return math.prod(self.shape) * self.chip.devices

    def check(self, count: int) -> None:
        """Checks that a program may be compiled for the first `count` devices.

        Raises:
            DeviceError: there are fewer, or the compiler fails for so many.
        """
        if count > self.size:
            raise DeviceError(
                f"{count} replicas need {count} devices, but the slice {self.name} has {self.size}. Plan for a larger "
                "slice, or for fewer replicas."
            )
        check_count(self.chip.name, self.shape, count)


def slice_named(name: object) -> Slice:
    """The slice of a name.

    Raises:
        DeviceError: no slice has this name; the message lists the right names.
    """
    found = re.fullmatch(r"([a-z]*\d+[a-z]*):(\d+(?:x\d+)*)", name.strip().lower()) if isinstance(name, str) else None
    if found is None:
        raise _unknown(name)
    chip = CHIPS.get(_OTHER_NAMES.get(found[1], found[1]))
    shape = tuple(map(int, found[2].split("x")))
    if chip is None or len(shape) != chip.axes or not _exists(chip, shape):
        raise _unknown(name)
    return Slice(f"{chip.name}:{found[2]}", chip, shape)


def kernels_for(device: Any) -> str:
    """The platform whose kernels of Pallas serve a device, "tpu" or "gpu"; "" if none does."""
    # Of GPUs those of NVIDIA, from Ampere on: older ones do not multiply bfloat16.
    capability = re.fullmatch(r"(\d+)\.\d+", str(getattr(device, "compute_capability", "")))
    if capability is not None:
        return "gpu" if int(capability[1]) >= 8 else ""
    return next((each.platform for each in CHIPS.values() if each.has_kernels and each.kind == device.device_kind), "")


def check_devices(devices: Sequence[Any], count: int) -> None:
    """Checks that a program for the first `count` of these real TPUs does not end the process.

    Raises:
        DeviceError: it does.
    """
    chip = next((each for each in CHIPS.values() if each.kind == devices[0].device_kind), None)
    if chip is not None and all(hasattr(each, "coords") for each in devices):
        shape = [1 + max(each.coords[axis] for each in devices) for axis in range(chip.axes)]
        check_count(chip.name, tuple(shape), count)


def check_count(chip: str, shape: tuple[int, ...], count: int) -> None:
    """Raises DeviceError if the compiler fails for the first `count` devices of a slice of this shape."""
    size = math.prod(shape)
    if chip not in ("v5e", "v6e") or count in (1, size):
        return
    # Found by trying: libtpu ends the process at the first of these, and refuses the program at the others.
    if (shape, count) == ((2, 4), 6) or (shape[0], count) == (4, 4) or size > _WHOLE_ONLY.get(chip, size):
        raise DeviceError(
            f"{count} of the {size} chips of a slice {chip}:{'x'.join(map(str, shape))} cannot run one program: "
            f"libtpu, their compiler, fails at all-reduces over this part of the slice. Take all {size}, or "
            "another number."
        )


def _exists(chip: Chip, shape: tuple[int, ...]) -> bool:
    if chip.platform == "gpu":
        return 1 <= shape[0] <= _MOST_GPUS
    hosts_are_whole = all(size and size % 2 == 0 for size in shape[:2])  # a host has 2x2 chips
    return all(shape) and (hosts_are_whole or math.prod(shape) == 1)


def _unknown(name: object) -> DeviceError:
    kinds = {axes: [each.name for each in CHIPS.values() if each.axes == axes] for axes in (2, 3)}
    rows = [
        f"  {', '.join(kinds[axes])}: with {', '.join(_SHOWN[axes])}{_MORE[axes]} chips, as in {example}"
        for axes, example in ((2, "v5e:2x4"), (3, "v5p:2x2x2"))
    ]
    rows.append(f"  h100: with 1 to {_MOST_GPUS} GPUs, as in h100:8")
    near = _meant(str(name).lower())
    meant = f" Did you mean {near}?" if near else ""
    listed = "\n".join(rows)
    return DeviceError(
        f"No such topology: {base.shown(name)}.{meant} A topology is a kind of chip and a size:\n{listed}"
    )


def _all_shown() -> list[str]:
    named = [f"{chip.name}:{size}" for chip in CHIPS.values() for size in _SHOWN.get(chip.axes, ())]
    return [*named, *(f"h100:{count}" for count in range(1, _MOST_GPUS + 1))]


def _meant(name: str) -> str | None:
    """The topology that a wrong name is like, of a kind of chip like that in the name; all of a kind without a size.

    If the name says how many chips, it is one of that many; of a shape that no slice has, one of about as many.
    """
    # v5e-8 is how the cloud writes a slice of 8 chips.
    kind, _, size = name.replace("-", ":", 1).partition(":")
    kind = _OTHER_NAMES.get(kind, kind)
    kinds = [kind] if kind in CHIPS else difflib.get_close_matches(kind, CHIPS, n=len(CHIPS))
    shown = [each for each in _all_shown() if each.partition(":")[0] in kinds]
    if kind in CHIPS and not size:
        return f"{', '.join(shown[:-1])} or {shown[-1]}"
    if kind in CHIPS and size.isdecimal():
        return next((each for each in shown if _count_chips(each) == int(size)), None)
    if kind in CHIPS and re.fullmatch(r"\d+(x\d+)+", size):
        return min(shown, key=lambda each: abs(_count_chips(each) - _count_chips(f"{kind}:{size}")))
    near = difflib.get_close_matches(name, shown, n=1)
    return near[0] if near else None


def _count_chips(name: str) -> int:
    return math.prod(map(int, name.partition(":")[2].split("x")))
