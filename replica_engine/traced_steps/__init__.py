"""Calls of a `tf.function` in which replicas run, on threads or compiled.

- `supervised_call`: such a call is watched, limited, and ended on Ctrl-C; where its replicas are meanwhile.
- `marked_step`: where the replicas of one traced step are, from the marks in its graph.
"""
