"""Runs many ranks in virtual time: hvdlite's own code on transports whose messages take the time that they are said to take.

`hvdlite.comm.local` has a clock for each rank, and no common one. Here one clock orders everything that happens, so ranks can
share what carries one message after the other: the link of their host. And control messages take time too.

Each rank is a thread, but only one of them runs at any moment: the one whose clock is behind all others. It goes on until it
waits, or until something else would happen earlier. So a run is always the same, whatever the machine does.
"""

from __future__ import annotations

import heapq
import itertools
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, NoReturn, TypeVar

import numpy as np

from hvdlite.protocols import Array, Combine
from hvdlite.protocols.transport import ANY, Request
from hvdlite.tools.advise.link import NetworkLink

T = TypeVar("T")

_STACK_BYTES = 512 * 1024


@dataclass(frozen=True)
class Costs:
    """What the processors of the ranks need, in seconds.

    Attributes:
        announce: To submit a named operation.
        step: A call of `Controller.step`, without messages.
        look: To look for a control message, if there is none. Who waits looks again and again, so on the average a message
            comes in the middle of a look and a step.
        take: To receive a control message, and to do what it says.
        post: To send a control message.
        copy: To copy a byte in memory, while the other ranks of the host copy too.
        meeting: To meet the other ranks of the host.
    """

    announce: float = 0.0
    step: float = 0.0
    look: float = 0.0
    take: float = 0.0
    post: float = 0.0
    copy: float = 0.0
    meeting: float = 0.0


class Deadlock(Exception):
    """All ranks wait for each other."""


class Clock:
    """Orders what happens by virtual time, and lets one rank run at a time.

    Attributes:
        now: The time of what happens at the moment, in seconds. It never goes back.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[[], int | None]]] = []
        self._numbers = itertools.count()
        self._turns: list[threading.Semaphore] = []
        self._over = threading.Semaphore(0)
        self._running = 0
        self._error: BaseException | None = None

    def at(self, time: float, event: Callable[[], int | None]) -> None:
        """Call `event` at a time. It returns the rank that goes on then; None if the next event follows."""
        heapq.heappush(self._events, (time, next(self._numbers), event))

    def sleep_until(self, rank: int, time: float) -> None:
        """Let the calling thread, which is that of `rank`, go on at a time."""
        if time <= self.now:
            return
        if not self._events or self._events[0][0] > time:
            self.now = time
            return
        self.at(time, lambda: rank)
        self.park(rank)

    def park(self, rank: int) -> None:
        """Let the calling thread wait until an event returns its rank."""
        self._go_on()
        self._turns[rank].acquire()
        if self._error is not None:
            raise self._error

    def _go_on(self) -> None:
        while self._events:
            self.now, _, event = heapq.heappop(self._events)
            rank = event()
            if rank is not None:
                self._turns[rank].release()
                return
        if self._running:
            self._fail(Deadlock(f"{self._running} ranks wait for each other at {self.now} s."))

    def _fail(self, error: BaseException) -> None:
        if self._error is None:
            self._error = error
            self._over.release()

    def run(self, programs: Sequence[Callable[[], T]]) -> list[T]:
        """Run a program on each rank, and return their results by rank.

        Raises:
            Deadlock: All ranks wait for each other.
            Exception: A program has raised it.
        """
        results: dict[int, T] = {}
        self._turns = [threading.Semaphore(0) for _ in programs]
        self._running = len(programs)

        def work(rank: int) -> None:
            self._turns[rank].acquire()
            try:
                if self._error is None:
                    results[rank] = programs[rank]()
            except BaseException as error:  # `run` raises it
                self._fail(error)
                return
            self._running -= 1
            if self._running:
                self._go_on()
            else:
                self._over.release()

        before = threading.stack_size(_STACK_BYTES)
        try:
            threads = [threading.Thread(target=work, args=(rank,), daemon=True) for rank in range(len(programs))]
            for rank, thread in enumerate(threads):
                thread.start()
                self.at(self.now, lambda rank=rank: rank)  # type: ignore[misc]
        finally:
            threading.stack_size(before)
        self._go_on()
        self._over.acquire()
        if self._error is not None:
            for turn in self._turns:
                turn.release()
            raise self._error
        for thread in threads:
            thread.join()
        return [results[rank] for rank in range(len(programs))]


class _Message(NamedTuple):
    source: int
    content: Array | bytes
    arrival: float


class Cluster:
    """Hosts with equally many ranks. Each host has one link, which carries one message at a time in each direction.

    A message of n bytes leaves the host for nβ seconds when the link is free. It enters the other one for nβ seconds that begin
    α seconds later, or when that host's link is free. So without others in its way it arrives after α + nβ. The ranks of one
    host have no link: there a message keeps its sender busy for nβ, and nobody else.

    Args:
        hosts: The number of hosts.
        per_host: The number of ranks of each. The ranks of a host have consecutive numbers.
        between: The link of each host.
        inside: The messages within a host.
        costs: What the processors need.
        values: Whether messages carry their values. If not, receives write nothing, so that large arrays take no memory (see
            `without_values`).

    Attributes:
        clock: The common clock.
        clocks: For each rank the time at which it is, which may be ahead of the common clock while it computes.
        costs: See above.
    """

    def __init__(
        self,
        hosts: int,
        per_host: int,
        between: NetworkLink,
        inside: NetworkLink,
        costs: Costs = Costs(),  # it cannot change
        values: bool = True,
    ) -> None:
        self.size, self.per_host, self.costs, self.values = hosts * per_host, per_host, costs, values
        self.clock = Clock()
        self.clocks = [0.0] * self.size
        self._between, self._inside = between, inside
        self._out_free, self._in_free = [0.0] * hosts, [0.0] * hosts
        self._arrived: dict[Hashable, deque[_Message]] = defaultdict(deque)
        self._waiting: dict[Hashable, int] = {}
        self._meetings: dict[tuple[int, int], list[int]] = {}
        self._met = [0] * self.size
        self._channels: dict[Hashable, int] = {}

    def run(self, program: Callable[[VirtualTransport], T]) -> tuple[float, list[T]]:
        """Run a program on all ranks from now on. Return the seconds until the last one is done, and their results."""
        start = max(self.clocks)
        self.clocks = [start] * self.size
        everybody = tuple(range(self.size))
        # A program of its own for each rank: the lambda must not see the last rank only.
        programs = [lambda rank=rank: program(VirtualTransport(self, everybody, rank, -1)) for rank in everybody]
        results = self.clock.run(programs)
        return max(self.clocks) - start, results

    def host_of(self, rank: int) -> int:
        """Return the number of a rank's host."""
        return rank // self.per_host

    def channel_of(self, name: Hashable) -> int:
        """Return the number of a channel."""
        return self._channels.setdefault(name, len(self._channels))

    def settle(self, rank: int) -> None:
        """Wait until all that happens before the time of this rank has happened."""
        self.clock.sleep_until(rank, self.clocks[rank])

    def transfer(self, source: int, dest: int, nbytes: int, inbox: Hashable, content: Array | bytes) -> float:
        """Send a message now. Return the time at which its sender can send the next one."""
        now, here, there = self.clock.now, self.host_of(source), self.host_of(dest)

        def arrive(time: float) -> None:
            self.clock.at(time, lambda: self._deliver(dest, inbox, _Message(source, content, time)))

        if here == there:
            gone = now + nbytes * self._inside.seconds_per_byte
            arrive(gone + self._inside.latency)
            return gone
        taken = nbytes * self._between.seconds_per_byte

        def enter() -> None:
            self._in_free[there] = max(self.clock.now, self._in_free[there]) + taken
            arrive(self._in_free[there])

        leaves = max(now, self._out_free[here])
        self._out_free[here] = leaves + taken
        self.clock.at(leaves + self._between.latency, enter)
        return leaves + taken

    def _deliver(self, dest: int, inbox: Hashable, message: _Message) -> int | None:
        self._arrived[inbox].append(message)
        return self._waiting.pop(inbox, None)

    def wait(self, rank: int, inbox: Hashable) -> deque[_Message]:
        """Return the messages of an inbox of this rank, as soon as there is one."""
        self.settle(rank)
        if not self._arrived[inbox]:
            self._waiting[inbox] = rank
            self.clock.park(rank)
            self.clocks[rank] = max(self.clocks[rank], self.clock.now)
        return self._arrived[inbox]

    def look(self, rank: int, inbox: Hashable) -> deque[_Message]:
        """Return the messages of an inbox of this rank that are there now."""
        self.settle(rank)
        return self._arrived[inbox]

    def meet(self, rank: int) -> None:
        """Return when all ranks of this host have called this."""
        self.settle(rank)
        self._met[rank] += 1
        there = self._meetings.setdefault((self.host_of(rank), self._met[rank]), [])
        there.append(rank)
        if len(there) < self.per_host:
            self.clock.park(rank)
        else:
            for other in there[:-1]:
                self.clock.at(self.clock.now, lambda other=other: other)  # type: ignore[misc]
            del self._meetings[self.host_of(rank), self._met[rank]]
        self.clocks[rank] = self.clock.now + (self.costs.meeting if self.per_host > 1 else 0.0)


class VirtualTransport:
    """A rank's end of a `Cluster`: a `Transport`.

    Args:
        cluster: The cluster.
        members: The ranks of the cluster that belong to the group.
        rank: This rank in the group.
        channel: What tells the messages of this group from those of others.
    """

    medium, polls = "virtual time", False

    def __init__(self, cluster: Cluster, members: tuple[int, ...], rank: int, channel: Hashable) -> None:
        self.cluster, self.rank, self.size = cluster, rank, len(members)
        self._members, self._channel, self._me = members, channel, members[rank]
        self._control = (channel, "control", self._me)
        self._groups = 0

    def charge(self, seconds: float) -> None:
        """Let this rank compute for some time."""
        self.cluster.clocks[self._me] += seconds

    def meet(self) -> None:
        """Meet the ranks of this host."""
        self.cluster.meet(self._me)

    def timed(self, combine: Combine, seconds_per_byte: float) -> Combine:
        """Return a reduction that takes time."""

        def charged(into: Array, other: Array) -> None:
            combine(into, other)
            self.charge(into.nbytes * seconds_per_byte)

        return charged

    def send(self, data: Array, dest: int) -> None:
        self._advance(self._depart(data, dest))

    def recv(self, data: Array, source: int) -> None:
        self._advance(self._arrive(data, source))

    def sendrecv(self, send: Array, dest: int, recv: Array, source: int) -> None:
        gone = self._depart(send, dest)
        self._advance(self._arrive(recv, source))
        self._advance(gone)

    def _depart(self, data: Array, dest: int) -> float:
        self.cluster.settle(self._me)
        there, content = self._members[dest], data.copy() if self.cluster.values else data
        return self.cluster.transfer(self._me, there, data.nbytes, (self._channel, self._me, there), content)

    def _arrive(self, data: Array, source: int) -> float:
        message = self.cluster.wait(self._me, (self._channel, self._members[source], self._me)).popleft()
        assert isinstance(message.content, np.ndarray) and message.content.size == data.size
        if self.cluster.values:
            data[...] = message.content
        return message.arrival

    def _advance(self, time: float) -> None:
        self.cluster.clocks[self._me] = max(self.cluster.clocks[self._me], time)

    def post(self, message: bytes, dest: int) -> None:
        self.charge(self.cluster.costs.post)
        self.cluster.settle(self._me)
        there = self._members[dest]
        self.cluster.transfer(self._me, there, len(message), (self._channel, "control", there), message)

    def has_message(self) -> bool:
        return bool(self.cluster.look(self._me, self._control))

    def poll(self) -> tuple[int, bytes] | None:
        there = self.cluster.look(self._me, self._control)
        if not there:
            self.charge(self.cluster.costs.look)
            return None
        source, content, _ = there.popleft()
        assert isinstance(content, bytes)
        self.charge(self.cluster.costs.take)
        return self._members.index(source), content

    def wait_message(self) -> None:
        """Wait for a control message, and notice it."""
        costs = self.cluster.costs
        self.cluster.wait(self._me, self._control)
        self.charge((costs.look + costs.step) / 2)

    def subgroup(self, ranks: Sequence[int]) -> VirtualTransport:
        self._groups += 1
        members = tuple(self._members[rank] for rank in ranks)
        channel = self.cluster.channel_of((self._channel, members, self._groups))
        return VirtualTransport(self.cluster, members, ranks.index(self.rank), channel)

    def duplicate(self) -> VirtualTransport:
        return self.subgroup(range(self.size))

    def isend(self, data: Array, dest: int, tag: int = 0) -> Request:
        self._not_simulated("isend")

    def irecv(self, data: Array, source: int = ANY, tag: int = 0) -> Request:
        self._not_simulated("irecv")

    def close(self) -> None:
        """Do nothing."""

    def _not_simulated(self, what: str) -> NoReturn:
        raise NotImplementedError(f"{what}: messages with tags are not simulated.")


def without_values(elements: int) -> Array:
    """Return a float32 array of shape ``(elements,)`` that takes no memory: all elements are one."""
    return np.lib.stride_tricks.as_strided(np.zeros(1, np.float32), (elements,), (0,))
