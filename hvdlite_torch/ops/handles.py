"""Handles of operations in flight: whether an operation is over, and its result."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, overload

import torch

from hvdlite import Handle
from hvdlite.errors import ArgumentError, HvdliteError

T = TypeVar("T")


class CompositeHandle:
    """A handle of several operations in flight that make one result. Calling it waits, as programs for Horovod do.

    Args:
        parts: The handles of the operations.
        combine: A function that makes the result from the operations' results.
    """

    def __init__(self, parts: list[Handle[Any]], combine: Callable[..., Any]) -> None:
        self._parts = parts
        self._combine = combine
        self._results: list[Any] = []

    def poll(self) -> bool:
        """Return whether all operations are over, so that `wait` returns (or raises) at once."""
        return all([part.poll() for part in self._parts])  # a list, because each call makes its operation go on

    def wait(self) -> Any:
        """Wait until all operations are over.

        Returns:
            The result of `combine`. It can be asked for again.

        Raises:
            HvdliteError: The first error of an operation; see `hvdlite.Handle.wait`.
        """
        if not self._results:
            failure: HvdliteError | None = None
            results = []
            for part in self._parts:  # wait for all of them, so that all their names can be used again
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
    """Return whether an operation is over, so that `synchronize` returns (or raises) at once.

    Args:
        handle: What an asynchronous operation returned.

    Raises:
        ArgumentError: `handle` is something else.

    Examples:
        >>> def overlapped():
        ...     handle = hvd.allreduce_async(torch.ones(2), op=hvd.Sum)
        ...     hvd.synchronize(handle)
        ...     return hvd.poll(handle)
        >>> on_ranks(2, overlapped)
        [True, True]
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
        What the blocking function returns; for `alltoall` always a pair. The result can be asked for again.

    Raises:
        MismatchError: The ranks' calls do not belong together.
        CommunicationError: A rank has left the job, or the communication failed.
        ArgumentError: `handle` is something else.

    Examples:
        >>> def overlapped():
        ...     handles = [hvd.broadcast_async(torch.tensor([hvd.rank()]), root) for root in (0, 1)]
        ...     return [hvd.synchronize(handle).item() for handle in handles]
        >>> on_ranks(2, overlapped)
        [[0, 1], [0, 1]]
    """
    return _checked(handle).wait()


def _checked(handle: Any) -> Handle[Any] | CompositeHandle:
    if not isinstance(handle, Handle | CompositeHandle):
        raise ArgumentError(
            f"expected what an asynchronous operation returned; got {type(handle).__name__} {handle!r}."
        )
    return handle
