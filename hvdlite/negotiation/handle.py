"""What stands for the result of an operation that may not be over."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeVar

from hvdlite.negotiation.messages import Key
from hvdlite.negotiation.mismatch import name_of
from hvdlite.timeline import OperationRecord

T = TypeVar("T")


class Driver(Protocol):
    """What an engine does for a handle."""

    def poll(self, handle: Handle[Any]) -> bool:
        """See `Handle.poll`."""

    def wait(self, handle: Handle[Any]) -> None:
        """Return when the operation is over."""

    def release_name(self, handle: Handle[Any]) -> None:
        """Nobody can wait for the handle any more."""


class Handle(Generic[T]):
    """An operation in flight, whose result is a T."""

    __slots__ = ("_engine", "_error", "_hand_over", "_result", "done", "key", "record")

    def __init__(self, engine: Driver, key: Key) -> None:
        self.key = key
        self.done = False
        """Engine only: over, whether the caller has seen it or not."""
        self.record: OperationRecord | None = None
        """Engine only: what the timeline knows of it; None if it was submitted while none was kept."""
        self._engine = engine
        self._result: Any = None
        self._hand_over: Callable[[Any], Any] | None = None
        self._error: BaseException | None = None

    def __del__(self) -> None:
        if isinstance(self.key, str):
            self._engine.release_name(self)  # nobody can wait for it any more

    def poll(self) -> bool:
        """Whether the operation is over, so that `wait` returns (or raises) at once.

        This call may drive it a step; what that brings is seen by the next call.
        """
        return self._engine.poll(self)

    def wait(self) -> T:
        """Wait until the operation is over.

        Returns:
            Its result.

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
        """Engine only: the operation is over.

        Args:
            result: What `wait` returns.
            error: What it raises in its place.
            hand_over: Makes the former of `result`, in the thread that has waited, where that cannot be done before.
        """
        self._result, self._error, self._hand_over = result, error, hand_over
        self.done = True

    def __repr__(self) -> str:
        return f"<hvdlite.Handle of {name_of(self.key)}, {'done' if self.done else 'in flight'}>"
