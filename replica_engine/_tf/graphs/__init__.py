"""The private parts of TensorFlow that make, read and change function graphs.

`autograph` converts the user's function, and `function` takes a `tf.function` apart. `xla_ops` traces a function for
XLA and returns its StableHLO. `host_ops` finds the ops that XLA cannot compile, and runs them on the host. `subgraphs`
runs a part of a graph in eager mode. `made_ops` and `random_ops` see or replace ops while they are added to a graph.
`gradients` gives values in a graph their gradient.

`control_flow` wraps TensorFlow's branches, loops and tapes. `calls` sets options for calls of functions in which
replicas run. Four modules are for tracing one replica for all: `source` is the graph that it traces, `repeatable` says
which ops may be copied, `copies` copies them, and `nodes` compares the ops of two graphs.
"""
