"""Every exception that hvdlite raises on purpose.

All derive from `HvdliteError`, so one ``except`` clause catches them. Where Python has a
built-in that callers already expect (``ValueError``, ``TypeError``), the class derives from
that one too.
"""

from __future__ import annotations


class HvdliteError(RuntimeError):
    """Base of all errors of this package."""


class NotInitializedError(HvdliteError, ValueError):
    """A call that needs ``hvdlite.init()`` came before it, or after ``shutdown()``."""

    def __init__(self, call: str) -> None:
        super().__init__(f"hvdlite.{call} needs hvdlite.init() first: call it once at the start of the program.")


class WorldSizeError(HvdliteError):
    """The environment says that there are several processes, and MPI says that there is one."""


class ThreadLevelError(HvdliteError):
    """The MPI library in use does not allow calls from several threads."""


class ArgumentError(HvdliteError, ValueError):
    """An argument whose type is right and whose value is not."""


class UnsupportedTensorError(HvdliteError, TypeError):
    """A tensor (or its dtype) that the requested operation cannot take."""


class CommunicationError(HvdliteError):
    """The ranks could not do together what they were asked to. Under Horovod's name: ``HorovodInternalError``."""


class MismatchError(CommunicationError):
    """The ranks submitted operations that do not belong together. Raised on every rank alike."""


class OutOfSyncError(HvdliteError):
    """Ranks that should hold the same weights do not. Raised on every rank alike."""


class DuplicateNameError(HvdliteError, ValueError):
    """An operation was submitted under a name that is still in flight on this rank."""


class PeerLeftError(CommunicationError):
    """A rank left the job while this rank was waiting for it."""


class MissingPackageError(HvdliteError, ModuleNotFoundError):
    """A package that an extra of hvdlite brings is not installed."""

    def __init__(self, text: str, name: str) -> None:
        ModuleNotFoundError.__init__(self, text, name=name)


class WorkerError(HvdliteError):
    """A function started by ``hvdlite.run`` failed on a rank; the rank's traceback is in the text."""


class LaunchError(HvdliteError):
    """A job could not be started: bad options, no MPI, a host that cannot be reached."""


class NotYetError(HvdliteError, NotImplementedError):
    """A name that Horovod has, for something that hvdlite does not do yet."""
