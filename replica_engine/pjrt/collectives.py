"""The collectives of StableHLO that bodies use: one record for each.

A body holds a marker for a collective, with its parameters (`markers`). From here the module gets its operation, the
analysis of a body learns whether the result is equal on all replicas, and the workers of a job know which programs they
must compare.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, NamedTuple

Parameters = dict[str, Any]
"""Those of a marker: "groups" or "pairs" of replicas, axes, the name of the reduction as "op", and as "divide_by" what
its result is divided by."""


class CollectiveForm(NamedTuple):
    """One collective.

    Attributes:
        attributes: the attributes of its operation in StableHLO, as text, from the parameters of its marker.
        gives_parts: whether each replica gets another part of the result, even if all brought equal values.
    """

    attributes: Callable[[Parameters], dict[str, str]]
    gives_parts: bool = False


def _table(rows: list[list[int]]) -> str:
    return f"dense<{json.dumps(rows)}> : tensor<{len(rows)}x{len(rows[0]) if rows else 0}xi64>"


def _groups(parameters: Parameters) -> dict[str, str]:
    """The groups of replicas, padded with -1 to one size."""
    groups = parameters["groups"]
    longest = max(map(len, groups))
    return {"replica_groups": _table([group + [-1] * (longest - len(group)) for group in groups])}


def _exchange(parameters: Parameters) -> dict[str, str]:
    return {
        "split_dimension": f"{parameters['split_axis']} : i64",
        "concat_dimension": f"{parameters['concat_axis']} : i64",
        "split_count": f"{len(parameters['groups'][0])} : i64",
        **_groups(parameters),
    }


def _pairs(parameters: Parameters) -> dict[str, str]:
    pairs = parameters["pairs"]
    return {"source_target_pairs": _table(pairs) if pairs else "dense<> : tensor<0x2xi64>"}


COLLECTIVES = {
    "all_reduce": CollectiveForm(_groups),
    "all_gather": CollectiveForm(lambda given: {"all_gather_dim": f"{given['axis']} : i64", **_groups(given)}),
    "reduce_scatter": CollectiveForm(
        lambda given: {"scatter_dimension": f"{given['axis']} : i64", **_groups(given)}, gives_parts=True
    ),
    "all_to_all": CollectiveForm(_exchange, gives_parts=True),
    "collective_permute": CollectiveForm(_pairs, gives_parts=True),
}
"""By the name of the operation in StableHLO."""
