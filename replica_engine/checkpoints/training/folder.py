"""A folder of checkpoints, of which each is complete or not there.

A checkpoint is written into a folder under another name, and renamed when all of its files are on the disk. So a
process that is killed at any instant leaves the earlier ones as they were, and one half folder that no reader takes.

All workers of a job may share the folder. Each may call `finish` when all have written: the first one renames.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from pathlib import Path

from replica_engine.process import folders

_NAME = re.compile(r"backup-(\d+)-(\d+)")
_COMPLETE, _HALF = "", ".half"  # suffixes of the names


class BackupFolder:
    """The last complete checkpoints of a training, by the number of epochs and batches that it has done.

    Args:
        directory: the folder. It is made when the first checkpoint is written.
        keep: how many complete checkpoints stay.

    Attributes:
        given: the folder as the user gave it.
        path: the folder from the root: a training may change its folder.
    """

    def __init__(self, directory: str | os.PathLike[str], keep: int):
        self.given = os.fspath(directory)
        self.path = Path(folders.absolute(self.given))
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
                folders.to_disk(str(file))
            if complete.exists():
                shutil.rmtree(half)
            else:
                half.rename(complete)
        with contextlib.suppress(FileNotFoundError):  # another worker has cleared the folder
            folders.to_disk(str(self.path))
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
