"""Summaries of a body go to the writer of the thread that calls `run`, at the step that this thread has set.

A body is traced once, and later calls may have another writer and another step. So in a call from eager mode the step
becomes an argument of the body, and pieces look up the writer when they run. The key of the trace includes everything
that decides whether a body has summaries at all: whether there is a writer, and whether recording is on. In a call
inside a `tf.function` the writer and the step are traced in, as in any `tf.function`.
"""

from __future__ import annotations

import contextlib
import numbers
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from replica_engine._tf import thread_state
from replica_engine.values.structure import ById
from replica_engine.xla.signature.arguments import Arguments, Shapes, Slot


def add_caller(arguments: Arguments, shapes: Shapes) -> Shapes:
    """Adds to a body's arguments the state of the caller that the body's summaries need. Only for eager mode.

    Returns:
        The shapes of all slots.
    """
    writer, step, recording = thread_state.summary_state()
    if writer is None:
        return shapes
    arguments.summary_writer = thread_state.callers_writer()
    is_plain = recording is None or isinstance(recording, bool)  # None before anybody has set it
    key: list[Any] = ["summaries", recording if is_plain else ById(recording)]
    if tf.is_tensor(recording) and not tf.is_symbolic_tensor(recording) and not callable(recording):
        key[1] = bool(recording)
    if isinstance(step, (numbers.Integral, np.ndarray, tf.__internal__.EagerTensor)):
        slot = Slot("the step of the summaries", [tf.cast(step, tf.int64)])
        arguments.slots.append(slot)
        arguments.summary_step = len(arguments.slots) - 1
        shapes = (*shapes, slot.shape)
        key.append("a step")
    else:
        key.append(None if step is None else ById(step))
    arguments.key = (arguments.key, tuple(key))
    return shapes


def bound(arguments: Arguments, placeholders: Sequence[tf.Tensor]) -> contextlib.AbstractContextManager[Any]:
    """Inside, while the body is traced, its summaries are for the writer and the step of each later caller."""
    if arguments.summary_writer is None:
        return contextlib.nullcontext()
    step = None if arguments.summary_step is None else placeholders[arguments.summary_step]
    return thread_state.summaries_of_caller(step)
