"""Who is late, and where the time goes: what watches over runs while they run. Standard library only.

- `watchdog`: reports what does not come back, and ends the wait for it where there is a limit.
- `stacks`: where threads are in the user's program.
- `timeline`, `trace_file`: spans of time, one track a replica, and the file that a browser draws.

It knows no replica and no program: the engine and the runtime, which do, tell it what to watch and what to say.
"""
