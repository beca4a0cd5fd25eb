"""Ctrl-C at random moments, many times in one process, which catches KeyboardInterrupt, checks its state and goes on.

With `--of-a-thread`, another thread raises the exception in the main thread (`PyThreadState_SetAsyncExc`).

If Ctrl-C arrives in a callback of a weak reference or in a `__del__`, Python prints the exception and continues. Such a
round is counted and ends.
"""

from __future__ import annotations

import argparse
import copy
import ctypes
import operator
import os
import random
import signal
import sys
import threading
import time

import numpy as np

from soak.programs.common import SIZE, check, left_threads, make_strategy, running_threads, say

from soak.model import Ledger, Model  # isort: skip


def main() -> None:
    """Runs steps until it is interrupted; repeats that."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("strategy")
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--within", type=float, default=1.0, help="seconds until Ctrl-C must have been answered")
    parser.add_argument("--of-a-thread", action="store_true", help="another thread raises the exception")
    flags = parser.parse_args()

    strategy = make_strategy(flags.strategy)
    compiled = flags.strategy == "compiled"
    model, ledger, draw = Model(strategy, compiled), Ledger.new(SIZE), random.Random(flags.seed)
    x = np.arange(SIZE * 3, dtype=np.float32).reshape(SIZE, 3)
    inputs = model.inputs(x)
    began = time.perf_counter()
    for _ in range(11):
        first = time.perf_counter()
        strategy.run(model.step, args=(inputs,))
        ledger.whole_step(x)
    usual = time.perf_counter() - first
    check(not ledger.differences(model), str(ledger.differences(model)))
    threads, slowest, parts = len(running_threads()), 0.0, 0
    ignored: list[None] = []
    sys.unraisablehook = lambda what: ignored.append(None) if what.exc_type is KeyboardInterrupt else None
    say("ready")
    for number in range(flags.rounds):
        moment = draw.uniform(0, 4 * usual)
        sent: list[float] = []
        made: list[None] = []  # one item per step; append is one instruction, which Ctrl-C cannot interrupt halfway
        killer = threading.Thread(target=_interrupt_after, args=(moment, sent, flags.of_a_thread))
        before = time.perf_counter()
        try:
            killer.start()
            lost = len(ignored)
            while len(ignored) == lost:
                strategy.run(model.step, args=(inputs,))
                made.append(None)
                check(time.perf_counter() - before < 20, f"round {number}: Ctrl-C was lost")
        except KeyboardInterrupt:
            slowest = max(slowest, time.perf_counter() - (sent or [time.perf_counter()])[0])
        killer.join()
        for _ in made:
            ledger.whole_step(x)
        parts += _look(model, ledger, x, number, compiled)
        result = strategy.run(model.step, args=(inputs,))
        ledger.whole_step(x)
        check(all((value == 2 * x.sum(axis=0)).all() for value in model.values(result)), "the next run's result")
        check(not ledger.differences(model), f"round {number}: after the next run {ledger.differences(model)}")
    left = left_threads(threads)
    check(not left, str(left))
    check(slowest < flags.within, f"Ctrl-C took {slowest:.2f} s")
    took = time.perf_counter() - began
    found = f"{flags.rounds} interrupts in {took:.0f} s, the slowest answered in {slowest * 1e3:.0f} ms"
    say(f"{found}; {parts} came between two updates, {len(ignored)} in a callback, where Python ignores it")
    say("done")


def _interrupt_after(seconds: float, sent: list[float], of_a_thread: bool) -> None:
    time.sleep(seconds)
    sent.append(time.perf_counter())
    if of_a_thread:
        main = ctypes.c_ulong(threading.main_thread().ident or 0)
        ctypes.pythonapi.PyThreadState_SetAsyncExc(main, ctypes.py_object(KeyboardInterrupt))
    else:
        os.kill(os.getpid(), signal.SIGINT)


def _look(model: Model, ledger: Ledger, x: np.ndarray, number: int, compiled: bool) -> int:
    """Checks the variables, and records in the ledger what the interrupted step has done.

    A merged variable has its value from before or after the step, the same on all replicas. A variable that each
    replica writes itself has either value on each replica. In a compiled step, all variables have their values from
    before the step, or all from after it.

    Returns:
        1 if some variables are from before and some from after, else 0.
    """
    before, after, made = ledger.rows(), copy.deepcopy(ledger), {}
    after.whole_step(x)
    for name, news in after.rows().items():
        olds, rows = before[name], model.values(getattr(model, name))
        is_new = [(row == new).all() for row, new in zip(rows, news, strict=False)]
        is_old = [(row == old).all() for row, old in zip(rows, olds, strict=False)]
        text = f"round {number}: {name} is {np.stack(rows).tolist()}, was {np.stack(olds).tolist()}"
        check(all(map(operator.or_, is_new, is_old)), f"{text}: of no whole step")
        made[name] = is_new
        if name in ("weight", "count"):
            check(all(is_new) or all(is_old), f"{text}: replicas differ")
            setattr(ledger, name, getattr(after if all(is_new) else ledger, name))
        else:
            rows = [news[index] if is_new[min(index, len(is_new) - 1)] else olds[index] for index in range(SIZE)]
            setattr(ledger, name, np.stack(rows))
    flat = [one for each in made.values() for one in each]
    if compiled:
        check(all(flat) or not any(flat), f"round {number}: a part of a step was made: {made}")
    return int(any(flat) and not all(flat))


if __name__ == "__main__":
    main()
