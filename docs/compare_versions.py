"""Compares the numbers of TensorFlow functions and gradients between versions, and the strategies with one device.

`record FILE`, run in the environment of each version, writes what each case computes. `compare OLD NEW` prints where
the numbers differ, and where a strategy differs from one device.
"""

import faulthandler
import functools
import itertools
import json
import operator
import os
import pathlib
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import tensorflow as tf

import replica_engine

NAN, INF = np.nan, np.inf
EDGES = [
    0,
    -0.0,
    NAN,
    INF,
    -INF,
    1e-40,
    -1e-40,
    *(s * x for x in (1e-7, 0.1, 0.5, 1, 1.5, 3, 20, 90, 3e38) for s in (1, -1)),
]
PAIRS = np.array(np.meshgrid(*2 * [[0, -0.0, NAN, INF, -INF, 1e-40, 0.3, 1, 5, -2.5, 3e38]])).reshape(2, -1)
ROWS = [[1, 2, 3], [0, -0.0, 0], [NAN, 1, 2], [INF, 1, -2], [1e-40, 0, 1e-40], [3e38, 3e38, 1], [0, 5, 0], [2, 0, 7]]
EMPTY, IDS = np.zeros([0, 3]), [0, 0, 1, 1, 3, 3, 3, 4]
SOUND = np.array([[[4, 1, 0.5], [1, 3, 0.2], [0.5, 0.2, 2]], np.eye(3)])
MATRICES = {"positive definite": SOUND, "negative definite": -SOUND, "singular": np.ones([1, 3, 3])}
LABELS, SHARES = np.eye(3)[[0, 1, 2, 0]], [[0, 0.5, 0.5], [1, 0, 0], [0.2, 0.3, 0.5], [0, 0, 1]]
IMAGE = np.arange(50).reshape(1, 5, 5, 2) % 7 - 3
IMAGES = {"finite": IMAGE, "with NaN, infinity": np.where(IMAGE == 2, NAN, np.where(IMAGE == 3, INF, IMAGE))}
KERNEL = np.arange(16).reshape(2, 2, 2, 2) % 5 - 2

ELEMENTWISE = """abs acos acosh asin asinh atan atanh cos cosh exp floor math.ceil round sigmoid sign sin sinh sqrt
square tan tanh math.bessel_i0 math.bessel_i0e math.bessel_i1 math.bessel_i1e math.digamma math.erf math.erfc
math.erfcinv math.erfinv math.expm1 math.lgamma math.log math.log1p math.log_sigmoid math.ndtri math.reciprocal
math.reciprocal_no_nan math.rsqrt math.softplus nn.softsign math.special.bessel_j0 math.special.bessel_j1
math.special.bessel_k0 math.special.bessel_k0e math.special.bessel_k1 math.special.bessel_k1e math.special.bessel_y0
math.special.bessel_y1 math.special.dawsn math.special.expint math.special.fresnel_cos math.special.fresnel_sin
math.special.spence nn.elu nn.gelu nn.leaky_relu nn.relu nn.relu6 nn.selu nn.silu keras.activations.hard_sigmoid
keras.activations.mish"""
OF_TWO = """atan2 divide math.divide_no_nan math.floordiv math.floormod math.igamma math.igammac math.maximum
math.minimum math.multiply_no_nan math.nextafter math.polygamma math.pow math.squared_difference math.xdivy
math.xlog1py math.xlogy math.zeta nn.sigmoid_cross_entropy_with_logits nn.log_poisson_loss"""
OF_ROWS = """argsort cumsum math.cumprod math.cumulative_logsumexp norm math.reduce_max math.reduce_mean
math.reduce_prod math.reduce_sum math.reduce_euclidean_norm math.reduce_logsumexp math.reduce_std math.reduce_variance
nn.softmax nn.log_softmax math.l2_normalize sort"""
OF_MATRICES = "cholesky det eigvalsh inv logdet slogdet"
OF_LOSSES = """BinaryCrossentropy CategoricalCrossentropy CosineSimilarity Huber KLDivergence LogCosh
MeanAbsolutePercentageError MeanSquaredLogarithmicError Poisson"""
OF_SEGMENTS = "segment_max segment_mean segment_min segment_prod segment_sum"
OF_IMAGES: dict[str, Callable[..., Any]] = {
    "nn.conv2d": lambda x: tf.nn.conv2d(x, tf.constant(KERNEL, x.dtype), 1, "SAME"),
    "nn.conv2d_transpose": lambda x: tf.nn.conv2d_transpose(x, tf.constant(KERNEL, x.dtype), [1, 10, 10, 2], 2),
    "nn.max_pool2d": lambda x: tf.nn.max_pool2d(x, 2, 2, "SAME"),
    "nn.avg_pool2d": lambda x: tf.nn.avg_pool2d(x, 3, 2, "SAME"),
    "nn.local_response_normalization": lambda x: tf.nn.local_response_normalization(x, 1),
    "fused_batch_norm": lambda x: tf.compat.v1.nn.fused_batch_norm(x, [1.0, 2], [0.5, 0])[0],
    "image.resize, bilinear": lambda x: tf.image.resize(x, [7, 3]),
    "image.resize, bicubic": lambda x: tf.image.resize(x, [7, 3], "bicubic"),
    "image.resize, nearest": lambda x: tf.image.resize(x, [7, 3], "nearest"),
    "image.resize, antialias": lambda x: tf.image.resize(x, [3, 2], "lanczos3", antialias=True),
    "image.crop_and_resize": lambda x: tf.image.crop_and_resize(x, [[0.1, 0, 0.7, 1.2]], [0], [3, 3]),
    "image.per_image_standardization": tf.image.per_image_standardization,
}
SEED = [3, 4]
OTHERS: dict[str, tuple[Callable[..., Any], list[Any]]] = {
    "clip_by_norm": (lambda x: tf.clip_by_norm(x, 1.5, -1), [ROWS]),
    "clip_by_norm, infinite limit": (lambda x: tf.clip_by_norm(x, INF, -1), [ROWS]),
    "clip_by_norm, limit 0": (lambda x: tf.clip_by_norm(x, 0.0, -1), [ROWS]),
    "clip_by_value": (lambda x: tf.clip_by_value(x, -1, 2), [EDGES]),
    "clip_by_value, NaN": (lambda x: tf.clip_by_value(x, NAN, 2), [EDGES]),
    "clip_by_global_norm": (lambda x, y: tf.clip_by_global_norm([x, y], 1.5)[0], [ROWS[0], ROWS[7]]),
    "clip_by_global_norm, infinity": (lambda x, y: tf.clip_by_global_norm([x, y], 1.5)[0], [ROWS[0], ROWS[3]]),
    "clip_by_global_norm, NaN": (lambda x, y: tf.clip_by_global_norm([x, y], 1.5)[0], [ROWS[0], ROWS[2]]),
    "clip_by_global_norm, infinite limit": (lambda x, y: tf.clip_by_global_norm([x, y], INF)[0], [ROWS[0], ROWS[7]]),
    "norm, ord 1": (lambda x: tf.norm(x, 1, -1), [ROWS]),
    "norm, ord infinity": (lambda x: tf.norm(x, INF, -1), [ROWS]),
    "norm of all": (tf.norm, [np.zeros([2, 2])]),
    "math.cumprod, reverse, exclusive": (lambda x: tf.math.cumprod(x, -1, True, True), [ROWS]),
    "gather": (lambda x: tf.gather(x, [7, 0, 0, 2]), [ROWS]),
    "dynamic_stitch": (lambda x, y: tf.dynamic_stitch([[0, 2, 1], [1, 3]], [x, y]), [ROWS[2], ROWS[0][:2]]),
    "dynamic_stitch, repeated": (lambda x, y: tf.dynamic_stitch([[0, 1, 1], [1, 0]], [x, y]), [ROWS[0], ROWS[3][:2]]),
    "dynamic_partition": (lambda x: tf.dynamic_partition(x, IDS, 5), [ROWS]),
    "scatter_nd": (lambda x: tf.scatter_nd([[each] for each in IDS], x, [6, 3]), [ROWS]),
    "tensor_scatter_nd_max": (lambda x, y: tf.tensor_scatter_nd_max(x, [[0], [0]], y), [ROWS, ROWS[2:4]]),
    "where": (lambda x, y: tf.where(x > y, x / y, y), list(PAIRS)),
    "math.top_k": (lambda x: tf.math.top_k(x, 2), [ROWS]),
    "argmax": (lambda x: tf.argmax(x, -1), [ROWS]),
    "cast to int32": (lambda x: tf.cast(x, tf.int32), [EDGES]),
    "cast to uint8": (lambda x: tf.cast(x, tf.uint8), [EDGES]),
    "cast to bfloat16": (lambda x: tf.cast(tf.cast(x, tf.bfloat16), tf.float32), [EDGES]),
    "quantization.fake_quant": (lambda x: tf.quantization.fake_quant_with_min_max_args(x, -1, 2), [EDGES]),
    "math.unsorted_segment_mean": (lambda x: tf.math.unsorted_segment_mean(x, IDS, 6), [ROWS]),
    "math.unsorted_segment_max": (lambda x: tf.math.unsorted_segment_max(x, IDS, 6), [ROWS]),
    "math.unsorted_segment_prod": (lambda x: tf.math.unsorted_segment_prod(x, IDS, 6), [ROWS]),
    "linalg.solve": (tf.linalg.solve, [SOUND, SOUND + 1]),
    "linalg.triangular_solve": (tf.linalg.triangular_solve, [SOUND, SOUND + 1]),
    "signal.fft": (lambda x: tf.signal.fft(tf.complex(x, x)), [ROWS]),
    "signal.rfft": (tf.signal.rfft, [ROWS]),
    "signal.dct": (tf.signal.dct, [ROWS]),
    "nn.dropout": (lambda x: tf.nn.experimental.stateless_dropout(x, 0.5, SEED), [EDGES]),
    "random.stateless_normal": (lambda x: x + tf.random.stateless_normal([9], SEED), [0.0]),
    "random.stateless_uniform": (lambda x: x + tf.random.stateless_uniform([9], SEED), [0.0]),
    "random.stateless_gamma": (lambda x: tf.random.stateless_gamma([9], SEED, x), [2.5]),
    "nn.ctc_loss": (
        lambda x: tf.nn.ctc_loss([[1, 2]], x[:, None], [2], [8], blank_index=0),
        [np.log1p(IDS * np.ones([3, 1])).T],
    ),
    "nn.softmax_cross_entropy": (lambda x: tf.nn.softmax_cross_entropy_with_logits(tf.ones_like(x) / 3, x), [ROWS]),
    "nn.sparse_softmax_cross_entropy": (lambda x: tf.nn.sparse_softmax_cross_entropy_with_logits([0] * 8, x), [ROWS]),
}


def _loss(name: str, x: tf.Tensor) -> tf.Tensor:
    return getattr(tf.keras.losses, name)(reduction=None)(LABELS, x)


def _cases() -> Iterator[tuple[str, tuple[Callable[..., Any], list[Any]]]]:
    def get(name: str) -> Callable[..., Any]:
        return operator.attrgetter(name)(tf)

    for name in ELEMENTWISE.split():
        yield name, (get(name), [EDGES])
    for name in OF_TWO.split():
        yield name, (get(name), list(PAIRS))
    for name in OF_ROWS.split():
        yield name, (functools.partial(get(name), axis=-1), [ROWS])
        yield f"{name} of nothing", (functools.partial(get(name), axis=0), [EMPTY])
    for name in OF_MATRICES.split():
        yield from ((f"linalg.{name}, {kind}", (getattr(tf.linalg, name), [x])) for kind, x in MATRICES.items())
    for name in OF_LOSSES.split():
        yield f"keras.losses.{name}", (functools.partial(_loss, name), [SHARES])
    for name in OF_SEGMENTS.split():
        yield f"math.{name}", (functools.partial(lambda f, x: f(x, IDS), getattr(tf.math, name)), [ROWS])
    for name, function in OF_IMAGES.items():
        yield from ((f"{name}, {kind}", (function, [x])) for kind, x in IMAGES.items())
    yield from OTHERS.items()


CASES = dict(_cases())
"""Each function with its inputs, which become float32."""

FORMS = ("one device", "compiled", "MirroredStrategy", "TPUStrategy")
KEYS = [f"{what}, {form}" for what in ("values", "gradients") for form in FORMS]
LIMIT = 900
"""Seconds for one case in all forms, after which its process ends."""
ROUNDING = 1e-5
KINDS = SAME, ZEROS, LAST_BITS, VALUES = ("the same", "other signs of zeros", "other last bits", "other values")
Results = list[dict[str, Any]] | str
"""Dtype, shape and bits of each tensor; or what was raised."""
Recorded = dict[str, dict[str, Any]]


def values(function: Callable[..., Any], *inputs: tf.Tensor) -> list[tf.Tensor]:
    """All outputs."""
    return tf.nest.flatten(function(*inputs))


def gradients(function: Callable[..., Any], *inputs: tf.Tensor) -> list[tf.Tensor]:
    """The gradients with respect to all inputs, of the outputs times 1, 2, ... 7, 1, ..."""
    with tf.GradientTape() as tape:
        tape.watch(inputs)
        outputs = [y for y in values(function, *inputs) if y.dtype.is_floating]
    factors = [tf.cast(tf.reshape(tf.range(tf.size(y)) % 7 + 1, tf.shape(y)), y.dtype) for y in outputs]
    found = tape.gradient(outputs, inputs, factors) if outputs else []
    return [tf.convert_to_tensor(each) for each in found if each is not None]


def compute(names: list[str]) -> None:
    """Prints a line of JSON for each case: its inputs, and its results by form. Those of both replicas are there."""
    devices = replica_engine.logical_devices(2)
    strategies = replica_engine.MirroredStrategy(devices), replica_engine.TPUStrategy(num_cores=2)

    def on(strategy: Any, function: Callable[..., Any], *inputs: tf.Tensor) -> list[tf.Tensor]:
        results = [strategy.experimental_local_results(each) for each in strategy.run(function, args=inputs)]
        return [result for replica in zip(*results, strict=True) for result in replica]

    for name in names:
        faulthandler.dump_traceback_later(LIMIT, exit=True)
        function, inputs = CASES[name][0], [tf.constant(each, tf.float32) for each in CASES[name][1]]
        entry: dict[str, Any] = {"inputs": _bits(inputs)}
        for what in (values, gradients):
            body = functools.partial(what, function)
            forms = [
                body,
                tf.function(body, jit_compile=True),
                *(functools.partial(on, each, body) for each in strategies),
            ]
            for form, run in zip(FORMS, forms, strict=True):
                try:
                    entry[f"{what.__name__}, {form}"] = _bits(run(*inputs))
                except Exception as error:
                    entry[f"{what.__name__}, {form}"] = f"{type(error).__name__}: {error}"[:300]
        print(json.dumps({name: entry}), flush=True)


def _bits(tensors: list[tf.Tensor]) -> list[dict[str, Any]]:
    arrays = map(np.asarray, tensors)
    return [{"dtype": each.dtype.name, "shape": each.shape, "bits": each.tobytes().hex()} for each in arrays]


def record(file: pathlib.Path, names: Iterable[str]) -> None:
    """Computes cases in a process of its own; in another one after a case at which the process ends."""
    file.write_text("")
    quiet = os.environ | {"TF_CPP_MIN_LOG_LEVEL": "3"}
    while left := [name for name in names if name not in read(file)]:
        with file.open("a") as lines:
            status = subprocess.run([sys.executable, __file__, "cases", *left], stdout=lines, env=quiet).returncode
            if status:
                name = next(name for name in left if name not in read(file))
                ended = {"inputs": []} | dict.fromkeys(KEYS, f"the process ended with {status}")
                print(json.dumps({name: ended}), file=lines)


def read(file: pathlib.Path) -> Recorded:
    """What was recorded for each case."""
    return {name: entry for line in file.read_text().splitlines() for name, entry in json.loads(line).items()}


def difference(old: Results, new: Results) -> tuple[str, np.ndarray]:
    """How two results differ, and at which elements."""
    none = np.array([], int)
    if isinstance(old, str) or isinstance(new, str):
        return (SAME if isinstance(old, str) and isinstance(new, str) else VALUES), none
    if [each["shape"] for each in old] != [each["shape"] for each in new]:
        return VALUES, none
    a, b = _numbers(old), _numbers(new)
    with np.errstate(all="ignore"):
        equal = (a == b) | (np.isnan(a) & np.isnan(b))
        bound = np.maximum(ROUNDING * np.maximum(abs(a), abs(b)), np.finfo(np.float32).tiny)
        near = equal | (np.isfinite(a) & np.isfinite(b) & (abs(a - b) <= bound))
    zeros = (np.signbit(a) != np.signbit(b)) & (a == 0) & equal
    kinds = {VALUES: ~near, LAST_BITS: ~equal, ZEROS: zeros}
    return next(((kind, np.flatnonzero(there)) for kind, there in kinds.items() if there.any()), (SAME, none))


def _numbers(results: list[dict[str, Any]]) -> np.ndarray:
    """All elements in one row; of complex numbers their parts."""
    arrays = [np.frombuffer(bytes.fromhex(each["bits"]), each["dtype"]) for each in results]
    return np.concatenate([[], *(each.view(each.real.dtype).astype(float) for each in arrays)])


def compare(old: Recorded, new: Recorded, pairs: list[tuple[list[str], str]]) -> dict[str, list[str]]:
    """Where a form in one record differs from each of some forms in the other: rows of a table by kind."""
    found: dict[str, dict[tuple[str, ...], list[str]]] = {kind: {} for kind in KINDS}
    for name, what in itertools.product([name for name in old if name in new], ("values", "gradients")):
        for lefts, right in pairs:
            b = _of_one_replica(new[name], what, right) if lefts == [right] else new[name][f"{what}, {right}"]
            each = [_of_one_replica(old[name], what, left) for left in lefts]
            if lefts != [right]:
                each = [a if isinstance(a, str) else 2 * a for a in each]
            kind, at, a = min(((*difference(a, b), a) for a in each), key=lambda one: KINDS.index(one[0]))
            row = (name, what, *(_row(old[name], a, b, at[:3]) if kind == VALUES else ()))
            found[kind].setdefault(row, []).append(right)
    return {kind: [f"| {' | '.join((*row, ', '.join(rows[row])))} |" for row in rows] for kind, rows in found.items()}


def _of_one_replica(entry: dict[str, Any], what: str, form: str) -> Results:
    results = entry[f"{what}, {form}"]
    return results if form in FORMS[:2] or isinstance(results, str) else results[: len(results) // 2]


def _row(entry: dict[str, Any], old: Results, new: Results, at: np.ndarray) -> tuple[str, str, str]:
    """The inputs at which results differ, or the numbers of elements if these are not so many; and the results."""
    texts = [each.partition(":")[0] if isinstance(each, str) else str(_numbers(each)[at]) for each in (old, new)]
    rows = [_numbers([each]).reshape(each["shape"]) for each in entry["inputs"]]
    count = len(rows[0]) if len(at) and rows[0].ndim in (1, 2) else 0
    if not count or any(len(x) != count for x in rows) or new[0]["shape"][:1] != [count]:
        return f"elements {at}", texts[0], texts[1]
    places = dict.fromkeys(at // (_numbers(new[:1]).size // count) % count)
    return "; ".join(str([x[i].tolist() for x in rows]) for i in places), texts[0], texts[1]


def main(command: str, *arguments: str) -> None:
    """Records, or compares and prints."""
    if command == "cases":
        return compute(list(arguments))
    if command == "record":
        return record(pathlib.Path(arguments[0]), arguments[1:] or CASES)
    old, new = (read(pathlib.Path(each)) for each in arguments)
    parts = {"Old and new": compare(old, new, [([form], form) for form in FORMS])}
    one, compiled, threads, tpu = FORMS
    for version, each in {"old": old, "new": new}.items():
        found = compare(each, each, [([one], threads), ([compiled, one], tpu)])
        parts[f"One device and the strategies, {version}"] = found
    for (title, found), kind in itertools.product(parts.items(), KINDS[1:]):
        print(f"\n{title}, {kind}: {len(found[kind])}", *found[kind], sep="\n")
    return None


if __name__ == "__main__":
    main(*sys.argv[1:])
