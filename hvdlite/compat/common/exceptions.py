"""``horovod.common.exceptions`` has the exceptions of hvdlite under Horovod's names, and those that only programs name."""

from __future__ import annotations

from hvdlite.elastic import HostsUpdatedInterrupt
from hvdlite.errors import CommunicationError

__all__ = [
    "HorovodInternalError",
    "HorovodVersionMismatchError",
    "HostsUpdatedInterrupt",
    "get_version_mismatch_message",
]

HorovodInternalError = CommunicationError
"""The ranks could not complete an operation together."""


class HorovodVersionMismatchError(ImportError):
    """A framework has another version than the one that Horovod was built with. hvdlite never raises it: it builds nothing.

    Args:
        name: The name of the framework.
        version: The version of the framework that Horovod was built with.
        installed_version: The version of the framework that is installed.
    """

    def __init__(self, name: str, version: str, installed_version: str) -> None:
        super().__init__(get_version_mismatch_message(name, version, installed_version))
        self.name = name
        self.version = version
        self.installed_version = installed_version


def get_version_mismatch_message(name: str, version: str, installed_version: str) -> str:
    """Return the text of `HorovodVersionMismatchError`, which describes the arguments."""
    return f"{name} {installed_version} is installed, and {name} {version} was expected: the build was made with that version."
