"""replica_engine: run one TensorFlow function on N replicas.

The map of the house; imports run one way, from the top of this list to the bottom:

    demo/        the program behind `python -m replica_engine demo`, to read and to copy
    testing/     helpers for tests, yours too: logical devices, leak check, scripted interleavings
    strategies/  MirroredStrategy, and the base to write your own on
    replica/     what a replica is to TensorFlow: its context, the state it inherits, values, variables
    engine/      replica threads and the sync points where they meet; standard library only
    errors.py    every exception, with its wording
    _compat/     every private TensorFlow name, each with its reason

>>> import replica_engine
>>> strategy = replica_engine.MirroredStrategy(["CPU:0"])
>>> strategy.run(lambda x: x + 1, args=(1,))
2
"""

from replica_engine import errors, strategies, testing
from replica_engine.replica import ReplicaContext, call_for_each_replica
from replica_engine.strategies import MirroredStrategy
from replica_engine.strategies.starvation import make_room

__version__ = "0.1.0"

__all__ = [
    "MirroredStrategy",
    "ReplicaContext",
    "call_for_each_replica",
    "errors",
    "strategies",
    "testing",
]

make_room()
