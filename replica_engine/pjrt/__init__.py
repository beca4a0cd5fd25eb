"""PJRT, the runtime that compiled programs run on: the only package that imports jax or jaxlib.

- `jaxlib`: every name of jax and jaxlib that is used, with its reason, and the check of the version.
- `devices`: the devices of each platform, and CPU devices in any number.
- `group`: the devices of one program; arrays on them.
- `executable`: a program compiled for a group, and its launches.
- `abandoned`: programs that nothing waits for any more.
- `interrupts`: holding off Ctrl-C while a program is launched.
- `memory`: how much memory a CPU device can have.
- `markers`: markers in a program, rewritten to collectives and host calls.

>>> from replica_engine.pjrt.devices import device_group
>>> device_group("cpu", 2).size
2
"""
