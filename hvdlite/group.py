"""One group of ranks, as one of its ranks has it: its identity, its named operations, its gradients, and joining.

Two groups of equal ranks are two groups: each has an engine, communicators, channels and memory of its own, and a number that
all its ranks know it by. Whatever lives as long as a group holds the group; whatever outlives it (an optimizer that is used
again after `shutdown` and `init`) asks the world for the group that is in effect now.
"""

from __future__ import annotations

import contextlib
import contextvars
import gc
import threading
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, runtime_checkable

from hvdlite.comm.channel import WatchedChannel
from hvdlite.comm.hierarchical import HierarchicalCollectives
from hvdlite.comm.hierarchy import MakeCollectives
from hvdlite.config import Config
from hvdlite.errors import PeerLeftError
from hvdlite.gpu.collectives import DeviceCollectives
from hvdlite.gpu.groups import Devices, GroupCollectives
from hvdlite.gradients.planner import Planner
from hvdlite.gradients.reducer import ReducerContext
from hvdlite.gradients.reducers import Reducers
from hvdlite.negotiation.engine import Engine
from hvdlite.operations import Agreement, AllgatherObject
from hvdlite.process_set import ProcessSet
from hvdlite.protocols import Channel, Device, Exchange, Plan, TensorInfo, Transport
from hvdlite.tensors.reduction import nbytes_of
from hvdlite.timeline import Timeline
from hvdlite.topology import Members
from hvdlite.watchdog.watchdog import Watchdog

_MANY_EXCHANGES, _MUCH_BYTES = 32, 2**24
"""From here on it is worth looking for exchanges that the program has dropped."""


@runtime_checkable
class RebindableExchange(Exchange, Protocol):
    """An exchange that goes on after ``shutdown()`` and ``init()``, in the world that `init` makes.

    Attributes:
        process_set: The ranks that take part. The exchange is rebound when this very object is in effect again.
    """

    @property
    def process_set(self) -> ProcessSet: ...

    def leave(self) -> None:
        """Hold nothing of its world any more: that has ended. This is each rank's own affair; nothing is sent."""
        ...

    def rebind(self) -> None:
        """Begin anew in the present world, and enter its group (`Group.add`). Every rank of the process set calls this.

        It makes the collective calls that making it makes, in the same order: a new process makes its own meanwhile.
        """
        ...


@dataclass(frozen=True)
class Runtime:
    """What all groups of one rank share.

    Attributes:
        config: The settings.
        hosts: For each rank of the job, some number of its host.
        make_flat: Makes collectives by messages over the ranks of a transport, for their own use alone.
        watch: Is told of waits that last.
        timeline: Is told of what this rank does.
        devices: The GPUs of this rank.
        exchanges: What adapters have made to exchange gradients, of all groups, in the order in which it was made.
    """

    config: Config
    hosts: Sequence[int]
    make_flat: MakeCollectives
    watch: Watchdog
    timeline: Timeline
    devices: Devices
    exchanges: list[Exchange] = field(default_factory=list)

    def engine(self, transport: Transport, members: Members) -> Engine:
        """The named operations of a group; `transport` is for them alone."""
        hosts = [self.hosts[rank] for rank in members.ranks]
        collectives = GroupCollectives(
            transport.duplicate(), hosts, self.make_flat, self.config.shared_memory, self.devices, members
        )
        return Engine(transport, collectives, members, self.watch, self.config, self.timeline)


class Group:
    """One group of ranks. All its ranks make it at the same point of their sequence.

    Args:
        members: Its ranks.
        transport: Over these ranks, for this group alone.
        runtime: What all groups of this rank share.

    Attributes:
        engine: Runs operations by name.
        reducers: Memory for gradients, and how they become those of all ranks.
        exchanges: What adapters have made to exchange gradients (see `add`), in the same order on all ranks of the group.
        stood_in: How many exchanges of others this rank has taken part in with nothing, without a reducer.
        missed: How many exchanges each rank of the group took part in with nothing while the latest `join` lasted.
    """

    def __init__(self, members: Members, transport: Transport, runtime: Runtime) -> None:
        self.members = members
        self._transport = transport
        self._runtime = runtime
        self.engine = runtime.engine(transport, members)
        plan = Plan(message_bytes=runtime.config.bucket_bytes)
        context = ReducerContext(members, runtime.watch, runtime.timeline)
        self.reducers = Reducers(self.engine.run, context, plan, runtime.devices)
        self.engine.use_to_make_late(self.reducers.shared.make_late)
        self.exchanges: list[Exchange] = []
        self.stood_in = 0
        self.missed: list[int] = []
        self._collect_at = _MUCH_BYTES

    @property
    def ranks(self) -> tuple[int, ...]:
        """The world ranks, ascending."""
        return self.members.ranks

    @property
    def rank(self) -> int:
        """This process's number within the group."""
        return self.engine.rank

    @property
    def size(self) -> int:
        """The number of ranks."""
        return self.engine.size

    def add(self, exchange: Exchange) -> None:
        """An adapter has made something to exchange gradients. All ranks of the group do this, in the same order."""
        self.exchanges.append(exchange)
        self._runtime.exchanges.append(exchange)

    def remove(self, exchange: Exchange) -> None:
        """It is used no more. All ranks of the group do this."""
        self.exchanges.remove(exchange)
        self._runtime.exchanges.remove(exchange)

    def channel(self, purpose: str) -> Channel:
        """A new channel for messages between two ranks. All ranks of the group call this; the caller closes it.

        Args:
            purpose: What it is for, the same on all ranks.

        Raises:
            MismatchError: The ranks do not all do this.
        """

        def create(_: HierarchicalCollectives) -> Channel:
            return WatchedChannel(self._transport.duplicate(), self.members, self._runtime.watch)

        made: Channel = self.engine.run(Agreement("channel", [("purpose", purpose)], create))
        return made

    def planner(
        self,
        infos: Sequence[TensorInfo],
        gather: Callable[[Any], list[Any]],
        adapts: bool,
        overlap: bool | None = None,
    ) -> Planner:
        """Finds the plan for a reducer.

        Args:
            infos: Dtype and shape of each tensor.
            gather, adapts: See `Planner`.
            overlap: In place of the setting of that name.
        """
        config, hosts = self._runtime.config, self._runtime.hosts
        own = hosts[self.ranks[self.rank]]
        return Planner(
            [nbytes_of(info) for info in infos],
            self.reducers.plan,
            config if overlap is None else replace(config, overlap="on" if overlap else "off"),
            sum(host == own for host in hosts),
            len({hosts[rank] for rank in self.ranks}) > 1,
            gather,
            self.rank == 0,
            adapts,
        )

    def device_collectives(self, device: Device) -> DeviceCollectives:
        """New collectives on the GPUs of the group, for the caller alone. All its ranks call this.

        The caller closes them, as all ranks do at the same point; `shutdown` closes what is left.

        Args:
            device: This rank's.

        Raises:
            MismatchError: The ranks do not all do this.
            DeviceError: A rank cannot take part, or this one has used another GPU before.
            NcclError: NCCL could not connect the ranks. Raised on all of them.
        """
        devices = self._runtime.devices
        devices.choose(device)

        def create(collectives: HierarchicalCollectives) -> DeviceCollectives:
            return devices.connect(collectives.duplicate(), self.members, device.kind, device)

        made: DeviceCollectives = self.engine.run(Agreement("device collectives", [("device", device.kind)], create))
        return made

    def join(self) -> int:
        """Take part with nothing in what the others do, until all ranks of the group have called this.

        Returns:
            The number, within the group, of the rank that went furthest, and of several the one that was the last.

        Raises:
            HvdliteError: As `Engine.begin_join`.
        """
        joining = self.engine.begin_join()  # first: a rank that may not join must not stand in either
        exchanges = list(self.exchanges)
        context = contextvars.copy_context()
        # Daemons: if this wait fails, the process is to end.
        threads = [
            threading.Thread(target=context.copy().run, args=(_stand_in, exchange), name="hvdlite-join", daemon=True)
            for exchange in exchanges
        ]
        before = self._stood_in()
        for thread in threads:
            thread.start()
        last = joining.wait()
        for thread in threads:
            thread.join()
        self.reducers.shared.wait()
        self.missed = []
        # Memory alone has nothing to catch up, and ranks that had joined may not have it yet.
        exchanges = kept = [exchange for exchange in exchanges if not exchange.memory_only]
        if exchanges:
            # Messages that say who has joined may arrive in another order than gradients, which go other ways.
            missed = self._stood_in() - before
            passes = {(index, key): made for index, each in enumerate(exchanges) for key, made in each.passes.items()}
            held = [
                exchange.keep() for exchange in exchanges
            ]  # Python may drop one between the answer and its catching up
            mine = missed, passes, [each is None or it.dropped for each, it in zip(held, exchanges, strict=True)]
            answers = self.engine.run(AllgatherObject(mine))
            self.missed = [answer[0] for answer in answers]
            dropped = [any(each) for each in zip(*(answer[2] for answer in answers), strict=True)]
            kept = [exchange for exchange, gone in zip(exchanges, dropped, strict=True) if not gone]
            last = _furthest(self.missed, [answer[1] for answer in answers], last)
        for exchange in kept:
            exchange.catch_up(self.ranks[last])
        return last

    def _stood_in(self) -> int:
        return self.stood_in + self.reducers.stood_in

    def release_dropped(self) -> None:
        """Release what exchanges held that all ranks have dropped. All of them call this."""
        if not self.exchanges:
            return
        # An optimizer and what it uses refer to each other, and to look for that takes Python a tenth of a second.
        looked = len(self.exchanges) % _MANY_EXCHANGES == 0 or self.reducers.nbytes >= self._collect_at
        if looked:
            gc.collect()
        exchanges = list(self.exchanges)
        everybody = self.engine.run(AllgatherObject([exchange.dropped for exchange in exchanges]))
        for exchange, dropped in zip(exchanges, zip(*everybody, strict=True), strict=True):
            if all(dropped):
                self.remove(exchange)
                exchange.release()
        if looked:
            self._collect_at = max(_MUCH_BYTES, 2 * self.reducers.nbytes)


def _stand_in(exchange: Exchange) -> None:
    """Take part in the exchanges of others, until they end or fail: why they fail, the wait for the others says."""
    with contextlib.suppress(PeerLeftError):
        exchange.stand_in()


def _furthest(missed: Sequence[int], passes: Sequence[Mapping[Hashable, int]], last: int) -> int:
    """The rank that missed the fewest exchanges, and of these the one that has made the most passes.

    Args:
        missed: How many each rank missed.
        passes: How many each rank has made with each optimizer. An optimizer that not all of these ranks have does not count:
            one of them made it for itself, or the others have dropped it already.
        last: The rank to take where several are equal, if it is one of them.
    """
    complete = [rank for rank, count in enumerate(missed) if count == min(missed)]
    shared = set.intersection(*(set(passes[rank]) for rank in complete))
    return max(complete, key=lambda rank: (sum(passes[rank][key] for key in shared), rank == last))
