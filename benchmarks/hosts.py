"""All-reduces and training steps of several processes on this machine, beside other libraries and the sockets alone.

    python -m benchmarks.hosts [--workers 2,4] [--sizes 1000,1000000,100000000] [--models mlp] [--repeats 3] [--quick]

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
import json
import pathlib
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

from benchmarks import command
from benchmarks.measure import Row, interleaved, same

OURS, COMPILED = "MultiWorkerMirroredStrategy", "TPUStrategy"
NEEDS = {OURS: "jax", COMPILED: "jax", "JAX": "jax", "PyTorch Gloo": "torch"}
PEERS = ("tf.distribute", "JAX", "PyTorch Gloo", "TCP")
CONTENDERS = (OURS, COMPILED, *PEERS)
SEVERAL = (OURS, COMPILED, "JAX")
"""Those that can have several replicas in a process without GPUs."""

TARGETS = {"tf.distribute": 1.0, "JAX": 1.0, "PyTorch Gloo": 1.0}
"""At or ahead of each peer."""

MESSAGE, OF_A_STEP = 0.03, "a step of 1 ms"
PATIENCE = 300.0  # seconds for the answer to an order
TOLERANCE = 1e-4
ROOT = pathlib.Path(__file__).parents[1]


class Workers:
    """The processes of one contender.

    Args:
        name: of `host_worker.CONTENDERS`.
        workers: how many.
        replicas: of each.
    """

    def __init__(self, name: str, workers: int, replicas: int):
        self.name = name
        addresses = unused_addresses(workers + 1)
        arguments = [sys.executable, "-m", "benchmarks.host_worker", name]
        self._processes: list[Any] = [
            subprocess.Popen(
                [*arguments, str(index), str(workers), str(replicas), *addresses],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                cwd=ROOT,
            )
            for index in range(workers)
        ]

    def ready(self) -> Workers:
        """Waits until all are connected."""
        self._answers()
        return self

    def do(self, what: str, argument: Any, times: int) -> tuple[float, float | None]:
        """Has something done by all workers; returns the milliseconds of the slowest, and the first one's number.

        Args:
            what: the method of the contender.
            argument: its argument; None for none.
            times: how often.
        """
        order = json.dumps([what, argument, times]) + "\n"
        for process in self._processes:
            process.stdin.write(order)
            process.stdin.flush()
        answers = self._answers()
        return max(answer["ms"] for answer in answers), answers[0]["value"]

    def close(self) -> None:
        """Ends the processes."""
        for process in self._processes:
            process.kill()
            process.communicate()

    def _answers(self) -> list[dict[str, Any]]:
        watch = threading.Timer(PATIENCE, self._kill)  # a collective whose peer has failed waits without end
        watch.start()
        try:
            lines = [process.stdout.readline() for process in self._processes]
        finally:
            watch.cancel()
        if not all(lines):
            raise RuntimeError(f"a worker of {self.name} has ended, or has not answered in {PATIENCE:.0f} s")
        return [json.loads(line) for line in lines]

    def _kill(self) -> None:
        for process in self._processes:
            process.kill()


def unused_addresses(count: int) -> list[str]:
    """Addresses of this machine that nobody uses."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [f"127.0.0.1:{each.getsockname()[1]}" for each in sockets]


def measure(flags: argparse.Namespace) -> Iterator[Row]:
    """The rows of each number of workers, and of each number of replicas that they have."""
    missing = [name for name, module in NEEDS.items() if importlib.util.find_spec(module) is None]
    note = "".join(f"{name} is not installed. " for name in missing).strip()
    for workers in flags.workers:
        for replicas in flags.replicas:
            able = CONTENDERS if replicas == 1 else SEVERAL
            names = [name for name in able if name not in missing and (name not in PEERS or name in flags.contenders)]
            with contextlib.ExitStack() as stack:
                every = [Workers(name, workers, replicas) for name in names]
                for each in every:
                    stack.callback(each.close)
                yield from _rows(flags, {each.name: each.ready() for each in every}, workers, replicas, note)


def _rows(
    flags: argparse.Namespace, every: dict[str, Workers], workers: int, replicas: int, note: str
) -> Iterator[Row]:
    of = f"{workers} workers" + (f" of {replicas}" if replicas > 1 else "")
    several = workers * replicas
    for size in flags.sizes:
        times = max(1, min(flags.times, flags.bytes // size))
        values = {name: each.do("all_reduce", size, 1)[1] for name, each in every.items()}
        values = {name: value for name, value in values.items() if name != "TCP" and value is not None}
        check = same("sum", values)
        for figures, targets in _ours_first(_figures(flags, every, "all_reduce", size, times)):
            yield Row("hosts", f"all-reduce, {of}", figures, "ms", several, targets, check, note, "bytes", size)
    for name in flags.models:
        trains = {who: each for who, each in every.items() if who != "TCP"}
        losses = {who: each.do("train", name, 3)[1] for who, each in trains.items()}
        check = same("first loss", {who: loss for who, loss in losses.items() if loss is not None}, TOLERANCE)
        for figures, targets in _ours_first(_figures(flags, trains, "train", name, flags.times)):
            yield Row("hosts", f"step of {name}, {of}", figures, "ms", several, targets, check, note)
    if replicas == 1:
        told, untold = (
            [every[OURS].do("launches", each, 1)[1] or 0.0 for _ in range(flags.repeats)] for each in (True, False)
        )
        figures = {OURS: [max(0.0, most - least) for most, least in zip(told, untold, strict=True)]}
        figures[OF_A_STEP] = [1.0] * flags.repeats
        yield Row("hosts", f"message of a launch, {of}", figures, "ms", workers, {OF_A_STEP: MESSAGE}, note=_MESSAGE)


_MESSAGE = "processor time of the first worker, its sending thread included"


def _ours_first(figures: dict[str, list[float]]) -> Iterator[tuple[dict[str, list[float]], dict[str, float]]]:
    """Figures and targets of a row for each of our strategies, without the other one."""
    peers = {name: each for name, each in figures.items() if name in PEERS}
    targets = {name: most for name, most in TARGETS.items() if name in peers}
    for name in (OURS, COMPILED):
        if name in figures:
            yield {name: figures[name], **peers}, targets


def _figures(
    flags: argparse.Namespace, every: dict[str, Workers], what: str, argument: Any, times: int
) -> dict[str, list[float]]:
    def timed(each: Workers) -> float:
        return each.do(what, argument, times)[0]

    return interleaved({name: functools.partial(timed, each) for name, each in every.items()}, flags.repeats)


if __name__ == "__main__":
    command.main(
        __doc__,
        measure,
        command.FEW_REPEATS,
        command.Option("workers", "2,4", "2", "how many processes", command.numbers),
        command.Option("replicas", "1,2", "1", "how many replicas in each", command.numbers),
        command.Option("sizes", "1000,1000000,100000000", "1000,100000", "bytes of an all-reduce", command.numbers),
        command.Option(
            "contenders", ",".join(PEERS), ",".join(PEERS), "compared with which", command.choose_some(*PEERS)
        ),
        command.Option(
            "models", "mlp,transformer", "mlp", "which to train", command.choose_some("mlp", "small", "transformer")
        ),
        command.Option("times", "20", "2", "how many are timed together at most"),
        command.Option("bytes", "100000000", "100000", "how many bytes are timed together at least"),
    )
