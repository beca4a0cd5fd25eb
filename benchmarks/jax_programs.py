"""The same programs in JAX: each device has its part of the batch, and `psum` sums the gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from benchmarks.shared_models import Contender, Model, jax_ops

SPLIT, SAME = PartitionSpec("replica"), PartitionSpec()


def mesh_of(replicas: int) -> Mesh:
    """The first devices, along one axis."""
    return Mesh(np.array(jax.devices()[:replicas]), ("replica",))


def on_devices(mesh: Mesh, values: Any, spec: Any) -> Any:
    """Arrays on the devices of this process."""
    return jax.device_put(values, NamedSharding(mesh, spec))


def mapped(function: Callable[..., Any], mesh: Mesh, given: Any, returned: Any, donated: Any = ()) -> Any:
    """A program for each device of a mesh, compiled; `given` and `returned` say how arrays are partitioned."""
    # With check_vma, shard_map would sum the gradients itself, and psum would sum them again.
    program = jax.shard_map(function, mesh=mesh, in_specs=given, out_specs=returned, check_vma=False)
    return jax.jit(program, donate_argnums=donated)


def replica_step_of(model: Model, replicas: int) -> Callable[[Any, Any, Any], tuple[list[Any], Any]]:
    """The training step of a device on its weights, a batch and its labels; returns the new weights and the loss."""
    ops = jax_ops()

    def replica_step(weights: list[Any], x: Any, labels: Any) -> tuple[list[Any], Any]:
        loss, gradients = jax.value_and_grad(lambda weights: model.loss(ops, weights, x, labels))(weights)
        totals = jax.lax.psum(gradients, "replica")
        return [weight - model.rate / replicas * total for weight, total in zip(weights, totals, strict=True)], loss

    return replica_step


def jax_contender(model: Model, mesh: Mesh, on_devices: Callable[[Any, Any], Any]) -> Contender:
    """The program in JAX on the devices of a mesh, which may be those of several processes.

    `on_devices` puts arrays on them; it takes the arrays and how they are partitioned.
    """
    replica_step = replica_step_of(model, mesh.devices.size)

    def of_part(weights: list[Any], x: Any, labels: Any) -> tuple[list[Any], Any]:
        weights, loss = replica_step(weights, x[0], labels[0])
        return weights, loss[None]

    compiled = mapped(of_part, mesh, (SAME, SPLIT, SPLIT), (SAME, SPLIT), donated=0)
    weights = on_devices(model.weights(), SAME)
    batches = on_devices(model.data(mesh.devices.size), SPLIT)

    def step(index: int) -> Any:
        nonlocal weights
        weights, losses = compiled(weights, *batches[index % len(batches)])
        # The replicas of two programs that run on CPU at once can deadlock.
        return jax.block_until_ready(losses)

    def mean(losses: Any) -> float:
        return float(np.mean([np.asarray(part.data) for part in losses.addressable_shards]))

    return Contender("JAX", step, mean)
