"""The versions that the tests run on, and what is left out on them. Imports no TensorFlow."""

import contextlib
import importlib.metadata
import sys

PACKAGES = ("tensorflow", "tensorflow-cpu", "tf-nightly", "tf-nightly-cpu")


def _minor_version(*packages: str) -> tuple[int, ...]:
    """The minor version of the first package that is installed; () if none is."""
    for name in packages:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return tuple(int(part) for part in importlib.metadata.version(name).split(".")[:2])
    return ()


TENSORFLOW = _minor_version(*PACKAGES)
"""The minor version of TensorFlow, such as (2, 21)."""

if not TENSORFLOW:
    raise RuntimeError(f"None of {', '.join(PACKAGES)} is installed")

JAXLIB = _minor_version("jaxlib")
"""The minor version of jaxlib, such as (0, 10); () without it."""

HAS_XLA = sys.version_info >= (3, 11) and TENSORFLOW >= (2, 19)
"""Whether replicas can be compiled: jax needs Python 3.11, and older versions of TensorFlow give no StableHLO."""

WHY_NO_XLA = "compiled replicas need Python 3.11 and TensorFlow 2.19"
