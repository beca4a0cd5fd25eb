"""Several devices on a machine that has one."""

from __future__ import annotations

from replica_engine.errors import DeviceError
from replica_engine.errors.base import positive_int, shown

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

    from replica_engine._tf import thread_state

    number = positive_int(n)
    if number is None:
        raise DeviceError.bad_count(n)
    if not isinstance(kind, str) or kind not in ("CPU", "GPU"):
        raise DeviceError(f'`kind` of logical devices must be "CPU" or "GPU"; got {shown(kind)}.')
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
