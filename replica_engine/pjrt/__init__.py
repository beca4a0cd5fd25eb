"""PJRT, the runtime that compiled programs run on: the only package that imports jax or jaxlib.

- `jaxlib`: every name of jax and jaxlib that is used, with its reason, and the check of the version.
- `devices`: the devices of each platform, CPU devices in any number, and how much memory a CPU device can have.
  `accelerators`: TPUs and GPUs, their kinds, and those that jax finds.
- `device_group`: the devices of one program; arrays on them; the order of programs; programs that were abandoned.
- `partitioned_group`: the same where each replica has several devices.
- `executable`: a program compiled for a group, and its launches. `stablehlo`: what is done with its text before.
  `rewrites`: operations that XLA runs slowly, written another way.
- `program_folder`: compiled programs in a folder, for later processes, and who can have written them.
- `job_devices`: the devices of all workers of a job, and `jaxlib_service`: the service by which their clients find each
  other. `worker_exchange`: small exchanges between workers; `worker_sums`: sums of replicas on threads over workers.
  `agreement`: what the workers are about to launch, compared.
- `plan`: what a program needs on its devices; `plans` has its names until 0.3. `absent_chips`: compiling for chips that
  are not there, in a child process.

>>> from replica_engine.pjrt.devices import device_group
>>> device_group("cpu", 2).size
2
"""
