"""Sends requests over several connections, and says what has become of each."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import deque
from collections.abc import Callable

from hvdlite.errors import LaunchError
from hvdlite.serving.bench.client import Connection, Target

NO_ANSWER = "no answer in time"
NO_CONNECTION = "no connection"
LOOK_EVERY = 0.05  # seconds between two looks at what takes too long


class Sender:
    """Sends requests, one at a time over each connection, and keeps the connections. Times are of `time.perf_counter`.

    Args:
        to: Where requests go.
        connections: The most connections. A request for which none is free waits for one.
        timeout: A request that has no answer so long after it was due is given up, in seconds.
        over: Called for each request with when it was due, its status or what went wrong, and when that was.

    Attributes:
        lateness: How much later than due requests were sent, in seconds.
    """

    def __init__(
        self, to: Target, connections: int, timeout: float, over: Callable[[float, int | str, float], None]
    ) -> None:
        self._to, self._connections, self._timeout, self._over = to, connections, timeout, over
        self._bodies = itertools.cycle(to.requests)
        self._waiting: deque[float] = deque()
        self._busy: dict[Connection, float] = {}
        self._free: list[Connection] = []
        self._connecting: set[asyncio.Task[None]] = set()
        self.lateness: list[float] = []

    async def __aenter__(self) -> Sender:
        """Connect for the first time.

        Raises:
            LaunchError: Nobody listens.
        """
        try:
            self._free.append(await Connection.open(self._to))
        except OSError as error:
            raise LaunchError(f"no server answers at {self._to.url}: {error}.") from None
        self._looking = asyncio.create_task(self._look())
        return self

    async def __aexit__(self, *error: object) -> None:
        """End all connections. Requests that are under way are forgotten."""
        tasks = [self._looking, *self._connecting]
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        for connection in (*self._free, *self._busy):
            connection.close()

    @property
    def is_idle(self) -> bool:
        """Whether no request is under way."""
        return not (self._waiting or self._busy)

    def submit(self, due: float) -> None:
        """Send a request as soon as there is a connection for it."""
        self._waiting.append(due)
        self._send()

    def _send(self) -> None:
        while self._waiting and self._free:
            connection = self._free.pop()
            if connection.is_open:
                due = self._busy[connection] = self._waiting.popleft()
                self.lateness.append(time.perf_counter() - due)
                connection.send(next(self._bodies), self._answered)
        more = len(self._waiting) - len(self._connecting)
        for _ in range(min(more, self._connections - len(self._busy) - len(self._connecting))):
            task = asyncio.create_task(self._connect())
            self._connecting.add(task)

    async def _connect(self) -> None:
        task = asyncio.current_task()
        try:
            self._free.append(await Connection.open(self._to))
        except OSError:
            if self._waiting:
                self._over(self._waiting.popleft(), NO_CONNECTION, time.perf_counter())
        finally:
            if task is not None:
                self._connecting.discard(task)
        self._send()

    def _answered(self, connection: Connection, outcome: int | str) -> None:
        due = self._busy.pop(connection)
        if connection.is_open:
            self._free.append(connection)
        self._over(due, outcome, time.perf_counter())
        self._send()

    async def _look(self) -> None:
        while True:
            await asyncio.sleep(LOOK_EVERY)
            now = time.perf_counter()
            for connection, due in list(self._busy.items()):
                if now > due + self._timeout and self._busy.get(connection) == due:
                    del self._busy[connection]
                    connection.close()
                    self._over(due, NO_ANSWER, now)
            while self._waiting and now > self._waiting[0] + self._timeout:
                self._over(self._waiting.popleft(), NO_ANSWER, now)
            self._send()
