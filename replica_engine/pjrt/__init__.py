"""PJRT, the runtime that compiled programs run on: the only package that imports jax or jaxlib.

- `jaxlib`: every name of jax and jaxlib that is used, with its reason, and the check of the version.
- `devices`: which devices there are, and CPU devices in any number.
- `group`: the devices of one program; arrays on them.
- `executable`: a program compiled for a group, and launching it.
- `watch`: a warning where a program does not end.
- `collectives`: markers in a program, rewritten to collective operations.

>>> from replica_engine.pjrt.devices import device_group
>>> device_group("cpu", 2).size
2
"""
