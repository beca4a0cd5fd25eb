"""TensorFlow and Keras in versions that do not serve, or that were never tested."""

from __future__ import annotations

from replica_engine.errors.base import ReplicaEngineError, warning


class TensorFlowVersionError(ReplicaEngineError, ImportError):
    """TensorFlow or Keras is missing, or its version does not serve.

    replica_engine does not install TensorFlow by itself, since `tensorflow` and `tensorflow-cpu` both serve.

    Raised by the first use of the library, or by its import where TensorFlow is imported already. Run the `pip install`
    of the message.
    """

    @classmethod
    def not_installed(cls) -> TensorFlowVersionError:
        """TensorFlow is not installed."""
        return cls(
            "replica_engine runs functions of TensorFlow, which is not installed, or not completely. Install one of\n"
            '    pip install "replica-engine[tensorflow]"\n'
            '    pip install "replica-engine[tensorflow-cpu]"     # without support for GPUs'
        )


def untested_version(package: str, version: str, oldest: str, newest: str) -> str:
    """The warning that an installed package is newer than those that the library was tested with."""
    return warning(
        "untested_version",
        f"{package} {version} is newer than what replica_engine was tested with, {oldest} to {newest}. Private names "
        f"may be missing or behave in another way. The newest tested version: "
        f'pip install "{package.lower()}=={newest}.*"',
    )
