"""Sonnet's own tests of its modules under a replicator, on ours.

They ask `named_replicators` for the strategies to run under. One of them restores checkpoints of earlier Sonnets, which
are not in the wheel: those here are made by the installed one, as Sonnet's own script makes them.
"""

import pytest
import tensorflow as tf
from helpers.sonnet_replicators import REPLICATORS
from sonnet.src.conformance import goldens
from sonnet.src.distribute import replicator_test_utils

replicator_test_utils.named_replicators = lambda: tuple(REPLICATORS.items())  # before the tests below are made

from sonnet.src.conformance import checkpoint_test, distribute_test  # noqa: E402
from sonnet.src.distribute import replicator_test  # noqa: E402

CHECKPOINTS = "sonnet/src/conformance/checkpoints"  # where its tests look, in the working directory


@pytest.fixture(scope="module", autouse=True)
def _checkpoints(tmp_path_factory):
    root = tmp_path_factory.mktemp("sonnet")
    for _, name, golden in goldens.list_goldens():
        module = golden().create_module()
        for variable in golden().create_all_variables(module):
            variable.assign(goldens.range_like(variable))
        tf.train.Checkpoint(module=module).save(str(root / CHECKPOINTS / name / "checkpoint"))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        yield


class TestModules(distribute_test.TpuReplicatorTest):
    """Variables created by the replicas, and recurrent networks unrolled by them."""


class TestVariables(replicator_test.ReplicatorTest):
    """What variables are under a replicator, and what assigning to them does."""


class TestCheckpoints(checkpoint_test.ReplicatorCheckpointTest):
    """Each module saved and restored, with and without a replicator on either side."""

    @pytest.fixture(autouse=True)
    def _folder_of_its_own(self, tmp_path, monkeypatch):
        monkeypatch.setenv("TEST_TMPDIR", str(tmp_path))  # by itself absltest gives all processes the same one

    def replicator_or_skip(self, replicator_fn, use_function):
        return replicator_fn()  # Sonnet skips eager mode under a TpuReplicator; ours runs in it
