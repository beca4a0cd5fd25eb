"""The cost of a call from a compiled program to Python, beside JAX's callbacks in the same process.

    python -m benchmarks.host_call [--replicas 1,2,4] [--payloads scalar,1KB,1MB] [--calls 100] [--launches 10]
        [--repeats 5] [--quick] [--json out.json]

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
import concurrent.futures
import dataclasses
import functools
import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from benchmarks import command
from benchmarks.measure import Row, WrongResult, interleaved, milliseconds, same

PAYLOADS = {"scalar": (), "1KB": (256,), "1MB": (512, 512)}
"""The shapes of the payloads by name; the dtype is float32."""

PATIENCE = 60
"""Seconds without a sign of life from the process that measures."""

OURS, PEERS = "outside_compilation", ("pure_callback", "ordered io_callback")


@dataclasses.dataclass(frozen=True)
class Case:
    """A payload and a number of replicas.

    Attributes:
        replicas: the number of replicas.
        payload: the name of the payload.
        failed: contenders that are left out, with the reason.
    """

    replicas: int
    payload: str
    failed: dict[str, str] = dataclasses.field(default_factory=dict)

    def sent(self) -> list[np.ndarray]:
        """The payload of each replica's first call."""
        return [np.full(PAYLOADS[self.payload], replica, np.float32) for replica in range(self.replicas)]


Program = Callable[[], Any]
"""Runs a program, finished when it returns; returns a sequence of the replicas' results."""

Make = Callable[[bool, int], Program]
"""Makes the program with this many iterations of the loop, and with or without the call."""


def outside_compilation(case: Case) -> Make:
    """This library's host calls."""
    import tensorflow as tf

    import replica_engine
    from replica_engine import xla

    @xla.returns(tf.TensorSpec(PAYLOADS[case.payload], tf.float32))
    def same(x: Any) -> Any:
        return x

    strategy = replica_engine.TPUStrategy(num_cores=case.replicas)
    sent = [tf.constant(value) for value in case.sent()]
    values = strategy.experimental_distribute_values_from_function(
        lambda context: sent[context.replica_id_in_sync_group]
    )

    def make(calls: bool, times: int) -> Program:
        def body(x: Any) -> Any:
            for _ in tf.range(times):
                x = (xla.outside_compilation(same, x) if calls else x) + 1
            return x

        return lambda: strategy.experimental_local_results(strategy.run(body, args=(values,)))

    return make


def pure_callback(case: Case) -> Make:
    """JAX's callback for functions without effects; XLA may omit or repeat such a call."""
    import jax

    return _jax(case, jax.pure_callback)


def io_callback(case: Case) -> Make:
    """JAX's ordered callback; this library's host calls are ordered too."""
    from jax.experimental import io_callback

    return _jax(case, functools.partial(io_callback, ordered=True))


def _jax(case: Case, callback: Callable[..., Any]) -> Make:
    import jax
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    mesh = Mesh(np.array(jax.devices()[: case.replicas]), ("replica",))
    split = PartitionSpec("replica")
    values = jax.device_put(np.stack(case.sent()), NamedSharding(mesh, split))
    returned = jax.ShapeDtypeStruct(PAYLOADS[case.payload], np.float32)

    def same(x: Any) -> Any:
        return x

    def make(calls: bool, times: int) -> Program:
        def step(_: Any, x: Any) -> Any:
            return (callback(same, returned, x) if calls else x) + 1

        def body(x: Any) -> Any:
            return jax.lax.fori_loop(0, times, step, x[0])[None]

        compiled = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=split, out_specs=split, check_vma=False))
        return lambda: jax.block_until_ready(compiled(values))

    return make


CONTENDERS = {OURS: outside_compilation, **dict(zip(PEERS, (pure_callback, io_callback), strict=True))}
"""By name."""


def microseconds(program: Program, launches: int) -> float:
    """Microseconds per launch."""
    return milliseconds(program, launches) * 1e3


def measure_case(case: Case, flags: argparse.Namespace, begin: Callable[[str], None]) -> list[Row]:
    """Checks all contenders that have not failed, and times them in turn.

    Args:
        case: the payload and the number of replicas.
        flags: the flags of the command line.
        begin: called with the name of each contender before its turn.

    Returns:
        A row for a call, and one for a launch with one call.

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
        return (microseconds(loop, 1) - microseconds(plain, flags.launches)) / flags.calls

    def launch(name: str) -> float:
        begin(name)
        return microseconds(programs[name][-1], flags.launches)

    def row(what: str, timed: Callable[[str], float]) -> Row:
        figures = interleaved({name: functools.partial(timed, name) for name in programs}, flags.repeats)
        return Row(
            "host_call",
            f"{what}, {case.payload}",
            figures,
            unit="us",
            replicas=case.replicas,
            check="results bitwise equal",
            note="; ".join(f"{name} {why}" for name, why in case.failed.items()),
        )

    return [row("a call", call), row("a launch with one", launch)]


def measure_text(replicas: int, flags: argparse.Namespace) -> Row:
    """Times training steps of a model with TextVectorization; runs in a process of its own."""
    import keras
    import tensorflow as tf

    import replica_engine
    from benchmarks.contenders import start
    from replica_engine.keras import replicate_model

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

    strategy = replica_engine.TPUStrategy(num_cores=replicas)
    models = {"TPUStrategy": replicate_model(make(), strategy=strategy), "Keras, one device": make()}
    losses = {name: [float(model.train_on_batch(x, y)) for _ in range(3)] for name, model in models.items()}

    def step(name: str) -> float:
        return microseconds(lambda: models[name].train_on_batch(x, y), flags.launches)

    return Row(
        "host_call",
        "a step with TextVectorization, 128 texts",
        interleaved({name: functools.partial(step, name) for name in models}, flags.repeats),
        unit="us",
        replicas=replicas,
        check=same("loss after 3 steps", {name: found[-1] for name, found in losses.items()}, 1e-4),
    )


def measure_all(cases: Sequence[Case], flags: argparse.Namespace, tell: Any) -> None:
    """Runs in the other process: sends whose turn it is, and the rows of each case."""
    from benchmarks.contenders import start

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
        with concurrent.futures.ProcessPoolExecutor(1, mp_context=context) as process:
            yield process.submit(measure_text, replicas, flags).result()


if __name__ == "__main__":
    command.main(
        __doc__,
        measure,
        command.Option("replicas", "1,2,4", "2", "numbers of replicas", command.numbers),
        command.Option("payloads", ",".join(PAYLOADS), "scalar", "payloads", command.choose_some(*PAYLOADS)),
        command.Option("calls", "100", "10", "calls in a launch with many calls"),
        command.Option("launches", "10", "2", "launches per repeat of a program with one call"),
    )
