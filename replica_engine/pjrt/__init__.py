"""PJRT, the runtime that compiled programs run on: the only package that imports jax or jaxlib.

- `jaxlib`: every name of jax and jaxlib that is used, with its reason, and the check of the version.
- `devices`: the devices of each platform, CPU devices in any number, and how much memory a CPU device can have.
- `group`: the devices of one program; arrays on them; the order of programs; holding off Ctrl-C during a launch.
- `workers`: the devices of all workers of a job, and `rendezvous`: the service by which their clients find each other.
- `exchange`: small exchanges between workers, such as the chief's value of a variable.
- `executable`: a program compiled for a group, and its launches.
- `cache_folder`: compiled programs in a folder, for later processes; `trusted_paths`: who can have written them.
- `plans`: what a compiled program needs on its devices, and compiling for chips that are not there.
- `abandoned`: programs that nothing waits for any more.
- `conversions`: conversions between types of numbers, as TensorFlow's kernels make them.
- `cpu_rewrites`: operations that XLA:CPU runs slowly, written another way.
- `markers`: markers in a program, rewritten to collectives and host calls.
- `mlir`: finds the functions and operations of a program, for all that rewrite it.

>>> from replica_engine.pjrt.devices import device_group
>>> device_group("cpu", 2).size
2
"""
