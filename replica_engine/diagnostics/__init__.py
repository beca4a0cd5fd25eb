"""Where in the user's program something is, and what is left of a run that failed.

- `user_frames`: which frames are the user's, and which are ours, TensorFlow's and Keras'. The one list of these.
- `op_lines`: the user's line that made an op.
- `tracebacks`: exceptions with the user's frames.
- `flight_record`: the last sync points of each replica as data, on threads and in compiled programs alike.
- `failed_run`: the notes and the file that a failed run leaves.

`telemetry` knows no TensorFlow. So this package tells it which frames to hide and how to start TensorFlow's profiler.
"""

from replica_engine._tf import profiler
from replica_engine.telemetry.timeline import Profiler, set_profiler

set_profiler(Profiler(profiler.is_running, profiler.Trace))
