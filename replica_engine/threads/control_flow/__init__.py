"""Merge calls inside control flow and nested functions: operators that all replicas enter together.

A merge function runs in the graph where `run` was called. A branch, a loop body or a nested `tf.function` is another
graph, which one replica builds alone, so a merge call inside it cannot be made there. This package turns the operator
itself (tf.cond, tf.while_loop, a `tf.function`) into the sync point:

- A replica enters an operator as an *attempt*. Without a merge call the operator stays the replica's own.
- A merge call in an attempt raises `MergeNeeded`, which leaves the operator again. Now the operator is a sync point.
- The coordinator builds ONE If, Case or While op (`joint_ops`). Whenever TensorFlow calls a branch, a condition or a
  body, the coordinator sends each replica into that graph on an errand (`joint_operator`). There, on its own thread,
  the replica traces its own part, and merge calls are merge calls: the graph is one where all replicas stand.
- A nested `tf.function` is inlined in a graph. In eager mode one `tf.function` goes around all replicas.
- `joint_operator` notes which replica each op belongs to, and what each replica's gradient may reach. Backward is a
  sync point too: one gradient op for all replicas, in which each replica differentiates its part on its thread.
- Conditions must be equal on all replicas; an op checks it when the graph runs.

Replica 0 decides whether an operator is joint. A replica decides for itself only where it enters another operator than
replica 0. Nesting costs one aborted attempt for each level. `entering` has the places in TensorFlow where all this
begins.

What must never happen: an attempt that leaves ops, variables without values, or tapes that have ended; a replica that
enters an operator alone while the others take it for joint; the gradient of one tensor counted for two replicas.
"""
