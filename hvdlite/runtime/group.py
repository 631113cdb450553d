"""`Group`: one group of ranks, on one of its ranks: its identity, its named operations, its gradients, and joining.

Two groups of equal ranks are different groups. Each group has its own engine, communicators, channels and memory, and a number
that is the same on all its ranks. An object that lives as long as a group holds a reference to the group. An object that
outlives the group (an optimizer that is used again after `shutdown` and `init`) asks the world for the group that is in effect
now.
"""

from __future__ import annotations

import contextlib
import contextvars
import gc
import threading
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, runtime_checkable

from hvdlite.comm.gpu.collectives import DeviceCollectives
from hvdlite.comm.gpu.groups import Devices, GroupCollectives
from hvdlite.comm.hierarchical import HierarchicalCollectives
from hvdlite.comm.hierarchy import MakeCollectives
from hvdlite.comm.ordered.channel import WatchedChannel
from hvdlite.config import Config
from hvdlite.errors import ArgumentError, PeerLeftError, ranks_text
from hvdlite.gradients.planner import Planner
from hvdlite.gradients.reducer import ReducerContext
from hvdlite.gradients.reducers import Reducers
from hvdlite.operations import Agreement, AllgatherObject, Operation
from hvdlite.operations.negotiation.engine import Engine
from hvdlite.protocols import Channel, Device, Exchange, Plan, TensorInfo, Transport
from hvdlite.ranks.process_set import ProcessSet
from hvdlite.ranks.topology import Members
from hvdlite.tensors.reduction import nbytes_of
from hvdlite.timeline import Timeline
from hvdlite.watchdog.watchdog import Watchdog

_MANY_EXCHANGES, _MUCH_BYTES = 32, 2**24
"""With so many exchanges or bytes, a garbage collection is worth its time, to find exchanges that the program has dropped."""


@runtime_checkable
class RebindableExchange(Exchange, Protocol):
    """An exchange that continues after ``shutdown()`` and ``init()``, in the world that `init` makes.

    Attributes:
        process_set: The ranks that participate. The exchange is rebound when this same `ProcessSet` object is in effect again.
    """

    @property
    def process_set(self) -> ProcessSet: ...

    def leave(self) -> None:
        """Drop all references to the world, which has ended. Each rank does this by itself; nothing is sent."""
        ...

    def rebind(self) -> None:
        """Begin again in the present world, and enter its group (`Group.add`). Every rank of the process set calls this.

        The method makes the same collective calls, in the same order, as the constructor of the exchange, because a new process
        calls the constructor at the same time.
        """
        ...


@dataclass(frozen=True)
class Runtime:
    """The objects that all groups of one rank share.

    Attributes:
        config: The settings.
        hosts: For each rank of the job, a number of its host.
        make_flat: A function that makes collectives by messages over the ranks of a transport, which nobody else uses.
        watch: The watchdog, which owns waits that last.
        timeline: The timeline, which records what this rank does.
        devices: The devices of this rank.
        exchanges: The exchanges that adapters have made, of all groups, in the order in which they were made.
    """

    config: Config
    hosts: Sequence[int]
    make_flat: MakeCollectives
    watch: Watchdog
    timeline: Timeline
    devices: Devices
    exchanges: list[Exchange] = field(default_factory=list)

    def engine(self, transport: Transport, members: Members) -> Engine:
        """Make the engine for the named operations of a group. Nobody else uses `transport`."""
        hosts = [self.hosts[rank] for rank in members.ranks]
        collectives = GroupCollectives(
            transport.duplicate(), hosts, self.make_flat, self.config.shared_memory, self.devices, members
        )
        return Engine(transport, collectives, members, self.watch, self.config, self.timeline)


class Group:
    """One group of ranks. All ranks of the group make it at the same point of their sequence.

    Args:
        members: The ranks of the group.
        transport: The transport over these ranks, which nobody else uses.
        runtime: The objects that all groups of this rank share.

    Attributes:
        engine: The engine, which runs named operations.
        reducers: The reducers: memory for gradients, and the exchange of gradients.
        exchanges: The exchanges that adapters have made (see `add`), in the same order on all ranks of the group.
        stood_in: The number of exchanges in which this rank has taken part without data and without a reducer.
        missed: For each rank of the group, the number of exchanges in which it took part without data during the latest `join`.
    """

    def __init__(self, members: Members, transport: Transport, runtime: Runtime) -> None:
        self.members = members
        self._transport = transport
        self._runtime = runtime
        self.engine = runtime.engine(transport, members)
        plan = Plan(message_bytes=runtime.config.bucket_bytes)
        context = ReducerContext(members, runtime.watch, runtime.timeline)
        self.reducers = Reducers(self._run_to_train, context, plan, runtime.devices)
        self.engine.use_to_make_late(self.reducers.shared.make_late)
        self.exchanges: list[Exchange] = []
        self.stood_in = 0
        self.missed: list[int] = []
        self._collect_at = _MUCH_BYTES
        self.making = threading.RLock()
        """Held while a thread makes an optimizer, so that it makes its calls one after the other."""
        self.optimizers = 0
        """How many optimizers of torch all ranks have made together."""
        self._makers: list[threading.Thread] = []

    def _run_to_train(self, operation: Operation, name: str | None = None) -> Any:
        """Run an operation that makes memory for gradients.

        Raises:
            ArgumentError: Ranks of this group only serve parameters. All ranks raise it.
        """
        size, servers = len(self._runtime.hosts), self._runtime.config.servers
        if serving := [rank for rank in self.ranks if rank >= size - servers]:
            raise ArgumentError(
                f"this job has --servers {servers} (HVDLITE_SERVERS), so {ranks_text(serving)} only "
                f"{'serves' if len(serving) == 1 else 'serve'} parameters, and cannot exchange gradients with the others: use "
                "AsyncDistributedOptimizer, or start the job without --servers."
            )
        return self.engine.run(operation, name)

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

    def maker(self) -> str:
        """Return which thread makes an optimizer now, in words that must be the same on all ranks.

        Ranks whose threads make optimizers at the same time would not notice if they made them in different orders.
        """
        here, main = threading.current_thread(), threading.main_thread()
        self._makers = [*(each for each in self._makers if each.is_alive() and each is not here), here]
        several = len([each for each in self._makers if each is not main]) > 1
        return "main" if here is main else f"thread {here.name!r}" if several else "another thread"

    def add(self, exchange: Exchange) -> None:
        """Enter an exchange that an adapter has made. All ranks of the group call this, in the same order."""
        self.exchanges.append(exchange)
        self._runtime.exchanges.append(exchange)

    def remove(self, exchange: Exchange) -> None:
        """Remove an exchange that is not used any more. All ranks of the group call this."""
        self.exchanges.remove(exchange)
        self._runtime.exchanges.remove(exchange)

    def channel(self, purpose: str) -> Channel:
        """Make a channel for messages between two ranks. All ranks of the group call this. The caller closes the channel.

        Args:
            purpose: The purpose of the channel, in a text that is the same on all ranks.

        Raises:
            MismatchError: Some rank calls something else, or gives another purpose.
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
        """Return a planner, which finds the plan for a reducer.

        Args:
            infos: Dtype and shape of each tensor.
            gather, adapts: See `Planner`.
            overlap: Replaces the setting `overlap` if not None.
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
        """Make collectives on the GPUs of the group, which nobody but the caller uses. All ranks of the group call this.

        All callers close the collectives, at the same point of their sequence. `shutdown` closes those that are left.

        Args:
            device: The device of this rank.

        Raises:
            MismatchError: Some rank calls something else, or has another kind of device.
            DeviceError: A rank cannot take part, or this rank has used another GPU before.
            NcclError: NCCL could not connect the ranks. Raised on all ranks.
        """
        devices = self._runtime.devices
        devices.choose(device)

        def create(collectives: HierarchicalCollectives) -> DeviceCollectives:
            return devices.connect(collectives.duplicate(), self.members, device.kind, device)

        made: DeviceCollectives = self.engine.run(Agreement("device collectives", [("device", device.kind)], create))
        return made

    def join(self) -> int:
        """Take part without data in what the other ranks do, until all ranks of the group have called this.

        Returns:
            The number within the group of the rank that went furthest; if several went equally far, the one that joined last.

        Raises:
            HvdliteError: See `Engine.begin_join`.
        """
        joining = self.engine.begin_join()  # this is first: a rank that may not join must not stand in either
        exchanges = list(self.exchanges)
        context = contextvars.copy_context()
        # These are daemons, so that the process can end if `joining.wait` fails.
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
        # Exchanges that are only memory have nothing to catch up, and ranks that had joined may not have them yet.
        exchanges = kept = [exchange for exchange in exchanges if not exchange.memory_only]
        if exchanges:
            # Messages that say which rank has joined travel by another way than gradients, and may arrive in another order.
            missed = self._stood_in() - before
            passes = {(index, key): made for index, each in enumerate(exchanges) for key, made in each.passes.items()}
            held = [
                exchange.keep() for exchange in exchanges
            ]  # Python may drop an exchange between the answer and `catch_up`
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
        """Release the exchanges that all ranks have dropped. All ranks of the group call this."""
        if not self.exchanges:
            return
        # An optimizer and its exchange refer to each other, so only a garbage collection frees them. It takes 0.1 seconds.
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
    """Take part in the exchanges of the other ranks until these end or fail. `Group.join` raises the reason of a failure."""
    with contextlib.suppress(PeerLeftError):
        exchange.stand_in()


def _furthest(missed: Sequence[int], passes: Sequence[Mapping[Hashable, int]], last: int) -> int:
    """Return the rank that missed the fewest exchanges; if there are several, the one that has made the most passes.

    Args:
        missed: The number of exchanges that each rank missed.
        passes: For each rank, the number of passes with each optimizer. Only optimizers that all ranks with the fewest missed
            exchanges have are counted: another one was made by some rank for itself, or other ranks have dropped it already.
        last: The rank that is preferred among equal ranks.
    """
    complete = [rank for rank, count in enumerate(missed) if count == min(missed)]
    shared = set.intersection(*(set(passes[rank]) for rank in complete))
    return max(complete, key=lambda rank: (sum(passes[rank][key] for key in shared), rank == last))
