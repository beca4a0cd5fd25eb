"""Programs that something happens to, each run in a process of its own. What they print is what is checked.

They say "ready" when they are in the middle of it, and "done" when all that they check themselves held.
"""
