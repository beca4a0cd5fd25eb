"""Whether a path leads to what only this user and root can have written.

Who may write to a folder may replace what is in it, and so may who owns it, since an owner may change the permissions.
The same holds for each folder around it, and for each symbolic link on the way. A folder with the sticky bit, such as
/tmp, lets others add entries, but not replace an entry that belongs to somebody else.

Permissions of the group count as those of others: a group may have members that this process does not know of, and
where there are access control lists, the bits of the group say what those allow at most.
"""

from __future__ import annotations

import errno
import os
import pathlib
import stat

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
