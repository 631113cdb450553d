"""Keeps memory until a device has used it."""

from __future__ import annotations

import threading
from collections import deque
from typing import Any


class Held:
    """Holds tensors whose memory must not be reused yet, for libraries that have no call to say so."""

    def __init__(self) -> None:
        self._held: deque[tuple[Any, Any]] = deque()
        self._lock = threading.Lock()

    def until(self, event: Any, tensor: Any, is_over: Any) -> None:
        """Hold `tensor` until a later call finds that `event` is over. Any thread may call this.

        Args:
            event: The event after which the device no longer uses the tensor.
            tensor: The tensor to hold.
            is_over: Returns whether an event is over. Tensors whose events are over are released, oldest first.
        """
        free = []  # released after the lock is: their destructors run code that is not hvdlite's
        with self._lock:
            self._held.append((event, tensor))
            while self._held and is_over(self._held[0][0]):
                free.append(self._held.popleft())
