"""Programs that outlive the process: StableHLO and executables in a folder, and why one is not found there.

The folder is that of `set_cache_dir`, else of the environment variable `REPLICA_ENGINE_CACHE_DIR`, else of
`JAX_COMPILATION_CACHE_DIR`. A program is found by its text and by everything else that its compilation depends on
(`circumstances`), so an executable that is found is the one that compiling would make. A text is found by the graph
that it was lowered from, and by TensorFlow's version. Programs with host calls are kept too: an executable holds only
the numbers of its host calls, and each process gives it its own functions. In a job of several workers each has its own
executables, which know the worker's number and that of all. They may be in folders of their own, so on CPU one worker
may read what another compiles. Elsewhere the workers may compile together: all read it, or none.

The folder only saves time, and nothing that is wrong with it may fail a program: what cannot be read is compiled and
written again, and what cannot be written is not. What other users can have written is not read. Each is warned of once.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import os
import re
import shlex
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import tensorflow as tf

from replica_engine._version import __version__
from replica_engine.errors import InputsError, WorkersMissingError, base, program_errors
from replica_engine.pjrt import jaxlib
from replica_engine.pjrt.device_group import DeviceGroup
from replica_engine.pjrt.executable import Executable, circumstances
from replica_engine.pjrt.program_folder import CacheFolder, UntrustedPathError
from replica_engine.process import setup
from replica_engine.upstream.graphs import xla_ops
from replica_engine.xla.stages.body_graph import count
from replica_engine.xla.stages.program import BodyProgram

_logger = logging.getLogger("replica_engine")

_VARIABLES = ("REPLICA_ENGINE_CACHE_DIR", "JAX_COMPILATION_CACHE_DIR")
_PROGRAM = "the program"  # the row of a program's text; told only if no other row differs

Made = TypeVar("Made")

_lock = threading.Lock()
_told: set[str] = set()
_chosen: list[str | None] = []  # what `set_cache_dir` was called with last


def set_cache_dir(path: str | os.PathLike[str] | None) -> None:
    """Keeps compiled programs in a folder, where later processes find them instead of compiling.

    Any number of processes may use a folder at the same time. jax's own cache may be in the same folder; the limit
    `jax_compilation_cache_max_size` then holds for both. Loading a program runs what its file says. So the folder is
    used only if it, the folders around it and the files in it belong to this user or to root, and nobody else may write
    to them; otherwise a warning says which command changes that, and programs are compiled.

    Args:
        path: the folder; if it does not exist, it is made for this user only, and `~` is the home folder. An address
            (`gs://...`) is warned of, and nothing is kept. None: no folder, also if the environment names one.

    Raises:
        InputsError: `path` is not a path.

    Example:
        >>> import tempfile
        >>> from replica_engine import xla
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     xla.set_cache_dir(folder)
        ...     before = xla.counts()
        ...     for _ in range(2):
        ...         program = xla.lower(lambda x: x + 1, [[1.0], [2.0]]).compile()
        ...     xla.set_cache_dir(None)
        >>> (xla.counts() - before).compiles, (xla.counts() - before).cache_hits
        (1, 1)
    """
    if path is not None:
        try:
            path = os.fspath(path)
        except TypeError:
            raise InputsError.no_cache_dir(path) from None
        if not isinstance(path, str):
            raise InputsError.no_cache_dir(path)
        path = setup.absolute(os.path.expanduser(path)) if path else path  # the current folder may change later
    with _lock:
        _chosen[:] = [path]


def found_or_compiled(
    text: str, program: BodyProgram, devices: DeviceGroup, make: Callable[[bytes | None], Executable], together: bool
) -> Executable:
    """The executable of a text: read from the folder, or compiled and written to it.

    Args:
        text: the program.
        program: the lowered body.
        devices: the devices to compile for.
        make: makes the executable from bytes that were written before; from None, it compiles.
        together: whether all workers are here for this program.

    Raises:
        WorkersMissingError: one of them did not say in time what its folder has.
        WorkerLostError or another failure of the job of several workers.
    """
    folder = _folder()
    found, key, about = None, "", {}
    digest = hashlib.sha256(text.encode()).hexdigest()
    if folder is not None:
        about = circumstances(devices) | {_PROGRAM: digest}
        key = _prefix(program.name) + _hash(about)
        found = _read(folder, key, make)
    dropped = False
    if together and devices.member is not None and devices.platform != "cpu":
        # Compilers of GPUs share out the kernels that they try: a worker that read its program would be waited for.
        timeout, warn_after = program.body.limits
        what = f"what the cache folders have of the program {digest[:16]}"
        with devices.member.watched(what, warn_after):
            all_found = devices.member.exchange(what, found is not None, timeout)
        if all_found is None:  # one that comes later may read its program, since it gets what this one has said
            raise WorkersMissingError(f"Other workers did not tell {what} within {timeout:g} s (timeout=).")
        dropped = found is not None and not all(all_found)
        found = found if all(all_found) else None
    if folder is not None and found is not None:
        count("cache_hits")
        _logger.info("`%s` was read from the cache folder %s, and not compiled.", program.name, folder.path)
        return found
    count("compiles")
    if folder is None:
        return make(None)
    # The key has these rows already, as part of the text: they are for the log.
    about = _taken(program) | about
    if dropped:
        _logger.info("`%s` is compiled, as another worker does, whose cache folder does not have it.", program.name)
    else:
        _logger.info(_reason(program.name, folder, about, folder.abouts(_prefix(program.name))))
    began = time.monotonic()
    executable = make(None)
    _write(folder, key, executable.serialized(), time.monotonic() - began, about)
    return executable


def found_or_lowered(name: str, function: Any, specs: Sequence[tf.TensorSpec], handles: Sequence[tf.Tensor]) -> str:
    """The StableHLO of a registered function: read from the folder, or lowered and written to it.

    Args:
        name: the name of the body.
        function: the function, as `xla_ops.register` returns it.
        specs: the static shapes of the tensors.
        handles: the handles of the variables.
    """
    folder = _folder()
    key = ""
    if folder is not None:
        about = {
            "function": xla_ops.digest(function),
            "tensors": str([(spec.dtype.name, str(spec.shape)) for spec in specs]),
            "variables": str([str(xla_ops.variable_dtype_and_shape(handle)) for handle in handles]),
            "versions": f"{tf.__version__} {__version__}",
            "flags": os.environ.get("TF_XLA_FLAGS", ""),
            "precision": str(tf.config.experimental.tensor_float_32_execution_enabled()),
        }
        key = _prefix(name, ".text") + _hash(about)
        if (text := _read(folder, key, bytes.decode)) is not None:
            return text
    count("lowerings")
    began = time.monotonic()
    text = xla_ops.stablehlo(function, specs, handles)
    if folder is not None:
        _write(folder, key, text.encode(), time.monotonic() - began, {})
    return text


def _prefix(name: str, kind: str = "") -> str:
    # A file name holds 255 bytes, and the hash takes 64.
    return f"replica_engine{kind}_{re.sub(r'[^A-Za-z0-9_]', '_', name)[:80]}-"


def _hash(about: Mapping[str, str]) -> str:
    return hashlib.sha256(repr(sorted(about.items())).encode()).hexdigest()


def _folder() -> CacheFolder | None:
    with _lock:
        path = _chosen[0] if _chosen else _named_by_environment()
    if path and "://" in path:
        text = (
            f"The cache folder {path} is an address, and compiled programs are kept in folders of the file system "
            "only. Programs are compiled in each process. Mount the store and name that folder, or name a local folder "
            "with REPLICA_ENGINE_CACHE_DIR or replica_engine.xla.set_cache_dir. set_cache_dir(None) turns the cache "
            "off."
        )
        _warn(base.warning("remote_cache_dir", text))
        return None
    return _trusted(_opened(path, jaxlib.cache_limit())) if path else None


def _named_by_environment() -> str | None:
    path = next(filter(None, map(os.environ.get, _VARIABLES)), None)
    return setup.resolve_environment_path(os.path.expanduser(path)) if path else None


_opened = functools.cache(CacheFolder)


def _trusted(folder: CacheFolder) -> CacheFolder | None:
    """The folder; None, after a warning, if another user could put programs into it."""
    try:
        folder.check()
    except UntrustedPathError as error:
        _warn_of_others(folder, error)
        return None
    except OSError:  # what is to be read or written there will tell
        pass
    return folder


def _read(folder: CacheFolder, key: str, make: Callable[[bytes], Made]) -> Made | None:
    try:
        data = folder.read(key)
        return None if data is None else make(data)
    except UntrustedPathError as error:
        _warn_of_others(folder, error)
    except OSError as error:
        _warn(program_errors.unusable_cache_dir(str(folder.path), error.strerror or str(error)))
    except (ValueError, *jaxlib.RUNTIME_ERRORS) as error:
        _warn(program_errors.broken_cache_file(str(folder.file(key)), str(error)))
    return None


def _write(folder: CacheFolder, key: str, compiled: bytes | None, seconds: float, about: Mapping[str, str]) -> None:
    if compiled is None:
        return
    try:
        folder.write(key, compiled, seconds, about)
    except UntrustedPathError as error:  # since it was looked at
        _warn_of_others(folder, error)
    except OSError as error:
        _warn(program_errors.unusable_cache_dir(str(folder.path), error.strerror or str(error)))


def _warn_of_others(folder: CacheFolder, error: UntrustedPathError) -> None:
    """Warns once of a folder that other users can write to, or that has files which they can."""
    beside = error.path.parent == folder.path
    paths = shlex.quote(str(folder.path)) + "/*" if beside else shlex.quote(str(error.path))
    message = program_errors.untrusted_cache_dir(str(folder.path), str(error), f"{error.command} {paths}", beside)
    _warn(message, f"{folder.path}{beside}")


def _warn(message: str, once: str = "") -> None:
    """Logs a warning, unless it was logged before, or one with the same `once`."""
    with _lock:
        new = (once or message) not in _told
        _told.add(once or message)
    if new:
        _logger.warning(message)


def _taken(program: BodyProgram) -> dict[str, str]:
    """What a program takes, in names and values that a user knows; the folder must not tell secrets, so no texts."""
    rows = {"the number of replicas": str(program.body.size)}
    for name, slot in zip(program.traced.slot_names, program.slots, strict=True):
        rows[name] = f"{slot.dtype.name} {slot.shape}"
    rows.update(program.traced.constants)
    for index, tensor in enumerate(program.traced.tensors):
        rows[f"the captured tensor {index}"] = f"{tensor.dtype.name} {tensor.shape}"
    for index, handle in enumerate(program.traced.handles):
        dtype, shape = xla_ops.variable_dtype_and_shape(handle) or ("?", "?")
        rows[f"the variable {index} ({xla_ops.variable_name(handle)})"] = f"{getattr(dtype, 'name', dtype)} {shape}"
    return rows


def _reason(name: str, folder: CacheFolder, about: Mapping[str, str], others: list[dict[str, str]]) -> str:
    """Why a program is compiled: what differs from the nearest one in the folder."""
    if not others:
        return f"`{name}` is compiled: the cache folder {folder.path} has no program of this name."
    found = min((_differences(about, other) for other in others), key=len)
    nearest = "the program" if len(others) == 1 else f"the nearest of {len(others)} programs"
    there = f"{nearest} of this name in the cache folder {folder.path}"
    if not found:
        return (
            f"`{name}` is compiled again: {there} has equal arguments, variables and options, and other operations. "
            "Its code, or that of a function that it calls, has changed, or an object that it uses has another value."
        )
    rows = [f"  {row}: {now or '(none)'} now, {before or '(none)'} there" for row, now, before in found[:8]]
    if len(found) > 8:
        rows.append(f"  and {len(found) - 8} more")
    why = "for a new shape" if any(_is_new_shape(now, before) for _, now, before in found) else "again"
    return "\n".join([f"`{name}` is compiled {why}: {there} was compiled for:", *rows])


def _is_new_shape(now: str | None, before: str | None) -> bool:
    """Whether two rows are tensors of one dtype, such as "float32 (16, 64)", that differ in shape."""
    shape = r"(\w+) \(.*\)"
    found, other = re.fullmatch(shape, now or ""), re.fullmatch(shape, before or "")
    return found is not None and other is not None and found[1] == other[1] and now != before


def _differences(about: Mapping[str, str], other: Mapping[str, str]) -> list[tuple[str, str | None, str | None]]:
    """For each row that differs, its name, its value now, and its value in the other."""
    names = [name for name in {**about, **other} if name != _PROGRAM and about.get(name) != other.get(name)]
    return [(name, about.get(name), other.get(name)) for name in names]
