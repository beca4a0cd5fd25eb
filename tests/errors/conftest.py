"""Leaves out what needs jax where there is none."""

import sys

import pytest

pytest.register_assert_rewrite("helpers.golden")

if sys.version_info < (3, 11):  # which jax needs
    collect_ignore = [
        "test_backend.py",
        "test_bodies.py",
        "test_collectives.py",
        "test_contrib.py",
        "test_device_loops.py",
        "test_host_calls.py",
        "test_inputs.py",
        "test_models.py",
        "test_scopes.py",
        "test_timeouts.py",
        "test_values.py",
    ]
