"""Objects that live as long as a graph. Checked on TensorFlow 2.21.0."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from replica_engine._tf import variables

T = TypeVar("T")

_KEPT = "_replica_engine_kept"  # attribute of a graph


def kept_on(graph: Any, name: str, make: Callable[[], T]) -> T:
    """An object that lives as long as a graph does, its attribute of that name; made at the first request."""
    kept = getattr(graph, name, None)
    if kept is None:
        kept = make()
        setattr(graph, name, kept)
    return kept


def keep(graph: Any, what: Any) -> bool:
    """Keeps an object as long as the graph of a function lives, or that of a function around it.

    Returns:
        Whether that is the graph of a function; otherwise nothing is done.
    """
    graphs = list(variables.function_graphs(graph))
    for each in graphs:
        kept_on(each, _KEPT, list).append(what)
    return bool(graphs)
