"""60 small trainings with Keras, in scopes and by `replicate_model`: what each computes, and what one device does.

It is for changes of how the library runs Keras: after each step of such a change, one command says which programs
compute something else than before, and which of them compute what one device does. What is compared are losses,
metrics, evaluations, predictions, weights and the variables of optimizers; of errors, which method raised them, the
class and the first line; of warnings, their names.

    export PYTHONPATH=.:tests
    python -m tests.keras_table                 runs all, and prints a line for each: the kept values and those of now
    python -m tests.keras_table --only tiny     the programs with this in their names
    python -m tests.keras_table --values        prints each array that differs too
    python -m tests.keras_table --base FOLDER   in place of the kept values, those of FOLDER/replica_engine, run now
    python -m tests.keras_table --keep          runs all twice, and writes kept.json

- **One device**: an array agrees if no element is farther away than 1e-5 of the largest one. All is in float32.
- **Kept values**: each bit counts, except for programs of which two runs had other bits when they were kept. Bits
  hold for one kind of processor and one set of versions: elsewhere, `--base` runs the library of before.

A run takes about two minutes of processor time, in two processes. The status is 1 if a program computes something else
than before. The values are kept anew after each change that is meant, so that the history of the file says what changed
when.
"""
