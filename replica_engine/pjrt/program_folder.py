"""A folder of compiled programs, and whether it can be trusted.

Later processes read the programs instead of compiling. The layout is that of jax's own persistent cache, so one folder
serves both. `KEY-cache` holds, compressed, four bytes with the seconds that compiling took, and then the executable.
`KEY-atime` holds the time of its last use, by which the oldest are removed (`jax_compilation_cache_max_size`). jax's
functions for it are private and are not used. Nor are they enough, since they write in place: another process could
read half a file, and a broken file would stay forever. Here a file appears whole or not at all, and a broken one is
replaced. `KEY-about` says what the program was compiled for, so that a later process can say why it has to compile
again.

Loading an executable runs what the file says. So a folder and a file are used only if nobody but this user and root can
have written them (`check`), and what is written here is for this user only, whatever the umask.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import pathlib
import stat
import tempfile
import time
import zlib
from collections.abc import Mapping

_OTHERS = stat.S_IWGRP | stat.S_IWOTH


class UntrustedPathError(Exception):
    """Another user can change what a path leads to.

    Attributes:
        path: the folder, file or link that it can be changed by.
        command: the command that, with this path behind it, ends that.
    """

    def __init__(self, what: str, command: str, path: pathlib.Path):
        super().__init__(what)
        self.command, self.path = command, path


def check(path: pathlib.Path) -> None:
    """Checks that nobody but this user and root can change what an absolute path leads to.

    A user who may write to a folder may replace what is in it. So may its owner, who may change the permissions. The
    same holds for each folder around it, and for each symbolic link on the way. A folder with the sticky bit, such as
    /tmp, lets others add entries, but not replace an entry that belongs to somebody else.

    Permissions of the group count as those of others: a group may have members that this process does not know of, and
    where there are access control lists, the bits of the group say what those allow at most.

    Raises:
        UntrustedPathError: another user can.
        OSError: the path does not exist, or is neither a folder nor a file.
    """
    if not hasattr(os, "geteuid"):  # Windows, where other rules hold
        return
    path.stat()  # raises for links that lead nowhere, or in a circle
    _check(path)


def _check(path: pathlib.Path) -> None:
    for each in (*reversed(path.parents), path):
        found = each.lstat()
        is_link = stat.S_ISLNK(found.st_mode)
        if found.st_uid not in (0, os.geteuid()):
            raise UntrustedPathError(
                f"{each} belongs to user {found.st_uid}, and this process runs as user {os.geteuid()}",
                f"chown {'-h ' if is_link else ''}{os.geteuid()}",
                each,
            )
        if is_link:
            _check(each.parent / each.readlink())
        elif stat.S_ISDIR(found.st_mode) or stat.S_ISREG(found.st_mode):
            if found.st_mode & _OTHERS and (each == path or not found.st_mode & stat.S_ISVTX):
                raise UntrustedPathError(
                    f"other users may write to {each} (its mode is {stat.S_IMODE(found.st_mode):04o})",
                    "chmod go-w",
                    each,
                )
        else:
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(each))


UNLIMITED = -1

_CACHE, _ATIME, _ABOUT = "-cache", "-atime", "-about"
_SECONDS = 4  # bytes before the executable
_MOST_ABOUTS = 256
_PARTIAL = ".partial"
_PARTIAL_FOR = 3600.0  # seconds after which a partial file belongs to a process that was killed


class CacheFolder:
    """A folder of executables, each under a key. Any number of processes may use it at the same time.

    Args:
        path: the folder, as an absolute path. It is made when the first program is written, for this user only.
        limit: the most bytes that the executables may have together; those not used for longest are removed.
    """

    def __init__(self, path: str | os.PathLike[str], limit: int = UNLIMITED):
        self.path = pathlib.Path(path)
        self._limit = limit
        self._tidied = False

    def file(self, key: str) -> pathlib.Path:
        """The file of a program."""
        return self.path / f"{key}{_CACHE}"

    def check(self) -> None:
        """Checks that nobody but this user and root can write to the folder, or can put another one in its place.

        Raises:
            UntrustedPathError: another user can.
            OSError: there is no such folder, and none can be made.
        """
        check(next(each for each in (self.path, *self.path.parents) if os.path.lexists(each)))

    def read(self, key: str) -> bytes | None:
        """The executable of a key; None if the folder has none.

        Raises:
            OSError: the file cannot be read.
            UntrustedPathError: another user can change the file.
            ValueError: the file is broken.
        """
        try:
            check(self.file(key))
            packed = self.file(key).read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            return None
        try:
            data = zlib.decompress(packed)  # has a checksum: XLA would run a changed program as it is
        except zlib.error as error:
            raise ValueError(str(error)) from None
        if self._limit != UNLIMITED:
            with contextlib.suppress(OSError):  # the time of use is a hint; a folder may be read-only
                self._write(key + _ATIME, _now())
        return data[_SECONDS:]

    def write(self, key: str, executable: bytes, seconds: float, about: Mapping[str, str]) -> None:
        """Writes an executable, over one that may be there.

        Args:
            key: the name that it is found by.
            executable: its bytes.
            seconds: how long compiling took.
            about: what it was compiled for, as text.

        Raises:
            OSError: the folder cannot be written.
            UntrustedPathError: another user can write to the folder.
        """
        self.check()
        for each in (*reversed(self.path.parents), self.path):
            if not each.exists():
                each.mkdir(mode=0o700, exist_ok=True)  # `parents=True` would make the outer ones with the umask
        packed = zlib.compress(int(seconds).to_bytes(_SECONDS, "big") + executable, 1)
        if self._limit != UNLIMITED:
            if len(packed) > self._limit:
                return
            self._evict(self._limit - len(packed))
        self._write(key + _ATIME, _now())  # before the program: jax expects each program to have one
        self._write(key + _ABOUT, json.dumps(dict(about)).encode())
        self._write(key + _CACHE, packed)

    def abouts(self, prefix: str) -> list[dict[str, str]]:
        """What the programs were compiled for whose keys begin with a prefix, the newest first."""
        found = []
        for file in self.path.glob(f"{prefix}*{_ABOUT}"):
            with contextlib.suppress(OSError):
                if self._has_program(file):  # jax may have removed it
                    found.append((file.stat().st_mtime, file))
        rows = []
        for _, file in sorted(found, reverse=True)[:_MOST_ABOUTS]:
            with contextlib.suppress(OSError, ValueError, RecursionError):  # cut short, or written by another program
                about = json.loads(file.read_text())
                if isinstance(about, dict):
                    rows.append(about)
        return rows

    def _has_program(self, about: pathlib.Path) -> bool:
        return self.file(about.name.removesuffix(_ABOUT)).exists()

    def _write(self, name: str, data: bytes) -> None:
        """Writes a file that other processes see whole or not at all."""
        self._tidy()
        handle, partial = tempfile.mkstemp(suffix=_PARTIAL, dir=self.path)  # for this user only
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(data)
            os.replace(partial, self.path / name)
        finally:
            with contextlib.suppress(OSError):  # it has its name by now, unless something has failed
                os.unlink(partial)

    def _tidy(self) -> None:
        """Removes half-written files of killed processes, and `KEY-about` files of programs that jax has removed."""
        if self._tidied:
            return
        self._tidied = True
        abouts = (file for file in self.path.glob(f"*{_ABOUT}") if not self._has_program(file))
        for file in (*self.path.glob(f"*{_PARTIAL}"), *abouts):
            with contextlib.suppress(OSError):
                if time.time() - file.stat().st_mtime > _PARTIAL_FOR:  # a newer one may still get its program
                    file.unlink()

    def _evict(self, limit: int) -> None:
        """Removes the programs that were not used for longest, until the others have at most `limit` bytes."""
        found = []
        for file in self.path.glob(f"*{_CACHE}"):
            key = file.name.removesuffix(_CACHE)
            with contextlib.suppress(OSError):  # another process may have removed it
                found.append((self._used(key), key, file.stat().st_size))
        total = sum(size for _, _, size in found)
        for _, key, size in sorted(found):
            if total <= limit:
                return
            total -= size
            for suffix in (_CACHE, _ATIME, _ABOUT):
                with contextlib.suppress(OSError):
                    (self.path / f"{key}{suffix}").unlink()

    def _used(self, key: str) -> int:
        with contextlib.suppress(OSError):
            return int.from_bytes((self.path / f"{key}{_ATIME}").read_bytes(), "little")
        return 0


def _now() -> bytes:
    return time.time_ns().to_bytes(8, "little")
