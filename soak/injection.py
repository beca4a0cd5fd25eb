"""One fault: the exception, the point and the replicas. A seed determines the fault."""

from __future__ import annotations

import dataclasses
import random

from soak import model
from soak.exceptions import KINDS

EAGER, RUN_IN_FUNCTION, FUNCTION_IN_RUN = "eager", "run in tf.function", "tf.function in run"
THREADS, CONCURRENT, COMPILED = "MirroredStrategy", "MirroredStrategy(concurrent=True)", "TPUStrategy"

COMPILE, LAUNCH, DEVICE = "compiling", "launching", "the program fails on the devices"
INPUTS = "in the input pipeline"

OF_REPLICAS = (model.BEFORE, model.BETWEEN, model.AFTER, model.END, model.BETWEEN_CREATIONS, model.NESTED)
"""Points where a replica's own Python code raises."""

OF_MERGES = (model.MERGE_BEGINS, model.MERGE_ENDS)
MISMATCHES = (model.SKIPS, model.STRUCTURE)
PATHS = (*OF_REPLICAS, model.UNWINDING, model.CREATING, *OF_MERGES, *MISMATCHES)
"""Points in the Python code of a body, on threads: where it runs eagerly, and where it is traced."""

TRACED = (model.BEFORE, model.BETWEEN, model.AFTER, model.END, *OF_MERGES, model.CREATING, model.BETWEEN_CREATIONS)
"""The same points in a body that is traced once for all replicas."""

HOSTS = (model.HOST, model.HOST_LATE)
CREATIONS = (model.CREATING, model.BETWEEN_CREATIONS)

# The weights of the draws. Tracing takes a tenth of a second, compiling almost a second, a run some milliseconds.
_WAYS = (
    (48, THREADS, EAGER, PATHS),
    (22, CONCURRENT, EAGER, PATHS),
    (15, COMPILED, EAGER, HOSTS),
    (5, COMPILED, RUN_IN_FUNCTION, (model.HOST,)),
    (4, THREADS, RUN_IN_FUNCTION, (model.HOST,)),
    (2, THREADS, FUNCTION_IN_RUN, (model.HOST,)),
    (2, COMPILED, EAGER, (LAUNCH, DEVICE)),
    (0.5, THREADS, RUN_IN_FUNCTION, PATHS),
    (0.5, THREADS, FUNCTION_IN_RUN, PATHS),
    (0.5, COMPILED, EAGER, (*TRACED, model.LOWERING, COMPILE)),
    (0.25, COMPILED, RUN_IN_FUNCTION, (*TRACED, model.LOWERING, COMPILE)),
    (0.25, COMPILED, FUNCTION_IN_RUN, (*TRACED, model.LOWERING, COMPILE)),
    (0.4, THREADS, EAGER, (INPUTS,)),
    (0.6, COMPILED, EAGER, (INPUTS,)),
)


@dataclasses.dataclass(frozen=True)
class Injection:
    """A fault to inject."""

    seed: int  # the seed that determines the fault
    strategy: str  # the kind of strategy
    size: int  # the number of replicas
    form: str  # the form of `run`
    point: str  # the place in the program where the fault happens
    error: str  # the kind of exception
    who: tuple[int, ...]  # the replicas that raise, if each replica runs its own Python code
    in_thread: bool  # whether a thread other than the main one calls `run`
    again: bool  # whether the next run calls the function that failed

    @classmethod
    def drawn(cls, seed: int, only_quick: bool = False) -> Injection:
        """The fault that a seed determines; `only_quick` leaves out faults that need tracing or compiling."""
        draw = random.Random(seed)
        ways = [way for way in _WAYS if way[3] is PATHS and way[2] == EAGER] if only_quick else _WAYS
        ((_, strategy, form, points),) = draw.choices(ways, [way[0] for way in ways])
        point = draw.choice(points)
        alone = point not in MISMATCHES  # whether all replicas may raise
        size = draw.randint(1 if alone else 2, 4)
        many = draw.choice((1, 1, draw.randint(1, size if alone else size - 1)))
        who = tuple(sorted(draw.sample(range(size), many)))
        if point == model.CREATING or (point == model.BETWEEN_CREATIONS and form != EAGER):
            who = (0,)  # creates for all
        error = draw.choice(sorted(KINDS))
        return cls(seed, strategy, size, form, point, error, who, draw.random() < 0.2, draw.random() < 0.3)

    @property
    def is_compiled(self) -> bool:
        """Whether the strategy compiles bodies."""
        return self.strategy == COMPILED

    @property
    def runs_once(self) -> bool:
        """Whether the Python code that fails runs once for all replicas."""
        return self.is_compiled and self.point not in HOSTS

    @property
    def traces(self) -> bool:
        """Whether the fault needs a function that was not traced before."""
        if self.point in (INPUTS, LAUNCH, DEVICE, *HOSTS):
            return False
        return self.is_compiled or self.form != EAGER

    def __str__(self) -> str:
        who = "" if self.runs_once else f", replicas {list(self.who)}"
        thread = ", from another thread" if self.in_thread else ""
        return (
            f"seed {self.seed}: {self.error}, {self.point}{who}, {self.strategy} with {self.size} replicas, "
            f"{self.form}{thread}"
        )
