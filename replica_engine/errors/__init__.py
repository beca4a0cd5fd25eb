"""All exceptions of the package.

A message stands where it is raised. The modules have the classes, the texts of errors that several places raise, and
those of warnings and notes that branch, that several places use, or that are long:

- `base`: ReplicaEngineError, the base class.
- `timeouts`: replicas and programs that do not return in time, and the table that shows where each replica is.
- `run_errors`: replicas that do not meet at the same sync points, or that differ; objects of another strategy; calls
  with unusable arguments, or from the wrong place.
- `program_errors`: bodies that XLA cannot compile, programs that fail or do not end, and their host calls.
- `worker_errors`: jobs of several workers.
- `device_errors`: devices that do not exist, and versions of TensorFlow, Keras or jax that do not work.
- `value_errors`: values, models, optimizers and checkpoints; results that differ between one device and N replicas; and
  TensorFlow's contrib API of 2018.

The exceptions form three families. The family tells a reader of a traceback what must change:

- misuse (`MergeCallMismatchError`, `StructureMismatchError`, ...): the program must change;
- the outside world (`ReplicaTimeoutError`, for example): something did not return in time, or does not exist;
- `ReplicaUnwound`: not an error. It unwinds the stack of a paused replica after another replica failed. It
  derives from BaseException, so that no `except Exception` in user code catches it.

A user's own exception is never wrapped: it leaves `run` as the object that was raised, and `note_failure`
adds a note that names the replica that raised it. These modules import only the standard library.
"""

from replica_engine.errors import device_errors, program_errors, run_errors, value_errors, worker_errors
from replica_engine.errors.base import ReplicaEngineError
from replica_engine.errors.device_errors import *
from replica_engine.errors.program_errors import *
from replica_engine.errors.run_errors import *
from replica_engine.errors.timeouts import CoordinatorRow, ReplicaRow, ReplicaTimeoutError
from replica_engine.errors.value_errors import *
from replica_engine.errors.worker_errors import *

# One of the forms that type checkers understand: what is not in `__all__` is private to them.
__all__ = ["CoordinatorRow", "ReplicaEngineError", "ReplicaRow", "ReplicaTimeoutError"]
__all__ += device_errors.__all__
__all__ += program_errors.__all__
__all__ += run_errors.__all__
__all__ += value_errors.__all__
__all__ += worker_errors.__all__

# Users, tracebacks and pickle see one module, `replica_engine.errors`, not the files.
for _name in __all__:
    globals()[_name].__module__ = __name__
