"""Objects that live as long as a graph. Checked on TensorFlow 2.21.0."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

_KEPT = "_replica_engine_kept"  # attribute of a graph


def keep(graph: Any, what: Any) -> bool:
    """Keeps an object as long as the graph of a function lives, or that of a function around it.

    Returns:
        Whether that is the graph of a function; otherwise nothing is done.
    """
    is_function = isinstance(graph, tf.__internal__.FuncGraph)
    while isinstance(graph, tf.__internal__.FuncGraph):
        if not hasattr(graph, _KEPT):
            setattr(graph, _KEPT, [])
        getattr(graph, _KEPT).append(what)
        graph = graph.outer_graph
    return is_function
