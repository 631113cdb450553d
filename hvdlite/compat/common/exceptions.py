"""``horovod.common.exceptions`` has the exceptions of hvdlite under Horovod's names, and those that only programs name."""

from __future__ import annotations

from hvdlite.errors import CommunicationError

HorovodInternalError = CommunicationError
"""The ranks could not complete an operation together."""


class HostsUpdatedInterrupt(RuntimeError):
    """The hosts of an elastic job have changed. hvdlite does not raise it yet; programs name it in their handlers.

    Args:
        skip_sync: The state need not be synchronized, because hosts have only left.
    """

    def __init__(self, skip_sync: bool) -> None:
        super().__init__()
        self.skip_sync = skip_sync


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
