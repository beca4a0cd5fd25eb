"""Tells whether a tensor came out of a dataset that was not distributed. Checked on TensorFlow 2.21.0.

An eager tensor does not know where it came from. So this module wraps the iterators of plain datasets: they note the
tensors that they return, for as long as the tensors live.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import tensorflow as tf

# OwnedIterator: the iterator of a tf.data.Dataset; `_next_internal` gives its next element.
from tensorflow.python.data.ops.iterator_ops import OwnedIterator as _OwnedIterator

# Eager tensors cannot be hashed, so they are known by their id. An entry goes with its tensor.
_given: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
_GET_NEXT = ("IteratorGetNext", "IteratorGetNextSync")

OWNER, NAME = _OwnedIterator, "_next_internal"


def noted(original: Callable[..., Any], self: Any) -> Any:
    """Notes the tensors that an iterator gives; wrapped around `OWNER.NAME`."""
    element = original(self)
    if tf.executing_eagerly():
        for leaf in element if type(element) is tuple else (element,):
            if isinstance(leaf, tf.Tensor):
                _given[id(leaf)] = leaf
    return element


def any_given() -> bool:
    """Whether a tensor of a plain dataset is alive."""
    return bool(_given)


def is_of_dataset(value: Any) -> bool:
    """Whether a value is a tensor that a plain dataset gave, as an element or in a tuple."""
    if not isinstance(value, tf.Tensor):
        return False
    if isinstance(value, tf.__internal__.EagerTensor):
        return _given.get(id(value)) is value
    return value.op.type in _GET_NEXT
