"""The exceptions that hvdlite raises on purpose.

All derive from `HvdliteError`, so one ``except`` clause catches them all. If callers expect an exception that Python has
(``ValueError``, ``TypeError``), the class derives from that one too.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence


class HvdliteError(RuntimeError):
    """The base class of all errors of hvdlite."""


# When an exception passes through a function that TensorFlow has translated, TensorFlow makes the exception again, and adds the
# lines of the function to its text. It does so only if the class has this __init__. Others become TensorFlow's StagingError.
HvdliteError.__init__ = Exception.__init__  # type: ignore[method-assign]


class NotInitializedError(HvdliteError, ValueError):
    """A call that needs ``hvdlite.init()`` came before ``init()``, or after ``shutdown()``."""

    @classmethod
    def of(cls, call: str) -> NotInitializedError:
        """Return the error for a call, given in the form ``"rank()"``.

        This is no constructor, because pickle, Keras and TensorFlow make exceptions again from their text alone.
        """
        text = f"hvdlite.{call} needs hvdlite.init() first: call it once at the start of the program."
        if "horovod" in sys.modules:  # programs for Horovod look for Horovod's words
            text = f"Horovod has not been initialized; use hvd.init(). ({text})"
        return cls(text)


class WorldSizeError(HvdliteError):
    """The environment says that the job has several processes, but MPI says that it has one."""


class ThreadLevelError(HvdliteError):
    """The MPI library in use does not allow calls from several threads."""


class ArgumentError(HvdliteError, ValueError):
    """An argument has a value that is not allowed."""


class DistributedAlreadyError(ArgumentError):
    """The program makes an optimizer or a tape distributed that exchanges gradients already."""


class UnsupportedTensorError(HvdliteError, TypeError):
    """The requested operation cannot take this tensor, or its dtype."""


class CommunicationError(HvdliteError):
    """The ranks could not complete an operation together. Horovod's name for it is ``HorovodInternalError``."""


class MismatchError(CommunicationError):
    """The ranks submitted operations that do not match. Every rank raises this error."""


class OutOfSyncError(HvdliteError):
    """The ranks should hold the same weights, and do not. Every rank raises this error."""


class DuplicateNameError(HvdliteError, ValueError):
    """An operation was submitted under a name that is still in flight on this rank."""


class PeerLeftError(CommunicationError):
    """A rank left the job while this rank was waiting for it."""


class CommitError(HvdliteError):
    """An elastic training could not commit its state, or what it has committed is lost."""


class CheckpointError(HvdliteError):
    """A checkpoint could not be saved, or none could be loaded. Every rank raises this error."""


class DeviceError(HvdliteError):
    """A GPU or the library for communication between GPUs is missing, or cannot be used as requested."""


class NcclError(CommunicationError):
    """A call of NCCL (or RCCL) failed, or an operation that it had started failed. The text holds NCCL's own message."""


class MissingPackageError(HvdliteError, ModuleNotFoundError):
    """A package is not installed that an extra of hvdlite would install. The text has the command that installs it."""

    def __init__(self, text: str, name: str | None = None) -> None:
        ModuleNotFoundError.__init__(self, text, name=name)


class WorkerError(HvdliteError):
    """A rank of ``hvdlite.run`` failed, or has no result. The text holds the rank's traceback, if there is one."""


class LaunchError(HvdliteError):
    """A job could not be started: an option is wrong, MPI is missing, or a host cannot be reached."""


class NotYetError(HvdliteError, NotImplementedError):
    """Horovod has a feature that hvdlite does not have yet."""


def ranks_text(ranks: Sequence[int]) -> str:
    """Write a list of ranks in words: ``rank 3``, or ``ranks 0-2, 5``."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    text = ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {text}"
