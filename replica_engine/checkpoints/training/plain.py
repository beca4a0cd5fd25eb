"""Values of Python and NumPy as a JSON file and a file of arrays, which any program can read.

Nothing is pickled: a checkpoint is data, and reading one never runs code.
"""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

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
