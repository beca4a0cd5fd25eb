"""What goes over a connection between a member and the coordinator: JSON arrays, one on each line.

The first element of an array is the kind of the message. JSON and not pickle: nothing that arrives can run code.

The member proves first that it knows the job's token, and so does the coordinator. Each side sends a random
number, and the other side sends a keyed hash (HMAC-SHA256) of both numbers. The token itself is never sent, and a proof
that was overheard is worth nothing later. What follows is neither encrypted nor signed: the network between the hosts
of a job must be one that nobody else can write to.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
from typing import Any

Message = list[Any]

MEMBER, COORDINATOR = "member", "coordinator"
LONGEST_LINE = 1 << 20  # bytes
LONGEST_STRANGER = 1 << 14  # bytes of a line from somebody who has not proved anything yet


class BadMessageError(Exception):
    """The other side has sent something else than a message. The connection cannot be used any more."""


def encode(message: Message) -> bytes:
    """A message as its line."""
    return json.dumps(message, separators=(",", ":")).encode() + b"\n"


class Lines:
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
