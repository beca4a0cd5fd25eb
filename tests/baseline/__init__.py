"""200 programs with what each of them computes: the base that a change of the library is compared with.

A program is drawn with a seed, and makes three steps. What it returns are arrays with names: losses, weights, the
variables of the optimizer, predictions, metrics, and of a mistake that it makes, the class of the error with the first
line of its text, and the whole text with the notes, which is compared and not kept. It uses public names only, so it
runs on this library and on the one of 2026-11-27 alike.

- `make baseline` runs all of them on both libraries, on one machine and in one environment, and compares bit by bit.
- `tests/baseline/test_baseline.py`, in `make test-full`, compares with the values in `kept.json`, to 1e-6: another
  processor has other bits.

A difference is a fault, unless `allowed.py` has a line for it, which says why. So is a program that ends with an error
on both libraries: then nothing of it is compared. The values are kept anew with

    PYTHONPATH=.:tests .venv/bin/python -m tests.baseline --keep

only after a change that is meant to change numbers: `make baseline` first lists what differs, each difference gets its
line in `allowed.py`, and no other value may change. Another version of TensorFlow, Keras or jax is such a change too,
if nothing differs between the two libraries there.
"""
