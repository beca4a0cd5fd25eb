"""Values of all kinds, drawn by hypothesis from the tables of `bad_inputs`, alone and in containers."""

import collections
import os
import types

import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from helpers.bad_inputs import (
    ARRAYS,
    COMPOSITES,
    DISTRIBUTED,
    ENDLESS,
    OBJECTS,
    OTHER_NUMBERS,
    PYTHON,
    TENSORS,
    VARIABLES,
    Pair,
    Record,
    Slotted,
)

EXAMPLES = int(os.environ.get("BAD_INPUT_EXAMPLES", "0"))
"""How many examples each property is tried on, for long runs; 0 leaves each property its own small number."""


def examples(number):
    """Settings of a property: the same examples in each run, as many as there is time for in the suite."""
    return settings(
        max_examples=EXAMPLES or max(2, number // 2),
        deadline=None,
        derandomize=not EXAMPLES,
        database=None,
        suppress_health_check=list(HealthCheck),
    )


def values_from(*tables):
    """A value of one of these tables."""
    makers = [make for table in tables for make in table.values()]
    return st.sampled_from(makers).map(lambda make: make())


def arrays():
    """Arrays of any dtype that TensorFlow has, with NaNs, infinities, denormal numbers, and any shape."""
    kinds = [np.dtype(code) for code in "?bBhHiIqQefdFD"]
    shapes = hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=3)
    return st.sampled_from(kinds).flatmap(lambda kind: hnp.arrays(kind, shapes))


def leaves():
    """Any value that is not a container."""
    return (
        arrays()
        | values_from(PYTHON, ARRAYS)
        | values_from(TENSORS, COMPOSITES, VARIABLES, OBJECTS)
        | values_from(DISTRIBUTED, OTHER_NUMBERS)
    )


def containers(inner):
    """Containers of all kinds around others."""
    keys = st.sampled_from(["a", "b", 1, None, (1, 2), 2.5])
    return st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=2).map(tuple),
        st.dictionaries(keys, inner, max_size=3),
        st.dictionaries(st.text(max_size=2), inner, max_size=2).map(collections.OrderedDict),
        st.dictionaries(st.text(max_size=2), inner, max_size=2).map(lambda made: collections.defaultdict(list, made)),
        st.dictionaries(st.text(max_size=2), inner, max_size=2).map(types.MappingProxyType),
        st.dictionaries(st.text(max_size=2), inner, max_size=2).map(lambda made: collections.ChainMap(made, {"z": 1})),
        st.tuples(inner, inner).map(lambda two: Pair(*two)),
        st.tuples(inner, inner).map(lambda two: Record(*two)),
        inner.map(Slotted),
    )


def structures():
    """Any value, alone or in containers."""
    return st.recursive(leaves(), containers, max_leaves=4)


def garbage():
    """Anything but a number, a function or an iterator of batches: for parameters that take one of these."""
    return values_from(PYTHON, ARRAYS, TENSORS, COMPOSITES, OBJECTS, DISTRIBUTED, ENDLESS)
