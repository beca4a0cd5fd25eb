"""What becomes of a tensor on its way to another one in a graph: whether the way is linear.

A replica computes a part of a batch, and its gradients, or its sum of losses, are added to those of other replicas at
the end. What happens to them before that gives the same numbers after the sum if it is linear: `f(a) + f(b)` is
`f(a + b)`. A gradient that is clipped, normalized or rounded does not.

`tag` says which tensors to follow and which are the samples. The ops of the graph say the rest. What an op does that
this module does not know counts as not linear: then a step is slower than it could be, and never wrong.

A gradient may also go through a variable: a step adds up those of several batches, and clips the sum. A variable that
the graph has written a followed gradient to is one, where it is read; what a loop writes is not seen.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable, Sequence

import tensorflow as tf

from replica_engine.upstream.graphs import graph_walk

APART, OF_BATCH, LINEAR, OTHER = range(4)
"""What a tensor has to do with those that are followed: nothing, and nothing with the samples either; it depends on the
samples; it is linear in those that are followed; it depends on them in another way."""

SAMPLES, GRADIENTS, SUMS, COMMON = "samples", "gradients", "sums", "common"
"""The kinds of tags: samples that a replica was given; gradients of weights; sums over its samples; what replicas have
brought together, so that all have the same."""

_LINEAR_IN: dict[str, tuple[int, ...]] = {
    **dict.fromkeys(
        ("Identity", "IdentityN", "StopGradient", "PreventGradient", "CheckNumerics", "CheckNumericsV2"), ()
    ),
    **dict.fromkeys(("Neg", "Add", "AddV2", "AddN", "Sub", "Pack", "Unpack", "ConcatV2", "Real", "Imag", "Conj"), ()),
    **dict.fromkeys(("TensorListSetItem", "TensorListPushBack", "TensorListConcatV2", "TensorListStack"), ()),
    **dict.fromkeys(("TensorListGetItem", "TensorListPopBack", "TensorListFromTensor", "TensorListGather"), (0,)),
    **dict.fromkeys(("Cast", "Reshape", "Transpose", "Squeeze", "ExpandDims", "EnsureShape", "Slice"), (0,)),
    **dict.fromkeys(("StridedSlice", "Sum", "Mean", "BroadcastTo", "Tile", "Pad", "ReverseV2", "Roll"), (0,)),
    **dict.fromkeys(("Gather", "GatherV2", "GatherNd", "UnsortedSegmentSum", "SegmentSum", "SplitV", "Cumsum"), (0,)),
    **dict.fromkeys(("MatrixBandPart", "MatrixDiagV3", "MatrixDiagPartV3", "Diag", "DiagPart"), (0,)),
    **dict.fromkeys(("Split", "ScatterNd"), (1,)),
    **dict.fromkeys(("TensorScatterAdd", "TensorScatterSub", "TensorScatterUpdate"), (0, 2)),
}
"""For each type of op that is linear in several inputs together, which these are; () are all."""

_PRODUCTS = ("Mul", "MulNoNan", "MatMul", "BatchMatMul", "BatchMatMulV2", "BatchMatMulV3", "Einsum", "Conv2D")
_QUOTIENTS = frozenset({"RealDiv", "Div", "DivNoNan"})
_CHOICES = frozenset({"Select", "SelectV2"})
_LENGTHS = frozenset({"Shape", "ShapeN", "Size", "Rank"})
_OF_SHAPES = _LENGTHS | {"ZerosLike", "OnesLike"}
_ASSIGNING = frozenset({"AssignVariableOp", "AssignAddVariableOp"})
_WRITES = _ASSIGNING | {"AssignSubVariableOp"}
_ENTERED = frozenset({*graph_walk.CALLS, *graph_walk.BRANCHES})

_FEW = 8
"""Elements of a short constant."""

_tags: weakref.WeakKeyDictionary[tf.Graph, dict[str, set[str]]] = weakref.WeakKeyDictionary()


def tag(tensors: Iterable[tf.Tensor | tf.IndexedSlices], kind: str) -> None:
    """Tags tensors of a graph, the values of rows of tables among them; eager tensors are left out."""
    for tensor in tensors:
        tensor = tensor.values if isinstance(tensor, tf.IndexedSlices) else tensor
        if tf.is_symbolic_tensor(tensor):
            _tags.setdefault(tensor.graph, {}).setdefault(tensor.name, set()).add(kind)


class Ways:
    """The ways from tagged tensors to others.

    Args:
        followed: the kind of the tensors that are followed, `GRADIENTS` or `SUMS`.
        of_lengths: whether a factor that depends on the number of samples counts as one that depends on samples.
        rows: the number of samples, if the graph was made for one number; a factor may then be a constant that was made
            of it.

    Attributes:
        bent: the op at which a way stopped being linear; None if there is none so far.
    """

    def __init__(self, followed: str, of_lengths: bool = False, rows: int | tf.Tensor | None = None):
        self.bent: tf.Operation | None = None
        self._followed = followed
        self._of_lengths = of_lengths
        self._rows = rows if of_lengths and isinstance(rows, int) else None
        self._known: dict[tf.Graph, dict[str, list[int]]] = {}
        self._looked_at: frozenset[int] = frozenset()  # the ids of handles of variables

    def to(self, tensor: tf.Tensor | tf.IndexedSlices) -> int:
        """What a tensor has to do with those that are followed; an eager tensor nothing."""
        tensor = tensor.values if isinstance(tensor, tf.IndexedSlices) else tensor
        if not tf.is_symbolic_tensor(tensor):
            return APART
        return self._to([tensor], self._known.setdefault(tensor.graph, {}), {})[0]

    def into(self, handles: Iterable[tf.Tensor]) -> int:
        """The worst that the graph that is being traced has written so far to variables with these handles.

        If that depends on those that are followed, `bent` is an op that has written it.
        """
        graph = tf.compat.v1.get_default_graph()
        inside = {id(graph_walk.outermost(outer)): inner for outer, inner in getattr(graph, "captures", ())}
        worst = APART
        for handle in (inside[id(each)] for each in handles if id(each) in inside):
            found = self._written(handle, {})
            if found >= LINEAR and self.bent is None:
                self.bent = next(op for op in handle.consumers() if op.type in _WRITES | _ENTERED)
            worst = max(worst, found)
        return worst

    def _to(self, tensors: Sequence[tf.Tensor], known: dict[str, list[int]], given: dict[str, int]) -> list[int]:
        """The same for tensors of one graph.

        Args:
            tensors: the tensors.
            known: what is known of the outputs of ops, by the names of the ops.
            given: what is known of the arguments of the graph, by their names.
        """
        pending = [tensor.op for tensor in tensors if self._tagged(tensor) is None]
        while pending:
            op = pending[-1]
            if op.name in known:
                pending.pop()
                continue
            unknown = [each.op for each in op.inputs if self._tagged(each) is None and each.op.name not in known]
            if unknown:
                pending += unknown
                continue
            known[op.name] = self._outputs(op, [self._seen(each, known) for each in op.inputs], given)
        return [self._seen(tensor, known) for tensor in tensors]

    def _seen(self, tensor: tf.Tensor, known: dict[str, list[int]]) -> int:
        tagged = self._tagged(tensor)
        return known[tensor.op.name][tensor.value_index] if tagged is None else tagged

    def _tagged(self, tensor: tf.Tensor) -> int | None:
        kinds = _tags.get(tensor.graph, {}).get(tensor.name, ())
        if self._followed in kinds:
            return LINEAR
        if COMMON in kinds and self._followed == GRADIENTS:
            return APART
        return OF_BATCH if SAMPLES in kinds else None

    def _outputs(self, op: tf.Operation, inputs: list[int], given: dict[str, int]) -> list[int]:
        count = len(op.outputs)
        if op.type == "ReadVariableOp" and self._followed == SUMS:
            return [max(self._to(_assigned_before(op), {}, given), default=APART)]
        if op.type == "Placeholder":
            if op.name in given:
                return [given[op.name]]
            outside = graph_walk.captured(op.outputs[0])
            return [APART if outside is None else self.to(outside)]
        if graphs := graph_walk.list_inner_graphs(op):
            return self._judge_functions(op, graphs, inputs)
        worst = max(inputs, default=APART)
        if op.type in graph_walk.READS and self._followed == GRADIENTS:
            return [max(worst, self._judge_variable(op.inputs[0]))] * count
        if op.type in _OF_SHAPES:
            # Ones like the samples are as many as these, and their sum is the number of samples. Those like a gradient
            # are as many as the weights.
            is_length = worst and (worst != LINEAR or op.type in _LENGTHS)
            is_length = is_length and any(each.shape.rank != 0 for each in op.inputs)
            return [OF_BATCH if self._of_lengths and is_length else APART] * count
        if worst == LINEAR and not self._is_linear(op, inputs):
            worst = self._bends(op)
        return [worst] * count

    def _judge_variable(self, handle: tf.Tensor) -> int:
        """The same for the value of a variable, by what has been written to it."""
        handles = [handle]
        while handle.op.type == "Placeholder" and tf.is_symbolic_tensor(handle := graph_walk.captured(handle)):
            handles.append(handle)
        if not self._looked_at.isdisjoint(map(id, handles)):
            return APART  # it is written to itself
        ways = Ways(self._followed, self._of_lengths, self._rows)  # another one: what it knows does not hold outside
        ways._looked_at = self._looked_at.union(map(id, handles))
        found = max(ways._written(each, {}) for each in handles)
        self.bent = self.bent or ways.bent
        return found if found >= LINEAR else APART

    def _written(self, handle: tf.Tensor, given: dict[str, int]) -> int:
        """The worst that is written to a variable in a graph, and in the branches and calls in it."""
        known: dict[str, list[int]] = {} if given else self._known.setdefault(handle.graph, {})
        found = APART
        for op in handle.consumers():
            if op.type in _WRITES:
                found = max(found, *self._to([op.inputs[1]], known, given))
            elif op.type in _ENTERED:
                outer = op.inputs if op.type in graph_walk.CALLS else op.inputs[1:]
                place = next(place for place, each in enumerate(outer) if each is handle)
                for graph in graph_walk.list_inner_graphs(op):
                    # A function that was differentiated may have got more inputs since an op called it.
                    kinds = zip(graph.inputs, self._to(outer, known, given), strict=False)
                    inner = {each.op.name: kind for each, kind in kinds}
                    found = max(found, self._written(graph.inputs[place], inner))
        return found

    def _bends(self, op: tf.Operation) -> int:
        self.bent = self.bent or op
        return OTHER

    def _is_linear(self, op: tf.Operation, inputs: list[int]) -> bool:
        """Whether an op is linear in those of its inputs that are linear."""
        if op.type in _CHOICES:
            return inputs[0] == APART
        if op.type in _QUOTIENTS:
            return self._is_factor(op.inputs[1], inputs[1])
        if op.type in _PRODUCTS:
            factors = [(each, kind) for each, kind in zip(op.inputs, inputs, strict=True) if kind != LINEAR]
            return len(factors) == len(inputs) - 1 and all(self._is_factor(*each) for each in factors)
        if op.type == "Cast" and not (op.outputs[0].dtype.is_floating or op.outputs[0].dtype.is_complex):
            return False  # it rounds
        places = _LINEAR_IN.get(op.type)
        if places is None:
            return False
        return not places or all(kind != LINEAR or place in places for place, kind in enumerate(inputs))

    def _is_factor(self, tensor: tf.Tensor, kind: int) -> bool:
        """Whether what is multiplied by a tensor stays linear, on a part of the samples as on all."""
        if kind != APART or self._rows is None:
            return kind == APART
        numbers, lengths = _constants(tensor)
        # A length that the factor itself does not have was added up, as that of ones like the samples.
        numbers += [] if tensor.shape.rank is None else lengths.difference(tensor.shape)
        return not any(map(self._is_of_rows, numbers))

    def _is_of_rows(self, number: float) -> bool:
        """Whether a constant may have been made of the number of samples: a multiple of it, or one over a multiple."""
        assert self._rows is not None
        if not math.isfinite(number) or number == 0:
            return False
        times = [number / self._rows, 1 / (number * self._rows)]
        return any(abs(each) > 0.5 and abs(each - round(each)) < 1e-4 for each in times)

    def _judge_functions(self, op: tf.Operation, graphs: list[tf.Graph], inputs: list[int]) -> list[int]:
        """The same for the outputs of a branch, loop or call, by the graphs of its functions."""
        if op.type in graph_walk.CALLS:
            return self._through(graphs[0], inputs)
        if op.type in graph_walk.BRANCHES:
            branches = [self._through(graph, inputs[1:]) for graph in graphs]
            found = [max(kinds) for kinds in zip(*branches, strict=True)]
            if inputs[0] != APART and max(found, default=APART) >= LINEAR:
                return [self._bends(op)] * len(found)
            return [max(each, inputs[0]) for each in found]
        condition, body = graphs
        while (after := [max(both) for both in zip(inputs, self._through(body, inputs), strict=True)]) != inputs:
            inputs = after
        ends = self._through(condition, inputs)
        if ends[0] >= LINEAR:
            return [self._bends(op)] * len(inputs)
        # A list has what each turn of the loop made, as `tf.map_fn` does for each sample: a list of what is the
        # samples' own is no worse than the samples.
        kinds = zip(inputs, op.outputs, strict=True)
        return [LINEAR if kind == OTHER and each.dtype == tf.variant else kind for kind, each in kinds]

    def _through(self, graph: tf.Graph, inputs: list[int]) -> list[int]:
        given = {inner.op.name: kind for inner, kind in zip(graph.inputs, inputs, strict=True)}
        return self._to(graph.outputs, {}, given)


def _assigned_before(read: tf.Operation) -> list[tf.Tensor]:
    """What the graph put into a variable before an op reads it, a running number of samples for example.

    An optimizer's updates are left out: they are subtracted, and the same on all replicas.
    """
    if read.type != "ReadVariableOp":
        return []
    operations = read.graph.get_operations()
    earlier = operations[: operations.index(read)]
    return [op.inputs[1] for op in earlier if op.type in _ASSIGNING and op.inputs[0] is read.inputs[0]]


def _constants(tensor: tf.Tensor) -> tuple[list[float], set[int]]:
    """The numbers in the short constants that a tensor depends on, in its graph, and the lengths of all constants."""
    found: list[float] = []
    lengths: set[int] = set()

    def before(op: tf.Operation) -> list[tf.Operation]:
        return [each.op for each in (*op.inputs, *_assigned_before(op))]

    for op in graph_walk.reached([tensor.op], before, lambda op: op.name):
        if op.type == "Const":
            shape, dtype = op.outputs[0].shape, op.outputs[0].dtype
            lengths.update(shape)
            if 0 < (shape.num_elements() or 0) <= _FEW and (dtype.is_floating or dtype.is_integer):
                found += [float(each) for each in tf.make_ndarray(op.get_attr("value")).ravel()]
    return found, lengths
