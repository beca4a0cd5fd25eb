"""What TensorFlow, XLA and NumPy read from the environment when a process of tests begins, and its subprocesses."""

import os

from helpers.versions import JAXLIB, TENSORFLOW

# Tests compile many small programs and run each a few times: LLVM need not spend long on them, in subprocesses either,
# nor XLA on fused loops of its newer kind. With XLA_FLAGS= in the environment they are compiled as users' are.
QUICK_TO_COMPILE = (
    "--xla_backend_optimization_level=0",
    "--xla_llvm_disable_expensive_passes=true",
    # XLA exits where it does not know it.
    *(["--xla_cpu_use_fusion_emitters=false"] if (2, 20) <= TENSORFLOW < (2, 22) and JAXLIB < (0, 11) else []),
)


def set_up() -> None:
    """Sets what the caller has not set."""
    os.environ.setdefault("XLA_FLAGS", " ".join(QUICK_TO_COMPILE))
    # For each op of each graph, oneDNN's pass searches all kernels: 3% of the time of all tests. Only some CPUs have it
    # on.
    os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "0")
    # Threads of NumPy's linear algebra spin for a while when a process begins, and tests multiply small matrices.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
