"""Memory that must stay until a device has used it."""

from __future__ import annotations

import threading
from collections import deque
from typing import Any


class Held:
    """Tensors whose memory must not be given away yet, where the library cannot be told so."""

    def __init__(self) -> None:
        self._held: deque[tuple[Any, Any]] = deque()
        self._lock = threading.Lock()

    def until(self, event: Any, tensor: Any, is_over: Any) -> None:
        """Hold `tensor` until some time after `event`, and let go of those whose time has come. From any thread."""
        free = []  # once the lock is, for what that calls is not ours
        with self._lock:
            self._held.append((event, tensor))
            while self._held and is_over(self._held[0][0]):
                free.append(self._held.popleft())
