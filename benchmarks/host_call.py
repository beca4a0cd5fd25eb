"""The cost of a call from a compiled program to Python, beside JAX's callbacks in the same process.

Each replica's program is a loop that passes an array to a Python function, which returns it unchanged, and adds 1. The
cost of a call is the time of a launch, minus that of the same program without the function, divided by the number of
calls. All replicas call at once and Python runs one call at a time, so the cost is about N times that of one replica.
The other figure is a launch of a program with one call. `outside_compilation` gets the result's spec through
`returns`, as JAX's callbacks do. It passes a TensorFlow tensor to the function; JAX's callbacks pass a JAX array.

Another row is a training step of a Keras model that splits and looks up its texts itself (`TextVectorization`), on
replicas and on one device: the host does that in the middle of the compiled step.

All contenders must have the same results.

JAX copies what its functions get with a thread of its client, and without a free one a program waits for ever;
`contenders.start` gives it enough. In case it does, or dies, a process of its own measures: then the row says which
peer failed, and another process goes on without.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import keras
import numpy as np
import tensorflow as tf
from jax.experimental import io_callback

from benchmarks import command
from benchmarks.contenders import COMPILED, distributed, start, strategy_of
from benchmarks.fresh import in_fresh_process
from benchmarks.jax_programs import SPLIT, mapped, mesh_of, on_devices
from benchmarks.measure import Row, WrongResult, interleaved, milliseconds, same
from replica_engine import xla
from replica_engine.keras import replicate_model

PAYLOADS = {"scalar": (), "1KB": (256,), "1MB": (512, 512)}  # the shapes of the payloads by name; the dtype is float32

PATIENCE = 60  # seconds without a sign of life from the process that measures

OURS, PEERS = "outside_compilation", ("pure_callback", "ordered io_callback")


@dataclasses.dataclass(frozen=True)
class Case:
    """A payload and a number of replicas."""

    replicas: int  # the number of replicas
    payload: str  # the name of the payload
    failed: dict[str, str] = dataclasses.field(default_factory=dict)  # contenders that are left out, with the reason

    def sent(self) -> list[np.ndarray]:
        """The payload of each replica's first call."""
        return [np.full(PAYLOADS[self.payload], replica, np.float32) for replica in range(self.replicas)]


Make = Callable[[bool, int], Callable[[], Any]]
"""Makes a program with or without the call, and with this many iterations of the loop; it returns all results."""


def _unchanged(x: Any) -> Any:
    return x


def outside_compilation(case: Case) -> Make:
    """This library's host calls."""
    called = xla.returns(tf.TensorSpec(PAYLOADS[case.payload], tf.float32))(_unchanged)
    strategy = strategy_of(COMPILED, case.replicas)
    values = distributed(strategy, case.sent())

    def make(calls: bool, times: int) -> Callable[[], Any]:
        def body(x: Any) -> Any:
            for _ in tf.range(times):
                x = (xla.outside_compilation(called, x) if calls else x) + 1
            return x

        return lambda: strategy.experimental_local_results(strategy.run(body, args=(values,)))

    return make


def _jax(callback: Callable[..., Any], case: Case) -> Make:
    mesh = mesh_of(case.replicas)
    values = on_devices(mesh, np.stack(case.sent()), SPLIT)
    returned = jax.ShapeDtypeStruct(PAYLOADS[case.payload], np.float32)

    def make(calls: bool, times: int) -> Callable[[], Any]:
        def step(_: Any, x: Any) -> Any:
            return (callback(_unchanged, returned, x) if calls else x) + 1

        compiled = mapped(lambda x: jax.lax.fori_loop(0, times, step, x[0])[None], mesh, SPLIT, SPLIT)
        return lambda: jax.block_until_ready(compiled(values))

    return make


CONTENDERS: dict[str, Callable[[Case], Make]] = {
    OURS: outside_compilation,
    "pure_callback": functools.partial(_jax, jax.pure_callback),  # XLA may omit or repeat such a call
    "ordered io_callback": functools.partial(_jax, functools.partial(io_callback, ordered=True)),  # as ours are
}
"""By name."""


def measure_case(case: Case, flags: argparse.Namespace, begin: Callable[[str], None]) -> list[Row]:
    """Checks all contenders that have not failed, and times them in turn: a call, and a launch with one call.

    `begin` is called with the name of each contender before its turn.

    Raises:
        WrongResult: a contender has other results.
    """
    programs = {}
    for name in [name for name in CONTENDERS if name not in case.failed]:
        begin(name)
        make = CONTENDERS[name](case)
        loop, plain, one = programs[name] = make(True, flags.calls), make(False, flags.calls), make(True, 1)
        for program, times in ((loop, flags.calls), (plain, flags.calls), (one, 1)):
            for result, sent in zip(program(), case.sent(), strict=True):
                if not np.array_equal(result, sent + times):
                    raise WrongResult(f"{name} of {case} has another result after {times} calls: {result}")

    def call(name: str) -> float:
        begin(name)
        loop, plain, _ = programs[name]
        return (milliseconds(loop) - milliseconds(plain, flags.launches)) / flags.calls * 1e3

    def launch(name: str) -> float:
        begin(name)
        return milliseconds(programs[name][-1], flags.launches) * 1e3

    names = {name: name for name in programs}
    note = "; ".join(f"{name} {why}" for name, why in case.failed.items())
    row = functools.partial(Row, "host_call", unit="us", replicas=case.replicas, note=note)
    return [
        row(f"{what}, {case.payload}", interleaved(names, flags.repeats, timed), check="results bitwise equal")
        for what, timed in (("a call", call), ("a launch with one", launch))
    ]


def measure_text(replicas: int, flags: argparse.Namespace) -> Row:
    """Times training steps of a model with TextVectorization; runs in a process of its own."""
    start(replicas)
    drawn = np.random.default_rng(0)
    vocabulary = [f"word{number}" for number in range(1000)]
    texts = [" ".join(drawn.choice(vocabulary, drawn.integers(1, 40))) for _ in range(128)]
    x, y = tf.constant(texts), tf.constant(drawn.normal(size=(128, 1)).astype("f"))

    def make() -> Any:
        keras.utils.set_random_seed(1)
        layers = keras.layers
        vectorize = layers.TextVectorization(output_sequence_length=32, vocabulary=vocabulary)
        table = layers.Embedding(1002, 32)
        model = keras.Sequential(
            [keras.Input((), dtype="string"), vectorize, table, layers.GlobalAveragePooling1D(), layers.Dense(1)]
        )
        model.compile("sgd", "mse")
        return model

    strategy = strategy_of(COMPILED, replicas)
    models = {COMPILED: replicate_model(make(), strategy=strategy), "Keras, one device": make()}
    losses = {name: [float(model.train_on_batch(x, y)) for _ in range(3)] for name, model in models.items()}
    check = same("loss after 3 steps", {name: found[-1] for name, found in losses.items()}, 1e-4)

    def step(model: Any) -> float:
        return milliseconds(lambda: model.train_on_batch(x, y), flags.launches) * 1e3

    figures = interleaved(models, flags.repeats, step)
    return Row("host_call", "a step with TextVectorization, 128 texts", figures, "us", replicas, check=check)


def measure_all(cases: Sequence[Case], flags: argparse.Namespace, tell: Any) -> None:
    """Runs in the other process: sends whose turn it is, and the rows of each case."""
    start(max(case.replicas for case in cases))
    for case in cases:
        tell.send(measure_case(case, flags, tell.send))


def measure(flags: argparse.Namespace) -> Iterator[Row]:
    """Yields the rows of each payload and number of replicas, and that of steps with texts.

    Raises:
        RuntimeError: the measurement failed in a contender that is not a peer.
    """
    waiting = [Case(replicas, payload) for payload in flags.payloads for replicas in flags.replicas]
    context = multiprocessing.get_context("spawn")
    while waiting:
        hear, tell = context.Pipe(duplex=False)
        process = context.Process(target=measure_all, args=(waiting, flags, tell), daemon=True)
        process.start()
        tell.close()
        turn = ""
        try:
            while waiting and hear.poll(PATIENCE):
                told = hear.recv()
                if isinstance(told, str):
                    turn = told
                else:
                    waiting.pop(0)
                    yield from told
            why = f"hung for {PATIENCE} s"
        except EOFError:
            process.join()
            why = f"died, exit code {process.exitcode}"
        process.kill()
        process.join()
        if waiting:
            if turn not in PEERS or process.exitcode == 1:  # an exception
                raise RuntimeError(f"{turn} {why} with {waiting[0]}")
            waiting[0].failed[turn] = why
    for replicas in flags.replicas:
        yield in_fresh_process(measure_text, replicas, flags)


if __name__ == "__main__":
    command.main(
        __doc__,
        measure,
        command.replicas("1,2,4"),
        command.Option("payloads", ",".join(PAYLOADS), "scalar", "payloads", command.choose_some(*PAYLOADS)),
        command.Option("calls", "100", "10", "calls in a launch with many calls"),
        command.Option("launches", "10", "2", "launches per repeat of a program with one call"),
    )
