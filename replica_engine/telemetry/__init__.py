"""Shows which replica is late and where the time goes, while runs are in progress. Standard library only.

- `watchdog`: reports operations that do not return, and ends the wait for them if there is a timeout.
- `stacks`: where threads are in the user's program.
- `timeline`: spans of time on one track for each replica, and the file that trace viewers draw.
- `report`: the command that draws a recorded timeline. `html`: tables for notebooks.

The package does not know replicas or programs. The engine and the runtime tell it what to watch and what to report.
"""
