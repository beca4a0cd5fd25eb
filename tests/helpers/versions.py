"""The versions that the tests run on, and what is left out on them. Imports no TensorFlow."""

import contextlib
import importlib.metadata

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

KERAS = _minor_version("keras-nightly", "keras")
"""The minor version of Keras, such as (3, 15). Where both packages are installed, the files are those of the first."""

JAXLIB = _minor_version("jaxlib")
"""The minor version of jaxlib, such as (0, 10); () without it."""

HAS_XLA = bool(JAXLIB)
"""Whether replicas can be compiled."""

WHY_NO_XLA = "compiled replicas need jax"
