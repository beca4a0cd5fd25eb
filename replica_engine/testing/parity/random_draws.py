"""Finds the layers of a traced model that draw random numbers, from the ops of the model's graph."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from replica_engine.diagnostics.op_lines import is_scope_of

_STATEFUL = ("Random", "Truncated", "Multinomial", "ParameterizedTruncated", "Stateful", "NonDeterministic")
_STATELESS = (
    "StatelessRandom",
    "StatelessTruncated",
    "StatelessMultinomial",
    "StatelessParameterized",
    "StatelessShuffle",
)
_CHOOSES = ("StatelessRandomGetKeyCounterAlg", "StatelessRandomGetKeyCounter", "StatelessRandomGetAlg")
_PASSES_ON = ("Identity", "Cast", "Pack", "Bitcast", "StopGradient")


class Draw(NamedTuple):
    """One way to draw random numbers.

    Attributes:
        layer: the innermost layer that draws them; "" if no layer does.
        op: the type of the op.
        is_stateless: whether the numbers depend on a constant seed and on the algorithm that the device chooses.
    """

    layer: str
    op: str
    is_stateless: bool


def draws(graph: Any, layers: Sequence[str]) -> list[Draw]:
    """Finds the random numbers that a graph draws, one entry for each layer and way to draw.

    Args:
        graph: a `tf.Graph`; functions that the graph calls are searched too.
        layers: names of layers, which appear in the name scopes of the layers' ops.
    """
    found: dict[Draw, None] = {}
    for scope, kind, is_fixed in _random_ops(graph.as_graph_def()):
        inside = [part for part in scope.split("/") for name in layers if is_scope_of(part, name)]
        named = [name for part in inside[-1:] for name in layers if is_scope_of(part, name)]
        # The op that makes a key from the seed comes first and tells no more than the op that draws.
        if kind not in _CHOOSES:
            found[Draw(max(named, key=len, default=""), kind, is_fixed)] = None
    return list(found)


def _random_ops(definition: Any) -> Iterator[tuple[str, str, bool]]:
    """For each random op: its name with scopes, its type, and whether a fixed seed meets the device's own algorithm."""
    functions = {function.signature.name: function for function in definition.library.function}

    def walk(nodes: Any, prefix: str, around: tuple[str, ...]) -> Iterator[tuple[str, str, bool]]:
        by_name = {node.name: node for node in nodes}
        for node in nodes:
            name = f"{prefix}{node.name}"
            if node.op.startswith(_STATELESS) and node.op not in _CHOOSES:
                yield name, node.op, _is_fixed(node, by_name)
            elif node.op.startswith(_STATEFUL) and node.op != "StatefulPartitionedCall":
                yield name, node.op, False
            for called in _called(node):
                if called in functions and called not in around:
                    yield from walk(functions[called].node_def, f"{name}/", (*around, called))

    yield from walk(definition.node, "", ())


def _called(node: Any) -> Iterator[str]:
    for value in node.attr.values():
        if value.HasField("func"):
            yield value.func.name
        for each in value.list.func:
            yield each.name


def _is_fixed(node: Any, by_name: dict[str, Any]) -> bool:
    """Whether the key comes from a constant seed, through an op that lets the device choose the algorithm."""
    sources = [by_name[name] for name in map(_plain, node.input) if name in by_name]
    for source in sources:
        if source.op in _CHOOSES and source.input:
            seed = by_name.get(_plain(source.input[0]))
            while seed is not None and seed.op in _PASSES_ON and len(seed.input) == 1:
                seed = by_name.get(_plain(seed.input[0]))
            return seed is not None and seed.op == "Const"
    return False


def _plain(name: str) -> str:
    return name.lstrip("^").split(":")[0]
