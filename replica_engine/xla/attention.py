"""Keras' attention in a body for TPUs or GPUs, by a kernel of Pallas where one serves.

A kernel goes over the keys block by block, and keeps no matrix of all scores. Keras calls one function with all that
its layers have made of their arguments, the mask among them: a tensor of [batch, 1, time of queries, time of keys]. A
kernel takes what such masks are made of: masks of queries, masks of keys, and whether a query sees no later keys. So
the ops behind the mask are read.

The numbers are those of Keras' own attention, but for the rounding: a query for which all keys are masked gets the mean
of all values. So float32 is left to Keras: kernels multiply it with fewer bits on the chips.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from replica_engine.errors import InputsError
from replica_engine.pjrt import jaxlib
from replica_engine.pjrt.jaxlib import jax
from replica_engine.xla.body import Body
from replica_engine.xla.kernels import from_jax

LONG = 1024
"""So many keys are a long sequence: Keras' attention of shorter ones stays as it is, unless a kernel is asked for."""

_BLOCKS = (512, 256, 128)  # of queries and of keys; the largest that divides a length
_SMALLEST = _BLOCKS[-1]
# What the kernels were compiled for.
_DTYPES = {"tpu": ("bfloat16",), "gpu": ("bfloat16", "float16")}
_SIZES = {"tpu": (64, 128, 256), "gpu": (32, 64, 128)}


def attended(body: Body, given: Mapping[str, Any]) -> tf.Tensor | None:
    """What a kernel for a body computes; None where Keras computes it.

    Args:
        body: the body.
        given: the arguments of Keras' function, by their names.

    Raises:
        InputsError: a kernel is asked for, and none serves.
    """
    masks = _Masks()
    reason, wanted = _why_not(body, given, masks), given.get("flash_attention")
    if reason and wanted:
        raise InputsError(
            f"An attention with flash_attention=True has no kernel for {body.kernels.upper()}s: {reason}. Without "
            "flash_attention=True, Keras computes it there."
        )
    query, key, value = _arrays(given)
    if reason or not (wanted or key.shape[1] >= LONG):
        return None
    scale = query.shape[-1] ** -0.5 if given.get("scale") is None else given["scale"]
    causal = masks.causal or bool(given.get("is_causal"))
    queries, keys = (functools.reduce(tf.logical_and, each) if each else None for each in (masks.queries, masks.keys))
    return _kernel()(query, key, value, queries, keys, platform=body.kernels, causal=causal, scale=float(scale))


def _arrays(given: Mapping[str, Any]) -> list[Any]:
    return [given[name] for name in ("query", "key", "value")]


@functools.cache
def _kernel() -> Any:
    return from_jax(attention)


def _why_not(body: Body, given: Mapping[str, Any], masks: _Masks) -> str:
    """Why no kernel serves, in words for users; "" if one does. Notes what its mask is made of."""
    platform, arrays = body.kernels, _arrays(given)
    if given.get("bias") is not None or given.get("attn_logits_soft_cap") is not None:
        return "it has a bias or a soft cap"
    if body.mesh is not None:
        return "the devices of a replica divide the model, and a kernel is not divided"
    if any(not tf.is_tensor(each) or each.shape.rank != 4 or not each.shape.is_fully_defined() for each in arrays):
        return "it takes tensors of four dimensions whose sizes are known"
    if not isinstance(given.get("scale"), (int, float, np.number, type(None))):
        return "its scale is no number of Python"
    dtypes = sorted({each.dtype.name for each in arrays})
    if len(dtypes) > 1 or dtypes[0] not in _DTYPES[platform]:
        return f"the values are {' and '.join(dtypes)}, and it takes {' or '.join(_DTYPES[platform])}"
    (batch, time, heads, size), key, value = (tuple(each.shape) for each in arrays)
    if key != value or (key[0], key[3]) != (batch, size):
        return "queries, keys and values must have one batch size and one head size, and keys and values one shape"
    if size not in _SIZES[platform]:
        return f"the head size is {size}, and it takes {', '.join(map(str, _SIZES[platform]))}"
    if heads % key[2]:
        return f"{heads} heads of queries are no multiple of {key[2]} heads of keys"
    if time % _SMALLEST or key[1] % _SMALLEST:
        return f"the lengths are {time} and {key[1]}, and it takes multiples of {_SMALLEST}"
    if given.get("mask") is not None and not masks.read(given["mask"], (time, key[1])):
        return "its mask is not made of masks of queries, masks of keys and a causal mask"
    if platform == "gpu" and time != key[1]:
        return "queries and keys are of different length"
    of_queries, of_keys = ({each.ref() for each in found} for found in (masks.queries, masks.keys))
    if platform == "gpu" and of_keys and of_keys != of_queries:
        return "keys are masked, and their queries are not masked in the same way"
    return ""


class _Masks:
    """What a mask is made of.

    Attributes:
        queries: masks of [batch or 1, queries].
        keys: masks of [batch or 1, keys].
        causal: whether it is causal.
    """

    def __init__(self) -> None:
        self.queries: list[tf.Tensor] = []
        self.keys: list[tf.Tensor] = []
        self.causal = False

    def read(self, mask: Any, lengths: tuple[int, int]) -> bool:
        """Whether a mask is made of such parts, which are noted; its last dimensions are queries and keys, or 1."""
        if not tf.is_symbolic_tensor(mask):  # a value: it is a constant of the program
            mask = tf.identity(mask) if tf.is_tensor(mask) else tf.constant(mask)
        return mask.shape.rank == 4 and self._read(mask, lengths)

    def _read(self, mask: tf.Tensor, lengths: tuple[int, int]) -> bool:
        *outer, queries, keys = mask.shape
        if mask.dtype != tf.bool or outer[1:] not in ([], [1]):
            return False
        if (queries, keys) == (1, lengths[1]):
            self.keys.append(_flat(mask, keys))
        elif (queries, keys) == (lengths[0], 1):
            self.queries.append(_flat(mask, queries))
        elif mask.op.type == "LogicalAnd":
            return all(each.shape.rank == mask.shape.rank and self._read(each, lengths) for each in mask.op.inputs)
        elif mask.op.type == "ExpandDims" and mask.shape.rank == 4:
            inner = mask.op.inputs[0]
            return list(inner.shape) == [*outer[:1], queries, keys] and self._read(inner, lengths)
        elif (queries, keys) == lengths and _is_causal(mask.op):
            self.causal = True
        else:
            return False
        return True


def _flat(mask: tf.Tensor, length: int) -> tf.Tensor:
    """A mask of queries or of keys as [batch or 1, length]: one tensor for all that are made of one by new axes."""
    while mask.shape.rank > 2 and mask.op.type == "ExpandDims":
        mask = mask.op.inputs[0]
    return mask if tuple(mask.shape[1:]) == (length,) else tf.reshape(mask, [-1, length])


def _is_causal(op: tf.Operation) -> bool:
    """Whether an op makes the causal mask of Keras, which compares the numbers of rows with those of columns."""
    sums = [each.op for each in op.inputs]
    if op.type != "GreaterEqual" or any(each.type != "Cumsum" for each in sums):
        return False
    ones = [each.inputs[0].op for each in sums]
    if any(each.type != "Fill" or tf.get_static_value(each.inputs[1]) != 1 for each in ones):
        return False
    if any(each.get_attr("reverse") or each.get_attr("exclusive") for each in sums):
        return False
    rank = op.outputs[0].shape.rank
    axes = [tf.get_static_value(each.inputs[1]) for each in sums]
    return None not in axes and [axis % rank for axis in axes] == [rank - 2, rank - 1]


# What follows is JAX. Arrays are [batch, time, heads, size].


def attention(
    query: Any,
    key: Any,
    value: Any,
    queries: Any,
    keys: Any,
    *,
    platform: str,
    causal: bool,
    scale: float,
    interpret: bool = False,
) -> Any:
    """Attention by a kernel, with gradients of all orders: those of the first order by kernels too.

    Kernels have no gradients of gradients. So a gradient of the kernel's gradient is that of `plain`.

    Args:
        query: the queries.
        key: the keys.
        value: the values.
        queries: bool [batch or 1, time], the queries that are not masked; None if none is.
        keys: the same for keys.
        platform: whose kernel.
        causal: whether a query sees no later keys.
        scale: a factor of the scores.
        interpret: for tests: whether the kernel is computed on CPUs, as plain code of JAX.
    """
    masks = [
        None if mask is None else jax.numpy.broadcast_to(mask, each.shape[:2])
        for mask, each in ((queries, query), (keys, key))
    ]
    slow = functools.partial(_plain, causal=causal, scale=scale)
    fast = functools.partial(_by_kernel, causal=causal, scale=scale, interpret=interpret, on_tpu=platform == "tpu")
    structure: Any = None  # of the kernel's own gradient: those of two traces do not compare equal

    @jax.custom_vjp
    def forward(arrays: Any, masks: Any) -> Any:
        nonlocal structure
        results, pull = jax.vjp(lambda *arrays: fast(*arrays, *masks), *arrays)
        saved, structure = jax.tree_util.tree_flatten(pull)
        return results, saved

    @jax.custom_vjp
    def backward(saved: Any, arrays: Any, masks: Any, upstream: Any) -> Any:
        return jax.tree_util.tree_unflatten(structure, saved)(upstream)

    def keep(arrays: Any, masks: Any) -> Any:
        results, saved = forward(arrays, masks)
        return (results, saved), (saved, arrays, masks)

    def first(kept: Any, upstream: Any) -> Any:
        return backward(*kept, upstream[0]), None

    def keep_again(*given: Any) -> Any:
        return backward(*given), given[1:]

    def second(kept: Any, upstream: Any) -> Any:
        arrays, masks, weight = kept

        def gradients(arrays: Any, weight: Any) -> Any:
            return jax.vjp(lambda *arrays: slow(*arrays, *masks), *arrays)[1](weight)

        of_arrays, of_weight = jax.vjp(gradients, arrays, weight)[1](upstream)
        return None, of_arrays, None, of_weight

    forward.defvjp(keep, first)
    backward.defvjp(keep_again, second)
    return forward((query, key, value), masks)[0]


def _plain(query: Any, key: Any, value: Any, queries: Any, keys: Any, causal: bool, scale: float) -> Any:
    """Attention as Keras computes it, with a matrix of all scores."""
    jnp = jax.numpy
    key, value = (jnp.repeat(each, query.shape[2] // each.shape[2], axis=2) for each in (key, value))
    scores = jnp.einsum("bqnh,bknh->bnqk", query, key).astype(jnp.float32) * scale
    seen = jnp.tri(query.shape[1], key.shape[1], dtype=bool) if causal else jnp.ones([], bool)
    seen = seen if queries is None else seen & queries[:, None, :, None]
    seen = seen if keys is None else seen & keys[:, None, None, :]
    weights = jax.nn.softmax(jnp.where(seen, scores, -0.7 * jnp.finfo(jnp.float32).max))
    return jnp.einsum("bnqk,bknh->bqnh", weights.astype(value.dtype), value)


def _by_kernel(
    query: Any,
    key: Any,
    value: Any,
    seen: Any,
    keys: Any,
    causal: bool,
    scale: float,
    interpret: bool,
    on_tpu: bool,
) -> Any:
    jnp = jax.numpy
    result = (_on_tpu if on_tpu else _on_gpu)(query, key, value, keys, causal, scale, interpret)
    if keys is not None:
        # Which queries see a key at all: a kernel has arbitrary numbers for the others.
        time, length = query.shape[1], key.shape[1]
        last = jnp.minimum(jnp.arange(time), length - 1) if causal else jnp.full([time], length - 1)
        some = jnp.cumsum(keys, axis=1, dtype=jnp.int32)[:, last] > 0
        seen = some if seen is None else seen & some
    if seen is None:
        return result
    mean = jnp.mean(value.astype(jnp.float32), axis=1, keepdims=True).astype(value.dtype)
    mean = jnp.repeat(mean, query.shape[2] // key.shape[2], axis=2)
    return jnp.where(seen[:, :, None, None], result, mean)


def _on_tpu(query: Any, key: Any, value: Any, keys: Any, causal: bool, scale: float, interpret: bool) -> Any:
    jnp, splash = jax.numpy, jaxlib.attention_on_tpus()
    shape = query.shape[1], key.shape[1]
    mask = splash.CausalMask(shape) if causal else splash.FullMask(shape)
    q, k = (next(each for each in _BLOCKS if length % each == 0) for length in shape)
    # Not kept: its arrays are constants of the trace that they are made in.
    kernel = splash.make_splash_mha(
        splash.MultiHeadMask([mask] * query.shape[2]),
        block_sizes=splash.BlockSizes(q, k, k, q, k, k, q, k),
        head_shards=1,
        q_seq_shards=1,
        interpret=interpret,
    )
    scaled = (query.astype(jnp.float32) * scale).astype(query.dtype)
    ids = None if keys is None else splash.SegmentIds(jnp.ones(query.shape[:2], jnp.int32), keys.astype(jnp.int32))
    query, key, value = (each.swapaxes(1, 2) for each in (scaled, key, value))
    return jax.vmap(kernel)(query, key, value, ids).swapaxes(1, 2)


def _on_gpu(query: Any, key: Any, value: Any, keys: Any, causal: bool, scale: float, interpret: bool) -> Any:
    groups = query.shape[2] // key.shape[2]
    key, value = (jax.numpy.repeat(each, groups, axis=2) for each in (key, value))
    # A masked query sees the masked keys here, and gets the mean instead.
    ids = None if keys is None else keys.astype(jax.numpy.int32)
    return jaxlib.attention_on_gpus().mha(query, key, value, ids, sm_scale=scale, causal=causal, interpret=interpret)
