"""The private parts of Keras that this library needs.

`hooks` has what it replaces in Keras, for models in a scope and for replicated ones alike. `model` has the parts of
models that have no public name: the variables under Keras variables, losses, metrics, optimizers. `accumulation` has
the parts of an optimizer that accumulate gradients. `sums` finds out whether a metric only adds to its variables.
`trainer` names the methods that make the functions for `fit` and `evaluate`, and `fitting` what happens while they run.
`layouts` knows variables while they are made, and the distributions of Keras. `normalization` synchronizes statistics
under a mask. `files` lets one of several workers write the files. `state` is the state that Keras keeps separately for
each thread, and `added_losses` keeps the losses that layers add so. Only `model` and `sums` import Keras.
"""
