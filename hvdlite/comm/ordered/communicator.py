"""`Communicator`: one rank's end of a group whose ranks call the same things in the same order."""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from hvdlite.algorithms.gather_bytes import allgather_text
from hvdlite.comm.hierarchical import HierarchicalCollectives
from hvdlite.comm.hierarchy import MakeCollectives
from hvdlite.comm.host import PATIENT
from hvdlite.comm.ordered.calls import Calls, CollectiveCall, Pending
from hvdlite.comm.ordered.channel import WatchedChannel
from hvdlite.comm.ordered.comparison import Comparison
from hvdlite.comm.ordered.messages import ProgressThread
from hvdlite.config import Config
from hvdlite.errors import HvdliteError, MismatchError, ranks_text
from hvdlite.protocols import ANY, Array, Channel, ReduceOp, Request, Transport
from hvdlite.ranks.topology import Members, has_free_core
from hvdlite.timeline import Row, Timeline
from hvdlite.watchdog.watchdog import WaitGuard, Watchdog

_NO_NUMBER = -(2**62)
_FINISH_SECONDS = 1.0
"""How long `close` waits for calls that nobody waits for."""


@dataclass(frozen=True)
class Communicators:
    """What the communicators of one rank share, and those that are open.

    Attributes:
        transport: The transport over all ranks of the job.
        hosts: For each rank of the job, a number of its host.
        make_flat: A function that makes collectives by messages over the ranks of a transport, which nobody else uses.
        config: The settings.
        watch: The watchdog, which owns every wait.
        timeline: The timeline, which records every call.
        progress: The thread for messages that nobody waits for.
        kinds: The kinds of calls that this rank has made, such as "all_reduce", and "message".
        open: The communicators that are open.
    """

    transport: Transport
    hosts: Sequence[int]
    make_flat: MakeCollectives
    config: Config
    watch: Watchdog
    timeline: Timeline
    progress: ProgressThread = field(default_factory=ProgressThread)
    kinds: set[str] = field(default_factory=set)
    open: list[Communicator] = field(default_factory=list)
    _numbers: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    def new(self, ranks: Sequence[int], name: str, limit: float | None = None) -> Communicator:
        """Make a communicator. Exactly the ranks that it is for call this, in the same order.

        Args:
            ranks: Ranks of the job, ascending, with this one among them.
            name: The name of the group for people to read, the same on all ranks.
            limit: The longest time of one call in seconds; None for the setting `stall_shutdown_time_seconds`.

        Raises:
            MismatchError: The ranks make groups of different names.
        """
        everybody, hosts = self.transport, self.hosts
        ours = Members(0, tuple(ranks))
        local = sum(host == hosts[everybody.rank] for host in hosts)
        with self.watch.guarded(lambda: f"{name} of {ranks_text(ranks)} to be made", ours, remember=False):
            transport = everybody.subgroup(ranks)
            # Groups of process sets have numbers from 0 on. Below 0, the first rank of each group counts.
            number = -(ranks[0] + 1 + everybody.size * next(self._numbers)) if transport.rank == 0 else _NO_NUMBER
            agreed = np.array([number, not has_free_core(local)], np.int64)
            self.make_flat(transport).allreduce(agreed, ReduceOp.MAX)
            members = Members(int(agreed[0]), ours.ranks)
            made = Communicator(self, transport, members, name, limit, bool(agreed[1] == 0))
        made.meet()
        self.open.append(made)
        return made

    def close(self) -> None:
        """Close all communicators. This does not wait for other ranks."""
        for each in list(self.open):
            each.close()
        self.progress.close()


class Communicator:
    """Collectives and messages of one group. `Communicators.new` makes it.

    Args:
        shared: What all communicators of this rank share.
        transport: A transport over the group, for this object alone.
        members: The ranks of the group. Their number is not that of any other group.
        name: The name of the group for people to read.
        limit: See `Communicators.new`.
        has_free_cores: Whether each rank of the group can have a second core to itself.

    Attributes:
        rank: The rank of this process in the group.
        size: The number of ranks in the group.
        begins_at_once: Whether submitted calls run while the program computes. If not, the program should wait for a call
            whose result it needs: it then runs the call itself.
    """

    def __init__(
        self,
        shared: Communicators,
        transport: Transport,
        members: Members,
        name: str,
        limit: float | None,
        has_free_cores: bool,
    ) -> None:
        self._shared, self._name, self._limit = shared, name, limit
        self.members, self.rank, self.size = members, transport.rank, transport.size
        hosts = [shared.hosts[rank] for rank in members.ranks]
        config, watch = shared.config, shared.watch
        self._collectives = HierarchicalCollectives(
            transport.duplicate(), hosts, shared.make_flat, config.shared_memory
        )
        self._comparison = Comparison(self._collectives)
        self._channel: Channel = WatchedChannel(transport, members, watch, limit)
        self._number = watch.new_channel(members)
        self._link = watch.link(members, self._number, self._interrupt)
        self.begins_at_once = config.overlap == "on" or (config.overlap == "auto" and has_free_cores)
        self._calls = Calls(self._run, self._guard, self.begins_at_once, watch.users.leave_out)

    def meet(self) -> None:
        """Wait until all ranks have made this communicator, under the same name."""
        self._calls.wait(
            self._calls.submit(CollectiveCall(f"the making of {self._name}", lambda _: None), background=False)
        )

    def run(self, call: CollectiveCall) -> Any:
        """Run a call after those that were submitted before, and return its result.

        Raises:
            MismatchError: The ranks of the group have called different things. All of them raise this.
            HvdliteError: A rank has left, or the communicator is closed.
        """
        return self._calls.wait(self.submit(call, background=False))

    def submit(self, call: CollectiveCall, background: bool = True) -> Pending:
        """Submit a call, and go on. The errors are those of `run`; `wait` raises those that come later.

        Args:
            call: The call.
            background: Whether it may run before this rank waits for it. False saves time if the program waits at once.
        """
        self._link.check()
        self._shared.kinds.add(call.kind)
        return self._calls.submit(call, background)

    def wait(self, pending: Pending, seconds: float | None = None) -> Any:
        """Wait for a call that was submitted, and return its result.

        Args:
            pending: The call.
            seconds: The longest time to wait for another thread that runs it; None for no limit but that of the group.

        Raises:
            CommunicationError: The time is over.
            HvdliteError: See `run`.
        """
        return self._calls.wait(pending, seconds)

    def then(self, pending: Pending, act: Callable[[], None]) -> None:
        """Call `act` when a call is over: now, if it is; else in the thread that runs it, before the next call runs."""
        self._calls.then(pending, act)

    def isend(self, data: Array, dest: int, tag: int = 0) -> Request:
        """Begin to send an array; it goes on while the program computes. See `Channel.isend`."""
        return self._go_on(self._channel.isend(data, dest, tag))

    def irecv(self, data: Array, source: int = ANY, tag: int = 0) -> Request:
        """Begin to receive an array; it goes on while the program computes. See `Channel.irecv`."""
        return self._go_on(self._channel.irecv(data, source, tag))

    @property
    def channel(self) -> Channel:
        """The messages alone, for callers that wait for each message in a thread of theirs: no other thread tests them."""
        self._shared.kinds.add("message")
        return self._channel

    def _go_on(self, request: Request) -> Request:
        self._shared.kinds.add("message")
        return self._shared.progress.begin(request)

    @property
    def is_open(self) -> bool:
        """Whether `close` was not called, and hvdlite was not shut down."""
        return self in self._shared.open

    def close(self) -> None:
        """End every wait on this rank and release everything. This does not wait for other ranks."""
        if self not in self._shared.open:
            return
        self._shared.open.remove(self)
        idle = self._calls.finish(_FINISH_SECONDS)  # a program may end without a wait for its last calls
        self._link.fail(HvdliteError(f"{self._name} is closed: hvdlite has been shut down, or the group destroyed."))
        self._calls.close()
        self._channel.close()
        if idle:
            self._collectives.close()

    def _guard(self, call: CollectiveCall, runs: bool = False) -> WaitGuard:
        def what() -> str:
            return call.text if self._name in call.text else f"{call.text} of {self._name}"

        return self._shared.watch.guarded(what, self.members, runs, self._number, self._link, self._limit)

    def _run(self, call: CollectiveCall, in_background: bool) -> Any:
        collectives = self._collectives
        naps = collectives.host.patiently(PATIENT) if in_background else nullcontext()
        span = self._shared.timeline.span(Row.EXCHANGE, call.kind.upper(), call.text, group=self._name)
        with naps, self._guard(call, runs=True), span:
            if not self._comparison.all_show(zlib.crc32(call.text.encode())):
                raise self._mismatch(call)
            return call.run(collectives)

    def _mismatch(self, call: CollectiveCall) -> MismatchError:
        texts = allgather_text(self._collectives, call.text)
        called = "\n".join(f"  rank {rank}: {text}" for rank, text in zip(self.members.ranks, texts, strict=True))
        return MismatchError(
            f"the ranks of {self._name} call different things:\n{called}\nAll ranks of a group make the same calls in the same "
            "order, with tensors of equal dtypes and sizes."
        )

    def _interrupt(self, error: HvdliteError) -> None:
        self._collectives.stop(error)
        self._calls.fail(error)
