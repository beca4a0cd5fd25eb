"""Numbers of the variables of a job of several workers, for the comparison of what the workers launch.

Models of one shape have equal programs and equal sums. So programs and sums are compared with the variables that they
use. All workers make the variables of a strategy together, and so number them alike.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import hashlib
import itertools
from collections.abc import Iterable
from typing import Any

import tensorflow as tf

from replica_engine.process import interrupts
from replica_engine.upstream import distribute
from replica_engine.workers import Program

_NUMBER = "_replica_engine_number"  # an attribute of handles: they are what a traced function has captured
_SHOWN = 8  # numbers in a message

_made = itertools.count()
_of_model: contextvars.ContextVar[set[int]] = contextvars.ContextVar("replica_engine_model", default=set())  # noqa: B039


def number(handles: Iterable[tf.Tensor]) -> None:
    """Gives the handles of a variable, which all workers have just made, the next number."""
    mine = next(_made)
    for handle in handles:
        setattr(handle, _NUMBER, mine)


def handles(value: Any) -> list[tf.Tensor]:
    """The handles of a distributed variable; of another value none."""
    return [each.handle for each in value.values] if isinstance(value, distribute.DistributedVariable) else []


def numbers(handles: Iterable[tf.Tensor]) -> set[int]:
    """The numbers of variables, of those that have one."""
    found = {getattr(handle, _NUMBER, None) for handle in handles}
    return {each for each in found if each is not None}


def of_model(numbers: set[int]) -> contextlib.AbstractContextManager[set[int]]:
    """Inside the block, collectives are those of a model with variables of these numbers."""
    return interrupts.variable_for_block(_of_model, numbers)


def current_model() -> set[int]:
    """The numbers of the variables of the model whose step runs; none outside of Keras' steps."""
    return _of_model.get()


def using(program: Program, numbers: set[int], which: str = "") -> Program:
    """The program, as workers compare it, with the numbers of the variables that it uses.

    Args:
        program: the program.
        numbers: the numbers.
        which: what else tells it from other programs with the same digest.
    """
    if not numbers and not which:
        return program
    known = sorted(numbers)
    takes, digest = program.takes, hashlib.sha256(f"{program.digest} {known} {which}".encode()).hexdigest()[:16]
    if known:
        shown = ", ".join(map(str, known[:_SHOWN])) + ", ..." * (len(known) > _SHOWN)
        takes = " and ".join(filter(None, [takes, f"variable{'s' * (len(known) > 1)} {shown}"]))
    return dataclasses.replace(program, digest=digest, takes=takes)
