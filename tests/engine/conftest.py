"""What the engine's tests share. None of them needs TensorFlow."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from replica_engine.engine import Replica, Run, SyncGroup


@pytest.fixture(params=[False, True], ids=["sequential", "concurrent"])
def concurrent(request: pytest.FixtureRequest) -> bool:
    return request.param


@pytest.fixture
def run_bodies() -> Iterator[Callable[..., list]]:
    """Runs bodies once each on a group of their own."""
    groups = []

    def run(*bodies: Callable[[Replica], Any], merge: Callable = lambda requests: requests, **options: Any) -> list:
        group = SyncGroup([f"CPU:{index}" for index in range(len(bodies))])
        groups.append(group)
        return Run(group, bodies, merge, **options)()

    yield run
    for group in groups:
        group.close()
