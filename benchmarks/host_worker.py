"""One worker of one contender in the benchmark of several processes: does what it is told, order by order.

It answers each order with milliseconds for each, and the number to compare. All workers
of a contender get the same orders, and the clock is that of each worker. `CONTENDERS` is the place for another library
or strategy: a class with `all_reduce` and, if it trains, `train`. Only the libraries of the contender are imported.
"""

from __future__ import annotations

import functools
import itertools
import json
import os
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.measure import milliseconds
from benchmarks.shared_models import MODELS, Contender, torch_ops

Do = Callable[[], Any]
"""Does it once and waits for its end; returns the result."""


class OnTensorFlow:
    """A strategy of TensorFlow's kind.

    Args:
        strategy: the strategy.
        in_function: whether its steps are in a `tf.function`.
    """

    def __init__(self, strategy: Any, in_function: bool = True):
        self.strategy = strategy
        self._in_function = in_function

    def all_reduce(self, size: int) -> Do:
        """Sums a float32 array of `size` bytes; returns its first number."""
        import tensorflow as tf

        ones = self.strategy.experimental_distribute_values_from_function(lambda context: tf.ones([size // 4]))

        def body(own: Any) -> Any:
            own = tf.identity(own)  # tf.distribute does not take an argument itself
            return tf.distribute.get_replica_context().all_reduce("SUM", own)

        step = tf.function(lambda values: self.strategy.run(body, args=(values,)))
        return lambda: self.strategy.experimental_local_results(step(ones))[0].numpy()[0]

    def train(self, name: str) -> Do:
        """One step of a model; returns the loss of this worker's replicas."""
        from benchmarks.contenders import strategy_contender

        return _steps(strategy_contender("", self.strategy, MODELS[name], self._in_function))


class Threads(OnTensorFlow):
    """`replica_engine.MultiWorkerMirroredStrategy`."""

    def __init__(self, index: int, workers: int, replicas: int, addresses: list[str]):
        import tensorflow as tf

        import replica_engine

        _set_cluster(index, addresses)
        one = tf.config.LogicalDeviceConfiguration()
        tf.config.set_logical_device_configuration(tf.config.list_physical_devices("CPU")[0], [one] * replicas)
        super().__init__(replica_engine.MultiWorkerMirroredStrategy())

    def launches(self, told: bool) -> Do:
        """Steps of a millisecond, of which the job is told or not; returns the processor milliseconds of a step."""
        import tensorflow as tf

        launched = self.strategy.extended.launches.describe("all_reduce", tf.ones([256]))
        launched()
        launch, millisecond, steps = launched if told else lambda: None, threading.Event(), 1000

        def once() -> float:
            before = time.process_time()
            for _ in range(steps):
                launch()
                millisecond.wait(1e-3)
            return (time.process_time() - before) / steps * 1e3

        return once


class Compiled(OnTensorFlow):
    """`replica_engine.TPUStrategy` on CPU devices, with steps in eager mode, which is how it is fastest."""

    def __init__(self, index: int, workers: int, replicas: int, addresses: list[str]):
        import replica_engine

        _set_cluster(index, addresses)
        cpus = replica_engine.xla.PjrtClusterResolver("cpu")
        super().__init__(replica_engine.TPUStrategy(cpus, num_cores=workers * replicas), in_function=False)

    def all_reduce(self, size: int) -> Do:
        """As `OnTensorFlow.all_reduce`, from a variable to a variable, so that the numbers stay on the devices."""
        import tensorflow as tf

        with self.strategy.scope():
            ones, total = tf.Variable(tf.ones([size // 4])), tf.Variable(tf.zeros([size // 4]))

        def body() -> Any:
            total.assign(tf.distribute.get_replica_context().all_reduce("SUM", ones.read_value()))
            return total[0]

        return lambda: self.strategy.experimental_local_results(self.strategy.run(body))[0].numpy()


class TfDistribute(OnTensorFlow):
    """`tf.distribute.MultiWorkerMirroredStrategy`, which has one replica for each worker without GPUs."""

    def __init__(self, index: int, workers: int, replicas: int, addresses: list[str]):
        import tensorflow as tf

        _set_cluster(index, addresses)
        super().__init__(tf.distribute.MultiWorkerMirroredStrategy())


class Jax:
    """`jax.distributed` with Gloo: `psum` in `shard_map`."""

    def __init__(self, index: int, workers: int, replicas: int, addresses: list[str]):
        import jax

        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", replicas)
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(addresses[0], workers, index)
        self._mesh = jax.sharding.Mesh(np.array(jax.devices()), ("replica",))

    def all_reduce(self, size: int) -> Do:
        """As `OnTensorFlow.all_reduce`."""
        import jax

        from benchmarks.jax_programs import SAME, SPLIT, mapped

        ones = self._on_devices(np.ones([len(jax.devices()), size // 4], np.float32), SPLIT)
        compiled = mapped(lambda own: jax.lax.psum(own[0], "replica"), self._mesh, SPLIT, SAME)
        return lambda: float(np.asarray(compiled(ones).addressable_shards[0].data)[0])

    def train(self, name: str) -> Do:
        """As `OnTensorFlow.train`."""
        from benchmarks.jax_programs import jax_contender

        return _steps(jax_contender(MODELS[name], self._mesh, self._on_devices))

    def _on_devices(self, values: Any, spec: Any) -> Any:
        import jax

        sharding = jax.sharding.NamedSharding(self._mesh, spec)
        return jax.tree.map(
            lambda value: jax.make_array_from_callback(value.shape, sharding, lambda index: value[index]), values
        )


class Gloo:
    """PyTorch's Gloo; a worker is one replica."""

    def __init__(self, index: int, workers: int, replicas: int, addresses: list[str]):
        import torch

        torch.set_num_threads(max(1, (os.cpu_count() or 1) // workers))  # its threads spin while they wait
        torch.distributed.init_process_group("gloo", f"tcp://{addresses[0]}", rank=index, world_size=workers)
        self._index, self._workers = index, workers

    def all_reduce(self, size: int) -> Do:
        """As `OnTensorFlow.all_reduce`; the result replaces the operand, which is set to one again."""
        import torch

        values = torch.ones(size // 4)

        def once() -> float:
            values.fill_(1.0)
            torch.distributed.all_reduce(values)
            return float(values[0])

        return once

    def train(self, name: str) -> Do:
        """As `OnTensorFlow.train`; all gradients are summed as one tensor, as DistributedDataParallel sums a bucket."""
        import torch

        model, ops = MODELS[name], torch_ops()
        weights = [torch.tensor(value, requires_grad=True) for value in model.weights()]
        batches = [
            (torch.tensor(x[self._index]), torch.tensor(labels[self._index], dtype=torch.int64))
            for x, labels in model.data(self._workers)
        ]

        def step(index: int) -> Any:
            loss = model.loss(ops, weights, *batches[index % len(batches)])
            gradients = torch.autograd.grad(loss, weights)
            total = torch.cat([gradient.reshape(-1) for gradient in gradients])
            torch.distributed.all_reduce(total)
            with torch.no_grad():
                for weight, own in zip(weights, total.split([each.numel() for each in weights]), strict=True):
                    weight -= model.rate / self._workers * own.reshape(weight.shape)
            return loss

        return _steps(Contender("", step, lambda loss: float(loss.detach())))


class Tcp:
    """The limit: a ring of sockets that carries what a ring must, 2 (N - 1) / N of the bytes, and adds nothing."""

    def __init__(self, index: int, workers: int, replicas: int, addresses: list[str]):
        own, following = (_host_and_port(addresses[each % workers]) for each in (index, index + 1))
        with socket.create_server(own) as listener:
            self._next = _connected(following)
            self._before, _ = listener.accept()
        self._workers = workers
        for each in (self._next, self._before):
            each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def all_reduce(self, size: int) -> Do:
        """Sends in as many rounds as a ring has, each to the next one while it receives from the one before."""
        part = bytes(max(size // self._workers, 1))
        found = bytearray(len(part))
        fits = (
            len(part) <= 1 << 16
        )  # into the buffers of a connection, so that sending does not wait for the other side

        def once() -> float:
            for _ in range(2 * (self._workers - 1)):
                sender = threading.Thread(target=self._next.sendall, args=(part,))
                if fits:
                    self._next.sendall(part)
                else:
                    sender.start()
                view = memoryview(found)
                while view:
                    view = view[self._before.recv_into(view) :]
                if not fits:
                    sender.join()
            return float(self._workers)

        return once


CONTENDERS: dict[str, Callable[[int, int, int, list[str]], Any]] = {
    "MultiWorkerMirroredStrategy": Threads,
    "TPUStrategy": Compiled,
    "tf.distribute": TfDistribute,
    "JAX": Jax,
    "PyTorch Gloo": Gloo,
    "TCP": Tcp,
}
"""The ways to use several processes. Each takes the worker's index, the number of workers, the replicas of each, and
addresses of this machine that nobody uses, one more than there are workers."""


def _host_and_port(address: str) -> tuple[str, int]:
    host, port = address.split(":")
    return host, int(port)


def _connected(address: tuple[str, int]) -> socket.socket:
    while True:
        try:
            return socket.create_connection(address, timeout=60.0)
        except ConnectionRefusedError:  # it is about to listen
            time.sleep(0.05)


def _set_cluster(index: int, addresses: list[str]) -> None:
    """Puts the cluster into the environment; the last address is the coordinator's."""
    task = {"cluster": {"worker": addresses[:-1]}, "task": {"type": "worker", "index": index}}
    os.environ["TF_CONFIG"] = json.dumps(task)
    os.environ["REPLICA_ENGINE_TOKEN"] = "the secret of a benchmark"
    os.environ["REPLICA_ENGINE_COORDINATOR"] = addresses[-1]


def _steps(contender: Contender) -> Do:
    count = itertools.count()
    return lambda: contender.mean(contender.step(next(count)))


def serve(pipe: Any, name: str, index: int, workers: int, replicas: int, addresses: list[str]) -> None:
    """Follows orders, until its process is ended: runs in a process of its own."""
    os.dup2(2, 1)  # Gloo prints to stdout
    contender = CONTENDERS[name](index, workers, replicas, addresses)
    known = functools.cache(lambda what, argument: getattr(contender, what)(argument))
    pipe.send("ready")
    while True:
        what, argument, times = pipe.recv()
        do = known(what, argument)
        value = float(do())
        pipe.send((milliseconds(do, times), value))
