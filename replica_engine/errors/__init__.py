"""Every exception of the package, each with its wording.

- `base`: ReplicaEngineError.
- `threads`: replicas that do not meet, do not come back, or differ.
- `devices`: devices that are not there, and jax missing.
- `programs`: bodies that cannot be compiled, and programs that do not end.
- `host_calls`: host calls of compiled bodies.
- `models`: Keras models, their batches and optimizers.
- `contrib`: the names of 2018.

Three families, so that a reader of a traceback knows whose turn it is:

- misuse (`MergeCallMismatchError`, `StructureMismatchError`, ...): the program has to change;
- the outside world (`ReplicaTimeoutError`): something did not come back;
- `ReplicaUnwound`: not an error at all, but how a paused replica is taken down when another failed. It
  derives from BaseException so that no `except Exception` in user code stops it on its way.

A user's own exception is never wrapped: it leaves `run` as the object that was raised, and `note_failure`
adds to it which replica it came from. Nothing here imports anything but the standard library.
"""

from replica_engine.errors.base import (
    ReplicaEngineError,
    add_note,
)
from replica_engine.errors.contrib import (
    ContribError,
)
from replica_engine.errors.devices import (
    BackendMissingError,
    DeviceError,
)
from replica_engine.errors.host_calls import (
    HostAccessError,
    HostResultError,
    NestedHostCallError,
    note_host_failure,
    note_stuck,
    note_unknown_results,
)
from replica_engine.errors.models import (
    BatchError,
    OptimizerError,
    ReplicateError,
    many_batch_sizes,
)
from replica_engine.errors.programs import (
    CaptureError,
    CollectiveError,
    GraphModeError,
    InputsError,
    LostVariableError,
    LoweringError,
    NotInBodyError,
    ReplicaMismatchError,
    StuckProgramError,
    VariableCreationError,
    many_traces,
    note_kept_steps,
    slow_program,
)
from replica_engine.errors.threads import (
    MergeCallGraphError,
    MergeCallMismatchError,
    NotInReplicaError,
    ReplicaRow,
    ReplicaTimeoutError,
    ReplicaUnwound,
    StructureMismatchError,
    VariableMismatchError,
    note_abandoned,
    note_failure,
    note_merge_failure,
    slow_replicas,
)

__all__ = [
    "BackendMissingError",
    "BatchError",
    "CaptureError",
    "CollectiveError",
    "ContribError",
    "DeviceError",
    "GraphModeError",
    "HostAccessError",
    "HostResultError",
    "InputsError",
    "LostVariableError",
    "LoweringError",
    "MergeCallGraphError",
    "MergeCallMismatchError",
    "NestedHostCallError",
    "NotInBodyError",
    "NotInReplicaError",
    "OptimizerError",
    "ReplicaEngineError",
    "ReplicaMismatchError",
    "ReplicaRow",
    "ReplicaTimeoutError",
    "ReplicaUnwound",
    "ReplicateError",
    "StructureMismatchError",
    "StuckProgramError",
    "VariableCreationError",
    "VariableMismatchError",
    "add_note",
    "many_batch_sizes",
    "many_traces",
    "note_abandoned",
    "note_failure",
    "note_host_failure",
    "note_kept_steps",
    "note_merge_failure",
    "note_stuck",
    "note_unknown_results",
    "slow_program",
    "slow_replicas",
]

# In tracebacks and to users this package is one module.
for _name in __all__:
    globals()[_name].__module__ = __name__
