"""Helpers for tests: this library's own tests and yours.

- `check_parity(model, x, y)`: checks whether N replicas compute the same numbers as one device, and shows where not.
- `logical_devices(n)`: another name of `replica_engine.logical_devices`.
- `no_leaked_threads()`: fails if a block leaves threads behind.
- `Sequencer`: fixes the order in which threads pass marked places, without sleeping.

TensorFlow and Keras are imported only when a name that needs them is first used.
"""

import importlib
from typing import TYPE_CHECKING, Any

from replica_engine.process.devices import logical_devices
from replica_engine.testing.leaks import no_leaked_threads
from replica_engine.testing.sequencer import Sequencer

if TYPE_CHECKING:
    from replica_engine.testing.parity import check_parity
    from replica_engine.testing.parity_report import ParityReport

__all__ = ["ParityReport", "Sequencer", "check_parity", "logical_devices", "no_leaked_threads"]

_OF_PARITY = ("ParityReport", "check_parity")


def __getattr__(name: str) -> Any:
    if name in _OF_PARITY:
        return getattr(importlib.import_module("replica_engine.testing.parity"), name)
    raise AttributeError(f"module 'replica_engine.testing' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
