"""Checkpoints and SavedModels: what TensorFlow would write goes to this library first.

`take_over` gives a function the values of checkpoints that have variables of a strategy: in place of MultiDeviceSaver,
which writes files at once, and of AsyncCheckpointHelper, which keeps a second variable for each one, gathers parts on
the host, and tells of an error two saves later.

`let_the_chief_write` is for SavedModels of several workers in one shared folder. A worker whose path is not the chief's
writes there as if it were alone. The others save into a folder of their own, which is deleted at once: saving may read
variables that have a part on each worker, so all workers have to do it. Workers meet before they save, and again when
the chief has written. They keep the same list of checkpoints as the chief, and neither write nor delete a file.
Checked on TensorFlow 2.21.0.
"""

from __future__ import annotations

import contextlib
import contextvars
import copy
import functools
import os
import re
import tempfile
import weakref
from collections.abc import Callable
from typing import Any, Protocol, TypeAlias, TypeVar

import tensorflow as tf

# checkpoint: Checkpoint._write is what save, write and CheckpointManager.save end in; _execute_callbacks is called
# there at the end. Checkpoint.save, read and restore turn to AsyncCheckpointHelper before that, which
# _async_checkpointer makes. TrackableSaver.restore is what they and tf.saved_model.load end in.
# checkpoint_context: in_preemption_save_context says that the process is about to be ended.
from tensorflow.python.checkpoint import checkpoint as _checkpoint
from tensorflow.python.checkpoint import checkpoint_context as _context

# values_util: get_on_write_saveable, get_on_write_restore_ops: how a mirrored variable is saved and read.
from tensorflow.python.distribute import values_util as _values_util

# VARIABLE_VALUE_KEY: the name of a variable's value among what an object saves.
# SaveSpec: what an object saves, in slices if it likes.
from tensorflow.python.trackable.base import VARIABLE_VALUE_KEY as _VALUE
from tensorflow.python.training.saving.saveable_object import SaveSpec as _SaveSpec

from replica_engine.process import interrupts
from replica_engine.upstream.hook import FIRST_WORKERS_SCOPE, Hook, StandIn

_CHECKPOINTS, _CHECKPOINT = "tensorflow.python.checkpoint", "tensorflow.python.checkpoint.checkpoint.Checkpoint"
_MANAGEMENT = f"{_CHECKPOINTS}.checkpoint_management"
_FIRST = "the first scope of a strategy, the first `TrainingState`, or the first `BackupAndRestore`"
_KINDS = "checkpoints are atomic, asynchronous, and in parts"
_NOT_OURS = (
    "passes on to TensorFlow for checkpoints without variables of this library's strategies and without a "
    "`TrainingState`"
)

# Also: file_io is what writes the file that lists the checkpoints, finds files and deletes old ones.
# MultiDeviceSaver.save writes the values of a checkpoint, and _get_shards_by_task reads them.
WRITE = Hook(_CHECKPOINT, "_write", why=_KINDS, since=_FIRST, until=_NOT_OURS)
HELPER = Hook(_CHECKPOINT, "_async_checkpointer", why=_KINDS, since=_FIRST, until=_NOT_OURS)
SAVE = Hook(f"{_CHECKPOINTS}.functional_saver.MultiDeviceSaver", "save", why=_KINDS, since=_FIRST, until=_NOT_OURS)
RESTORE = Hook(
    f"{_CHECKPOINTS}.checkpoint.TrackableSaver",
    "restore",
    why="checkpoints are read in parts, and from folders whose names TensorFlow takes for patterns",
    since=_FIRST,
    until="the second for all checkpoints",
)
FILES = Hook(
    _MANAGEMENT,
    "file_io",
    why="a folder such as `lr[1]` is no pattern for `lr1`: the last checkpoint is found, and only old ones are "
    "deleted; the chief lists and deletes them for all workers",
    since=_FIRST,
    until="the first for all checkpoints",
)
NODES = Hook(
    "tensorflow.python.saved_model.save",
    "save_and_return_nodes",  # what tf.saved_model.save calls
    why="the chief writes files for all workers",
    since=FIRST_WORKERS_SCOPE,
    until="passes on to TensorFlow for what is not trained on several workers",
)

_LISTS = _checkpoint.__name__, _MANAGEMENT
"""The modules whose callbacks write the list of checkpoints."""

DATA = ".data-?????-of-?????"
"""What the names of data files have behind the prefix of a checkpoint, in TensorFlow's words."""

VALUE = _VALUE
"""The name of a variable's value among what an object saves."""

T = TypeVar("T")
Own = Callable[..., object]  # what TensorFlow does itself
Options: TypeAlias = tf.train.CheckpointOptions | None
Path = str | bytes | os.PathLike[str] | os.PathLike[bytes]


def spec(read: Callable[[], tf.Tensor | None], part: str, dtype: tf.DType, device: str) -> _SaveSpec:
    """A value that an object saves, or a part of it; its key is not known yet.

    Args:
        read: returns the value; None if it is not to be saved.
        part: the part in TensorFlow's words, or "" for all.
        dtype: its dtype.
        device: the device of the variable on the host.
    """
    return _SaveSpec(read, part, "", dtype, device)


def mirrored_spec(variable: tf.Variable) -> _SaveSpec:
    """What TensorFlow saves of a mirrored variable."""
    return _values_util.get_on_write_saveable(variable, variable._primary, "")[1][0]


def restore_mirrored(variable: tf.Variable, value: tf.Tensor) -> object:
    """What TensorFlow does to read a mirrored variable."""
    return _values_util.get_on_write_restore_ops(variable, value)


class Worker(Protocol):
    """A worker that saves together with others."""

    def saving(self, what: str, path: Path) -> contextlib.AbstractContextManager[bool]:
        """A context manager around saving: all workers meet before and after it. Inside is whether this one writes."""


class CheckpointSaver(Protocol):
    """What takes over."""

    def concerns(self, saved: object) -> bool:
        """Whether it takes over this checkpoint."""

    def save(
        self, saved: object, path: str, take: Callable[[], object], finish: Callable[[bool], None], asynchronous: bool
    ) -> None:
        """Saves a checkpoint.

        Args:
            saved: the checkpoint.
            path: its final prefix.
            take: reads the values; `receiver` is called meanwhile.
            finish: is called when the checkpoint is complete, with whether this worker has written it.
            asynchronous: whether to return when the values are taken.
        """

    def receiver(self) -> Callable[[list[list[tuple[str, str, tf.Tensor]]]], None] | None:
        """What to give the values to that this thread saves, in bundles of (key, slice, value); None outside a save."""

    def absolute(self, path: str) -> str:
        """A path as it is in the current folder."""

    def readable(self, path: str) -> str:
        """The prefix to read a checkpoint from, which stays what it is and which TensorFlow takes for no pattern."""

    def reading(self, path: str) -> contextlib.AbstractContextManager[object]:
        """A context manager around reading a checkpoint."""

    def wait(self, raises: bool) -> None:
        """Waits for the end of asynchronous saves, and may raise their error."""


def take_over(saves: CheckpointSaver) -> None:
    """Gives the checkpoints that concern `saves` to it; once per process."""
    WRITE.around(functools.partial(_written, saves))
    HELPER.around(functools.partial(_helped, saves))
    RESTORE.around(functools.partial(_read, saves))
    SAVE.around(functools.partial(_given, saves))
    FILES.put(lambda own: own if isinstance(own, _Files) else _Files(own))


def matching(path: str) -> list[str]:
    """The files of a path, in which nothing is a pattern but `DATA` at its end, which stands for all data files.

    TensorFlow takes `[ ] * ? \\` in the names of folders and checkpoints for a pattern too: it does not find the files,
    and deletes those of a folder or checkpoint beside it.
    """
    if not path.endswith(DATA):
        return [path] if tf.io.gfile.exists(path) else []
    folder, name = os.path.split(path.removesuffix(DATA))
    pattern = re.compile(re.escape(name) + r"\.data-[0-9]{5}-of-[0-9]{5}")
    try:
        names = tf.io.gfile.listdir(folder or ".")
    except tf.errors.NotFoundError:
        return []
    return sorted(os.path.join(folder, each) for each in names if pattern.fullmatch(each))


class _Files(StandIn):
    """TensorFlow's module of files, for the module that lists checkpoints, finds the last one and deletes old ones."""

    def get_matching_files(self, path: str) -> list[str]:
        """Returns the files that are asked for, and those of no other folder; none to a worker that deletes none."""
        return [] if _leaves.get() else matching(_in_folder(path))

    def atomic_write_string_to_file(self, path: str, contents: str) -> None:
        """Writes the list of checkpoints, if this worker does not leave that to the chief."""
        if not _leaves.get():
            self._own.atomic_write_string_to_file(_in_folder(path), contents)

    def delete_file(self, path: str) -> None:
        """Deletes an old file, if this worker does not leave that to the chief."""
        if not _leaves.get():
            self._own.delete_file(_in_folder(path))


def let_the_chief_write(find_worker: Callable[[object], Worker | None]) -> None:
    """Keeps all workers but the chief from writing SavedModels to the chief's path; once per process.

    Args:
        find_worker: takes what is to be saved, and returns this worker; None if it is not trained on several workers.
    """
    NODES.around(functools.partial(_exported, find_worker))


def _written(
    saves: CheckpointSaver,
    original: Own,
    self: tf.train.Checkpoint,
    file_prefix: str | os.PathLike[str],
    options: Options = None,
) -> object:
    if not tf.executing_eagerly() or not saves.concerns(self):
        return original(self, file_prefix, options)
    asynchronous = (options is not None and options.experimental_enable_async_checkpoint) or _asynchronously.get()
    options = _synchronous(options)
    callbacks, options.experimental_write_callbacks = options.experimental_write_callbacks, None
    path = os.fspath(file_prefix)
    place = saves.absolute(path)

    def finish(writes: bool) -> None:
        is_moved = saves.absolute(path) != place  # the program's folder, while the checkpoint was written
        folder = place.removesuffix(path) if is_moved else None
        with interrupts.variable_for_block(_leaves, not writes), interrupts.variable_for_block(_folder, folder):
            for callback in callbacks or ():
                lists = callback.__module__ in _LISTS  # paths relative to the list's, both as they were given
                _checkpoint._execute_callbacks([callback], path if lists or not is_moved else place)

    if asynchronous:
        self._async_checkpointer()  # so that `sync` waits for it
    take = functools.partial(original, self, path, options)
    # The process is about to be ended: what is on a thread then may be lost.
    saves.save(self, path, take, finish, asynchronous and not _context.in_preemption_save_context())
    return path


_asynchronously: contextvars.ContextVar[bool] = contextvars.ContextVar("replica_engine_asynchronously", default=False)
"""Whether `Checkpoint.save` was called with an option that it must not see itself."""


class _Helper:
    """What a checkpoint has in the place of AsyncCheckpointHelper.

    A program may have names of its own for methods of a checkpoint (`save = checkpoint.save`), from a time when it had
    no variables of a strategy. These methods turn to the helper.
    """

    def __init__(self, saves: CheckpointSaver, checkpoint: tf.train.Checkpoint):
        self._saves, self._checkpoint = saves, weakref.ref(checkpoint)

    def save(self, file_prefix: object, options: Options) -> object:
        with interrupts.variable_for_block(_asynchronously, True):
            return self._synchronous().save(file_prefix, _synchronous(options))

    def read(self, save_path: object, options: Options) -> object:
        return self._synchronous().read(save_path, _synchronous(options))

    def restore(self, save_path: object, options: Options) -> object:
        return self._synchronous().restore(save_path, _synchronous(options))

    def sync(self) -> None:
        self._saves.wait(raises=True)

    def _synchronous(self) -> tf.train.Checkpoint:
        checkpoint = self._checkpoint()
        assert checkpoint is not None, "it is being used"
        checkpoint._checkpoint_options = None  # it would turn to the helper again
        return checkpoint


def _helped(saves: CheckpointSaver, original: Own, self: tf.train.Checkpoint) -> object:
    known = self._async_checkpointer_impl
    is_ours = isinstance(known, _Helper)
    if saves.concerns(self) is not is_ours:
        if known is not None:
            known.sync()
        self._async_checkpointer_impl = None if is_ours else _Helper(saves, self)
    return self._async_checkpointer_impl or original(self)


def _read(saves: CheckpointSaver, original: Own, self: object, save_path: object, options: object = None) -> object:
    saves.wait(raises=False)  # the objects may have no variables yet: they get their values when they are made
    if not isinstance(save_path, (str, os.PathLike)):
        return original(self, save_path, options)
    path = saves.readable(os.fspath(save_path))
    with saves.reading(path):
        return original(self, path, options)


def _given(saves: CheckpointSaver, original: Own, self: Any, file_prefix: object, options: Options = None) -> object:
    receive = saves.receiver()
    if receive is None or not tf.executing_eagerly() or self._registered_savers:  # those write files themselves
        return original(self, file_prefix, options)
    callback = options.experimental_sharding_callback if options else None
    receive(
        [
            [
                (key, part, tf.convert_to_tensor(value))  # Keras gives variables, which steps go on changing
                for key, parts in shard.items()
                for part, value in parts.items()
                if value is not None
            ]
            for _, shards in self._get_shards_by_task(callback)
            for shard in shards
        ]
    )
    return None


def _synchronous(options: Options) -> tf.train.CheckpointOptions:
    """The options without asynchronous saving, which is done by this library and not by TensorFlow."""
    options = copy.copy(options or tf.train.CheckpointOptions())
    options.experimental_enable_async_checkpoint = False
    return options


def _exported(
    find_worker: Callable[[object], Worker | None],
    original: Own,
    obj: object,
    export_dir: Path,
    *args: object,
    **kwargs: object,
) -> object:
    return saved_by("a SavedModel", find_worker(obj), export_dir, lambda path: original(obj, path, *args, **kwargs))


def saved_by(what: str, worker: Worker | None, path: Path, save: Callable[[Path], T]) -> T:
    """What `save(path)` returns; a worker that is not to write there saves into a folder that is deleted at once."""
    if worker is None:
        return save(path)
    with worker.saving(what, path) as writes:
        if writes:
            return save(path)
        with tempfile.TemporaryDirectory() as folder:
            return save(os.path.join(folder, os.path.basename(os.fsdecode(path))))


def _in_folder(path: str) -> str:
    """A path of the call that saved, which is one of another folder if the program has changed its folder since."""
    folder = _folder.get()
    return path if folder is None or "://" in path else os.path.join(folder, path)


_leaves: contextvars.ContextVar[bool] = contextvars.ContextVar("replica_engine_leaves_files", default=False)
"""Whether this worker leaves files to the chief now."""

_folder: contextvars.ContextVar[str | None] = contextvars.ContextVar("replica_engine_folder_of_call", default=None)
"""The folder in which a checkpoint was saved that is complete now; None if it is the current one."""
