"""Values as files in TensorFlow's V2 format, with a complete checkpoint at the final name at every instant.

A checkpoint at the prefix "ckpt" is "ckpt.index" and one or more "ckpt.data-00000-of-00001". The index says how many
data files there are, and so which of them belong to it. This makes a write atomic:

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

import contextlib
import os
import re
from collections.abc import Sequence
from typing import NamedTuple

import tensorflow as tf

from replica_engine._tf import checkpoints
from replica_engine.process import folders

TEMPORARY = "_replica_engine_temp"
"""What the name of the folder has behind the prefix. What is there is deleted, so it is a name that no user gives."""

_NUMBER = re.compile(r"\.data-\d{5}-of-(\d{5})$")
_HEADER = re.compile(rb"\0\0.\x08([\x80-\xff]*[\0-\x7f])", re.DOTALL)  # sizes of the first key and value; the value


class Row(NamedTuple):
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


def write(rows: Sequence[Row], prefix: str) -> None:
    """Writes values to a bundle of their own, not yet at a final name."""
    names, parts, values = zip(*rows, strict=True)
    tf.raw_ops.SaveV2(prefix=prefix, tensor_names=names, shape_and_slices=parts, tensors=values)


def split(bundles: list[list[Row]], path: str, others: int = 0) -> list[list[Row]]:
    """Divides rows into so many bundles that the checkpoint at the final prefix has not their number of files.

    Args:
        bundles: the rows of each bundle.
        path: the final prefix.
        others: the number of bundles that other workers write.
    """
    taken, bundles = _number_of(path), list(bundles)
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
    data = checkpoints.matching(merged + checkpoints.DATA)
    for file in [*data, merged + ".index"]:
        folders.to_disk(file)
    for file in data:
        tf.io.gfile.rename(file, path + file[len(merged) :], overwrite=True)
    folders.to_disk(os.path.dirname(path))  # the data files before the index that needs them
    tf.io.gfile.rename(merged + ".index", path + ".index", overwrite=True)
    folders.to_disk(os.path.dirname(path))
    for file in checkpoints.matching(path + checkpoints.DATA):
        if _number(file) != len(data):
            tf.io.gfile.remove(file)
    tf.io.gfile.rmtree(path + TEMPORARY)


def discard(path: str) -> None:
    """Deletes the folder of a write that has failed, as far as the file system lets it."""
    with contextlib.suppress(tf.errors.OpError):
        tf.io.gfile.rmtree(path + TEMPORARY)


def _number_of(path: str) -> int | None:
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
