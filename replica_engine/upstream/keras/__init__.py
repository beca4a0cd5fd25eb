"""The private parts of Keras that this library needs.

`keras_hooks` has what it replaces in Keras, for models in a scope and for replicated ones alike. `keras_models` has the
parts of models that have no public name: the variables under Keras variables, losses, metrics, optimizers.
`keras_training` has the parts of the trainer and of optimizers, what happens while `fit` runs, and which worker writes
the files. `metric_updates` finds out whether a metric only adds to its variables. `keras_variables` knows variables
while they are made, the distributions of Keras, and the state that Keras keeps separately for each thread. Only
`keras_models` and `metric_updates` import Keras.
"""
