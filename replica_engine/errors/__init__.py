"""Every exception of the package, each with its wording.

- `base`: ReplicaEngineError.
- `timeouts`: replicas and programs that do not come back, and the table of who is where.
- `threads`: replicas that do not meet, or differ.
- `devices`: devices that are not there, and jax missing.
- `inputs`: what replicated functions are called with, and from where.
- `programs`: bodies that cannot be compiled, and programs that do not end.
- `host_calls`: host calls of compiled bodies.
- `values`: values that replicas cannot be given, or that cannot be brought together.
- `models`: Keras models, their batches and optimizers.
- `parity`: numbers that differ between one device and replicas.
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
    is_alike,
    positive_int,
)
from replica_engine.errors.contrib import (
    ContribError,
)
from replica_engine.errors.devices import (
    BackendMissingError,
    DeviceError,
    ForkedError,
)
from replica_engine.errors.host_calls import (
    HostAccessError,
    HostResultError,
    NestedHostCallError,
    moved_to_host,
    note_host_failure,
    note_stuck,
    note_unknown_results,
)
from replica_engine.errors.inputs import (
    InputsError,
    NotInBodyError,
    ReplicaMismatchError,
)
from replica_engine.errors.models import (
    BatchError,
    OptimizerError,
    ReplicateError,
    many_batch_sizes,
    note_sparse_inputs,
)
from replica_engine.errors.parity import (
    ParityArgumentError,
    ParityError,
)
from replica_engine.errors.programs import (
    CaptureError,
    CollectiveError,
    GraphModeError,
    LostVariableError,
    LoweringError,
    ProgramError,
    StuckProgramError,
    VariableCreationError,
    many_traces,
    note_kept_steps,
)
from replica_engine.errors.threads import (
    MergeCallGraphError,
    MergeCallMismatchError,
    NotInReplicaError,
    ReplicaUnwound,
    StructureMismatchError,
    VariableMismatchError,
    note_abandoned,
    note_failed_alike,
    note_failure,
    note_merge_failure,
    note_sync_points,
)
from replica_engine.errors.timeouts import (
    CoordinatorRow,
    ReplicaRow,
    ReplicaTimeoutError,
    slow_compile,
    slow_function,
    slow_program,
    slow_replicas,
    slow_trace,
)
from replica_engine.errors.values import (
    ReplicaValueError,
)

__all__ = [
    "BackendMissingError",
    "BatchError",
    "CaptureError",
    "CollectiveError",
    "ContribError",
    "CoordinatorRow",
    "DeviceError",
    "ForkedError",
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
    "ParityArgumentError",
    "ParityError",
    "ProgramError",
    "ReplicaEngineError",
    "ReplicaMismatchError",
    "ReplicaRow",
    "ReplicaTimeoutError",
    "ReplicaUnwound",
    "ReplicaValueError",
    "ReplicateError",
    "StructureMismatchError",
    "StuckProgramError",
    "VariableCreationError",
    "VariableMismatchError",
    "add_note",
    "is_alike",
    "many_batch_sizes",
    "many_traces",
    "moved_to_host",
    "note_abandoned",
    "note_failed_alike",
    "note_failure",
    "note_host_failure",
    "note_kept_steps",
    "note_merge_failure",
    "note_sparse_inputs",
    "note_stuck",
    "note_sync_points",
    "note_unknown_results",
    "positive_int",
    "slow_compile",
    "slow_function",
    "slow_program",
    "slow_replicas",
    "slow_trace",
]

# In tracebacks and to users this package is one module.
for _name in __all__:
    globals()[_name].__module__ = __name__
