"""The handle of an operation: stands for a result that may not be there yet."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeVar

from hvdlite.operations.negotiation.messages import Key
from hvdlite.operations.negotiation.mismatch import name_of
from hvdlite.timeline import OperationRecord

T = TypeVar("T")


class HandleOwner(Protocol):
    """The part of an engine that a handle uses."""

    def poll(self, handle: Handle[Any]) -> bool:
        """See `Handle.poll`."""

    def wait(self, handle: Handle[Any]) -> None:
        """Return when the operation is over."""

    def release_name(self, handle: Handle[Any]) -> None:
        """Allow the name of the handle again: nobody can wait for the handle any more."""


class Handle(Generic[T]):
    """The handle of an operation whose result is a T.

    Examples:
        >>> def overlapped():
        ...     handle = hvdlite.allreduce_async(np.array([2.0]), hvdlite.Sum)
        ...     found = handle.wait()  # after what the program does meanwhile
        ...     return handle.poll(), found.item()
        >>> on_ranks(2, overlapped)
        [(True, 4.0), (True, 4.0)]
    """

    __slots__ = ("_engine", "_error", "_hand_over", "_result", "done", "key", "record")

    def __init__(self, engine: HandleOwner, key: Key) -> None:
        self.key = key
        self.done = False
        """True if the operation is over, whether the caller has seen the result or not. The engine sets it."""
        self.record: OperationRecord | None = None
        """The timeline's record of the operation; None if there was no timeline at its submission. The engine uses it."""
        self._engine = engine
        self._result: Any = None
        self._hand_over: Callable[[Any], Any] | None = None
        self._error: BaseException | None = None

    def __del__(self) -> None:
        if isinstance(self.key, str):
            self._engine.release_name(self)  # nobody can wait for it any more

    def poll(self) -> bool:
        """Say whether the operation is over: then `wait` returns or raises at once.

        This call may drive the operation one step. The next call sees the effect.
        """
        return self._engine.poll(self)

    def wait(self) -> T:
        """Wait until the operation is over.

        Returns:
            The result of the operation.

        Raises:
            MismatchError: The ranks submitted operations that do not belong together.
            PeerLeftError: A rank that must take part has left the job.
        """
        self._engine.wait(self)
        if self._error is not None:
            raise self._error
        if self._hand_over is not None:
            return self._hand_over(self._result)  # type: ignore[no-any-return]
        return self._result  # type: ignore[no-any-return]

    def finish(self, result: Any, error: BaseException | None, hand_over: Callable[[Any], Any] | None = None) -> None:
        """Complete the handle. Only the engine calls this.

        Args:
            result: The result that `wait` returns.
            error: The error that `wait` raises; None if the operation has succeeded.
            hand_over: A function that makes the caller's result of `result`, in the thread that waits; None if `result` is it.
        """
        self._result, self._error, self._hand_over = result, error, hand_over
        self.done = True

    def __repr__(self) -> str:
        return f"<hvdlite.Handle of {name_of(self.key)}, {'done' if self.done else 'in flight'}>"
