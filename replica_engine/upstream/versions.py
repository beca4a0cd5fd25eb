"""The versions of TensorFlow and Keras that this library was tested with, and what the older ones lack.

This module is imported before the rest of `upstream`, so that a wrong version is reported before a private name is
missing. `docs/versions.md` says what was run on which versions. What differs between the versions of these ranges:

- `eager.py`: whether a profile is being taken is a variable before TensorFlow 2.21, and a function since then.
- `thread_state.py`: what cancels calls is of the process before TensorFlow 2.22, and of a thread since then.
- `graphs/function_graphs.py`: a Python function is kept by the outermost graph before TensorFlow 2.22, and by the
  graph of its op since then.
- `keras/keras_training.py`, `keras/keras_variables.py`: classes of trainers, and modules of the TensorFlow backend,
  have other names since Keras 3.16.
"""

from __future__ import annotations

import functools
import importlib.util
import logging
import pathlib
import re
import sys
from types import ModuleType

import numpy as np

from replica_engine.errors import TensorFlowVersionError
from replica_engine.errors.device_errors import untested_version

TENSORFLOW = ((2, 19), (2, 22))
"""The oldest and the newest minor version of TensorFlow that the library was tested with."""

KERAS = ((3, 10), (3, 16))
"""The oldest and the newest minor version of Keras that the library was tested with."""

try:
    import tensorflow as tf
except ModuleNotFoundError as error:
    if error.name != "tensorflow":
        raise
    raise TensorFlowVersionError.not_installed() from error

if not hasattr(tf, "__version__"):  # what is left of `tensorflow` when `tensorflow-cpu` is uninstalled beside it
    raise TensorFlowVersionError.not_installed()


def minor(version: str) -> tuple[int, int]:
    """The first two numbers of a version."""
    major, number, *_ = version.split(".")
    return int(major), int(number)


def check(package: str, version: str, tested: tuple[tuple[int, int], tuple[int, int]]) -> None:
    """Compares the version of a package with those that were tested; warns of one that is newer.

    Raises:
        TensorFlowVersionError: it is older.
    """
    oldest, newest = map(_text, tested)
    if minor(version) < tested[0]:
        raise TensorFlowVersionError(
            f"{package} {version} is installed; replica_engine needs {oldest} or newer. Install it with\n"
            f'    pip install --upgrade "{package.lower()}>={oldest}"'
        )
    if minor(version) > tested[1]:
        logging.getLogger("replica_engine").warning(untested_version(package, version, oldest, newest))


@functools.cache
def keras() -> str | None:
    """The version of Keras, which need not be imported; None without it.

    It is that of its files. The packages keras and keras-nightly have the same folder, so where both are installed, the
    one that was installed last is there, whatever pip says.
    """
    found = importlib.util.find_spec("keras")
    file = pathlib.Path(found.origin).parent / "src" / "version.py" if found is not None and found.origin else None
    if file is None or not file.is_file():
        return None
    written = re.search(r'^__version__ = "(.+)"', file.read_text(encoding="utf-8"), re.MULTILINE)
    return written and written[1]


def keras_renamed() -> bool:
    """Whether Keras has the names that it has since 3.16."""
    version = keras()
    return version is None or minor(version) >= (3, 16)


def check_keras() -> None:
    """Compares the version of Keras, which is imported, with those that were tested; warns of one that is newer.

    Raises:
        TensorFlowVersionError: it is older.
    """
    check("Keras", sys.modules["keras"].__version__, KERAS)


def list_worker_versions() -> dict[str, str]:
    """The versions of packages that must be equal on all workers of a job: numbers and saved files depend on them."""
    return {"tensorflow": tf.__version__, "keras": keras() or "not there", "numpy": np.__version__}


def imported(module: str) -> ModuleType:
    """A module of this library, or an error that names a version of TensorFlow or Keras that does not serve."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        if (known := find_version_error(error)) is None:
            raise
        raise known from error


def find_version_error(error: ImportError) -> TensorFlowVersionError | None:
    """The error for a private name of TensorFlow or Keras that cannot be imported; None for all other errors."""
    package = (error.name or "").partition(".")[0]
    if package == "tensorflow":
        name, version, newest = "TensorFlow", tf.__version__, _text(TENSORFLOW[1])
    elif package == "keras" and "keras" in sys.modules:
        name, version, newest = "Keras", sys.modules["keras"].__version__, _text(KERAS[1])
    else:
        return None
    return TensorFlowVersionError(
        f"{name} {version} lacks a name that replica_engine uses ({error}). Install the newest version that "
        f'replica_engine was tested with:\n    pip install "{package}=={newest}.*"'
    )


def _text(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))


check("TensorFlow", tf.__version__, TENSORFLOW)
