"""Shows which replica is late and where the time goes, while runs are in progress. Standard library only.

- `watchdog`: reports operations that do not return, with the stacks of threads, and ends the wait for them if there is
  a timeout.
- `timeline`: spans of time on one track for each replica, and the file that trace viewers draw.
- `timeline_report`: the command that draws a recorded timeline, and names the straggler.

The package does not know replicas or programs. The engine and the runtime tell it what to watch and what to report.
"""
