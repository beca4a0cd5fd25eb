"""What this process sets up once: devices, TensorFlow's thread pool, its folder; and no run after a fork.

`replica_engine` imports this module first. So it must import neither TensorFlow nor a module that imports it: importing
the package stays cheap.
"""

from __future__ import annotations

import contextlib
import os
import sys

from replica_engine.errors import DeviceError, ForkedError, base
from replica_engine.process import cores

# Several devices on a machine that has one.

GPU_SHARE = 1024  # MiB of memory for each logical GPU


def logical_devices(n: int, kind: str = "CPU") -> list[str]:
    """Ensures that at least `n` logical devices of a kind exist, and returns the names of the first `n`.

    Divides the first physical device, which TensorFlow allows only before it runs its first op. This function does not
    start TensorFlow. It may be called again; a larger `n` is possible until TensorFlow has started.

    Args:
        n: the number of devices.
        kind: "CPU" or "GPU"; a logical GPU gets 1024 MiB.

    Returns:
        The names, `["CPU:0", "CPU:1", ...]`.

    Raises:
        DeviceError: TensorFlow has started with fewer devices, the machine has no device of this kind, or an argument
            is invalid.

    Example:
        >>> import replica_engine
        >>> replica_engine.logical_devices(1)
        ['CPU:0']
    """
    # Imported here, so that the helpers of `testing` work without TensorFlow.
    import tensorflow as tf

    from replica_engine.upstream import thread_state

    number = base.positive_int(n)
    if number is None:
        raise DeviceError.bad_count(n)
    if not isinstance(kind, str) or kind not in ("CPU", "GPU"):
        raise DeviceError(f'`kind` of logical devices must be "CPU" or "GPU"; got {base.shown(kind)}.')
    n = number
    if not thread_state.started():
        _divide(n, kind)  # and does not start TensorFlow: a strategy of several workers must come before that
    elif (present := len(tf.config.list_logical_devices(kind))) < n:
        raise DeviceError(
            f"{n} logical {kind} devices were requested, but TensorFlow has already started with {present}. "
            "Logical devices must be made before TensorFlow runs anything: call "
            f"replica_engine.logical_devices({n}) at the top of the program, before a strategy is made."
        )
    return [f"{kind}:{index}" for index in range(n)]


def _divide(n: int, kind: str) -> None:
    import tensorflow as tf

    physical = tf.config.list_physical_devices(kind)
    if not physical:
        raise DeviceError(
            f"This machine has no {kind} device that could be divided into logical devices. Every machine has a "
            "CPU: logical_devices(n)."
        )
    if len(physical) >= n:
        return
    already = tf.config.get_logical_device_configuration(physical[0]) or []
    if len(already) < n:
        share = {"memory_limit": GPU_SHARE} if kind == "GPU" else {}
        tf.config.set_logical_device_configuration(
            physical[0], [tf.config.LogicalDeviceConfiguration(**share) for _ in range(n)]
        )


# TensorFlow's inter-op thread pool.

VARIABLE = "TF_NUM_INTEROP_THREADS"  # TensorFlow reads it when it starts
FOR_ONE_LAUNCH = 2  # threads: one for the launch, and one for its host calls
FOR_LAUNCHES = 16  # threads: enough for launches from up to 15 user threads

_set_here = False


def make_room(threads: int) -> None:
    """Makes TensorFlow's inter-op pool at least `threads` large.

    Launches inside `tf.function`s must never exhaust the pool. TensorFlow runs the ops of a `tf.function` on the
    threads of this pool, and makes one thread for each core. The launch of a compiled program is one op, and holds its
    thread until the program has ended. A host call of that program may run another `tf.function`, which needs another
    thread of the same pool. If launches hold all threads (a launch that waits for its turn holds one too), the host
    call never gets a thread and the program never ends.

    Nothing else needs more threads than cores, because iterators wait on other threads. On few cores, more threads make
    small graph steps slower. So the pool is enlarged only where compiled programs are used.

    Does nothing if the pool is larger already, if TensorFlow has started, which fixes the size, or if the user has
    chosen a size.
    """
    global _set_here
    if "tensorflow" in sys.modules:
        from replica_engine.upstream import thread_state

        if thread_state.started():
            return
    if (VARIABLE not in os.environ or _set_here) and cores() < threads:
        os.environ[VARIABLE] = str(threads)
        _set_here = True


# No run in a process that was forked from a process in which TensorFlow had started.

_parent: int | None = None  # the parent's process id, in such a child; None in any other process


def check_not_forked() -> None:
    """Raises ForkedError in a child process that was forked after TensorFlow had started.

    A fork copies the memory of a process, but only one of its threads. The child lacks the threads of TensorFlow's and
    XLA's thread pools, and the replica threads. Code that waits for such a thread in the child waits for ever.
    """
    if _parent is not None:
        raise ForkedError(
            f"Process {os.getpid()} was forked from process {_parent}, in which TensorFlow had already started. A "
            "forked process has none of its parent's threads, so any code that waits for those threads, replicas "
            "included, would wait for ever. Start a new process instead, "
            "multiprocessing.get_context('spawn').Process(...), or fork before the first op of TensorFlow. The "
            "parent process is not affected."
        )


def _after_fork() -> None:
    global _parent
    # None too if another thread is importing it.
    started = getattr(sys.modules.get("replica_engine.upstream.thread_state"), "started", None)
    if started is not None and started():
        _parent = os.getppid()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


# Which folder a relative path is in: the one of the call that got it, wherever the program goes later.
#
# Programs change their folder (hydra does, and notebooks), and what takes a path may use it much later, or on another
# thread. So a path is made absolute by what takes it from the user.


def absolute(path: str) -> str:
    """A path from the root, as it is in the current folder; an address, such as gs://..., stays.

    `..` stays in it: behind a symbolic link it is another folder than the one before.
    """
    if "://" not in path and not os.path.isabs(path):
        with contextlib.suppress(FileNotFoundError):  # somebody has deleted the folder: whatever opens the path says so
            return os.path.join(os.getcwd(), path)
    return path


def resolve_environment_path(path: str) -> str:
    """A path that stands in an environment variable: it is relative to the folder in which the process has begun."""
    return path if not path or "://" in path else os.path.join(_BEGAN_IN, path)


def to_disk(path: str) -> None:
    """Waits until a file, or the names in a folder, would survive a loss of power. Object stores need no such call."""
    if "://" in path:
        return
    descriptor = os.open(path or ".", os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


_BEGAN_IN = absolute("")
