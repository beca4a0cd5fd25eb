"""Maps events to lines of the user's program, and records what a failed run leaves behind.

- `user_frames`: decides which frames belong to the user, and which to this library, TensorFlow and Keras. Only this
  module has that list. It finds the user's line of a call, of a sync point and of an op.
- `tracebacks`: exceptions with only the user's frames, also in the text of an error that a graph raised.
- `flight_record`: the last sync points of each replica as data, and the notes and the file that a failed run leaves.
- `misuse`: TensorFlow's errors about strategies in the user's terms, and warnings about programs that run and probably
  do not do what their author wants.

`watch` does not depend on TensorFlow. So this package tells it which frames to hide and how to start TensorFlow's
profiler.
"""

import tensorflow as tf

from replica_engine.upstream import eager
from replica_engine.watch.timeline import Profiler, set_profiler

set_profiler(Profiler(eager.is_profiling, tf.profiler.experimental.Trace))
