"""What the workers of a job are about to launch, compared before each launch of another program than the last one.

Collectives of several workers meet by the order of their launches. Where two workers swap two programs, Gloo adds up
values of both, or ends the process if their sizes differ. The log of launches finds that a tenth of a second later.

Gloo has separate connections for each order of devices. So a small program gathers the digests of what all workers
launch next, over their first devices in reverse order, and its messages never meet those of another program. A worker
that launches what it launched last asks nothing. Up to the last launch all have launched the same, so one of two
workers that differ asks at least. If both ask, they see that they differ. If one does, it waits here, and the other in
a collective of its program, until the log ends both waits.

It is a program of its own, and no part of those that it guards: a program that is not launched has taken no values of
variables, so none is lost, and no program need be rewritten, divided ones included. It costs a small launch. The sums
of replicas on threads (`worker_sums`) are many programs that alternate, and have no variables: each begins with the
same gather (`gather_program`), and small values travel in it.

What must never happen: a program is launched without a question while one is open, which Ctrl-C or a limit has ended
here, and which others may have had answered. An open question is answered by the log, where all meet. If the launch
that it was for is left for the one before, which others launch without a question, the logs differ.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np

from replica_engine.pjrt.device_group import DeviceGroup, Limits, held_off
from replica_engine.pjrt.executable import Executable
from replica_engine.workers import Member, Program
from replica_engine.workers.member import Leave, NobodyWaits

T = TypeVar("T")

_NAME = "the comparison of launches"
_WORDS = 4  # of 32 bits: the digest, the number of the launch, and a number for `least`


class Agreement:
    """The launches of all workers over the devices of a job. All methods need `DeviceGroup.in_flight`.

    Args:
        platform: the platform of the devices.
        devices: the first device of each worker.
        member: the connection to the job.
    """

    def __init__(self, platform: str, devices: tuple, member: Member):
        self._member = member
        self._devices = DeviceGroup(platform, (devices[member.worker],), devices[::-1], member)
        self._program: Executable | None = None
        self._last = ""  # the digest of the program that was launched last; "" if it must be compared again
        self._question: Any = None  # what this worker has said last
        self._answers: Any = None  # what all have said then, on the devices
        self._is_open = False  # whether the launch that was asked for has not been made

    def launch(self, program: Program, limits: Limits, launch: Callable[[], T], left: Leave | None) -> T:
        """Calls `launch`, which launches a program and calls `launches`, once all workers are about to do so.

        Args:
            program: the program.
            limits: of waits at the coordinator: the seconds until an error, and until a warning.
            launch: is called with signals held off. Before that, Ctrl-C ends the wait and takes the launch back.
            left: an event that ends the wait: nobody needs the launch any more.

        Raises:
            ProgramDisagreementError: another worker launches another program.
            WorkerLostError or another failure of the job.
            NobodyWaits: `left` is set.
        """
        try:
            if self._is_open and self._last == program.digest:  # which one who has asked nothing launches at once
                self._member.meet(f"the launch of {program.words}, after another one was left", *limits)
            if self._is_open or self._last != program.digest:
                self._agree(program, 0, limits, left)
            _check_is_needed(left)
            return held_off().around(launch)
        finally:
            held_off().around(self._member.withdraw)

    def launches(self, program: Program, is_compared_again: bool) -> None:
        """Notes that a program is launched; with signals held off.

        Args:
            program: the program.
            is_compared_again: whether it is, although it is the next one too: its collectives may have the devices in
                reverse order.
        """
        self._is_open, self._last = False, "" if is_compared_again else program.digest
        self._member.launched(program)

    def least(self, program: Program, number: int, limits: Limits, left: Leave | None) -> int:
        """The least of the numbers of all workers, of 32 bits each; compared as a launch, and raises the same."""

        def end() -> None:
            self._is_open = False
            self._member.launched(program)

        try:
            answers = self._agree(program, number, limits, left)
            _check_is_needed(left)
            held_off().around(end)
            return int(answers[:, -1].min())
        finally:
            held_off().around(self._member.withdraw)

    def leave_to(self, devices: DeviceGroup) -> None:
        """Has other devices wait for a comparison whose wait has been ended: it holds a thread that they may need."""
        if self._devices.interrupted:
            devices.running, devices.running_name, devices.interrupted = self._devices.running, _NAME, True

    def _agree(self, program: Program, number: int, limits: Limits, left: Leave | None) -> Any:
        """Waits until all workers are about to launch a program; returns what each has said, in reverse order."""
        count = held_off().around(functools.partial(self._member.announce, program))
        digest = np.frombuffer(bytes.fromhex(program.digest), np.int32)
        question = np.array([[*digest, count & 0x7FFFFFFF, number]], np.int32)
        meets = self._is_open or self._program is None
        check = self._program = self._program or gather_program(self._devices, _WORDS)
        while True:
            check.wait(left)  # at first for the question before, if its wait was ended
            if self._devices.interrupted:
                raise NobodyWaits
            if np.array_equal(question, self._question):
                answers = self._devices.fetch(self._answers, 0)
                if (answers[:, :-1] == question[:, :-1]).all():
                    return answers
            if meets:  # others may launch another program, or be at another question
                self._member.meet(f"the launch of {program.words}", *limits)
            held_off().around(functools.partial(self._ask, check, question))
            meets = True

    def _ask(self, check: Executable, question: np.ndarray) -> None:
        self._is_open = True
        (self._answers,) = check.launch([self._devices.put([question])])
        self._question = question


def _check_is_needed(left: Leave | None) -> None:
    """Raises NobodyWaits if nobody needs the launch: the others may have come just after that, and answered."""
    if left is not None and left.is_set():
        raise NobodyWaits


def gather_program(
    devices: DeviceGroup,
    words: int,
    given: str = "",
    then: str = "",
    kinds: Sequence[str] = (),
    results: Sequence[tuple[tuple[int, ...], np.dtype]] = (),
) -> Executable:
    """The program that gathers what all workers say, `%said`, as its last result `%all`, before it does anything else.

    Args:
        devices: a device of each worker.
        words: of 32 bits, that each says.
        given: the arguments before it, as text.
        then: what it does after that, as text; its results are `%y`.
        kinds: the types of these results.
        results: the shapes and dtypes of these results.
    """
    workers = devices.replicas
    said, by_all = (f"tensor<{size}x{words}xi32>" for size in (1, workers))
    arguments, of = ", ".join(filter(None, [given, f"%said: {said}"])), ", ".join([*kinds, by_all])
    text = f"""module @replica_body {{
      func.func public @main({arguments}) -> ({of}) {{
        %all = "stablehlo.all_gather"(%said) {{all_gather_dim = 0 : i64, {groups(workers)}}} : ({said}) -> {by_all}
        {then}
        return {", ".join([*(f"%y#{index}" for index in range(len(kinds))), "%all"])} : {of}
      }}
    }}
    """
    return Executable(text, devices, [*results, ((workers, words), np.dtype(np.int32))])


def groups(workers: int) -> str:
    """The attribute of a collective over all workers."""
    return f"replica_groups = dense<[{list(range(workers))}]> : tensor<1x{workers}xi64>"
