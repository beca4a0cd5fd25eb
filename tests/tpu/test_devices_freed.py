"""Devices that were replaced because a program on them did not end are freed when it has."""

import textwrap


def test_devices_are_freed_once_the_program_that_was_given_up_has_ended(programs):
    """In a process of its own: what other tests have left must not keep them."""
    source = """
        import gc
        import threading
        import time
        import weakref

        import tensorflow as tf

        from replica_engine import TPUStrategy, xla
        from replica_engine.pjrt.devices import device_group

        goes_on = threading.Event()

        def use():
            strategy = TPUStrategy(num_cores=2, timeout=5)
            sizes = strategy.experimental_distribute_values_from_function(
                lambda context: tf.ones([context.replica_id_in_sync_group + 1])
            )
            strategy.run(lambda x: x + 1.0, args=(sizes,))
            xla.replicate(xla.replica_id, num_replicas=2)

            @xla.returns(tf.TensorSpec([], tf.float32))
            def save(x):
                goes_on.wait(60)
                return x

            def step(x):
                return xla.cross_replica_sum(xla.outside_compilation(save, x))

            try:
                strategy.run(step, args=(tf.constant(1.0),))
            except TimeoutError:
                return weakref.ref(strategy.extended.backend.own_programs().devices)

        replaced = use()
        print("replaced", device_group("cpu", 2) is not replaced())
        running = replaced()
        goes_on.set()
        print("ended", running.ends_within(60.0))
        del running
        device_group("cpu", 2)
        until = time.monotonic() + 60
        while replaced() is not None and time.monotonic() < until:  # the thread of its launch ends a little later
            gc.collect()
        print("freed", replaced() is None)
    """
    done = programs.run(textwrap.dedent(source))
    assert done.stdout.split("\n")[-4:] == ["replaced True", "ended True", "freed True", ""], done.stdout + done.stderr
