"""The strategy of most tests of replica threads."""

import pytest
from helpers.devices import DEVICES

from replica_engine import MirroredStrategy


@pytest.fixture
def mirrored():
    return MirroredStrategy(DEVICES[:2])
