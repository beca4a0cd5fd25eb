"""One replica runs out of memory: it asks for more than the machine has ("huge"), or meets a "limit" of the system."""

from __future__ import annotations

import resource
import sys
from typing import Any

import tensorflow as tf

from soak.programs.common import check, check_works, make_strategy, say

HUGE = 10**12  # elements: 4 TB

SPARE = 2**30  # the bytes that the process may still take under the limit


def main() -> None:
    """Runs out of memory on replica 1, and continues."""
    strategy = make_strategy(sys.argv[1])
    with strategy.scope():
        count = tf.Variable(0, aggregation=tf.VariableAggregation.ONLY_FIRST_REPLICA)
    check_works(strategy)
    elements = HUGE
    if sys.argv[2] == "limit":
        with open("/proc/self/statm") as file:
            size = int(file.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (size + SPARE, resource.RLIM_INFINITY))
        elements = SPARE  # of 4 bytes each

    def body() -> Any:
        context = tf.distribute.get_replica_context()
        total = context.all_reduce("SUM", tf.ones([]))
        if tf.get_static_value(context.replica_id_in_sync_group) in (1, None):
            total += tf.reduce_sum(tf.random.uniform([elements])) * 0.0
        count.assign_add(1)
        return total

    for _ in range(3):
        found: BaseException | None = None
        try:
            strategy.run(body)
        except Exception as error:
            found = error
        check(found is not None, "nothing was raised")
        text = f"{type(found).__name__}: {found}"
        is_memory = isinstance(found, tf.errors.ResourceExhaustedError | MemoryError) or "memory" in text.lower()
        check(is_memory, f"{text} came out")
        check(int(count.numpy()) == 0, "a part of the step was made")
        check_works(strategy)
    strategy.run(lambda: count.assign_add(1))
    check(int(count.numpy()) == 1, "the next step was not made")
    say(f"{type(found).__name__} each time")
    say("done")


if __name__ == "__main__":
    main()
