"""Ranks wait for each other, and a rank that has no more data takes part."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import hvdlite
from hvdlite import ProcessSet
from hvdlite.api import world


def barrier(process_set: ProcessSet = hvdlite.global_process_set) -> None:
    """Return when every rank of `process_set` has called this function. See `hvdlite.barrier`.

    Examples:
        >>> on_ranks(2, hvd.barrier)
        [None, None]
    """
    hvdlite.barrier(process_set=process_set)


def join(device: int = -1, *, process_set: ProcessSet = hvdlite.global_process_set) -> int:
    """Say that this rank has no more data, and take part in the operations of the other ranks until all have joined.

    `hvdlite.join` says what this rank contributes to operations and to the steps of a `DistributedOptimizer`, and which errors
    there are. It does not know the model's buffers: if they matter, call
    ``broadcast_parameters(model.state_dict(), last)`` afterwards, where `last` is what this function returned.

    Args:
        device: Horovod's argument. It has no effect, because no zeros are made on a device.

    Returns:
        The rank that joined last; its rank in the job, also with a process set.

    Examples:
        >>> def epoch():
        ...     sums = [hvd.allreduce(torch.ones(1), op=hvd.Sum).item() for batch in range(1 + hvd.rank())]
        ...     return sums, hvd.join()
        >>> on_ranks(2, epoch)  # rank 1 has one batch more
        [([2.0], 1), ([2.0, 1.0], 1)]
    """
    return world("join()").ranks(process_set)[hvdlite.join(process_set)]


@contextlib.contextmanager
def uneven(process_set: ProcessSet = hvdlite.global_process_set) -> Iterator[None]:
    """A context manager around an epoch in which the ranks may have different numbers of batches. It calls `join` at its end::

        with hvd.uneven():
            for x, y in loader:
                ...
                optimizer.step()

    It does not call `join` if the body raises: the error ends the job.

    Args:
        process_set: The ranks that train together.

    Examples:
        >>> def epoch():
        ...     weight = torch.nn.Parameter(torch.zeros(1))
        ...     optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0))
        ...     with hvd.uneven():
        ...         for batch in range(1 + hvd.rank()):  # rank 1 has one batch more
        ...             optimizer.zero_grad()
        ...             (weight * hvd.rank()).sum().backward()
        ...             optimizer.step()
        ...     return weight.item()
        >>> on_ranks(2, epoch)  # a step with the mean of 0 and 1, and a step with 1
        [-1.5, -1.5]
    """
    yield
    join(process_set=process_set)
