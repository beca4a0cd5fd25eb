"""What tests of jobs share. Only those of strategies need TensorFlow."""

import pytest
from helpers.jobs import job


@pytest.fixture
def unused_port(unused_ports) -> int:
    """A port of this machine that nobody listens at, and that nobody gets who asks for any."""
    return unused_ports(1)[0]


@pytest.fixture
def folders(tmp_path):
    """Two of them: that of the workers of a job, and that of one process which does the same alone."""
    found = tmp_path / "shared", tmp_path / "one"
    for each in found:
        each.mkdir()
    return found


@pytest.fixture
def made():
    """A job of two workers, which are still to come."""
    with job() as made:
        yield made
