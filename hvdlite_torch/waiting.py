"""What a rank waits for: operations in flight, and the other ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, TypeVar, overload

import torch

import hvdlite
from hvdlite import Handle, ProcessSet
from hvdlite.api import world
from hvdlite.errors import ArgumentError, HvdliteError

T = TypeVar("T")


class CompositeHandle:
    """Several operations in flight that make one result. It can be called, too: that is what Horovod's programs do.

    Args:
        parts: The operations.
        combine: Makes the result from theirs.
    """

    def __init__(self, parts: list[Handle[Any]], combine: Callable[..., Any]) -> None:
        self._parts = parts
        self._combine = combine
        self._results: list[Any] = []

    def poll(self) -> bool:
        """Whether all parts are over, so that `wait` returns (or raises) at once."""
        return all([part.poll() for part in self._parts])  # all of them, for each call drives one

    def wait(self) -> Any:
        """Wait until all parts are over.

        Returns:
            The result that they make.

        Raises:
            CommunicationError: As `hvdlite.Handle.wait`.
        """
        if not self._results:
            failure: HvdliteError | None = None
            results = []
            for part in self._parts:  # all of them, so that all their names can be used again
                try:
                    results.append(part.wait())
                except HvdliteError as error:
                    failure = failure or error
            if failure is not None:
                raise failure
            self._results = [self._combine(*results)]
        return self._results[0]

    __call__ = wait


def poll(handle: Handle[Any] | CompositeHandle) -> bool:
    """Whether an operation is over, so that `synchronize` returns (or raises) at once.

    Args:
        handle: What an asynchronous operation returned.
    """
    return _checked(handle).poll()


@overload
def synchronize(handle: Handle[T]) -> T: ...
@overload
def synchronize(handle: CompositeHandle) -> torch.Tensor: ...
def synchronize(handle: Handle[Any] | CompositeHandle) -> Any:
    """Wait until an operation is over.

    Args:
        handle: What an asynchronous operation returned.

    Returns:
        Its result: what the blocking form returns, without compression. For `alltoall` always a pair. It can be asked for
        again.

    Raises:
        CommunicationError: The ranks' calls do not belong together, or a rank has left.
    """
    return _checked(handle).wait()


def _checked(handle: Any) -> Handle[Any] | CompositeHandle:
    if not isinstance(handle, Handle | CompositeHandle):
        raise ArgumentError(
            f"expected what an asynchronous operation returned; got {type(handle).__name__} {handle!r}."
        )
    return handle


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
