"""``horovod.common.exceptions``."""

from __future__ import annotations

from hvdlite.errors import CommunicationError

HorovodInternalError = CommunicationError
"""Raised where the ranks could not do together what they were asked to."""


class HostsUpdatedInterrupt(RuntimeError):
    """The hosts of an elastic job have changed. (Nothing here raises it yet; programs name it in their handlers.)

    Args:
        skip_sync: The state need not be synchronized, since hosts have only left.
    """

    def __init__(self, skip_sync: bool) -> None:
        super().__init__()
        self.skip_sync = skip_sync


class HorovodVersionMismatchError(ImportError):
    """A framework has another version than the one that Horovod was built with. (Here nothing is built, so nothing raises it.)

    Args:
        name: The framework.
        version: The version that it was built with.
        installed_version: The version that is there.
    """

    def __init__(self, name: str, version: str, installed_version: str) -> None:
        super().__init__(get_version_mismatch_message(name, version, installed_version))
        self.name = name
        self.version = version
        self.installed_version = installed_version


def get_version_mismatch_message(name: str, version: str, installed_version: str) -> str:
    """The text of `HorovodVersionMismatchError`; arguments as there."""
    return f"{name} {installed_version} is installed, and {name} {version} was expected: the build was made with that version."
