"""Replicated XLA: one trace, one program, N devices. It works without a strategy; `TPUStrategy` is built on it.

A function becomes `Traced` (a graph), then `Lowered` (a StableHLO program), then `Compiled` (a program for devices).
The Python code of a body runs once, for all replicas, so it must not depend on which replica runs.

The modules and packages follow, from the top layer to the bottom; each imports only itself and lower layers:

- `replicate`: running a function on N replicas. Read this one first.
- `loop`: many steps in one launch, with inputs that a thread fetches ahead.
- `graph_op`: a compiled body as one op in the graph of a `tf.function`.
- `stages`: tracing, lowering, compiling and launching a body, and the cache of programs.
- `analysis`: what a body will do, as far as its graph tells: known values, collectives that some replicas miss.
- `collectives`: cross-replica operations inside a body. `constraints`: how its values are divided over the devices of a
  replica.
- `soft_placement`: ops of a body that XLA cannot compile run on the host.
- `host_calls`: calls from a program to the host, `outside_compilation` among them.
- `state`: values that stay on the devices between launches, and their host side, which is never stale.
- `body`: the replica body while it is traced.
- `signature`: the function, its parameters and its results.
- `corrected_ops`: ops for which XLA has other numbers than TensorFlow.
- `array_writes`: writes beyond the size of an array.
  `resolver`: the platform and the job, for `tf.distribute`.

>>> from replica_engine import xla
>>> [float(each) for each in xla.replicate(lambda x: x - xla.all_reduce(x, "MEAN"), [[1.0], [3.0]])]
[-1.0, 1.0]
"""

from replica_engine.pjrt.cpu_rewrites import set_cpu_rewrites
from replica_engine.pjrt.plans.plan import Plan
from replica_engine.xla.body import num_replicas, replica_id
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
from replica_engine.xla.host_calls.outside_compilation import outside_compilation
from replica_engine.xla.host_calls.results import returns
from replica_engine.xla.replicate import lower, replicate
from replica_engine.xla.resolver import PjrtClusterResolver, TPUSystemMetadata, get_tpu_system_metadata
from replica_engine.xla.soft_placement.moved import HostCallInfo
from replica_engine.xla.stages.compiled import Compiled
from replica_engine.xla.stages.lower import Lowered
from replica_engine.xla.stages.results import Counts, counts
from replica_engine.xla.stages.saved_programs import set_cache_dir
from replica_engine.xla.stages.trace import Traced

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
