"""The layers that are drawn, for each kind of input."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from soak.trainings.spec import Part

ACTIVATIONS = ("relu", "tanh", "gelu", "swish", "elu", "softplus", None)

Draw = Callable[[random.Random], Part]


def drawn(draw: random.Random, inputs: str, mask_zero: bool) -> tuple[Part, ...]:
    """The layers between inputs and heads."""
    if inputs in ("vector", "several", "text"):
        body = [_dense(draw) for _ in range(draw.randint(1, 3))]
    else:
        kinds, most, ends = {
            "sequence": (_SEQUENCE, 3, ("GlobalAveragePooling1D", "GlobalMaxPooling1D", "Flatten", "GRU")),
            "image": (_IMAGE, 2, ("GlobalAveragePooling2D", "GlobalMaxPooling2D", "Flatten")),
            "volume": (_VOLUME, 1, ("GlobalAveragePooling3D", "Flatten")),
            "tokens": (_TOKENS, 1, ("GlobalAveragePooling1D", "GRU", "LSTM", *(() if mask_zero else ("Flatten",)))),
        }[inputs]
        body = [draw.choice(kinds)(draw) for _ in range(draw.randint(inputs != "tokens", most))]
        end = draw.choice(ends)
        body.append(Part(end, {"units": 3} if end in ("GRU", "LSTM") else {}))
    for _ in range(draw.choice((0, 0, 1, 1, 2))):
        body.insert(draw.randint(1, len(body)), draw.choice(_NORMALIZATIONS))
    if draw.random() < 0.3:
        body.append(_dense(draw))
    if draw.random() < 0.1:
        body.append(Part("ActivityRegularization", {"l2": 0.01}))
    if draw.random() < 0.1:
        body.append(Part("Dropout", {"rate": 0.3}))
    return tuple(body)


def _dense(draw: random.Random) -> Part:
    regularizer = draw.choice((None, None, None, "l2", "l1"))
    options = {"units": draw.randint(2, 7), "activation": draw.choice(ACTIVATIONS), "kernel_regularizer": regularizer}
    return Part("Dense", options)


_NORMALIZATIONS = (
    Part("LayerNormalization"),
    Part("BatchNormalization", {"synchronized": True, "momentum": 0.7}),
    Part("GroupNormalization", {"groups": -1}),
    Part("UnitNormalization"),
    Part("LayerNormalization", {"center": False}),
)


def _convolution(name: str, rank: int) -> Draw:
    """A convolution, with strides or dilated, or neither."""

    def draw_one(draw: random.Random) -> Part:
        options: dict[str, Any] = {
            "kernel_size": draw.randint(1, 3 if rank < 3 else 2),
            "padding": draw.choice(("same", "valid")),
            "activation": draw.choice(ACTIVATIONS),
        }
        options |= {"depth_multiplier": draw.randint(1, 2)} if "Depthwise" in name else {"filters": draw.randint(2, 4)}
        more: list[dict[str, Any]] = [{}, {"strides": 2}]
        if name in ("Conv1D", "Conv2D"):
            more.append({"dilation_rate": 2, "kernel_size": 2, "padding": "same"})
        return Part(name, options | draw.choice(more))

    return draw_one


def _fixed(name: str, **options: object) -> Draw:
    return lambda draw: Part(name, dict(options))


def _recurrent(draw: random.Random) -> Part:
    layer = Part(draw.choice(("GRU", "LSTM", "SimpleRNN")), {"units": draw.randint(2, 4), "return_sequences": True})
    if draw.random() < 0.4:
        mode = draw.choice(("concat", "sum", "mul", "ave"))
        return Part("Bidirectional", {"layer": layer, "merge_mode": mode})
    backwards = {"go_backwards": True} if draw.random() < 0.3 else {}
    return Part(layer.name, layer.options | backwards)


_ATTENTION: tuple[Draw, ...] = (
    _fixed("MultiHeadAttention", num_heads=2, key_dim=2),
    _fixed("GroupQueryAttention", head_dim=2, num_query_heads=2, num_key_value_heads=1),
    _fixed("Attention", use_scale=True),
)
_BY_TIME = _fixed("TimeDistributed", layer=Part("Dense", {"units": 3, "activation": "tanh"}))
_SEQUENCE: tuple[Draw, ...] = (
    _convolution("Conv1D", 1),
    _convolution("SeparableConv1D", 1),
    _convolution("Conv1DTranspose", 1),
    _fixed("Conv1D", filters=3, kernel_size=2, padding="causal"),
    _recurrent,
    _recurrent,
    *_ATTENTION,
    _BY_TIME,
    _fixed("MaxPooling1D", pool_size=2, padding="same"),
    _fixed("AveragePooling1D", pool_size=2, padding="same"),
)
_IMAGE: tuple[Draw, ...] = (
    _convolution("Conv2D", 2),
    _convolution("Conv2D", 2),
    _convolution("DepthwiseConv2D", 2),
    _convolution("SeparableConv2D", 2),
    _convolution("Conv2DTranspose", 2),
    _fixed("MaxPooling2D", pool_size=2, padding="same"),
    _fixed("AveragePooling2D", pool_size=2, padding="same"),
    _fixed("UpSampling2D", interpolation="bilinear"),
    _fixed("ZeroPadding2D"),
    _fixed("Resizing", height=4, width=4),
)
_VOLUME: tuple[Draw, ...] = (
    _convolution("Conv3D", 3),
    _convolution("Conv3DTranspose", 3),
    _fixed("MaxPooling3D", pool_size=2),
)
_TOKENS: tuple[Draw, ...] = (_recurrent, _ATTENTION[0], _BY_TIME, _fixed("LayerNormalization"))
