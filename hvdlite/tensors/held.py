"""Keeps tensors until a device has used their memory."""

from __future__ import annotations

import threading
from collections import deque
from typing import Any


class Held:
    """Tensors whose memory a device still uses, for libraries that have no call to say so."""

    def __init__(self) -> None:
        self._held: deque[tuple[Any, Any]] = deque()
        self._lock = threading.Lock()

    def until(self, event: Any, tensor: Any, is_over: Any) -> None:
        """Keep `tensor` at least until `event`, and drop the tensors whose events are over. Any thread may call this."""
        free = []  # dropped after the lock is released, because dropping a tensor may call foreign code
        with self._lock:
            self._held.append((event, tensor))
            while self._held and is_over(self._held[0][0]):
                free.append(self._held.popleft())
