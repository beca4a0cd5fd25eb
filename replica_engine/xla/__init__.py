"""Replicated XLA: one trace, one program, N devices. Usable by itself; `TPUStrategy` is built on it.

A function on its way: `Traced` (a graph) -> `Lowered` (a StableHLO program) -> `Compiled` (for devices).

- `replicate`: running a function on N replicas. Read this one first.
- `collectives`: cross-replica operations inside.
- `body`: the replica body while it is traced.
- `arguments`, `outputs`: what becomes a parameter or a result of the program, and what is compiled in.
- `trace`, `lower`, `compiled`: the stages. `program`: finding what is compiled already. `counts`: how often.
- `source`: the function, and how to know it again. `random_numbers`: what random ops draw from.
- `outside_compilation`: host work in a body. Its parts: `templates` and `originals` (the function, with what it closes
  over), `host_specs` and `host_results` (what it returns), `host_call` (a call in the program), `host_run` (a launch).
- `device_loop`: many steps in one launch, for which a `prefetcher` puts `batches` into an `input_queue`.
- `uneven`: shares of different shapes. `graph_op`: a compiled body inside a host tf.function.
- `device_value`, `host_variable`, `host_graph`: variables on the devices, and their host side, never stale.
- `resolver`: which platform, for `tf.distribute`.
- `user_lines`: the user's line, for errors.

>>> from replica_engine import xla
>>> [float(each) for each in xla.replicate(lambda x: x - xla.all_reduce(x, "MEAN"), [[1.0], [3.0]])]
[-1.0, 1.0]
"""

from replica_engine.xla.body import num_replicas, replica_id
from replica_engine.xla.collectives import (
    all_gather,
    all_reduce,
    all_to_all,
    collective_permute,
    cross_replica_sum,
    ppermute,
)
from replica_engine.xla.host_calls.outside_compilation import outside_compilation
from replica_engine.xla.host_calls.result_specs import returns
from replica_engine.xla.replicate import lower, replicate
from replica_engine.xla.resolver import PjrtClusterResolver, TPUSystemMetadata, get_tpu_system_metadata
from replica_engine.xla.soft_placement import HostCallInfo
from replica_engine.xla.stages.compiled import Compiled
from replica_engine.xla.stages.counts import Counts, counts
from replica_engine.xla.stages.lower import Lowered
from replica_engine.xla.stages.trace import Traced

__all__ = [
    "Compiled",
    "Counts",
    "HostCallInfo",
    "Lowered",
    "PjrtClusterResolver",
    "TPUSystemMetadata",
    "Traced",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "collective_permute",
    "counts",
    "cross_replica_sum",
    "get_tpu_system_metadata",
    "lower",
    "num_replicas",
    "outside_compilation",
    "ppermute",
    "replica_id",
    "replicate",
    "returns",
]
