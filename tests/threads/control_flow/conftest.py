"""What all tests of merge calls in control flow need."""

import pytest
from helpers.on_mirrored import FORMS


@pytest.fixture(params=FORMS)
def form(request):
    return request.param
