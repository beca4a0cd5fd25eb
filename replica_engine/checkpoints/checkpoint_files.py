"""The values that a save takes, also in parts, the files that it writes, and the thread that writes them.

The files have TensorFlow's V2 format, with a complete checkpoint at the final name at every instant. A checkpoint at
the prefix "ckpt" is "ckpt.index" and one or more "ckpt.data-00000-of-00001". The index says how many data files there
are, and so which of them belong to it. This makes a write atomic:

1. All files are written in the folder "ckpt_replica_engine_temp", and are on the disk before anything else happens
   (fsync).
2. The data files are renamed into place. Their number is not the one that the index at this prefix names, so they take
   the place of files of earlier writes that were killed, at most.
3. The index is renamed into place. Before this instant the checkpoint is the old one or none, and after it the new one.
4. Data files of other numbers, and the folder, are deleted.

A process that is killed leaves the folder or data files behind; the next write to the prefix deletes them. TensorFlow
writes the index in place, and renames data files over those of the old index.
"""

from __future__ import annotations

import atexit
import contextlib
import contextvars
import functools
import logging
import os
import re
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import tensorflow as tf

from replica_engine.errors import CheckpointError, ReplicaEngineError, base
from replica_engine.process import interrupts, setup
from replica_engine.upstream import checkpoint_hooks, eager
from replica_engine.watch.watchdog import Wait

if TYPE_CHECKING:  # replicas on threads have no jax
    from replica_engine.pjrt.stablehlo.partition_local import ValuePart
    from replica_engine.xla.state.device_value import DeviceValue


# The files of a checkpoint.

TEMPORARY = "_replica_engine_temp"
"""What the name of the folder has behind the prefix. What is there is deleted, so it is a name that no user gives."""

_NUMBER = re.compile(r"\.data-\d{5}-of-(\d{5})$")
_HEADER = re.compile(rb"\0\0.\x08([\x80-\xff]*[\0-\x7f])", re.DOTALL)  # sizes of the first key and value; the value


class SavedValue(NamedTuple):
    """A value of a checkpoint.

    Attributes:
        name: its key.
        part: which part of the variable it is, in TensorFlow's words, or "" for all of it: "8 2 0,4:-".
        value: the value, on the host.
    """

    name: str
    part: str
    value: tf.Tensor


def begin(path: str) -> None:
    """Makes an empty folder for the files of a checkpoint at this prefix."""
    folder = path + TEMPORARY
    if tf.io.gfile.exists(folder):
        tf.io.gfile.rmtree(folder)
    tf.io.gfile.makedirs(folder)


def write(rows: Sequence[SavedValue], prefix: str) -> None:
    """Writes values to a bundle of their own, not yet at a final name."""
    names, parts, values = zip(*rows, strict=True)
    tf.raw_ops.SaveV2(prefix=prefix, tensor_names=names, shape_and_slices=parts, tensors=values)


def split(bundles: list[list[SavedValue]], path: str, others: int = 0) -> list[list[SavedValue]]:
    """Divides rows into so many bundles that the checkpoint at the final prefix has not their number of files.

    Args:
        bundles: the rows of each bundle.
        path: the final prefix.
        others: the number of bundles that other workers write.
    """
    taken, bundles = _read_file_count(path), list(bundles)
    if len(bundles) + others == taken:
        longest = max(bundles, key=len)
        if len(longest) > 1:  # it is 1 only in a checkpoint without any variable
            bundles.append([longest.pop()])
    return bundles


def commit(bundles: Sequence[str], path: str) -> None:
    """Makes bundles, which lie in the folder of `begin`, the checkpoint at the final prefix, and deletes the folder."""
    (merged,) = bundles if len(bundles) == 1 else (os.path.join(path + TEMPORARY, "merged"),)
    if len(bundles) > 1:
        tf.raw_ops.MergeV2Checkpoints(
            checkpoint_prefixes=list(bundles), destination_prefix=merged, delete_old_dirs=False
        )
    # On the disk before the first rename: a rename may survive a loss of power that the contents do not.
    data = checkpoint_hooks.matching(merged + checkpoint_hooks.DATA)
    for file in [*data, merged + ".index"]:
        setup.to_disk(file)
    for file in data:
        tf.io.gfile.rename(file, path + file[len(merged) :], overwrite=True)
    setup.to_disk(os.path.dirname(path))  # the data files before the index that needs them
    tf.io.gfile.rename(merged + ".index", path + ".index", overwrite=True)
    setup.to_disk(os.path.dirname(path))
    for file in checkpoint_hooks.matching(path + checkpoint_hooks.DATA):
        if _number(file) != len(data):
            tf.io.gfile.remove(file)
    tf.io.gfile.rmtree(path + TEMPORARY)


def discard(path: str) -> None:
    """Deletes the folder of a write that has failed, as far as the file system lets it."""
    with contextlib.suppress(tf.errors.OpError):
        tf.io.gfile.rmtree(path + TEMPORARY)


def _read_file_count(path: str) -> int | None:
    """How many data files the index at a prefix names; None without one that can be read.

    An index is a table, whose first entry has the key "" and the value BundleHeaderProto: b"\\x08" and the number.
    """
    try:
        with tf.io.gfile.GFile(path + ".index", "rb") as file:
            begin = file.read(16)
    except tf.errors.OpError:
        return None
    found = _HEADER.match(begin)
    return sum((byte & 0x7F) << 7 * place for place, byte in enumerate(found[1])) if found else None


def _number(file: str) -> int:
    found = _NUMBER.search(file)
    assert found is not None, "the pattern of the files is narrower"
    return int(found[1])


# The values that one save takes.

_ALIGNMENT = 64  # bytes; TensorFlow would copy an array that is aligned otherwise


class Snapshot:
    """What one save takes. Neither a step nor the user's program changes these values until they are written.

    Values of TensorFlow need no copy: an op that is about to write to a variable whose value somebody holds makes a
    copy first. Devices' values are overwritten by the next launch, and on CPUs a value on the host is a view of that
    memory. So an asynchronous save copies those, in the call of `save`, before anything else can run. The memory of the
    copies is kept for the next save: pages that the operating system gives for the first time take ten times as long
    as the copy.

    Args:
        together: whether all workers save to one path, so that each saves its own parts of divided variables.
        asynchronous: whether steps may run before the values are written.

    Attributes:
        bundles: the rows of each bundle that TensorFlow would write.
        together: see above.
    """

    def __init__(self, together: bool, asynchronous: bool):
        self.bundles: list[list[SavedValue]] = []
        self.together = together
        self._copies = asynchronous
        self._blocks: list[np.ndarray] = []

    def keep(self, view: np.ndarray) -> np.ndarray:
        """The value of a view of a device's memory, as it is now."""
        if not self._copies or not view.nbytes:
            return view
        size = view.nbytes
        block = next((each for each in _free if each.nbytes == size + _ALIGNMENT), None)
        if block is None:
            block = np.empty(size + _ALIGNMENT, np.uint8)
        else:
            _free[:] = (each for each in _free if each is not block)
        self._blocks.append(block)
        begin = -block.ctypes.data % _ALIGNMENT
        copy = block[begin : begin + size].view(view.dtype).reshape(view.shape)
        np.copyto(copy, view)
        return copy

    def release(self) -> None:
        """Forgets the values. A view of devices' memory would keep steps from overwriting it."""
        self.bundles = []
        eager.release_arrays()
        if self._copies:
            _free[:] = self._blocks  # only what the last save has needed


_free: list[np.ndarray] = []
"""Blocks of memory for copies. One save at a time uses them."""

_current: contextvars.ContextVar[Snapshot | None] = contextvars.ContextVar("replica_engine_snapshot", default=None)


def current() -> Snapshot | None:
    """The snapshot that this thread is taking; None outside."""
    return _current.get()


def taking(together: bool, asynchronous: bool) -> contextlib.AbstractContextManager[Snapshot]:
    """Inside, what TensorFlow would write to a checkpoint goes to the snapshot."""
    return interrupts.variable_for_block(_current, Snapshot(together, asynchronous))


# The thread that writes asynchronous checkpoints: one write at a time in a process.
#
# A second save waits for the first write, so memory holds one snapshot. The thread is not a daemon: the interpreter
# waits for it at exit, and it is never in the middle of a write when the interpreter goes. An error is raised by the
# next save on any checkpoint. If there is none, the exit of the process prints it, and gives the process the status 1.
# If another exception ends the process, that is what the user has to read, and the error of a write is one line after
# it.

_saving = threading.RLock()
_thread: threading.Thread | None = None
_error: ReplicaEngineError | None = None


def start(path: str, write: Callable[[], None]) -> None:
    """Runs `write` on the thread. The caller is in `alone`.

    Args:
        path: of the checkpoint.
        write: writes it, or raises CheckpointError.
    """

    begins = threading.Event()

    def work() -> None:
        global _error
        begins.wait()
        try:
            write()
        except CheckpointError as error:
            _error = error
        except ReplicaEngineError as error:  # of the job: it is what a save that is not asynchronous raises
            base.add_note(
                error,
                f"The checkpoint {path!r}, which was saved asynchronously by an earlier call, was not written. Earlier "
                "checkpoints, and what was at this path before, are untouched.",
            )
            _error = error
        except BaseException as error:  # no failed write may stay unknown
            _error = CheckpointError.not_written(path, f"{type(error).__name__}: {error}", True)
            _error.__cause__ = error

    global _thread
    _thread = threading.Thread(target=work, name=f"writer of {os.path.basename(path)}")
    try:
        _thread.start()
    finally:  # only now: a thread that runs Python keeps `start` from returning for some milliseconds
        begins.set()


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Inside, nothing is being written, and no other thread saves.

    Raises:
        CheckpointError: the last write has failed; raised once.
        WorkerLostError: or another failure of the job has ended it; raised once.
    """
    if threading.current_thread() is _thread:  # a callback of the save that is being written
        yield
        return
    with _saving:
        wait()
        yield


def wait() -> None:
    """Waits until nothing is being written.

    Raises:
        CheckpointError: the last write has failed; raised once.
        WorkerLostError: or another failure of the job has ended it; raised once.
    """
    global _error
    if join():
        error, _error = _error, None
        if error is not None:
            raise error


def join() -> bool:
    """Like `wait`, but leaves the error to the next save. Returns False on the thread itself, where it never waits."""
    thread = _thread
    if thread is threading.current_thread():  # a callback of a save may restore or save
        return False
    if thread is not None:
        with Wait(
            lambda seconds: f"A checkpoint that is being written ({thread.name}) is awaited for {seconds:.3g} s."
        ):
            thread.join()
    return True


def _after_fork() -> None:
    """A forked child neither has the thread nor must tell of its error."""
    global _thread, _error, _saving
    _thread, _error, _saving = None, None, threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


@atexit.register
def _at_exit() -> None:
    try:
        wait()
    except ReplicaEngineError as error:
        if hasattr(sys, "last_value"):  # an exception has ended the program, and its status is 1
            if isinstance(error, CheckpointError):  # else that exception has ended the write too
                print(base.in_words(error).splitlines()[0], file=sys.stderr)
            return
        sys.excepthook(type(error), error, error.__traceback__)
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)  # an exception in a function of `atexit` leaves the status 0, and nobody would start the job again


# Variables on devices: each is saved and read as it lies there, without a whole copy on the host.
#
# A divided variable is saved as slices, which TensorFlow's V2 format has for variables in partitions: each has the same
# key, and its place in the whole. A read of the key gives the whole value, whatever slices there are, and any other
# slice can be read too. So a checkpoint does not depend on how variables were divided, and plain TensorFlow reads it.
#
# Where a replica has devices of several workers, each worker saves its own parts, and reads the parts that it needs.

_SLICED = frozenset(
    (
        *(tf.float32, tf.float64, tf.bfloat16, tf.complex64, tf.complex128),
        *(tf.int8, tf.int16, tf.int32, tf.int64, tf.uint8, tf.bool),
    )
)
"""The dtypes whose slices TensorFlow can join to a whole value."""


def serialized(value: DeviceValue, device: str) -> dict[str, object] | None:
    """What a variable saves now, or reads now, in parts; None if TensorFlow's own way is right.

    Args:
        value: the value of the variable.
        device: the device of the variable on the host.

    Returns:
        For each part in TensorFlow's words, or "" for all, what reads the value.
    """
    taken, reading = current(), _reading.get()
    parts = value.parts_here() if value.dtype in _SLICED else None
    spec = functools.partial(checkpoint_hooks.spec, dtype=value.dtype, device=device)
    if taken is None:
        if reading is None or parts is None or not value.spans:
            return None  # a worker that has all parts reads them at once
        first = _words(value, parts[0])
        reading.specs[value] = spec(_nothing, first)  # TensorFlow tells it the key, and reads this part
        return {first: reading.specs[value]}
    if parts is None:
        return None if value.spans else {"": spec(functools.partial(value.newest, taken.keep, None), "")}
    if value.spans and not taken.together:
        return None  # the workers put it together
    return {
        _words(value, part): spec(
            functools.partial(value.newest, taken.keep, part) if part.is_first or not taken.together else _nothing,
            _words(value, part),
        )
        for part in parts
    }


def restored(value: DeviceValue, first: tf.Tensor) -> bool:
    """Sets a variable if this worker reads only its own parts of it; returns False for any other variable.

    Args:
        value: the value of the variable.
        first: what TensorFlow has read.
    """
    reading = _reading.get()
    spec = None if reading is None else reading.specs.pop(value, None)
    if reading is None or spec is None:
        return False
    parts = value.parts_here()
    assert parts is not None, "it has a spec"
    others = (
        tf.raw_ops.RestoreV2(
            prefix=reading.path,
            tensor_names=[spec.name] * (len(parts) - 1),
            shape_and_slices=[_words(value, part) for part in parts[1:]],
            dtypes=[value.dtype] * (len(parts) - 1),
        )
        if len(parts) > 1
        else []
    )
    value.set_parts({part: np.asarray(tensor) for part, tensor in zip(parts, [first, *others], strict=True)})
    return True


def _nothing() -> None:
    """Stands for a part that another worker saves, or that is read."""


def _words(value: DeviceValue, part: ValuePart) -> str:
    """A part as TensorFlow names it: "8 2 0,4:-" are the first four rows of eight."""
    shape = value.shape or ()
    places = (
        "-" if (begin, length) == (0, size) else f"{begin},{length}"
        for size, (begin, length) in zip(shape, part.place, strict=True)
    )
    return f"{' '.join(map(str, shape))} {':'.join(places)}"


class _Reading:
    """A checkpoint that is being read, and the variables that this worker reads in parts."""

    def __init__(self, path: str):
        self.path = path
        self.specs: dict[DeviceValue, Any] = {}


_reading: contextvars.ContextVar[_Reading | None] = contextvars.ContextVar("replica_engine_reading", default=None)


def reading(path: str) -> contextlib.AbstractContextManager[object]:
    """Inside, a variable that is divided over workers reads only this worker's parts."""
    return interrupts.variable_for_block(_reading, _Reading(path))
