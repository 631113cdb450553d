"""Ranks as threads of one process, on a simulated network.

Tests run n ranks in milliseconds with it, without MPI. It also shows how algorithms scale: the network keeps a virtual clock
for each rank, so 256 ranks on a slow network need no waiting.

    fabric = LocalFabric(8, Network(latency=10e-6, bandwidth=1e9))
    fabric.run(lambda transport: ring(transport, np.ones(1000), numpy_combine(ReduceOp.SUM)))
    print(fabric.elapsed())
"""

from __future__ import annotations

import math
import queue
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, NoReturn, TypeVar

from hvdlite.comm.mailbox import LocalReceive, LocalSend, Mailbox, Parcel
from hvdlite.comm.messages import check_message
from hvdlite.errors import ArgumentError, PeerLeftError
from hvdlite.protocols import ANY, Array, Combine

T = TypeVar("T")

STACK_BYTES = 1024 * 1024
"""The stack of each thread in bytes, if there are many ranks: the usual 8 MiB would reserve 2 GiB of addresses for 256."""
_FEW_RANKS = 16
"""Up to so many ranks have the usual stack. Few ranks may train a model, and a framework's compiler needs a large stack."""


@dataclass(frozen=True)
class Network:
    """The speed of a simulated network. The default is ideal: messages take no time.

    The time is virtual. Let a message of n bytes leave when the sender's clock shows t. It occupies the sender until t + nβ.
    The receiver begins to take it in at t + α, or when it asks for it if that is later, and is occupied for nβ::

        sender    ├──── nβ ────┤
        receiver       α →├──── nβ ────┤

    A rank takes in one message at a time, and can send at the same time (`sendrecv`). If each rank has one thread that
    communicates, then the clocks do not depend on how the threads are scheduled. Control messages (`post`) take no time,
    because the schedule decides when a rank sees them.
    """

    latency: float = 0.0
    """α, in seconds."""
    bandwidth: float = math.inf
    """1/β, in bytes per second."""
    reduce_bandwidth: float = math.inf
    """1/γ, in bytes per second: the speed of a `LocalTransport.timed` reduction."""

    def __post_init__(self) -> None:
        if self.latency < 0 or self.bandwidth <= 0 or self.reduce_bandwidth <= 0:
            raise ArgumentError(f"A network needs a latency of at least 0 and positive bandwidths, not {self}.")


class Traffic(NamedTuple):
    """The number of messages, of their bytes, and of control messages that a rank has sent, over all its channels."""

    messages: int
    bytes: int
    control_messages: int


class _Message(NamedTuple):
    data: Array
    departure: float


class _Control(NamedTuple):
    source: int
    text: bytes


class _Left(NamedTuple):
    """An entry that ends every wait. It is put on every queue when a rank has failed, and stays there."""

    rank: int
    error: BaseException


_Queue = queue.SimpleQueue[_Message | _Control | _Left]  # its `get` waits in C, without the GIL


class _Rank:
    """The clock and the counters of a rank, over all its channels.

    Attributes:
        clock: The virtual time of the rank, in seconds.
        sends_until, receives_until: The virtual time at which the last `isend` or `irecv` ends, in seconds.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.clock = self.sends_until = self.receives_until = 0.0
        self.messages = 0
        self.bytes = 0
        self.control_messages = 0


class LocalFabric:
    """The simulated network of the ranks of one process.

    Args:
        size: The number of ranks, at least 1.
        network: The network between ranks of different hosts.
        hosts: The host number of each rank. None puts each rank on a host of its own.
        host_network: The network between ranks of one host. None means `network`.

    Raises:
        ArgumentError: `size` is below 1, or `hosts` has another length.
    """

    def __init__(
        self,
        size: int,
        network: Network | None = None,
        hosts: Sequence[int] | None = None,
        host_network: Network | None = None,
    ) -> None:
        if size < 1:
            raise ArgumentError(f"A fabric needs at least 1 rank, not {size}.")
        self.hosts = tuple(range(size) if hosts is None else hosts)
        if len(self.hosts) != size:
            raise ArgumentError(f"hosts has {len(self.hosts)} entries for {size} ranks.")
        self.network = network or Network()
        self.host_network = host_network or self.network
        self._ranks = [_Rank() for _ in range(size)]
        self._lock = threading.Lock()
        self._queues: dict[Hashable, _Queue] = {}
        self._mailboxes: dict[Hashable, Mailbox] = {}
        self._left: _Left | None = None
        everybody = tuple(range(size))
        self.transports = [LocalTransport(self, everybody, rank, channel=()) for rank in everybody]
        """The transport of each rank."""

    def run(self, function: Callable[[LocalTransport], T], timeout: float | None = None) -> list[T]:
        """Call ``function(transport)`` for every rank at the same time, each in a thread of its own.

        Args:
            function: The program of a rank.
            timeout: The time limit in seconds; None for no limit.

        Returns:
            For each rank the result of `function`.

        Raises:
            TimeoutError: Some ranks were not done in time. The message has their stacks.
            Exception: `function` raised it on the first rank that failed. `abort` wakes the other ranks.
        """
        results: dict[int, T] = {}
        failures: list[BaseException] = []

        def work(transport: LocalTransport) -> None:
            try:
                results[transport.rank] = function(transport)
            except BaseException as error:  # the caller's thread raises it again, below
                failures.append(error)
                self.abort(transport.rank, error)

        threads = [
            threading.Thread(target=work, args=(transport,), name=f"rank {transport.rank}", daemon=True)
            for transport in self.transports
        ]
        default = threading.stack_size(STACK_BYTES if len(threads) > _FEW_RANKS else 0)
        try:
            for thread in threads:
                thread.start()
        finally:
            threading.stack_size(default)
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        for thread in threads:
            thread.join(None if deadline == math.inf else max(0.0, deadline - time.monotonic()))
        late = [rank for rank, thread in enumerate(threads) if thread.is_alive()]
        if late and not failures:
            where = "".join(f"\nrank {rank} is at\n{_stack_of(threads[rank])}" for rank in late)
            timed_out = TimeoutError(f"ranks {late} of {len(threads)} were not done after {timeout} s{where}")
            self.abort(late[0], timed_out)
            raise timed_out
        if failures:
            raise failures[0]
        return [results[rank] for rank in range(len(threads))]

    def abort(self, rank: int, error: BaseException) -> None:
        """Record that `rank` has failed with `error`. Who waits for a message now or later raises PeerLeftError."""
        with self._lock:
            if self._left is None:
                self._left = _Left(rank, error)
                for waiting in self._queues.values():
                    waiting.put(self._left)

    def elapsed(self) -> float:
        """Return the largest clock of all ranks: the virtual time of the whole program so far, in seconds."""
        return max(rank.clock for rank in self._ranks)

    def traffic(self, rank: int) -> Traffic:
        """Return what `rank` has sent so far."""
        counters = self._ranks[rank]
        return Traffic(counters.messages, counters.bytes, counters.control_messages)

    def _queue(self, key: Hashable) -> _Queue:
        with self._lock:
            if key not in self._queues:
                self._queues[key] = _Queue()
                if self._left is not None:
                    self._queues[key].put(self._left)
            return self._queues[key]

    def _mailbox(self, key: Hashable) -> Mailbox:
        with self._lock:
            return self._mailboxes.setdefault(key, Mailbox())


class LocalTransport:
    """A rank's end of a `LocalFabric`: a `Transport`, with a virtual clock."""

    # In this class a rank is a number in the group. Only `_members` has numbers in the fabric.

    def __init__(self, fabric: LocalFabric, members: tuple[int, ...], rank: int, channel: Hashable) -> None:
        self.fabric = fabric
        """The fabric that the ranks share."""
        self.rank = rank
        """This rank in the group."""
        self.size = len(members)
        """The number of ranks in the group."""
        self._members = members
        self._channel = channel
        self._self = fabric._ranks[members[rank]]
        self._outgoing: dict[int, _Queue] = {}
        self._incoming: dict[int, _Queue] = {}
        self._control = self._inbox(rank)
        self._subgroups: Counter[tuple[int, ...]] = Counter()

    @property
    def hosts(self) -> tuple[int, ...]:
        """The host number of each rank of the group."""
        return tuple(self.fabric.hosts[member] for member in self._members)

    @property
    def clock(self) -> float:
        """This rank's virtual time in seconds."""
        return self._self.clock

    def charge(self, seconds: float) -> None:
        """Let `seconds` of virtual time pass on this rank: for its work, or to make it a straggler."""
        with self._self.lock:
            self._self.clock += seconds

    def timed(self, combine: Combine) -> Combine:
        """Return `combine` as a reduction that also charges nγ seconds to this rank."""

        def charged(into: Array, other: Array) -> None:
            combine(into, other)
            self.charge(into.nbytes / self.fabric.network.reduce_bandwidth)

        return charged

    @property
    def medium(self) -> str:
        return "one process, without MPI"

    polls = False

    def send(self, data: Array, dest: int) -> None:
        """Copy `data` to the queue of `dest`. This never blocks."""
        self._set_clock(self._depart(data, dest)[1])

    def recv(self, data: Array, source: int) -> None:
        """Receive exactly ``data.size`` elements from `source` into `data`.

        Raises:
            PeerLeftError: A rank has failed, so the message may never come.
            ArgumentError: The message has another length or dtype than `data`.
        """
        self._set_clock(self._arrive(data, source, self.clock))

    def sendrecv(self, send: Array, dest: int, recv: Array, source: int) -> None:
        """Send and receive at the same time. The errors are those of `recv`."""
        begin, sent = self._depart(send, dest)
        self._set_clock(max(sent, self._arrive(recv, source, begin)))

    def isend(self, data: Array, dest: int, tag: int = 0) -> LocalSend:
        """Copy `data` to the mailbox of `dest`. In virtual time, several sends leave one after the other. See `Transport`."""
        check_message(data, dest, tag, self.size, receives=False)
        self._check(dest)
        rank = self._self
        with rank.lock:
            rank.messages += 1
            rank.bytes += data.nbytes
            departure = max(rank.clock, rank.sends_until)
            sent = rank.sends_until = departure + data.nbytes / self._network(dest).bandwidth
        self._mailbox(dest).put(Parcel(self.rank, tag, data.copy(), departure))
        return LocalSend(lambda: self._set_clock(sent))

    def irecv(self, data: Array, source: int = ANY, tag: int = 0) -> LocalReceive:
        """Take a message from this rank's mailbox as soon as one fits. See `Transport`."""
        check_message(data, source, tag, self.size, receives=True)
        begin = self.clock

        def check() -> None:
            if (left := self.fabric._left) is not None:
                self._raise(left, "waited for a message with a tag")

        def finish(parcel: Parcel) -> None:
            network, rank = self._network(parcel.source), self._self
            with rank.lock:
                arrival = max(begin, parcel.departure + network.latency, rank.receives_until)
                rank.receives_until = arrival + parcel.data.nbytes / network.bandwidth
                rank.clock = max(rank.clock, rank.receives_until)

        return LocalReceive(self._mailbox(self.rank), data, source, tag, check, finish)

    def post(self, message: bytes, dest: int) -> None:
        """Put a control message in the inbox of `dest`."""
        self._check(dest)
        with self._self.lock:
            self._self.control_messages += 1
        self._inbox(dest).put(_Control(self.rank, message))

    def has_message(self) -> bool:
        """Say whether `poll` would return a control message, or raise an error. No message is taken."""
        return not self._control.empty()

    def poll(self) -> tuple[int, bytes] | None:
        """Return the sender and the bytes of the next control message that has arrived, or None.

        Raises:
            PeerLeftError: A rank has failed, and all control messages from before have been read.
        """
        return self.wait_message(0.0)

    def wait_message(self, timeout: float) -> tuple[int, bytes] | None:
        """Return the next control message as `poll` does; None if none arrives within `timeout` seconds."""
        try:
            item = self._control.get(timeout > 0, timeout)
        except queue.Empty:
            return None
        if isinstance(item, _Left):
            self._control.put(item)
            self._raise(item, "waited for a control message")
        assert isinstance(item, _Control)
        return item.source, item.text

    def duplicate(self) -> LocalTransport:
        """Return a transport over the same ranks, whose messages never mix with those of this one. All ranks call this."""
        return self.subgroup(range(self.size))

    def subgroup(self, ranks: Sequence[int]) -> LocalTransport:
        """Return a transport over `ranks` (sorted ranks of this group). Exactly these ranks call this.

        Raises:
            ArgumentError: `ranks` are not sorted ranks of this group with this one among them.
        """
        ranks = tuple(ranks)
        if self.rank not in ranks or list(ranks) != sorted(set(ranks)) or ranks[0] < 0 or ranks[-1] >= self.size:
            raise ArgumentError(
                f"A subgroup needs different, sorted ranks below {self.size}, {self.rank} among them, not {ranks}."
            )
        # All members make their subgroups of these ranks in the same order. So they find the same name for the channel without
        # a message, as MPI finds its context ids.
        self._subgroups[ranks] += 1
        members = tuple(self._members[rank] for rank in ranks)
        return LocalTransport(
            self.fabric, members, ranks.index(self.rank), (self._channel, members, self._subgroups[ranks])
        )

    def close(self) -> None:
        """Do nothing: the fabric owns the queues."""

    def _depart(self, data: Array, dest: int) -> tuple[float, float]:
        """Send `data`, and return the virtual times at which the send begins and ends."""
        self._check(dest)
        if dest not in self._outgoing:
            self._outgoing[dest] = self._pair(self.rank, dest)
        with self._self.lock:
            self._self.messages += 1
            self._self.bytes += data.nbytes
            begin = max(self._self.clock, self._self.sends_until)
        self._outgoing[dest].put(_Message(data.copy(), begin))
        return begin, begin + data.nbytes / self._network(dest).bandwidth

    def _arrive(self, data: Array, source: int, begin: float) -> float:
        """Receive into `data`, and return the virtual time at which that ends. `begin` is the time of the call."""
        if source not in self._incoming:
            self._incoming[source] = self._pair(source, self.rank)
        item = self._incoming[source].get()
        if isinstance(item, _Left):
            self._incoming[source].put(item)
            self._raise(item, f"waited for rank {self._members[source]}")
        assert isinstance(item, _Message)
        if item.data.size != data.size or item.data.dtype != data.dtype:
            raise ArgumentError(
                f"Rank {self.rank} expected {data.size} elements of {data.dtype} from rank {source}, "
                f"which sent {item.data.size} of {item.data.dtype}."
            )
        data[...] = item.data
        network = self._network(source)
        return max(begin, item.departure + network.latency) + data.nbytes / network.bandwidth

    def _set_clock(self, clock: float) -> None:
        with self._self.lock:
            self._self.clock = max(self._self.clock, clock)

    def _network(self, other: int) -> Network:
        hosts = self.fabric.hosts
        same = hosts[self._members[other]] == hosts[self._members[self.rank]]
        return self.fabric.host_network if same else self.fabric.network

    def _pair(self, source: int, dest: int) -> _Queue:
        return self.fabric._queue((self._channel, self._members[source], self._members[dest]))

    def _inbox(self, dest: int) -> _Queue:
        return self.fabric._queue((self._channel, "control", self._members[dest]))

    def _mailbox(self, dest: int) -> Mailbox:
        return self.fabric._mailbox((self._channel, self._members[dest]))

    def _check(self, dest: int) -> None:
        """Raise PeerLeftError if a rank has failed: nobody may ever read what is sent to `dest`."""
        if self.fabric._left is not None:
            self._raise(self.fabric._left, f"sent to rank {self._members[dest]}")

    def _raise(self, left: _Left, action: str) -> NoReturn:
        raise PeerLeftError(
            f"Rank {left.rank} left the job, noticed when rank {self._members[self.rank]} {action}. "
            f"Its error: {type(left.error).__name__}: {left.error}"
        ) from left.error


def _stack_of(thread: threading.Thread) -> str:
    """Return the stack of a running thread as text."""
    frame = sys._current_frames().get(thread.ident or 0)
    return "it has just ended\n" if frame is None else "".join(traceback.format_stack(frame))
