"""Messages that go on while the program computes: a thread tests them, for MPI works on a message only while it is called."""

from __future__ import annotations

import threading

from hvdlite.comm.background import Background
from hvdlite.protocols import Request

_DOZE_SECONDS = 0.05


class ProgressThread:
    """The thread of a rank that tests the messages which nobody waits for."""

    def __init__(self) -> None:
        self._under_way: set[BackgroundRequest] = set()
        self._background = Background(lambda: not self._under_way, self._drive, "hvdlite-messages", _DOZE_SECONDS)

    def begin(self, request: Request) -> Request:
        """Return a request that goes on while the program computes, or waits elsewhere. Who drops it loses nothing.

        Whether MPI sends a message before it is received depends on its size, on MPI's transport and on its settings; the
        receiver cannot know. So a message of any size goes on here, unless it is over.

        Args:
            request: A message that was begun.
        """
        message = BackgroundRequest(request)
        if not message.go_on():
            self._under_way.add(message)
            self._background.wake()
        return message

    def close(self) -> None:
        """End the thread."""
        self._background.stop()
        self._background.join()

    def _drive(self) -> bool:
        over = [message for message in list(self._under_way) if message.go_on()]
        self._under_way.difference_update(over)
        return bool(over)


class BackgroundRequest:
    """A `Request` that two threads may test: the program's, and that of `ProgressThread`."""

    def __init__(self, request: Request) -> None:
        self._request = request
        self._lock = threading.Lock()
        self._over = False
        self._error: Exception | None = None

    @property
    def source(self) -> int | None:
        return self._request.source

    def go_on(self) -> bool:
        """Let the message go on, unless another thread does. Return whether it is over, well or not."""
        if not self._over and self._lock.acquire(blocking=False):
            try:
                self._over = self._over or self._request.test()
            except Exception as error:  # for the program, which asks later
                self._over, self._error = True, error
            finally:
                self._lock.release()
        return self._over

    def test(self) -> bool:
        over = self.go_on()
        self._check()
        return over

    def wait(self) -> None:
        with self._lock:
            if not self._over:
                self._request.wait()
                self._over = True
        self._check()

    def cancel(self) -> bool:
        with self._lock:
            cancelled = not self._over and self._request.cancel()
            self._over = True
        return cancelled

    def _check(self) -> None:
        if self._error is not None:
            raise self._error
