"""Makes a failing training small: drops or simplifies one thing after the other while it fails in the same way."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from soak.trainings.spec import Head, Part, Spec

_FIELDS = ("between", "callbacks", "body", "validation", "style", "schedule", "loss_scale", "loss_weights")
_FIELDS += ("sample_weight", "class_weight", "run_eagerly", "jit_compile", "limit", "shared", "mask_zero")
_FIELDS += ("steps_per_execution", "feed", "epochs", "optimizer", "inputs", "rate")
"""Fields that may be simpler, those that say most first. The dtype stays: it may be the cause."""


def smallest(spec: Spec, fails: Callable[[Spec], bool], seconds: float = float("inf")) -> Spec:
    """The smallest training found that still fails; no other one is tried after so many seconds.

    `fails` says whether a training fails in the same way. It is called once for each one that is tried.
    """
    until = time.monotonic() + seconds
    tried: list[Spec] = [spec]
    smaller = True
    while smaller:
        smaller = False
        for each in candidates(spec):
            if time.monotonic() > until:
                return spec
            if each in tried:
                continue
            tried.append(each)
            if fails(each):
                spec, smaller = each, True
                break
    return spec


def candidates(spec: Spec) -> Iterator[Spec]:
    """Trainings with one thing less. Each is smaller, so a chain of them ends."""
    for name in _FIELDS:
        value = "vector" if name == "inputs" else getattr(Spec, name)
        if getattr(spec, name) != value:
            yield _fitting(dataclasses.replace(spec, **{name: value}))
    for name in ("body", "callbacks"):
        for parts in _fewer(getattr(spec, name)):
            yield dataclasses.replace(spec, **{name: parts})
    for heads in _fewer(spec.heads):
        if heads:
            yield _fitting(dataclasses.replace(spec, heads=heads))
    for index, head in enumerate(spec.heads):
        for simpler in _simpler_heads(head):
            yield _fitting(dataclasses.replace(spec, heads=_with(spec.heads, index, simpler)))
    for index, part in enumerate(spec.body):
        for options in _fewer_options(part):
            yield dataclasses.replace(spec, body=_with(spec.body, index, options))
    for optimizer in _fewer_options(spec.optimizer):
        yield dataclasses.replace(spec, optimizer=optimizer)
    yield from _smaller_data(spec)


def _fitting(spec: Spec) -> Spec:
    """Without what other fields no longer allow."""
    masked = spec.mask_zero and spec.inputs in ("tokens", "several")
    shared, loss_weights = spec.shared and spec.inputs == "vector", spec.loss_weights and len(spec.heads) > 1
    return dataclasses.replace(spec, mask_zero=masked, shared=shared, loss_weights=loss_weights)


def _smaller_data(spec: Spec) -> Iterator[Spec]:
    """Fewer batches, smaller ones, fewer replicas."""
    for sizes in _fewer(spec.sizes):
        if sizes:
            yield dataclasses.replace(spec, sizes=sizes)
    for index, size in enumerate(spec.sizes):
        for smaller in sorted({1, size // 2} - {0, size}):
            yield dataclasses.replace(spec, sizes=_with(spec.sizes, index, smaller))
    for replicas in range(1, spec.replicas):
        yield dataclasses.replace(spec, replicas=replicas)


def _fewer(items: Sequence[Any]) -> Iterator[tuple[Any, ...]]:
    """Each half of the items, then all but one of them."""
    items = tuple(items)
    if len(items) > 3:
        half = len(items) // 2
        yield items[:half]
        yield items[half:]
    for index in range(len(items)):
        yield items[:index] + items[index + 1 :]


def _fewer_options(part: Part) -> Iterator[Part]:
    """The part without one of its options, and a wrapper's layer without its wrapper."""
    for name, value in part.options.items():
        yield Part(part.name, {key: each for key, each in part.options.items() if key != name})
        if isinstance(value, Part):
            yield value


def _simpler_heads(head: Head) -> Iterator[Head]:
    """A head without a metric, or with the simplest loss."""
    for metrics in _fewer(head.metrics):
        yield head._replace(metrics=metrics)
    for weighted in _fewer(head.weighted):
        yield head._replace(weighted=weighted)
    simplest = Head("numbers", Part("MeanSquaredError"))
    if head.loss != simplest.loss:
        yield simplest._replace(metrics=head.metrics, weighted=head.weighted)


def _with(items: tuple[Any, ...], index: int, item: Any) -> tuple[Any, ...]:
    return (*items[:index], item, *items[index + 1 :])
