"""Operations in flight: whether they are over, and their results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, overload

import torch

from hvdlite import Handle
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
