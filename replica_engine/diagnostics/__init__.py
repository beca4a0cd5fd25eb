"""Maps events to lines of the user's program, and records what a failed run leaves behind.

- `user_frames`: decides which frames belong to the user, and which to this library, TensorFlow and Keras. Only this
  module has that list.
- `op_lines`: the user's line that made an op.
- `tracebacks`: exceptions with only the user's frames.
- `graph_errors`: the same for the tracebacks in the text of an error that a graph raised.
- `flight_record`: the last sync points of each replica as data, for replica threads and for compiled programs.
- `marked_step`: where the replicas of a traced step are, from the marks in its graph. `traced_places` tells it and
  draws it; `traced_calls` watches it.
- `failed_run`: the notes and the file that a failed run leaves.
- `misuse`: TensorFlow's errors about strategies, in the user's terms.
- `suspicions`: warnings about programs that run and probably do not do what their author wants.

`telemetry` does not depend on TensorFlow. So this package tells it which frames to hide and how to start TensorFlow's
profiler.
"""

from replica_engine._tf import profiler
from replica_engine.telemetry.timeline import Profiler, set_profiler

set_profiler(Profiler(profiler.is_running, profiler.Trace))
