"""Helpers for tests, ours and yours.

- `logical_devices(n)`: several devices on a machine that has one.
- `no_leaked_threads()`: fails if a block leaves threads behind.
- `Sequencer`: fixes the order in which threads pass marked places, without sleeping.
"""

from replica_engine.testing.devices import logical_devices
from replica_engine.testing.leaks import no_leaked_threads
from replica_engine.testing.sequencer import Sequencer

__all__ = ["Sequencer", "logical_devices", "no_leaked_threads"]
