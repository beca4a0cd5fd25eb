"""What members and the coordinator tell each other.

A connection between a member and the coordinator carries JSON arrays, one on each line. The first element of an array
is the kind of the message. JSON and not pickle: nothing that arrives can run code.

The member proves first that it knows the job's token, and so does the coordinator. Each side sends a random
number, and the other side sends a keyed hash (HMAC-SHA256) of both numbers. The token itself is never sent, and a proof
that was overheard is worth nothing later. What follows is neither encrypted nor signed: the network between the hosts
of a job must be one that nobody else can write to.

The first failure of a job is data (`Failure`): the coordinator keeps it, sends it to all, and each member raises it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import hmac
import json
import os
import secrets
import sys
import traceback
from collections.abc import Callable
from types import TracebackType
from typing import Any

from replica_engine import errors
from replica_engine.errors import ReplicaEngineError, WorkerLostError, WorkerRow

# The first failure of a job.

_WORDINGS = {
    "WorkerLostError": (
        "killed",
        "exited",
        "vanished",
        "raised",
        "left",
        "silent",
        "parted",
        "gave_up",
        "stalled",
        "none_goes_on",
    ),
    "WorkersMissingError": ("not_joined", "not_met", "no_value", "no_room"),
    "WorkerVersionError": ("of_package", "of_devices", "of_strategies", "of_replicas"),
    "ProgramDisagreementError": ("differ",),
    "ClusterConfigError": ("other_size", "taken"),
}
"""What may arrive: nothing else is called because a message names it."""

_OURS = os.path.dirname(os.path.dirname(__file__)) + os.sep


@dataclasses.dataclass(frozen=True)
class Failure:
    """Which error to raise, and what it says.

    Attributes:
        wording: the class method that words it: "WorkerLostError.killed".
        arguments: its arguments.
    """

    wording: str
    arguments: tuple[object, ...]

    @classmethod
    def from_wording(cls, wording: Callable[..., ReplicaEngineError], *arguments: object) -> Failure:
        """The failure that a wording describes."""
        return cls(wording.__qualname__, arguments)

    @classmethod
    def from_exit(cls, row: WorkerRow, status: int) -> Failure:
        """The failure of a worker whose process has ended; the status is negative if it was a signal."""
        if status < 0:
            return cls.from_wording(WorkerLostError.killed, row, -status)
        return cls.from_wording(WorkerLostError.exited, row, status)

    @classmethod
    def from_json(cls, value: Any) -> Failure:
        """The failure that `as_json` has converted.

        Raises:
            AttributeError, TypeError or ValueError: it is something else.
        """
        wording, arguments = value
        owner, _, name = wording.partition(".")
        if name not in _WORDINGS.get(owner, ()):
            raise ValueError(f"not a failure: {wording!r}")
        return cls(wording, tuple(_from_json(each) for each in arguments))

    def as_json(self) -> list[object]:
        """The failure as something that JSON can hold."""
        return [self.wording, [_as_json(each) for each in self.arguments]]

    @property
    def worker(self) -> int | None:
        """The worker that is the cause; None if no single worker is."""
        return None if self._row is None else self._row.worker

    @property
    def step(self) -> int | None:
        """The last step of that worker; None if it reported none."""
        return None if self._row is None else self._row.step

    @property
    def is_end(self) -> bool:
        """Whether the failure is that a worker's program ended normally while others went on."""
        return self.wording == WorkerLostError.left.__qualname__

    @property
    def is_silence(self) -> bool:
        """Whether nothing more is heard of that worker: it does not end by itself, as one that has raised does."""
        return self.wording == WorkerLostError.silent.__qualname__

    @property
    def is_stall(self) -> bool:
        """Whether that worker is alive and stuck: it does not end by itself either, but may at a signal."""
        return self.wording == WorkerLostError.stalled.__qualname__

    @property
    def _row(self) -> WorkerRow | None:
        row = self.arguments[0] if self.arguments else None
        return row if isinstance(row, WorkerRow) else None

    def error(self) -> ReplicaEngineError:
        """A new error object, for each place that raises the failure."""
        owner, _, name = self.wording.partition(".")
        error: ReplicaEngineError = getattr(getattr(errors, owner), name)(*self.arguments)
        return error


def print_place(error: BaseException, trace: TracebackType | None) -> bool:
    """Prints where the loss of another worker ended this process, but not its cause, which the launcher prints once.

    Returns:
        Whether it was the loss of a worker; nothing is printed for another exception.
    """
    if not isinstance(error, WorkerLostError) or error.worker is None:
        return False
    frames = [frame for frame in traceback.extract_tb(trace) if not frame.filename.startswith(_OURS)]
    lines = ["Traceback (most recent call last):\n", *traceback.format_list(frames)]
    notes = [f"{note}\n" for note in getattr(error, "__notes__", ())]
    lost = f"worker {error.worker} ({error.host}, pid {error.pid}) is lost; `replica-engine launch` says below how"
    sys.stderr.write("".join([*lines, f"{type(error).__module__}.{type(error).__name__}: {lost}\n", *notes]))
    return True


def _as_json(value: object) -> object:
    if isinstance(value, WorkerRow):
        return {"row": dataclasses.asdict(value)}
    return [_as_json(each) for each in value] if isinstance(value, (list, tuple)) else value


def _from_json(value: object) -> object:
    if isinstance(value, dict):
        return WorkerRow(**value["row"])
    return [_from_json(each) for each in value] if isinstance(value, list) else value


# Messages, and the proof that a side knows the token.

Message = list[Any]

MEMBER, COORDINATOR = "member", "coordinator"
LONGEST_LINE = 1 << 20  # bytes
LONGEST_STRANGER = 1 << 14  # bytes of a line from somebody who has not proved anything yet


class BadMessageError(Exception):
    """The other side has sent something else than a message. The connection cannot be used any more."""


def encode(message: Message) -> bytes:
    """A message as its line."""
    return json.dumps(message, separators=(",", ":")).encode() + b"\n"


class MessageReader:
    """Takes what arrives apart into messages.

    Attributes:
        longest: how long a line may be, in bytes.
    """

    def __init__(self, longest: int = LONGEST_LINE):
        self.longest = longest
        self._rest = b""

    def feed(self, data: bytes) -> list[Message]:
        """Adds bytes that have arrived, and returns the messages that are complete now.

        Raises:
            BadMessageError: a line is too long or is not a message.
        """
        *lines, self._rest = (self._rest + data).split(b"\n")
        # The rest too: a stranger that never ends its line must not fill the memory.
        if max(map(len, [self._rest, *lines])) > self.longest:
            raise BadMessageError(f"a line of more than {self.longest} bytes")
        try:
            messages = [json.loads(line.decode()) for line in lines]
        except (ValueError, RecursionError) as error:
            raise BadMessageError(str(error)) from None
        for message in messages:
            if not isinstance(message, list) or not message or not isinstance(message[0], str):
                raise BadMessageError("not an array that begins with a kind")
        return messages


def nonce() -> str:
    """A random number for a proof of the other side, as text."""
    return secrets.token_hex(16)


def proof(token: str, side: str, coordinators: str, members: str) -> str:
    """The proof that `side` knows the token.

    Args:
        token: the job's secret.
        side: `MEMBER` or `COORDINATOR`, so that neither can send the other its own proof back.
        coordinators: the random number of the coordinator.
        members: the random number of the member.
    """
    text = json.dumps([side, coordinators, members])
    return hmac.new(token.encode(), text.encode(), hashlib.sha256).hexdigest()


def is_proof(value: object, token: str, side: str, coordinators: str, members: str) -> bool:
    """Whether a value is that proof; it takes as long for a wrong one, so that trying tells nothing."""
    expected = proof(token, side, coordinators, members)
    return isinstance(value, str) and value.isascii() and hmac.compare_digest(value, expected)
