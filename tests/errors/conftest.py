"""Leaves out what compiles replicas where that is not possible."""

import pytest
from helpers.versions import HAS_XLA

pytest.register_assert_rewrite("helpers.golden")

if not HAS_XLA:
    collect_ignore = [
        "test_backend.py",
        "test_bodies.py",
        "test_collectives.py",
        "test_contrib.py",
        "test_device_loops.py",
        "test_distribution.py",
        "test_host_calls.py",
        "test_inputs.py",
        "test_models.py",
        "test_scopes.py",
        "test_timeouts.py",
        "test_values.py",
    ]
