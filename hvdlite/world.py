"""Everything that one rank knows. A process has one; tests make one per thread."""

from __future__ import annotations

import contextlib
import contextvars
import functools
import gc
import hashlib
import math
import os
import sys
import threading
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from hvdlite.comm.hierarchical import HierarchicalCollectives
from hvdlite.comm.hierarchy import MakeCollectives
from hvdlite.config import Config
from hvdlite.errors import ArgumentError, HvdliteError, PeerLeftError
from hvdlite.gpu.collectives import DeviceCollectives
from hvdlite.gpu.groups import DeviceGroup, Devices
from hvdlite.gradients.planner import Planner
from hvdlite.gradients.reducer import Reducer
from hvdlite.gradients.sharded_reducer import ShardedReducer
from hvdlite.gradients.shared_reducers import Layout, SharedReducers
from hvdlite.negotiation.engine import Engine
from hvdlite.operations import Agreement, AllgatherObject
from hvdlite.process_set import ProcessSet
from hvdlite.protocols import Device, Exchange, Plan, RebindableExchange, ReduceOp, TensorInfo, Transport
from hvdlite.tensors.arithmetic import nbytes_of
from hvdlite.timeline import Timeline
from hvdlite.topology import Topology
from hvdlite.watchdog.watchdog import Watchdog

R = TypeVar("R", bound=Reducer)

_MANY_EXCHANGES, _MUCH_BYTES = 32, 2**24
"""From here on it is worth looking for exchanges that the program has dropped."""


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


class World:
    """One rank of a job.

    Args:
        transport: Over all ranks.
        make_flat: Makes collectives by messages over the ranks of a transport, for their own use alone.
        hosts: For each rank, some number of its host.
        config: Settings.
        end_job: Ends the whole job with a text; called when a wait can never end and no exception can be raised.
    """

    def __init__(
        self,
        transport: Transport,
        make_flat: MakeCollectives,
        hosts: Sequence[int],
        config: Config,
        end_job: Callable[[str], None],
    ) -> None:
        self.config = config
        self.topology = Topology.of(transport.rank, hosts)
        self._transport = transport
        self._make_flat = make_flat
        self._hosts = hosts
        self._letters = transport.duplicate()
        self.watch = Watchdog(self._letters, config, end_job)
        self.timeline = Timeline(transport.rank, transport.size)
        self.devices = Devices(config, hosts, self.watch.launches_on)
        self._everybody = tuple(range(transport.size))
        self._reducers: list[Reducer] = []
        self._collect_at = _MUCH_BYTES
        self._shared: dict[tuple[int, ...], SharedReducers] = {}
        self._engines: dict[tuple[int, ...], Engine | None] = {
            self._everybody: self._engine(transport.duplicate(), self._everybody)
        }
        self._sets: dict[int, ProcessSet] = {}
        self._next_set_id = 1
        self.exchanges: list[Exchange] = []
        """What adapters have made to exchange gradients, in the same order on all ranks."""
        self._waiting: list[RebindableExchange] = []
        """Exchanges of an earlier world, whose process sets are not in effect in this one yet."""
        self.over = False
        """This rank has left."""
        self.is_childs_copy = False
        """This process was forked from the one that is the rank."""
        self.stood_in = 0
        """How many exchanges of others this rank has taken part in with nothing, without a reducer."""
        self.missed: list[int] = []
        """How many exchanges each rank of the set took part in with nothing while the latest `join` lasted."""
        if config.timeline not in ("", "DYNAMIC"):
            self.start_timeline(config.timeline, config.timeline_mark_cycles)

    def _engine(self, transport: Transport, ranks: tuple[int, ...]) -> Engine:
        collectives = HierarchicalCollectives(
            transport.duplicate(), [self._hosts[rank] for rank in ranks], self._make_flat, self.config.shared_memory
        )
        collectives.devices = DeviceGroup(self.devices, ranks)
        engine = Engine(transport, collectives, ranks, self.watch, self.config, self.timeline)
        shared = self._shared[ranks] = SharedReducers(engine.run, functools.partial(self._make_reducer, ranks))
        engine.make_late = shared.make_late
        return engine

    def _make_reducer(
        self,
        ranks: Sequence[int],
        infos: Sequence[TensorInfo],
        op: ReduceOp,
        plan: Plan,
        collectives: HierarchicalCollectives,
    ) -> Reducer:
        reducer = Reducer(infos, collectives.duplicate(), op, plan, ranks, self.watch, self.timeline)
        self._reducers.append(reducer)
        return reducer

    def describe(self) -> str:
        """How many ranks there are, on how many hosts, and what carries their messages."""
        ranks, hosts = len(self._hosts), len(set(self._hosts))
        counts = f"{ranks} rank{'s' * (ranks > 1)} on {hosts} host{'s' * (hosts > 1)}"
        return f"{counts} ({self._transport.medium})"

    @property
    def kinds(self) -> set[str]:
        """Of the operations that this rank has submitted."""
        return set().union(*(engine.kinds for engine in self._engines.values() if engine is not None))

    def engine(self, process_set: ProcessSet | None = None) -> Engine:
        """The engine of a process set; of all ranks if None.

        Raises:
            ArgumentError: The set is not in effect, or this rank is not in it.
        """
        ranks = self.ranks(process_set)
        engine = self._engines.get(ranks)
        if process_set is not None and process_set.process_set_id is None:
            raise ArgumentError(f"{process_set} is not in effect: pass it to add_process_set() on every rank first.")
        if engine is None:
            raise ArgumentError(
                f"rank {self.topology.rank} is not in {process_set}, so it cannot take part in its operations."
            )
        return engine

    def ranks(self, process_set: ProcessSet | None = None) -> tuple[int, ...]:
        """The world ranks of a process set; all if None."""
        return self._everybody if process_set is None else process_set.members

    def ranks_of(self, process_set_id: int) -> tuple[int, ...]:
        """The world ranks of the process set of a number; of all for 0.

        Raises:
            ArgumentError: No set that is in effect has this number.
        """
        if process_set_id == 0:
            return self._everybody
        if process_set_id not in self._sets:
            raise ArgumentError(
                f"process_set_id={process_set_id!r}: expected the number of a process set that is in effect, one of "
                f"{', '.join(map(str, [0, *self._sets]))}."
            )
        return self._sets[process_set_id].members

    def add_process_set(self, process_set: ProcessSet | Iterable[int]) -> ProcessSet:
        """Put a process set into effect. All ranks of the job call this, with equal ranks.

        Raises:
            ArgumentError: A rank is unknown, or a set of these ranks is in effect already.
            MismatchError: The ranks of the job asked for different sets.
        """
        if not isinstance(process_set, ProcessSet):
            process_set = ProcessSet(process_set)
        ranks = process_set.members
        if ranks[-1] >= self.topology.size:
            raise ArgumentError(
                f"{process_set}: rank {ranks[-1]} does not exist; the job has ranks 0 to {self.topology.size - 1}."
            )
        if ranks in self._engines:
            raise ArgumentError(f"{process_set}: a process set of these ranks is in effect already; use that one.")

        def create(_: HierarchicalCollectives) -> int:
            included = self.topology.rank in ranks
            self._engines[ranks] = self._engine(self._transport.subgroup(ranks), ranks) if included else None
            self._next_set_id += 1
            return self._next_set_id - 1

        number = self.engine().run(Agreement("add_process_set", [("ranks", ranks)], create))
        process_set.bind(number, self.topology.rank)
        self._sets[number] = process_set
        self._rebind()
        return process_set

    def remove_process_set(self, process_set: ProcessSet) -> bool:
        """Take a process set out of effect. All ranks of the job call this.

        Returns:
            True if it was in effect. (The set of all ranks cannot be removed: False.)
        """
        if process_set.process_set_id not in self._sets:
            return False

        engine = self._engines[process_set.members]
        if engine is not None and engine.busy:
            raise ArgumentError(f"{process_set} has operations in flight: wait for their handles before it is removed.")

        def remove(_: HierarchicalCollectives) -> None:
            engine = self._engines.pop(process_set.members)
            self._shared.pop(process_set.members, None)
            if engine is not None:
                engine.close()

        self.engine().run(Agreement("remove_process_set", [("ranks", process_set.members)], remove))
        # One of the same ranks may be put into effect again, and begins anew.
        self.exchanges = [exchange for exchange in self.exchanges if not exchange.belongs_to(process_set)]
        del self._sets[process_set.process_set_id]
        process_set.bind(None, None)
        return True

    def join(self, process_set: ProcessSet | None = None) -> int:
        """Take part with nothing in what the others do, until all ranks of the set have called this.

        Returns:
            The number, within the set, of the rank that went furthest, and of several the one that was the last.

        Raises:
            HvdliteError: As `Engine.join`.
        """
        exchanges = [exchange for exchange in self.exchanges if exchange.belongs_to(process_set)]
        context = contextvars.copy_context()
        # Daemons: if this wait fails, the process is to end.
        threads = [
            threading.Thread(target=context.copy().run, args=(_stand_in, exchange), name="hvdlite-join", daemon=True)
            for exchange in exchanges
        ]
        before = self._stood_in()
        for thread in threads:
            thread.start()
        last = self.engine(process_set).join()
        for thread in threads:
            thread.join()
        self._shared[self.ranks(process_set)].wait()
        self.missed = []
        # Memory alone has nothing to catch up, and ranks that had joined may not have it yet.
        exchanges = kept = [exchange for exchange in exchanges if not exchange.memory_only]
        if exchanges:
            # Letters that say who has joined may arrive in another order than gradients, which go other ways.
            missed = self._stood_in() - before
            passes = {(index, key): made for index, each in enumerate(exchanges) for key, made in each.passes.items()}
            mine = missed, passes, [exchange.dropped for exchange in exchanges]
            answers = self.engine(process_set).run(AllgatherObject(mine))
            self.missed = [answer[0] for answer in answers]
            dropped = [any(each) for each in zip(*(answer[2] for answer in answers), strict=True)]
            kept = [exchange for exchange, gone in zip(exchanges, dropped, strict=True) if not gone]
            last = _furthest(self.missed, [answer[1] for answer in answers], last)
        for exchange in kept:
            exchange.catch_up(self.ranks(process_set)[last])
        return last

    def _stood_in(self) -> int:
        return self.stood_in + sum(reducer.stood_in for reducer in self._reducers)

    def plan(self) -> Plan:
        """How gradients are exchanged if nothing more is known about them."""
        return Plan(message_bytes=self.config.bucket_bytes)

    def planner(
        self,
        infos: Sequence[TensorInfo],
        process_set: ProcessSet | None,
        gather: Callable[[Any], list[Any]],
        adapts: bool,
        overlap: bool | None = None,
    ) -> Planner:
        """Finds the plan for `reducer`.

        Args:
            infos, process_set: As for `reducer`.
            gather, adapts: As for `Planner`.
            overlap: In place of the setting of that name.
        """
        ranks = self.ranks(process_set)
        return Planner(
            [nbytes_of(info) for info in infos],
            self.plan(),
            self.config if overlap is None else replace(self.config, overlap="on" if overlap else "off"),
            self.topology.local_size,
            len({self._hosts[rank] for rank in ranks}) > 1,
            gather,
            self.topology.rank == ranks[0],
            adapts,
        )

    def reducer(
        self,
        infos: Sequence[TensorInfo],
        op: ReduceOp = ReduceOp.AVERAGE,
        process_set: ProcessSet | None = None,
        plan: Plan | None = None,
        settings: Sequence[tuple[str, Any]] = (),
    ) -> Reducer:
        """Flat memory for the gradients of tensors like `infos`. All ranks of the set call this, with equal arguments.

        Args:
            infos: Dtype and shape of each.
            op: SUM or AVERAGE.
            process_set: The ranks that take part; all if None.
            plan: How to exchange them; `plan()` if None.
            settings: What else must be the same on all ranks, by name.

        Raises:
            MismatchError: The ranks have different tensors.
        """
        chosen = plan or self.plan()

        def make(channel: HierarchicalCollectives) -> Reducer:
            return Reducer(infos, channel, op, chosen, self.ranks(process_set), self.watch, self.timeline)

        return self._agree_on_gradients(infos, op, process_set, chosen, list(settings), make)

    def shared_reducer(
        self, infos: Sequence[TensorInfo], op: ReduceOp, process_set: ProcessSet | None, plan: Plan
    ) -> Reducer:
        """As `reducer`, for adapters that give memory by its layout: ranks that have joined make it, too.

        Args:
            infos, op, process_set, plan: As for `reducer`.

        Raises:
            MismatchError: The ranks have different tensors.
        """
        self.engine(process_set)
        return self._shared[self.ranks(process_set)].get(infos, op, plan)

    def late_layouts(self, process_set: ProcessSet | None) -> list[Layout]:
        """What other ranks have made by `shared_reducer` while this one had joined, and nobody here has asked for yet."""
        return list(self._shared[self.ranks(process_set)].late)

    def sharded_reducer(
        self,
        infos: Sequence[TensorInfo],
        op: ReduceOp = ReduceOp.AVERAGE,
        process_set: ProcessSet | None = None,
        plan: Plan | None = None,
        whole: bool = False,
    ) -> ShardedReducer:
        """As `reducer`, for gradients and parameters of which each rank answers for a share.

        Args:
            infos, op, process_set, plan: As for `reducer`.
            whole: Never cut a tensor between ranks.

        Raises:
            MismatchError: The ranks have different tensors.
        """
        chosen = plan or self.plan()

        def make(channel: HierarchicalCollectives) -> ShardedReducer:
            return ShardedReducer(infos, channel, op, chosen, self.ranks(process_set), self.watch, self.timeline, whole)

        return self._agree_on_gradients(infos, op, process_set, chosen, [("whole", whole)], make)

    def _agree_on_gradients(
        self,
        infos: Sequence[TensorInfo],
        op: ReduceOp,
        process_set: ProcessSet | None,
        plan: Plan,
        more: list[tuple[str, Any]],
        make: Callable[[HierarchicalCollectives], R],
    ) -> R:
        arguments = [
            ("tensors", len(infos)),
            ("elements", sum(math.prod(info.shape) for info in infos)),
            ("op", op.value),
            ("bucket_bytes", plan.message_bytes),
            *more,
            ("layout", hashlib.sha256(repr(([tuple(info) for info in infos], plan)).encode()).hexdigest()[:12]),
        ]

        def create(collectives: HierarchicalCollectives) -> R:
            return make(collectives.duplicate())

        reducer: R = self.engine(process_set).run(Agreement("gradient buckets", arguments, create))
        self._reducers.append(reducer)
        return reducer

    def device_collectives(self, process_set: ProcessSet | None, device: Device) -> DeviceCollectives:
        """New collectives on the GPUs of a process set, for the caller alone. All its ranks call this.

        The caller closes them, as all ranks do at the same point; `shutdown` closes what is left.

        Args:
            process_set: The ranks that take part; all if None.
            device: This rank's.

        Raises:
            MismatchError: The ranks do not all do this.
            DeviceError: A rank cannot take part, or this one has used another GPU before.
            NcclError: NCCL could not connect the ranks. Raised on all of them.
        """
        ranks = self.ranks(process_set)
        self.devices.choose(device)

        def create(collectives: HierarchicalCollectives) -> DeviceCollectives:
            return self.devices.connect(collectives.duplicate(), ranks, device.kind, device)

        made: DeviceCollectives = self.engine(process_set).run(
            Agreement("device collectives", [("device", device.kind)], create)
        )
        return made

    def release_dropped(self, process_set: ProcessSet | None) -> None:
        """Release what exchanges held that all ranks of the set have dropped. All of them call this."""
        exchanges = [exchange for exchange in self.exchanges if exchange.belongs_to(process_set)]
        if not exchanges:
            return
        # An optimizer and what it uses refer to each other, and to look for that takes Python a tenth of a second.
        looked = len(exchanges) % _MANY_EXCHANGES == 0 or self._held_bytes() >= self._collect_at
        if looked:
            gc.collect()
        mine = [exchange.dropped for exchange in exchanges]
        everybody = self.engine(process_set).run(AllgatherObject(mine))
        for exchange, dropped in zip(exchanges, zip(*everybody, strict=True), strict=True):
            if all(dropped):
                self.exchanges.remove(exchange)
                exchange.release()
        if looked:
            self._collect_at = max(_MUCH_BYTES, 2 * self._held_bytes())

    def adopt(self, exchanges: Iterable[RebindableExchange]) -> None:
        """Let exchanges of an earlier world go on in this one: now, or as soon as their process sets are in effect here.

        Args:
            exchanges: What `left` gave on this rank, in that order.

        Raises:
            HvdliteError: One cannot begin anew. That one and those after it are still waiting then.
        """
        self._waiting += exchanges
        self._rebind()

    def _rebind(self) -> None:
        for exchange in list(self._waiting):
            if exchange.process_set.included():  # in effect, and this rank, which may have another number now, is in it
                exchange.rebind()
                self._waiting.remove(exchange)
                self.exchanges.append(exchange)

    def left(self) -> list[RebindableExchange]:
        """The exchanges that can go on in another world, in the order in which they were made."""
        there = [exchange for exchange in self.exchanges if isinstance(exchange, RebindableExchange)]
        return [*there, *self._waiting]

    def _held_bytes(self) -> int:
        return sum(reducer.nbytes for reducer in self._reducers)

    def release(self, reducer: Reducer) -> None:
        """Close a reducer that is not used again. All ranks of its set do this."""
        self._reducers.remove(reducer)
        reducer.close()

    def start_timeline(self, path: str, mark_cycles: bool) -> None:
        """Begin to record what every rank does. All ranks of the job call this; rank 0's arguments count.

        Raises:
            ArgumentError: Recording already, or a rank cannot write. Raised on all ranks.
        """
        # Nothing else uses this transport while all ranks are here.
        start = functools.partial(self.timeline.start, self._transport, path, mark_cycles)
        self.engine().run(Agreement("start_timeline", [], lambda _: start()))

    def stop_timeline(self) -> None:
        """End the recording, if there is one, and merge it. All ranks of the job call this.

        Raises:
            HvdliteError: The trace could not be written. Raised on all ranks.
        """
        if self.timeline.started:
            self.engine().run(Agreement("stop_timeline", [], lambda _: self.timeline.stop(self._transport)))

    def shutdown(self, how: str = "it has called shutdown().", for_good: bool = False) -> None:
        """Say goodbye, wait until all ranks have, and release everything.

        Args:
            how: Why this rank leaves, as others say it that wait for it.
            for_good: The program is at its end, so nothing that it holds need stay of use.
        """
        self.watch.leave(how)
        self.over = True
        if self.timeline.started:
            try:
                self.timeline.stop(self._transport)
            except HvdliteError as error:
                print(f"hvdlite: {error}", file=sys.stderr, flush=True)
        for reducer in self._reducers:
            reducer.close()
        self._reducers.clear()
        self.devices.close()
        for engine in self._engines.values():
            if engine is not None:
                engine.close()
        for process_set in self._sets.values():
            process_set.bind(None, None)
        self._letters.close()
        self._transport.close()
        if not for_good:
            for exchange in self.left():
                exchange.leave()

    def become_child(self) -> None:
        """This process was forked from the rank, and is none: it can ask who that was, and must not disturb it."""
        self.is_childs_copy = True
        error = HvdliteError(
            f"this process (pid {os.getpid()}) was forked from rank {self.topology.rank} (pid {os.getppid()}) after "
            "hvdlite.init(), so it is no rank and cannot take part in operations. Let the rank call them; or begin a process "
            "that is to be a rank with hvdliterun."
        )
        self.timeline.on = False
        self.watch.become_child(error)
        for engine in self._engines.values():
            if engine is not None:
                engine.become_child(error)

    def abandon(self) -> None:
        """Stop this rank's threads without a word to the others: the job is over already."""
        self.watch.abandon()
        self.timeline.abandon()
        for engine in self._engines.values():
            if engine is not None:
                engine.stop()
