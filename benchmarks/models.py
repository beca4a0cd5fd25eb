"""Training real models, each figure in new processes: ResNet-50, MobileNetV2, BERT and an LSTM language model.

The replicas share a batch of 16. For each model and number of replicas there are rows for a step, for the first step,
for building the model and its first step (Keras on JAX compiles programs for initial values while it builds), for the
first step of a second process that finds the programs of the first in the cache folder, and for the largest memory of
the process. The first step of `TPUStrategy` and of Keras on JAX includes writing to that folder. TensorFlow's
`jit_compile` runs on one device, with the whole batch; Keras on JAX has a device for each replica. BERT has the
architecture and sizes of KerasHub's `bert_tiny_en_uncased`, in layers of Keras. Notes have the processor time of each
row: other programs on the machine change it less than the time.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence

from benchmarks import command
from benchmarks.fresh import in_fresh_process
from benchmarks.keras_models import BATCH, MODELS
from benchmarks.keras_training import FULL, JAX, JIT, STAGES, THEIRS, THREADS, WARM_UP, XLA, Took, Trained, train
from benchmarks.measure import Row, interleaved, same

TOLERANCE, AFTER_BATCH_NORM = 1e-3, 0.01
"""The largest relative difference of losses: of all, and after an update with batch normalization.

There rounding grows with depth and with the rate. At a rate of 0.003 the second loss of ResNet-50 on four replicas is
2.36 or 2.30 in TensorFlow itself, without oneDNN and with it. At 0.00003, which takes the loss from 3.07 to 2.25 as
well, different libraries are 0.001 apart.
"""

FIRST_START = "the first start"

PEERS = {THREADS: (FULL, THEIRS, JAX, JIT), XLA: (THEIRS, JAX, JIT)}
"""The contenders of this library, and with whom they are compared."""

SECOND_STARTS = (XLA, JAX)  # the contenders that keep programs for later processes

START_UP_TARGETS = {4: {THEIRS: 0.6}, 8: {THEIRS: 0.25}}
"""By number of replicas, of the first step of `MirroredStrategy` on ResNet-50. No other model has targets."""


Starts = Sequence[Trained]
"""What the first process of a contender measured, and the second one, of those that keep programs."""


def measure(flags: argparse.Namespace) -> Iterator[Row]:
    """Yields the rows of each model and number of replicas."""
    for name in flags.models:
        found = trained(name, flags.replicas, flags.steps, flags.repeats)
        for replicas in flags.replicas:
            yield from rows(name, replicas, {who: found[who, _size(who, replicas)] for who, _ in found})


def trained(name: str, sizes: Sequence[int], steps: int, repeats: int) -> dict[tuple[str, int], list[Starts]]:
    """What each contender measured with each number of replicas, in turn. Says on stderr how far it is."""

    def trains(turn: tuple[str, int]) -> Starts:
        who, replicas = turn
        found = starts(who, name, replicas, steps)
        print(f"{name}, {who}, N = {replicas}: {found}", file=sys.stderr, flush=True)
        return found

    contenders = dict.fromkeys(who for ours, peers in PEERS.items() for who in (ours, *peers))
    # Those that are compared come close to each other: the machine is faster in one minute than in another.
    turns = [(who, _size(who, replicas)) for replicas in sizes for who in contenders]
    return interleaved({turn: turn for turn in turns}, repeats, trains)


def _size(who: str, replicas: int) -> int:
    """The number of devices of a contender."""
    return 1 if who == JIT else replicas


def starts(who: str, name: str, replicas: int, steps: int) -> Starts:
    """Trains in a new process, and then in a second one if the contender keeps programs for it."""
    if who not in SECOND_STARTS:
        return [in_fresh_process(train, who, name, replicas, BATCH, steps)]
    with tempfile.TemporaryDirectory() as cache:
        return [in_fresh_process(train, who, name, replicas, BATCH, steps, cache) for _ in range(2)]


def rows(name: str, replicas: int, found: Mapping[str, Sequence[Starts]]) -> Iterator[Row]:
    """Yields the rows of a model and a number of replicas: `found` has what the processes of each repeat measured.

    Raises:
        WrongResult: losses differ.
    """
    first = {who: [each[0] for each in repeats] for who, repeats in found.items()}
    second = {who: [each[1] for each in found[who]] for who in SECOND_STARTS}
    check = checked(name, replicas, first)
    targets = _targets(name, replicas)

    def row(what: str, ours: str, figures: dict[str, list[Took]], note: str = "") -> Row:
        seconds = {who: [took.seconds for took in each] for who, each in figures.items()}
        told = "; ".join(filter(None, (processor_time(figures), note)))
        title = f"{MODELS[name].title}, {what}"
        return Row("models", title, seconds, "s", replicas, targets.get((what, ours), {}), check, told)

    for ours, peers in PEERS.items():
        shown = {who: first[who] for who in (ours, *peers)}
        yield row("step", ours, {who: [each.step for each in processes] for who, processes in shown.items()})
        begun = {who: [each.first for each in processes] for who, processes in shown.items()}
        yield row("first step", ours, begun, staged(first[ours]))
        started = {who: [_both(each.built, each.first) for each in processes] for who, processes in shown.items()}
        yield row("building it, and its first step", ours, started)
        memory = {who: [each.peak / 2**20 for each in processes] for who, processes in shown.items()}
        title = f"{MODELS[name].title}, largest memory"
        yield Row("models", title, memory, "MiB", replicas, check=check)
    compared = {XLA: second[XLA], FIRST_START: first[XLA], JAX: second[JAX]}
    check = checked(name, replicas, first | second)
    again = {who: [each.first for each in processes] for who, processes in compared.items()}
    yield row("second start", XLA, again, staged(second[XLA]))


def _both(one: Took, other: Took) -> Took:
    """The time of two pieces of work, one after the other."""
    return Took(one.seconds + other.seconds, one.processor + other.processor)


def _targets(name: str, replicas: int) -> dict[tuple[str, str], dict[str, float]]:
    """The targets, by row and contender."""
    if name != "resnet":
        return {}
    return {
        ("step", XLA): {THEIRS: 1.0, JAX: 0.5},
        ("first step", XLA): {JAX: 1.2},
        ("first step", THREADS): START_UP_TARGETS.get(replicas, {}),
        ("second start", XLA): {FIRST_START: 0.4},
    }


def checked(name: str, replicas: int, found: Mapping[str, Sequence[Trained]]) -> str:
    """Compares the losses of the contenders, and says what is equal.

    With batch normalization, replicas use the statistics of their part of the batch. Contenders that split the batch
    are then compared with each other, and so are those that do not.

    Raises:
        WrongResult: losses differ.
    """
    groups = {"": tuple(found)}
    if MODELS[name].batch_norm and replicas > 1:
        groups = {" of split batches": (THREADS, FULL, XLA, THEIRS), " of whole batches": (JAX, JIT)}
    told = []
    for which, contenders in groups.items():
        for step in range(WARM_UP):
            losses = {who: found[who][-1].losses[step] for who in contenders}
            tolerance = AFTER_BATCH_NORM if step and MODELS[name].batch_norm else TOLERANCE
            told.append(same(f"loss {step + 1}{which}", losses, tolerance))
    return "; ".join(told)


def processor_time(figures: Mapping[str, Sequence[Took]]) -> str:
    """A note: the processor time of the first contender, and its ratio to each other, as the table has for the time."""
    (_, ours), *peers = [(who, [took.processor for took in each]) for who, each in figures.items()]
    ratios = [
        f"{statistics.median(mine / its for mine, its in zip(ours, theirs, strict=True)):.2f} of {who}"
        for who, theirs in peers
    ]
    return f"processor time {statistics.median(ours):.3g} s: {', '.join(ratios)}"


def staged(found: Sequence[Trained]) -> str:
    """A note: the stages of the first step, where they are known."""
    if not found[0].stages:
        return ""
    seconds = {stage: statistics.median(each.stages.get(stage, 0.0) for each in found) for stage in STAGES}
    return ", ".join(f"{stage} {taken:.2g} s" for stage, taken in seconds.items())


if __name__ == "__main__":
    command.main(
        __doc__,
        measure,
        command.Option("repeats", "2", "1", "processes of each contender"),
        command.models(MODELS, "lstm"),
        command.Option("replicas", "1,2,4", "2", "numbers of replicas, divisors of 16", command.numbers),
        command.Option("steps", "5", "1", "steps for each figure of a step"),
    )
