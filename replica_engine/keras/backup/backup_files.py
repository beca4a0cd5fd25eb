"""A folder of backups, and plain data in it.

Each checkpoint in the folder is complete or not there (`BackupFolder`). Values of Python and NumPy are a JSON file and
a file of arrays, which any program can read (`write`). Nothing is pickled: a checkpoint is data, and reading one never
runs code.
"""

from __future__ import annotations

import base64
import contextlib
import io
import json
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from replica_engine.process import setup

_NAME = re.compile(r"backup-(\d+)-(\d+)")
_COMPLETE, _HALF = "", ".half"  # suffixes of the names


class BackupFolder:
    """The last complete checkpoints of a training, by the number of epochs and batches that it has done.

    A checkpoint is written into a folder under another name, and renamed when all of its files are on the disk. So a
    process that is killed at any instant leaves the earlier ones as they were, and one half folder that no reader
    takes.

    All workers of a job may share the folder. Each may call `finish` when all have written: the first one renames.

    Args:
        directory: the folder. It is made when the first checkpoint is written.
        keep: how many complete checkpoints stay.

    Attributes:
        given: the folder as the user gave it.
        path: the folder from the root: a training may change its folder.
    """

    def __init__(self, directory: str | os.PathLike[str], keep: int):
        self.given = os.fspath(directory)
        self.path = Path(setup.absolute(self.given))
        self._keep = keep

    def last(self) -> Path | None:
        """The folder of the last complete checkpoint; None if there is none."""
        return next(iter(self._named(_COMPLETE)), None)

    def begin(self, epoch: int, batch: int) -> Path:
        """Makes the folder to write the checkpoint of a place into, and returns it; `finish` takes it."""
        half = self.path / f"backup-{epoch:06d}-{batch:09d}{_HALF}"
        half.mkdir(parents=True, exist_ok=True)
        return half

    def finish(self, half: Path) -> None:
        """Makes a checkpoint complete, and removes older ones, complete and half.

        A half one of a later place stays: another worker may be behind, and this one may write that already.
        """
        complete = half.with_suffix("")
        with contextlib.suppress(FileNotFoundError):  # another worker was here first
            for file in half.iterdir():
                setup.to_disk(str(file))
            if complete.exists():
                shutil.rmtree(half)
            else:
                half.rename(complete)
        with contextlib.suppress(FileNotFoundError):  # another worker has cleared the folder
            setup.to_disk(str(self.path))
        older = [path for path in self._named(_HALF) if path.name <= half.name]
        for path in [*self._named(_COMPLETE)[self._keep :], *older]:
            shutil.rmtree(path, ignore_errors=True)

    def clear(self) -> None:
        """Removes all checkpoints, and the folder if nothing else is in it."""
        for path in [*self._named(_COMPLETE), *self._named(_HALF)]:
            shutil.rmtree(path, ignore_errors=True)
        with contextlib.suppress(OSError):
            self.path.rmdir()

    def _named(self, suffix: str) -> list[Path]:
        """The folders of checkpoints whose names have this suffix, the last one first, and nothing of the user's."""
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            named = ((_NAME.fullmatch(path.stem), path) for path in self.path.iterdir() if path.suffix == suffix)
            found = {tuple(map(int, match.groups())): path for match, path in named if match}
            return [found[place] for place in sorted(found, reverse=True)]
        return []


def in_words(epoch: int, batch: int) -> str:
    """How far a training is, as the names of the checkpoints count: "1 epoch and 3 batches"."""
    return f"{epoch} epoch{'' if epoch == 1 else 's'} and {batch} batch{'' if batch == 1 else 'es'}"


_KIND, _VALUE = "kind", "value"


class NotPlainError(TypeError):
    """A value is none of those that can be written. Its message is the path to the value, and its type."""


def write(path: Path, value: object) -> None:
    """Writes a value into `path`.json, and its arrays into `path`.npz.

    Args:
        path: without a suffix.
        value: None, a bool, int, float, str, an array or scalar of NumPy, or a list, tuple or dict of these.

    Raises:
        NotPlainError: something else is in it.
    """
    arrays: dict[str, np.ndarray] = {}
    text = json.dumps(encode(value, arrays))
    np.savez(path.with_suffix(".npz"), allow_pickle=False, **arrays)
    path.with_suffix(".json").write_text(text)


def read(path: Path) -> Any:
    """Reads what `write` wrote."""
    with np.load(path.with_suffix(".npz"), allow_pickle=False) as arrays:
        return decode(json.loads(path.with_suffix(".json").read_text()), arrays)


def dumps(value: object) -> str:
    """A value as text, with its arrays; see `write`."""
    arrays: dict[str, np.ndarray] = {}
    encoded = encode(value, arrays)
    file = io.BytesIO()
    np.savez(file, allow_pickle=False, **arrays)
    return json.dumps([encoded, base64.b64encode(file.getvalue()).decode()])


def loads(text: str) -> Any:
    """The value that `dumps` took."""
    encoded, file = json.loads(text)
    with np.load(io.BytesIO(base64.b64decode(file)), allow_pickle=False) as arrays:
        return decode(encoded, arrays)


def encode(value: object, arrays: dict[str, np.ndarray], at: str = "") -> object:
    """A value as JSON has it; its arrays are added to `arrays`, by name."""
    if isinstance(value, (tf.Tensor, tf.Variable)) and hasattr(value, "numpy"):  # callbacks put such into logs
        value = value.numpy()
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, (np.ndarray, np.generic)) and not value.dtype.hasobject:
        name = f"array {len(arrays)}"
        # NumPy's files do not know the types that TensorFlow adds, such as bfloat16.
        arrays[name] = np.array(value).view(f"u{value.dtype.itemsize}") if value.dtype.kind == "V" else np.array(value)
        kind = "array" if isinstance(value, np.ndarray) else "scalar"
        return {_KIND: kind, _VALUE: name, "dtype": value.dtype.name}
    if isinstance(value, (list, tuple)) and type(value) in (list, tuple):
        items = [encode(each, arrays, f"{at}[{index}]") for index, each in enumerate(value)]
        return items if isinstance(value, list) else {_KIND: "tuple", _VALUE: items}
    if isinstance(value, dict):
        pairs = [[encode(key, arrays, at), encode(each, arrays, f"{at}[{key!r}]")] for key, each in value.items()]
        return {_KIND: "dict", _VALUE: pairs}
    raise NotPlainError(f"{at.lstrip('.')}: {type(value).__name__}")


def decode(value: Any, arrays: Mapping[str, np.ndarray]) -> Any:
    """The value that `encode` took."""
    if isinstance(value, list):
        return [decode(each, arrays) for each in value]
    if not isinstance(value, dict):
        return value
    kind, inside = value[_KIND], value[_VALUE]
    if kind == "tuple":
        return tuple(decode(each, arrays) for each in inside)
    if kind == "dict":
        return {decode(key, arrays): decode(each, arrays) for key, each in inside}
    array = arrays[inside]
    if array.dtype.name != value["dtype"]:
        array = array.view(tf.as_dtype(value["dtype"]).as_numpy_dtype)
    return array if kind == "array" else array[()]
