"""All-reduces and training steps of several processes on this machine, beside other libraries and the sockets alone.

Each contender has its own processes, one for each worker, and they all live during the measurement; one contender works
at a time, and the others wait for orders. The time is the longest of the workers'. TCP is the limit: it carries the
bytes of a ring over loopback sockets and adds nothing. A contender whose library is not installed is left out, and the
row says so. What a message about a launch costs is processor time: a thread sends them, at most ten a second.

With two replicas for each worker, the sum inside the worker comes before the ring; `--replicas` has these rows, of the
libraries that can have several replicas in a process.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib.util
import itertools
import multiprocessing
import socket
import time
from collections.abc import Iterator
from typing import Any

from benchmarks import command, host_worker
from benchmarks.measure import Row, interleaved, same

OURS, COMPILED = "MultiWorkerMirroredStrategy", "TPUStrategy"
NEEDS = {OURS: "jax", COMPILED: "jax", "JAX": "jax", "PyTorch Gloo": "torch"}
PEERS = ("tf.distribute", "JAX", "PyTorch Gloo", "TCP")
CONTENDERS = (OURS, COMPILED, *PEERS)
SEVERAL = (OURS, COMPILED, "JAX")  # those that can have several replicas in a process without GPUs

TARGETS = {"tf.distribute": 1.0, "JAX": 1.0, "PyTorch Gloo": 1.0}  # at or ahead of each peer

MESSAGE, OF_A_STEP = 0.03, "a step of 1 ms"
PATIENCE = 300.0  # seconds for the answer to an order
TOLERANCE = 1e-4


class Workers:
    """The processes of one contender of `host_worker.CONTENDERS`: so many workers with so many replicas each."""

    def __init__(self, name: str, workers: int, replicas: int):
        self.name = name
        addresses, context = unused_addresses(workers + 1), multiprocessing.get_context("spawn")
        self._pipes, self._processes = [], []
        for index in range(workers):
            pipe, theirs = context.Pipe()
            arguments = (theirs, name, index, workers, replicas, addresses)
            process = context.Process(target=host_worker.serve, args=arguments, daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(pipe)
            self._processes.append(process)

    def do(self, what: str, argument: Any, times: int) -> tuple[float, float]:
        """Calls a method of all workers; returns the milliseconds of the slowest, and the first one's number."""
        for pipe in self._pipes:
            pipe.send((what, argument, times))
        milliseconds, values = zip(*self.answers(), strict=True)
        return max(milliseconds), values[0]

    def close(self) -> None:
        """Ends the processes."""
        for process in self._processes:
            process.kill()
            process.join()

    def answers(self) -> list[Any]:
        """What all workers say: first that they are connected, then what came of an order."""
        until = time.monotonic() + PATIENCE  # a collective whose peer has failed waits without end
        if not all(pipe.poll(max(0.0, until - time.monotonic())) for pipe in self._pipes):
            raise RuntimeError(f"a worker of {self.name} has not answered in {PATIENCE:.0f} s")
        return [pipe.recv() for pipe in self._pipes]


def unused_addresses(count: int) -> list[str]:
    """Addresses of this machine that nobody uses."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [f"127.0.0.1:{each.getsockname()[1]}" for each in sockets]


def measure(flags: argparse.Namespace) -> Iterator[Row]:
    """The rows of each number of workers, and of each number of replicas that they have."""
    missing = [name for name, module in NEEDS.items() if importlib.util.find_spec(module) is None]
    note = "".join(f"{name} is not installed. " for name in missing).strip()
    for workers, replicas in itertools.product(flags.workers, flags.replicas):
        names = [name for name in (CONTENDERS if replicas == 1 else SEVERAL) if name not in missing]
        with contextlib.ExitStack() as stack:
            every = [stack.enter_context(contextlib.closing(Workers(name, workers, replicas))) for name in names]
            for each in every:
                each.answers()
            yield from _rows(flags, {each.name: each for each in every}, workers, replicas, note)


def _rows(
    flags: argparse.Namespace, every: dict[str, Workers], workers: int, replicas: int, note: str
) -> Iterator[Row]:
    of = f"{workers} workers" + (f" of {replicas}" if replicas > 1 else "")
    several = workers * replicas
    for size in flags.sizes:
        times = max(1, min(flags.times, flags.bytes // size))
        check = same("sum", {name: each.do("all_reduce", size, 1)[1] for name, each in every.items() if name != "TCP"})
        timed = interleaved(every, flags.repeats, functools.partial(_timed, "all_reduce", size, times))
        for figures, targets in _ours_first(timed):
            yield Row("hosts", f"all-reduce, {of}", figures, "ms", several, targets, check, note, "bytes", size)
    for name in flags.models:
        trains = {who: each for who, each in every.items() if who != "TCP"}
        losses = {who: each.do("train", name, 3)[1] for who, each in trains.items()}
        check = same("first loss", losses, TOLERANCE)
        timed = interleaved(trains, flags.repeats, functools.partial(_timed, "train", name, flags.times))
        for figures, targets in _ours_first(timed):
            yield Row("hosts", f"step of {name}, {of}", figures, "ms", several, targets, check, note)
    if replicas == 1:
        told, untold = (
            [every[OURS].do("launches", each, 1)[1] for _ in range(flags.repeats)] for each in (True, False)
        )
        figures = {OURS: [max(0.0, most - least) for most, least in zip(told, untold, strict=True)]}
        figures[OF_A_STEP] = [1.0] * flags.repeats
        note = "processor time of the first worker, its sending thread included"
        yield Row("hosts", f"message of a launch, {of}", figures, "ms", workers, {OF_A_STEP: MESSAGE}, note=note)


def _timed(what: str, argument: Any, times: int, each: Workers) -> float:
    return each.do(what, argument, times)[0]


def _ours_first(figures: dict[str, list[float]]) -> Iterator[tuple[dict[str, list[float]], dict[str, float]]]:
    """Figures and targets of a row for each of our strategies, without the other one."""
    peers = {name: each for name, each in figures.items() if name in PEERS}
    targets = {name: most for name, most in TARGETS.items() if name in peers}
    for name in (OURS, COMPILED):
        if name in figures:
            yield {name: figures[name], **peers}, targets


if __name__ == "__main__":
    command.main(
        __doc__,
        measure,
        command.FEW_REPEATS,
        command.Option("workers", "2,4", "2", "how many processes", command.numbers),
        command.Option("replicas", "1,2", "1", "how many replicas in each", command.numbers),
        command.Option("sizes", "1000,1000000,100000000", "1000,100000", "bytes of an all-reduce", command.numbers),
        command.models(("mlp", "small", "transformer"), "mlp", "mlp,transformer"),
        command.Option("times", "20", "2", "how many are timed together at most"),
        command.Option("bytes", "100000000", "100000", "how many bytes are timed together at least"),
    )
