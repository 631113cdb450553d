"""Every exception that hvdlite raises on purpose.

All derive from `HvdliteError`, so one ``except`` clause catches them. Where Python has a
built-in that callers already expect (``ValueError``, ``TypeError``), the class derives from
that one too.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any


class HvdliteError(RuntimeError):
    """Base of all errors of this package."""


# TensorFlow makes exceptions that pass through a function which it has translated anew, with the lines of the function in their
# text; of classes that are made like this. Others come out as its own StagingError.
HvdliteError.__init__ = Exception.__init__  # type: ignore[method-assign]


class NotInitializedError(HvdliteError, ValueError):
    """A call that needs ``hvdlite.init()`` came before it, or after ``shutdown()``."""

    @classmethod
    def of(cls, call: str) -> NotInitializedError:
        """The error of such a call, given as ``"rank()"``.

        Exceptions are made again of their text alone: by pickle, by Keras, which adds the arguments of a layer to it, by
        TensorFlow. So no constructor makes the text.
        """
        text = f"hvdlite.{call} needs hvdlite.init() first: call it once at the start of the program."
        if "horovod" in sys.modules:  # whose programs look for its words
            text = f"Horovod has not been initialized; use hvd.init(). ({text})"
        return cls(text)


class WorldSizeError(HvdliteError):
    """The environment says that there are several processes, and MPI says that there is one."""


class ThreadLevelError(HvdliteError):
    """The MPI library in use does not allow calls from several threads."""


class ArgumentError(HvdliteError, ValueError):
    """An argument whose type is right and whose value is not."""


class DistributedAlreadyError(ArgumentError):
    """An optimizer or a tape that exchanges gradients by itself is to be made distributed again."""


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


class DeviceError(HvdliteError):
    """A GPU, or the library by which GPUs speak to each other, is not there or cannot be used as it was asked to."""


class NcclError(CommunicationError):
    """A call of NCCL (or RCCL) failed, or what it had started did; the text has its own words."""


class MissingPackageError(HvdliteError, ModuleNotFoundError):
    """A package that an extra of hvdlite brings is not installed."""

    def __init__(self, text: str, name: str | None = None) -> None:
        ModuleNotFoundError.__init__(self, text, name=name)


class WorkerError(HvdliteError):
    """A function started by ``hvdlite.run`` failed on a rank; the rank's traceback is in the text."""


class LaunchError(HvdliteError):
    """A job could not be started: bad options, no MPI, a host that cannot be reached."""


class NotYetError(HvdliteError, NotImplementedError):
    """A name that Horovod has, for something that hvdlite does not do yet."""


def not_yet(name: str) -> type[Any]:
    """What stands for a name of Horovod's that hvdlite does not have yet, so that programs can import it.

    Args:
        name: With the module that it is in, such as "hvdlite_tf.elastic.run".

    Returns:
        A class, which can be subclassed; called, as a class or as a function, it raises `NotYetError`.
    """

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        raise NotYetError(
            f"{name} is not there yet: the number of ranks is fixed while a job runs. Save checkpoints, and start the job "
            "again with hvdliterun when a rank fails."
        )

    module, _, short = name.rpartition(".")
    text = f"Raises `NotYetError` when it is called: elastic training is not there yet. Horovod's ``{short}``."
    return type(short, (), {"__init__": __init__, "__doc__": text, "__module__": module})


def ranks_text(ranks: Sequence[int]) -> str:
    """``rank 3``, or ``ranks 0-2, 5``."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    text = ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {text}"
