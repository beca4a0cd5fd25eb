"""What tests of jobs share. Only those of strategies need TensorFlow."""

import pytest


@pytest.fixture
def unused_port(unused_ports) -> int:
    """A port of this machine that nobody listens at, and that nobody gets who asks for any."""
    return unused_ports(1)[0]
