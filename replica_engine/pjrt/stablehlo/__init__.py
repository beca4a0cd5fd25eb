"""The text of a program before it is compiled: read, changed, and divided over the devices of a replica.

- `lowered_module`: the module that TensorFlow lowered a body to, as jaxlib writes it.
- `markers`: what takes the place of collectives and host calls. `mlir`: how modules are built and changed.
- `partition_program`: a program divided over devices. `partition_local`: how values are divided, and what each device
  computes with its part. `partition_indexed`: gathers, scatters and reductions.
- `partition_faults`: what XLA's partitioner divides wrongly, and how a program avoids it.

A replica may have several devices. They form a mesh, whose axes have names. The axes of a value say, for each of its
dimensions, over which axis of the mesh it is divided. A body is lowered as for one device. Its text then gets a layout:
the mesh, and the axes of each argument and result (`partition_program.with_layout`). When the text is compiled,
`partition_program.partition` turns the layout into shardings of Shardy. XLA divides everything in between, and inserts
the collectives that this needs. So the results of a body never depend on a layout, except by rounding.

How values lie on the devices:

- A dimension that does not divide evenly is stored with zeros behind it: 13 rows over 4 devices as 16. The program cuts
  them off what it gets, and adds them to what it returns.
- With several replicas, each value has one more dimension, the first, with a row for each replica. The body lies in a
  manual computation over the axis of the replicas, so that one program has all replicas: XLA has replicas beside
  partitions too, but jaxlib 0.10 aborts the process at the first divided result. What replicas exchange goes to the
  devices at the same place of other replicas.
"""
