"""What all tests of merge calls in control flow need."""

import pytest
from helpers.devices import DEVICES
from helpers.on_mirrored import FORMS

from replica_engine import MirroredStrategy


@pytest.fixture
def mirrored():
    return MirroredStrategy(DEVICES[:2])


@pytest.fixture(params=FORMS)
def form(request):
    return request.param
