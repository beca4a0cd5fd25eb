"""Differences from the base that are meant, each with the reason.

A line that nothing needs any more goes. A new line is right if the numbers of before were wrong, or if the docs say
that they are new, and no other program differs for that reason without a line.
"""

from __future__ import annotations

import fnmatch
from typing import NamedTuple

from tests.baseline.compare import Difference


class Allowed(NamedTuple):
    """A difference that is meant.

    Attributes:
        programs: the names of programs, as a pattern.
        arrays: the names of arrays, as a pattern.
        most: how large the difference may be, relative to the largest value of the array. Of texts, a pattern that the
            text of the checkout has.
        why: why the values of before were wrong, or why they are others now.
        by_chance: whether the base differs from itself so, and may be equal too.
    """

    programs: str
    arrays: str
    most: float | str
    why: str
    by_chance: bool = False

    def allows(self, difference: Difference) -> bool:
        """Whether it is this difference."""
        named = (difference.program, self.programs), (difference.array, self.arrays)
        if not all(fnmatch.fnmatchcase(name, pattern) for name, pattern in named):
            return False
        if isinstance(self.most, str):
            return fnmatch.fnmatchcase(difference.text, self.most)
        return difference.largest <= self.most


_NARROW = "Sums of float16 and bfloat16 over replicas are added in float32 and rounded once, where each step rounded."
_NEAR = "A misspelt keyword gets the nearest name, or the list of those that there are."
_PADS = "Shares of unequal shapes are told of split_batch, which pads them."
_ARGS = "If args does not fit the function, a note says how it is written."
_COMMA = "If args is no tuple, the message says that the comma makes one."
_NAMED = "A host call is named by the user's function, and not by a number."
_SHARED = "What to write for a sum of one value for all replicas: a tensor that each replica makes."
_ROOTS = (
    "Compiled gradients of sqrt, rsqrt and reciprocal, which a LayerNormalization has, are made of TensorFlow's "
    "operations, also at zero: other last bits."
)
_ROWS = "Rows of a table that replicas joined are added up in another order: other last bits."
_TWO_AXES = "On a mesh of two axes a convolution and its pooling are whole along divided lengths: other last bits."
_ACTIVATIONS = (
    "Compiled activations and gradients that XLA has otherwise are made of TensorFlow's operations since f82b5cb0, "
    "which made these last bits; relu is the only such activation here."
)

_DIVIDED = "In a scope, train_on_batch and others divide the batch, as fit does; each replica got all of it."
_WHOLE = "A model of a scope is trained by the steps of replicate_model: other last bits."
_CHANCE = "Two runs of the base differ so too: last bits of a float32 gradient in a graph, in about every second run."
_ORDER = (
    "In a function, a sum over three and more replicas on threads has the order of the replicas; TensorFlow's add_n "
    "sorts by the names of ops: other last bits."
)

ALLOWED: tuple[Allowed, ...] = (
    Allowed("collectives 06", "*, gradient of the mean of float32 of replica *", 2e-7, _CHANCE, by_chance=True),
    Allowed("collectives *", "*, sum of *float16 *", 1e-2, _NARROW),
    Allowed("collectives *", "*, mean of *float16 *", 1e-2, _NARROW),
    Allowed("collectives *", "*, merged mean of float16 *", 1e-2, _NARROW),
    Allowed("collectives *", "*, rows of float* of replica *", 2e-7, _ROWS),
    Allowed("trainings 00", "*", 1e-15, _WHOLE),
    Allowed("trainings 03", "*", 5e-7, _WHOLE),
    Allowed("trainings 06", "*", 1e-14, _WHOLE),
    Allowed("trainings 18", "*", 5e-7, _WHOLE),
    Allowed("trainings 33", "*", 5e-6, _WHOLE),
    Allowed("loops 06", "*", 1e-15, _ORDER),
    Allowed("loops 18", "*", 1e-15, _ORDER),
    Allowed("loops 22", "*", 1e-14, _ORDER),
    Allowed("trainings 31", "*", 1e-6, _ORDER),
    Allowed("saving 02", "*", 2e-7, _WHOLE),
    Allowed("saving 10", "*", 2e-7, _WHOLE),
    Allowed(
        "errors *", "a batch that does not divide*", "*", "Any batch trains a model of a scope, as docs/keras.md says."
    ),
    Allowed("trainings 10", "[!f]*", 1e-14, _ACTIVATIONS),  # all but the first fit
    Allowed("trainings 22", "*", 1e-14, _ROOTS),
    Allowed("trainings 35", "*", 1e-14, _ROOTS),
    Allowed("trainings 39", "*", 1.0, _DIVIDED),
    # A mean of squares of gradients: four times as much where a gradient is twice as much.
    Allowed("trainings 39", "* embedding_embeddings_velocity", 3.01, _DIVIDED),
    Allowed("trainings 41", "*", 1e-14, _ROOTS),
    Allowed("parts 09", "*", 1e-14, _ROOTS),
    Allowed("parts 10", "*", 1e-14, _TWO_AXES),
    Allowed(
        "errors *", "a misspelt keyword of *", "TypeError*got an unexpected keyword argument '*'. Did you mean *", _NEAR
    ),
    Allowed(
        "errors *", "a backup without a folder*", "TypeError*got an unexpected keyword argument '*'. It takes *", _NEAR
    ),
    Allowed("errors *", "values of other shapes*", "*or pad the share, as replica_engine.split_batch does.*", _PADS),
    Allowed("errors *", "arguments that do not fit, in full", "TypeError*note: strategy.run could not call *", _ARGS),
    Allowed(
        "errors *", "an argument that is no tuple, in full", "ReplicaValueError*the comma that makes a tuple*", _COMMA
    ),
    Allowed("errors *", "a host function that raises, in full", "LookupError*outside_compilation(fail) at*", _NAMED),
    Allowed("errors *", "a sum of *", "ReplicaValueError*or add up a tensor that each replica makes: tf.*", _SHARED),
)
