"""All exceptions of the package.

A message stands where it is raised. The modules have the classes, the texts of errors that several places raise, and
those of warnings and notes that branch, that several places use, or that are long:

- `base`: ReplicaEngineError, the base class.
- `timeouts`: replicas and programs that do not return in time, and the table that shows where each replica is.
- `threads`: replicas that do not meet at the same sync points, or that differ.
- `scopes`: objects and calls that do not belong to the strategy that uses them.
- `devices`: devices that do not exist, and a missing or unsuitable jax.
- `hosts`: jobs of several workers.
- `inputs`: calls of replicated functions with unusable arguments, or from the wrong place.
- `programs`: bodies that XLA cannot compile, and programs that fail or do not end.
- `host_calls`: host calls of compiled bodies.
- `values`: values that cannot be passed to replicas, reduced or joined, tensors that have no value yet, and checkpoints
  that cannot be written.
- `models`: Keras models, their batches and optimizers.
- `parity`: results that differ between one device and N replicas.
- `contrib`: TensorFlow's contrib API of 2018.
- `versions`: TensorFlow and Keras in versions that do not work, or that were never tested.

The exceptions form three families. The family tells a reader of a traceback what must change:

- misuse (`MergeCallMismatchError`, `StructureMismatchError`, ...): the program must change;
- the outside world (`ReplicaTimeoutError`, for example): something did not return in time, or does not exist;
- `ReplicaUnwound`: not an error. It unwinds the stack of a paused replica after another replica failed. It
  derives from BaseException, so that no `except Exception` in user code catches it.

A user's own exception is never wrapped: it leaves `run` as the object that was raised, and `note_failure`
adds a note that names the replica that raised it. These modules import only the standard library.
"""

from replica_engine.errors.base import ReplicaEngineError
from replica_engine.errors.device_errors import (
    BackendMissingError,
    DeviceError,
    DistributionError,
    ForkedError,
    TensorFlowVersionError,
)
from replica_engine.errors.program_errors import (
    CaptureError,
    CollectiveError,
    GraphModeError,
    HostAccessError,
    HostResultError,
    LostVariableError,
    LoweringError,
    NestedHostCallError,
    ProgramError,
    StuckProgramError,
    VariableCreationError,
)
from replica_engine.errors.replica_table import CoordinatorRow, ReplicaRow, ReplicaTimeoutError
from replica_engine.errors.thread_errors import (
    InputsError,
    MergeCallGraphError,
    MergeCallMismatchError,
    NoMethodError,
    NotInBodyError,
    NotInReplicaError,
    ReplicaMismatchError,
    ReplicaUnwound,
    ScopeError,
    StructureMismatchError,
    VariableMismatchError,
)
from replica_engine.errors.value_errors import (
    BackupError,
    BatchError,
    CheckpointError,
    ContribError,
    LogError,
    NoValueError,
    OptimizerError,
    ParityArgumentError,
    ParityError,
    ReplicateError,
    ReplicaValueError,
)
from replica_engine.errors.worker_errors import (
    ClusterConfigError,
    ProgramDisagreementError,
    WorkerLostError,
    WorkerRow,
    WorkersMissingError,
    WorkerVersionError,
)

__all__ = [
    "BackendMissingError",
    "BackupError",
    "BatchError",
    "CaptureError",
    "CheckpointError",
    "ClusterConfigError",
    "CollectiveError",
    "ContribError",
    "CoordinatorRow",
    "DeviceError",
    "DistributionError",
    "ForkedError",
    "GraphModeError",
    "HostAccessError",
    "HostResultError",
    "InputsError",
    "LogError",
    "LostVariableError",
    "LoweringError",
    "MergeCallGraphError",
    "MergeCallMismatchError",
    "NestedHostCallError",
    "NoMethodError",
    "NoValueError",
    "NotInBodyError",
    "NotInReplicaError",
    "OptimizerError",
    "ParityArgumentError",
    "ParityError",
    "ProgramDisagreementError",
    "ProgramError",
    "ReplicaEngineError",
    "ReplicaMismatchError",
    "ReplicaRow",
    "ReplicaTimeoutError",
    "ReplicaUnwound",
    "ReplicaValueError",
    "ReplicateError",
    "ScopeError",
    "StructureMismatchError",
    "StuckProgramError",
    "TensorFlowVersionError",
    "VariableCreationError",
    "VariableMismatchError",
    "WorkerLostError",
    "WorkerRow",
    "WorkerVersionError",
    "WorkersMissingError",
]

# Users, tracebacks and pickle see one module, `replica_engine.errors`, not the files.
for _name in __all__:
    globals()[_name].__module__ = __name__
