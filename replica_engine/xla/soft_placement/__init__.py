"""Soft placement: ops of a body that XLA cannot compile run on the host, without a request from the user.

TensorFlow does the same on TPUs: strings, tables, summaries, `tf.print`, `tf.py_function` and checks run on the host,
between the ops that run on the devices. Read `rewrite` first.

- `kinds`: which ops run on the host.
- `rewrite`: a copy of the body's graph, in which pieces stand for these ops.
- `values`: where each value of the body is while the copy is made.
- `pending`: how ops become pieces. `piece`: a piece in a launch.
- `unknown_shapes`: the shapes that Python functions and other host ops return, found out by trying them.
- `summaries`: the summary writer and the step of the caller.
- `moved`: the rewritten body, and the list of its host calls for the user.
"""

from replica_engine.xla.soft_placement.kinds import is_host_resource, is_left_on_host, may_move, needs_host
from replica_engine.xla.soft_placement.moved import HostCallInfo, Inputs, MovedBody, described, move
from replica_engine.xla.soft_placement.summaries import add_caller, bound

__all__ = [
    "HostCallInfo",
    "Inputs",
    "MovedBody",
    "add_caller",
    "bound",
    "described",
    "is_host_resource",
    "is_left_on_host",
    "may_move",
    "move",
    "needs_host",
]
