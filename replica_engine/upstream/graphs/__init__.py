"""The private parts of TensorFlow that make, read and change function graphs.

`autograph` converts the user's function, and finds the user's lines in what it generates. `operators` wraps
TensorFlow's branches, loops and tapes. `function_graphs` takes a `tf.function` apart, gives values in a graph their
gradient, and replaces ops while they are added. `xla_ops` traces a function for XLA and returns its StableHLO.
`host_kernels` finds the ops that XLA cannot compile, and runs them on the host. `graph_walk` finds what an op needs,
and runs a part of a graph in eager mode.

`function_calls` binds the arguments of calls, and sets options for calls of functions in which replicas run. `mark_ops`
marks where replicas are in a traced step.
"""
