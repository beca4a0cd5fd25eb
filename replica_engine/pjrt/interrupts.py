"""Holding off Ctrl-C while a program is launched.

A launch gives a program the old values of variables and takes the new ones over. An exception between the two would
lose both, and Ctrl-C may raise one anywhere.
"""

from __future__ import annotations

from replica_engine.pjrt.group import is_needed_by_a_program
from replica_engine.process import interrupts


def held_off() -> interrupts.held_off:
    """Ctrl-C is raised at the end of what runs inside.

    On one device a launch may run the program, and its host calls, right there. Then the user's code is interrupted as
    ever, and what it raises is taken care of.
    """
    return interrupts.held_off(is_needed_by_a_program)
