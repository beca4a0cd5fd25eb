"""The versions of TensorFlow and Keras that this library was tested with, and what the older ones lack.

This module is imported before the rest of `_tf`, so that a wrong version is reported before a private name is missing.
`docs/versions.md` says what was run on which versions. What differs between the versions of these ranges:

- Keras before 3.10 counts the steps of an optimizer elsewhere (`keras/accumulation.py`), and does not ask for a value
  of a metric's variables on each replica (`keras/metrics.py`).
- `profiler.py`: whether a profile is being taken is a variable before TensorFlow 2.21, and a function since then.
- `stablehlo` in `graphs/xla_ops.py` needs TensorFlow 2.19: without it there are no compiled replicas.
"""

from __future__ import annotations

import importlib.metadata
import logging
import sys

import numpy as np

from replica_engine.errors import BackendMissingError, TensorFlowVersionError
from replica_engine.errors.versions import untested_version

TENSORFLOW = ((2, 18), (2, 21))
"""The oldest and the newest minor version of TensorFlow that the library was tested with."""

KERAS = ((3, 8), (3, 15))
"""The oldest and the newest minor version of Keras that the library was tested with."""

STABLEHLO = (2, 19)
"""The oldest version of TensorFlow that lowers a function to StableHLO."""

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
        raise TensorFlowVersionError.too_old(package, version, oldest)
    if minor(version) > tested[1]:
        logging.getLogger("replica_engine").warning(untested_version(package, version, oldest, newest))


def keras() -> tuple[int, int]:
    """The minor version of Keras; the newest that was tested if Keras is not imported."""
    module = sys.modules.get("keras")
    return KERAS[1] if module is None else minor(module.__version__)


def check_keras() -> None:
    """Compares the version of Keras, which is imported, with those that were tested; warns of one that is newer.

    Raises:
        TensorFlowVersionError: it is older.
    """
    check("Keras", sys.modules["keras"].__version__, KERAS)


def check_stablehlo() -> None:
    """Refuses compiled replicas where TensorFlow cannot lower them.

    Raises:
        BackendMissingError: TensorFlow is too old for that.
    """
    if minor(tf.__version__) < STABLEHLO:
        oldest = _text(STABLEHLO)
        raise BackendMissingError(
            f"TensorFlow {tf.__version__} is installed; TPUStrategy and replica_engine.xla need {oldest} or newer, "
            "which lowers functions to StableHLO. MirroredStrategy works with this version. Install a newer one "
            "with\n"
            f'    pip install --upgrade "tensorflow>={oldest}" "replica-engine[xla]"     # or tensorflow-cpu'
        )


def of_worker() -> dict[str, str]:
    """The versions of packages that must be equal on all workers of a job: numbers and saved files depend on them."""
    try:
        keras = importlib.metadata.version("keras")  # not imported yet, perhaps
    except importlib.metadata.PackageNotFoundError:
        keras = "not there"
    return {"tensorflow": tf.__version__, "keras": keras, "numpy": np.__version__}


def explained(error: ImportError) -> TensorFlowVersionError | None:
    """The error for a private name of TensorFlow or Keras that cannot be imported; None for all other errors."""
    package = (error.name or "").partition(".")[0]
    if package == "tensorflow":
        return TensorFlowVersionError.name_vanished("TensorFlow", tf.__version__, _text(TENSORFLOW[1]), error)
    if package == "keras" and "keras" in sys.modules:
        return TensorFlowVersionError.name_vanished("Keras", sys.modules["keras"].__version__, _text(KERAS[1]), error)
    return None


def _text(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))


check("TensorFlow", tf.__version__, TENSORFLOW)
