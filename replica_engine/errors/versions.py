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

    @classmethod
    def too_old(cls, package: str, version: str, oldest: str) -> TensorFlowVersionError:
        """The installed TensorFlow or Keras is too old."""
        return cls(
            f"{package} {version} is installed; replica_engine needs {oldest} or newer. Install it with\n"
            f'    pip install --upgrade "{_distribution(package)}>={oldest}"'
        )

    @classmethod
    def name_vanished(cls, package: str, version: str, newest: str, error: BaseException) -> TensorFlowVersionError:
        """The installed TensorFlow or Keras lacks a name that the library uses."""
        return cls(
            f"{package} {version} lacks a name that replica_engine uses ({error}). Install the newest version that "
            f'replica_engine was tested with:\n    pip install "{_distribution(package)}=={newest}.*"'
        )


def untested_version(package: str, version: str, oldest: str, newest: str) -> str:
    """The warning that an installed package is newer than those that the library was tested with."""
    return warning(
        "untested_version",
        f"{package} {version} is newer than what replica_engine was tested with, {oldest} to {newest}. Private names "
        f"may be missing or behave in another way. The newest tested version: "
        f'pip install "{_distribution(package)}=={newest}.*"',
    )


def _distribution(package: str) -> str:
    """What pip calls a package."""
    return package.lower()
