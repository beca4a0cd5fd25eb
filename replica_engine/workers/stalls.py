"""Members that are alive and do not go on, while the others wait for them.

A member is waited for if it has launched less than the others, and all of those wait. So is one in the same launch
whose user code runs there, and one that the others wait for to tell them something. If all wait in the same launch,
only the limit counts: nobody knows whose fault it is. A member that waits for others itself, or that is not heard of,
is not called stuck.

All times are seconds of `time.monotonic`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

NOTICE = 600.0  # seconds that others wait for a member until all are told who it is, and until the next time
QUIET = 3.0  # seconds of silence from which on a member, which beats each second, is not heard
_LOOK = 0.5  # seconds between two looks
_PATIENCE = 2.0  # seconds to wait for the stack of a member
_MOST = 4  # stacks in a message
_LONGEST = 10_000  # characters of a stack


class Doing(NamedTuple):
    """What a member does, by its last sign of life.

    Attributes:
        in_step: whether it is in a step that others may have given up.
        waits: whether it waits for others in a program.
        asks: whether the thread that launches waits for an answer.
        calls: how often the program that runs has called the user's code.
    """

    in_step: int = False
    waits: int = False
    asks: int = False
    calls: int = 0


class Standing(Protocol):
    """What is known of a member.

    Attributes:
        heard: when it was heard of last.
        step: the last step that it reported.
        left: whether it has said goodbye.
        closed: whether its connection has ended.
        at_end: whether it waits for the others to come to the end of their programs.
        does: what it does.
    """

    heard: float
    step: int | None
    left: bool
    closed: bool
    at_end: bool
    does: Doing


class Stall(NamedTuple):
    """Something to say of members that do not go on.

    Attributes:
        workers: their indices.
        waiting: those that wait for them; none if all are in the same launch.
        asked: the first of them.
        stacks: where these are in the user's program, as text; "" if it is not known.
        seconds: how long it lasts.
        is_late: whether it lasts for longer than the limit.
    """

    workers: tuple[int, ...]
    waiting: tuple[int, ...]
    asked: tuple[int, ...]
    stacks: list[str]
    seconds: int
    is_late: bool


@dataclass
class _Watched:
    """Members that do not go on, until one of them or of those that wait does.

    Attributes:
        workers: their indices.
        waiting: those that wait for them.
        place: where all stand, in the launch log, in steps, and in calls of the user's code by the program that runs.
        since: since when.
        told: when all were told of it.
        asked_at: since when their stacks have been asked for; None if they have not.
        stacks: the stacks that have come, by worker.
    """

    workers: tuple[int, ...]
    waiting: tuple[int, ...]
    place: tuple[tuple[int, int | None, int], ...]
    since: float
    told: float
    asked_at: float | None = None
    stacks: dict[int, str] = field(default_factory=dict)


class Stalls:
    """Looks for members that do not go on.

    Args:
        now: the time.
        ask: asks a member for its stack.
    """

    def __init__(self, now: float, ask: Callable[[int], None]):
        self._ask = ask
        self._watched: _Watched | None = None
        self._looked = now

    def look(
        self, members: Mapping[int, Standing], position: Callable[[int], int], limit: float, now: float
    ) -> Stall | None:
        """Looks at all members; to be called several times a second.

        Args:
            members: the members, all of which have joined.
            position: the number of entries in the launch log of a worker.
            limit: how long they may be waited for.
            now: the time.

        Returns:
            What there is to say of them; None if there is nothing now.
        """
        if now - self._looked < _LOOK:
            return None
        self._looked = now
        workers, waiting = _waited_for(members, position, now)
        place = tuple((position(each), members[each].step, members[each].does.calls) for each in (*workers, *waiting))
        watched = self._watched
        if watched is None or (watched.workers, watched.waiting, watched.place) != (workers, waiting, place):
            self._watched = _Watched(workers, waiting, place, now, now) if workers else None
            return None
        is_late, asked = now - watched.since >= limit, workers[:_MOST]
        if watched.asked_at is None:
            if is_late or (waiting and now - watched.told >= NOTICE):
                watched.asked_at = now
                for worker in asked:
                    self._ask(worker)
            return None
        if len(watched.stacks) < len(asked) and now - watched.asked_at <= _PATIENCE:
            return None
        stacks = [watched.stacks.get(each, "") for each in asked]
        watched.told, watched.asked_at, watched.stacks = now, None, {}
        return Stall(workers, waiting, asked, stacks, round(now - watched.since), is_late)

    def take_stack(self, worker: int, text: str) -> None:
        """A member has said where it is."""
        watched = self._watched
        if watched is not None and watched.asked_at is not None and worker in watched.workers:
            watched.stacks[worker] = text[:_LONGEST]

    def forgive(self, seconds: float) -> None:
        """Moves all times on by the seconds in which this machine stood still."""
        if (watched := self._watched) is not None:
            watched.since, watched.told = watched.since + seconds, watched.told + seconds
            watched.asked_at = None if watched.asked_at is None else watched.asked_at + seconds


def _waited_for(
    members: Mapping[int, Standing], position: Callable[[int], int], now: float
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The members that the others wait for, and the others; all members, and none, if all wait in one launch."""
    there = {each: of for each, of in sorted(members.items()) if not (of.left or of.closed)}
    waits = {each for each, of in there.items() if of.does.waits or of.does.asks}
    if not waits or len(there) == 1:
        return (), ()
    least = min(map(position, there))
    found = [each for each in there if position(each) == least]
    is_one_place = len(found) == len(there)
    found = [each for each in found if each not in waits] or found
    others = tuple(each for each in there if each not in found)
    is_in_step = [there[each].does.in_step for each in found]
    # In one place a member that is in no launch may have it behind it, unless all others ask for something.
    if is_one_place and not all(is_in_step) and not (others and all(there[each].does.asks for each in others)):
        return (), ()
    if others and all(there[each].at_end for each in others) and not any(is_in_step):
        return (), ()  # their programs have ended; no collective waits
    is_heard = all(now - there[each].heard <= QUIET for each in found)  # another one may be silent, and so lost
    return (tuple(found), others) if is_heard and waits.issuperset(others) else ((), ())
