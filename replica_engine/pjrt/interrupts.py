"""Holds off Ctrl-C while a program is launched.

A launch gives the old values of variables to a program and takes the new values over. An exception between the two
would lose both, and Ctrl-C may raise an exception anywhere.
"""

from __future__ import annotations

from replica_engine.pjrt.group import is_needed_by_a_program
from replica_engine.process import interrupts


def held_off() -> interrupts.held_off:
    """Holds off Ctrl-C until the end of the block.

    On one device a launch may run the program, and its host calls, directly on this thread. Then Ctrl-C interrupts the
    user's code as usual, and the host call handles the exception.
    """
    return interrupts.held_off(is_needed_by_a_program)
