"""Ranks wait for each other, and a rank that has no more data takes part."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import hvdlite
from hvdlite import ProcessSet
from hvdlite.api import world


def barrier(process_set: ProcessSet = hvdlite.global_process_set) -> None:
    """Return when every rank has called it.

    Args:
        process_set: The ranks that take part.

    Raises:
        CommunicationError: As `synchronize`.
    """
    hvdlite.barrier(process_set=process_set)


def join(device: int = -1, *, process_set: ProcessSet = hvdlite.global_process_set) -> int:
    """Say that this rank has no more data, and take part in what the others still do until all have said so.

    The others train on: an average of gradients is one of those who have data. In the end every rank has the parameters and
    the optimizer state of the one that joined last. Buffers of the model are not known here: broadcast them, if they matter,
    by ``broadcast_parameters(model.state_dict(), last)``. See `hvdlite.join` for what this rank adds to other operations.

    Args:
        device: Where Horovod makes the zeros that it contributes. Nothing has to be made here; any number will do.
        process_set: The ranks that take part.

    Returns:
        The rank that joined last; its rank in the job, with a process set too.

    Raises:
        HvdliteError: As `hvdlite.join`.
    """
    return world("join()").ranks(process_set)[hvdlite.join(process_set)]


@contextlib.contextmanager
def uneven(process_set: ProcessSet = hvdlite.global_process_set) -> Iterator[None]:
    """For a with statement around an epoch: ranks may have different numbers of batches. As `join` at its end::

        with hvd.uneven():
            for x, y in loader:
                ...
                optimizer.step()

    A body that fails does not join: the error ends the job.

    Args:
        process_set: The ranks that take part.
    """
    yield
    join(process_set=process_set)
