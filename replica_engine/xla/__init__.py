"""Replicated XLA: one trace, one program, N devices. It works without a strategy; `TPUStrategy` is built on it.

A function becomes `Traced` (a graph), then `Lowered` (a StableHLO program), then `Compiled` (a program for devices).
The Python code of a body runs once, for all replicas, so it must not depend on which replica runs.

The modules and packages follow, from the top layer down; each imports only itself and lower layers:

- `replicate`: running a function on N replicas. Read this one first.
- `calls`: calls of a body, found again by their key; as one op in the graph of a `tf.function`; many steps in a launch.
- `stages`: tracing, lowering, compiling and launching a body.
- `body_context`: the replica context of a body, and each replica's own values in it.
- `collectives`: cross-replica operations inside a body.
- `soft_placement`: ops of a body that XLA cannot compile run on the host.
- `host_calls`: calls from a program to the host, `outside_compilation` among them.
- `attention`: Keras' attention in a body, by a kernel of TPUs or GPUs.
- `kernels`: functions of JAX, for bodies and for all other code of TensorFlow.
- `constraints`: how values of a body are divided over the devices of a replica.
- `state`: values that stay on the devices between launches, and their host side, which is never stale.
- `body`: the replica body while it is traced. `function_spec`: the function, its parameters and its options.
- `arguments`: the arguments and results of a body, taken apart.
- `corrected_ops`: ops for which XLA has other numbers than TensorFlow.
- `cluster_resolver`: the platform and the job, for `tf.distribute`.

>>> from replica_engine import xla
>>> [float(each) for each in xla.replicate(lambda x: x - xla.all_reduce(x, "MEAN"), [[1.0], [3.0]])]
[-1.0, 1.0]
"""

from replica_engine.pjrt.plan import Plan
from replica_engine.pjrt.rewrites import set_cpu_rewrites
from replica_engine.xla.body import num_replicas, replica_id
from replica_engine.xla.cluster_resolver import PjrtClusterResolver, TPUSystemMetadata, get_tpu_system_metadata
from replica_engine.xla.collectives import (
    all_gather,
    all_reduce,
    all_to_all,
    collective_permute,
    cross_replica_sum,
    ppermute,
    reduce_scatter,
)
from replica_engine.xla.constraints import constrain
from replica_engine.xla.host_calls.host_results import returns
from replica_engine.xla.host_calls.outside_compilation import outside_compilation
from replica_engine.xla.kernels import from_jax
from replica_engine.xla.replicate import lower, replicate
from replica_engine.xla.soft_placement.graph_copy import HostCallInfo
from replica_engine.xla.stages.body_graph import Counts, counts
from replica_engine.xla.stages.compiled import Compiled
from replica_engine.xla.stages.lowered import Lowered
from replica_engine.xla.stages.saved_programs import set_cache_dir
from replica_engine.xla.stages.traced import Traced

__all__ = [
    "Compiled",
    "Counts",
    "HostCallInfo",
    "Lowered",
    "PjrtClusterResolver",
    "Plan",
    "TPUSystemMetadata",
    "Traced",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "collective_permute",
    "constrain",
    "counts",
    "cross_replica_sum",
    "from_jax",
    "get_tpu_system_metadata",
    "lower",
    "num_replicas",
    "outside_compilation",
    "ppermute",
    "reduce_scatter",
    "replica_id",
    "replicate",
    "returns",
    "set_cache_dir",
    "set_cpu_rewrites",
]
