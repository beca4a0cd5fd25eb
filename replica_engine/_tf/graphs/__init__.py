"""The private parts of TensorFlow that make, read and change function graphs.

`autograph` converts the user's function, and `function` takes a `tf.function` apart. `xla_ops` traces a function for
XLA and returns its StableHLO. `host_ops` finds the ops that XLA cannot compile, and runs them on the host. `subgraphs`
runs a part of a graph in eager mode. `made_ops` and `replaced_ops` see or replace ops while they are added to a graph.
`gradients` gives values in a graph their gradient.

`control_flow` wraps TensorFlow's branches, loops and tapes. `calls` sets options for calls of functions in which
replicas run.
"""
