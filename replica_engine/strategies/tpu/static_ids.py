"""The warning that a replica id has no value while a compiled body is traced.

The body is traced once for all replicas, so `tf.get_static_value(context.replica_id_in_sync_group)` is None, and
`if tf.get_static_value(...) == 0:` takes the same way for each of them without a word. Under `MirroredStrategy` each
replica has its own trace, in which the id has a value.

A program that works under both strategies may ask whether the value is known. So nothing is warned of if a function of
the user, among those that led to the question, compares anything with None.
"""

from __future__ import annotations

import dis
import logging
import os
import threading
from types import CodeType, FrameType
from typing import Any

import tensorflow as tf

from replica_engine._tf import components
from replica_engine._tf.graphs import subgraphs
from replica_engine.diagnostics.op_lines import here
from replica_engine.diagnostics.user_frames import OURS, WRAPPERS, is_users
from replica_engine.errors import warn_no_static_id
from replica_engine.xla.body import Body, in_body

_logger = logging.getLogger("replica_engine")
_TOLD = "static id"
_TRACING = os.path.join(OURS, "xla", "stages", "")  # the functions that call the user's, while it is traced
_MOST = 100  # ops between the id and what is asked for


def install() -> None:
    """Looks on where a program asks for the value of a tensor, from now on."""
    components.note_unknown_values(_look)


def _look(tensor: object, frame: FrameType) -> None:
    """Warns if the tensor has no value because it depends on the replica id, and the user has asked for it.

    Args:
        tensor: what `tf.get_static_value` was called with, and returned None for.
        frame: the frame that called it.
    """
    body: Body | None = in_body()
    if body is None or not body.of_strategy or _TOLD in body.told or not tf.is_symbolic_tensor(tensor):
        return
    if _is_of_replica_id(tensor) and _is_asked_by_user(frame):
        body.told.add(_TOLD)
        _logger.warning(warn_no_static_id(here()))


def _is_of_replica_id(tensor: object) -> bool:
    """Whether a tensor would have a value if the replica id had one."""
    pending, seen, found = [tensor], set(), False
    while pending:
        each = pending.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        if not tf.is_symbolic_tensor(each) or len(seen) > _MOST:
            return False
        op = each.op  # type: ignore[attr-defined]
        if op.type == "Placeholder":
            pending.append(subgraphs.captured(each))  # of a function inside the body; else None, which ends this
        elif op.type == "XlaReplicaId":
            found = True
        elif op.type != "Const":
            if op.op_def.is_stateful or not op.inputs or subgraphs.functions_of(op):
                return False
            pending += op.inputs
    return found


def _is_asked_by_user(frame: FrameType | None) -> bool:
    """Whether a frame is the user's, or AutoGraph's for it, and no function of the user in the body tests for None."""
    threads = (threading.get_ident(),)
    while frame is not None and frame.f_code.co_name in WRAPPERS:
        frame = frame.f_back
    if frame is None or not is_users(frame, threads):
        return False
    while frame is not None and not frame.f_code.co_filename.startswith(_TRACING):
        if is_users(frame, threads) and _tests_for_none(frame.f_code):
            return False
        frame = frame.f_back
    return True


def _tests_for_none(code: CodeType) -> bool:
    """Whether a function compares anything with None: `is None`, `== None` or `in (1, None)`.

    What is compared is not known: `is` counts for any two objects.
    """
    before: Any = ()
    for each in dis.get_instructions(code):
        if each.opname == "IS_OP" or each.opname.endswith("NONE"):
            return True
        if each.opname == "COMPARE_OP" and before is None:
            return True
        if each.opname == "CONTAINS_OP" and isinstance(before, (tuple, frozenset)) and None in before:
            return True
        before = each.argval if each.opname == "LOAD_CONST" else ()
    return False
