"""Random Keras trainings: one result from run to run, and the numbers of one device.

`spec.py` says what a training is, as data. `draw.py`, `layers.py` and `heads.py` draw one from a seed. `model.py`,
`data.py` and `callbacks.py` build it. `run.py` trains it and collects every number. `judge.py` compares the numbers and
says what is rounding. `shrink.py` makes a failing training small. `suite.py` is the loop of
`python -m soak --only trainings`.
"""
