"""Replicas of several devices: how their values are divided, and the program that XLA's partitioner divides.

A replica's devices form a mesh, whose axes have names. The axes of a value say, for each of its dimensions, over which
axis of the mesh it is divided. A body is lowered as for one device. Its text then gets a layout: the mesh, and the axes
of each argument and result (`program.with_layout`). When the text is compiled, `program.partition` turns the layout
into shardings of Shardy. XLA divides everything in between, and inserts the collectives that this needs. So the results
of a body never depend on a layout, except by rounding.

How values lie on the devices:

- A dimension that does not divide evenly is stored with zeros behind it: 13 rows over 4 devices as 16. The program cuts
  them off what it gets, and adds them to what it returns.
- With several replicas, each value has one more dimension, the first, with a row for each replica. The body lies in a
  manual computation over the axis of the replicas, so that one program has all replicas: XLA has replicas beside
  partitions too, but jaxlib 0.10 aborts the process at the first divided result. What replicas exchange goes to the
  devices at the same place of other replicas.
"""
