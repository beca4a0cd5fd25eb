"""Programs that suffer a fault, each in a new process. The soak checks their output.

A program prints "ready" when it is in the middle of its work, and "done" when all its own checks have passed.
"""
