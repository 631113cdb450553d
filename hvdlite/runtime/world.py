"""`World`: the state of one rank of a job. A process has one world; tests make one per thread."""

from __future__ import annotations

import functools
import itertools
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Sequence

from hvdlite.comm.gpu.groups import Devices
from hvdlite.comm.hierarchical import HierarchicalCollectives
from hvdlite.comm.hierarchy import MakeCollectives
from hvdlite.comm.interrupt import Interrupt
from hvdlite.comm.mpi.start import never_finalize
from hvdlite.comm.ordered.communicator import Communicators
from hvdlite.comm.sockets.endpoint import SocketEndpoint
from hvdlite.config import Config
from hvdlite.errors import ArgumentError, HvdliteError
from hvdlite.operations import Agreement
from hvdlite.operations.negotiation.engine import Engine
from hvdlite.protocols import Transport
from hvdlite.ranks.log import set_level, tell
from hvdlite.ranks.process_set import ProcessSet
from hvdlite.ranks.topology import Members, Topology
from hvdlite.runtime.group import Group, RebindableExchange, Runtime
from hvdlite.runtime.pulse import Pulse
from hvdlite.timeline import Counts, Timeline
from hvdlite.watchdog.watchdog import Watchdog


class Groups:
    """The groups of ranks that one rank knows, by their numbers. An iteration returns the groups that contain this rank.

    Args:
        transport: The transport over all ranks of the job.
        runtime: The objects that all groups of this rank share.

    Attributes:
        everybody: The group of all ranks.
    """

    def __init__(self, transport: Transport, runtime: Runtime) -> None:
        self._transport = transport
        self._runtime = runtime
        self.everybody = Group(Members(0, tuple(range(transport.size))), transport.duplicate(), runtime)
        self._groups: dict[int, Group] = {0: self.everybody}
        self._removed: list[Group] = []
        """The groups that were taken out of effect. Objects that used a group may still read its memory."""
        self._sets: dict[int, ProcessSet] = {}
        self._added: set[int] = set()
        """The numbers of the sets that `add` has put into effect. No two of them may have equal ranks."""
        self._others: list[ProcessSet] = []
        """Objects that `take_over` has bound to a set in effect."""
        self._numbers = itertools.count(1)
        self._waiting: list[RebindableExchange] = []
        """Exchanges of an earlier world, whose process sets are not in effect in this world yet."""

    def __iter__(self) -> Iterator[Group]:
        return iter(list(self._groups.values()))

    @property
    def has_sets(self) -> bool:
        """Whether process sets other than that of all ranks are in effect."""
        return bool(self._sets)

    def of(self, process_set: ProcessSet) -> Group:
        """Return the group of a process set.

        Raises:
            ArgumentError: The set is not in effect, or this rank is not in it.
        """
        number = process_set.process_set_id
        if number is None or (number and number not in self._sets):
            raise ArgumentError(f"{process_set} is not in effect: pass it to add_process_set() on every rank first.")
        if number not in self._groups:
            raise ArgumentError(
                f"rank {self._transport.rank} is not in {process_set}, so it cannot take part in its operations."
            )
        return self._groups[number]

    def sets(self) -> dict[int, tuple[int, ...]]:
        """Return the world ranks of all process sets in effect, by their numbers. The set of all ranks has the number 0."""
        return {0: self.everybody.ranks} | {number: each.members for number, each in self._sets.items()}

    def ranks_of(self, process_set_id: int) -> tuple[int, ...]:
        """Return the world ranks of the process set with this number; the set of all ranks has the number 0.

        Raises:
            ArgumentError: No process set in effect has this number.
        """
        sets = self.sets()
        if process_set_id not in sets:
            raise ArgumentError(
                f"process_set_id={process_set_id!r}: expected the number of a process set that is in effect, one of "
                f"{', '.join(map(str, sets))}."
            )
        return sets[process_set_id]

    def add(self, process_set: ProcessSet | Iterable[int]) -> ProcessSet:
        """Put a process set into effect and return it. All ranks of the job call this, for the same ranks.

        Raises:
            ArgumentError: The job does not have one of the ranks, or a set of these ranks is in effect already.
            MismatchError: The ranks of the job asked for different sets.
        """
        if not isinstance(process_set, ProcessSet):
            process_set = ProcessSet(process_set)
        self._check_ranks(process_set)
        taken = [self.everybody.ranks, *(self._sets[number].members for number in self._added)]
        if process_set.members in taken or process_set.process_set_id in self._sets:
            raise ArgumentError(
                f"{process_set}: a process set of these ranks is in effect already; use that one. (new_group() makes another.)"
            )
        self._added.add(self._put_into_effect(process_set, "add_process_set"))
        return process_set

    def take_over(self, process_set: ProcessSet) -> ProcessSet:
        """Put a process set into effect; if a set of these ranks is in effect already, let `process_set` be that one, too.

        All ranks of the job call this, for the same ranks.
        """
        same = [number for number, ranks in self.sets().items() if ranks == process_set.members]
        if not same:
            return self.add(process_set)
        process_set.bind(same[0], self._transport.rank)
        self._others.append(process_set)
        return process_set

    def new(self, ranks: Iterable[int]) -> ProcessSet:
        """Make a process set and put it into effect, even if another set has the same ranks. All ranks of the job call this.

        Raises:
            ArgumentError: The job does not have one of the ranks.
            MismatchError: The ranks of the job asked for different sets.
        """
        process_set = ProcessSet(ranks)
        self._check_ranks(process_set)
        self._put_into_effect(process_set, "new_group")
        return process_set

    def _check_ranks(self, process_set: ProcessSet) -> None:
        if process_set.members[-1] >= self._transport.size:
            raise ArgumentError(
                f"{process_set}: rank {process_set.members[-1]} does not exist; the job has ranks 0 to "
                f"{self._transport.size - 1}."
            )

    def _put_into_effect(self, process_set: ProcessSet, called: str) -> int:
        ranks = process_set.members

        def create(_: HierarchicalCollectives) -> int:
            members = Members(next(self._numbers), ranks)
            if self._transport.rank in ranks:
                self._groups[members.id] = Group(members, self._transport.subgroup(ranks), self._runtime)
            return members.id

        number: int = self.everybody.engine.run(Agreement(called, [("ranks", ranks)], create))
        process_set.bind(number, self._transport.rank)
        self._sets[number] = process_set
        self._rebind()
        return number

    def remove(self, process_set: ProcessSet) -> bool:
        """Take a process set out of effect. All ranks of the job call this.

        Returns:
            Whether the set was in effect. The set of all ranks cannot be removed: the result is False.

        Raises:
            ArgumentError: Operations of the set are in flight.
        """
        number = process_set.process_set_id
        if number is None or number not in self._sets:
            return False

        group = self._groups.get(number)
        if group is not None and group.engine.busy:
            raise ArgumentError(f"{process_set} has operations in flight: wait for their handles before it is removed.")

        def take_out(_: HierarchicalCollectives) -> None:
            if group is not None:
                for exchange in list(group.exchanges):
                    group.remove(exchange)
                del self._groups[number]
                self._removed.append(group)
                group.engine.close()

        self.everybody.engine.run(Agreement("remove_process_set", [("ranks", process_set.members)], take_out))
        for each in (self._sets.pop(number), *self._others):
            if each.process_set_id == number:
                each.bind(None, None)
        self._added.discard(number)
        return True

    def adopt(self, exchanges: Iterable[RebindableExchange]) -> None:
        """Let exchanges of an earlier world continue in this world: now, or as soon as their process sets are in effect here.

        Args:
            exchanges: The exchanges that `left` has returned on this rank, in the same order.

        Raises:
            HvdliteError: An exchange cannot begin again. This exchange and those after it still wait then.
        """
        self._waiting += exchanges
        self._rebind()

    def _rebind(self) -> None:
        for exchange in list(self._waiting):
            number = exchange.process_set.process_set_id
            if number is not None and number in self._groups:
                exchange.rebind()
                self._waiting.remove(exchange)

    def left(self) -> list[RebindableExchange]:
        """Return the exchanges that can continue in another world, in the order in which they were made."""
        there = [exchange for exchange in self._runtime.exchanges if isinstance(exchange, RebindableExchange)]
        return [*there, *self._waiting]

    def close_reducers(self) -> None:
        """Release the memory of gradients. All ranks of the job call this."""
        for group in (*self._groups.values(), *self._removed):
            group.reducers.close()

    def close(self) -> None:
        """Close the engines, and take all process sets out of effect. All ranks of the job call this."""
        for group in self:
            group.engine.close()
        for process_set in (*self._sets.values(), *self._others):
            process_set.bind(None, None)


class World:
    """The state of one rank of a job.

    Args:
        transport: The transport over all ranks.
        make_flat: A function that makes collectives by messages over the ranks of a transport, which nobody else uses.
        hosts: For each rank, a number of its host.
        config: The settings.
        end_job: A function that ends the whole job with a text. The watchdog calls it when a wait can never end and it cannot
            raise an exception.
        interrupt: Ends every wait of the world, so that this rank can go on in another one; None if nothing ever does.
        endpoint: Where other hosts connect to this rank, which this object closes; None if MPI does everything between hosts.
        job_ranks: For each rank, its number in the job as it was started, by which the launcher knows it; None if that is the
            same.
    """

    def __init__(
        self,
        transport: Transport,
        make_flat: MakeCollectives,
        hosts: Sequence[int],
        config: Config,
        end_job: Callable[[str], None],
        interrupt: Interrupt | None = None,
        job_ranks: Sequence[int] | None = None,
        endpoint: SocketEndpoint | None = None,
    ) -> None:
        set_level(config.log_level)
        self.config = config
        self.interrupt = interrupt
        self.job_ranks: Sequence[int] = range(transport.size) if job_ranks is None else job_ranks
        self.topology = Topology.of(transport.rank, hosts)
        self._transport = transport
        self._hosts = hosts
        self._endpoint = endpoint
        self._control = transport.duplicate()
        self.watch = Watchdog(self._control, config, end_job, self.job_ranks)
        self.timeline = Timeline(transport.rank, transport.size)
        self._pulse: Pulse | None = None
        if config.pulse and config.control:
            self.timeline.counts = Counts()
            self._pulse = Pulse(config.control, self.job_ranks[transport.rank], self.timeline.counts, self.watch)
        self.devices = Devices(config, hosts, self.watch.launches_on)
        self.groups = Groups(transport, Runtime(config, hosts, make_flat, self.watch, self.timeline, self.devices))
        self.communicators = Communicators(transport, hosts, make_flat, config, self.watch, self.timeline)
        self.over = False
        """Whether this rank has left the job."""
        self.is_childs_copy = False
        """Whether this process was forked from the process of the rank."""
        self.has_servers = False
        """Whether this rank has taken part in a training with a parameter server."""
        tell("world", f"hvdlite begins: {self.describe()}", transport.rank, logging.INFO)
        if config.timeline not in ("", "DYNAMIC"):
            self.start_timeline(config.timeline, config.timeline_mark_cycles)

    @property
    def hosts(self) -> Sequence[int]:
        """For each rank of the job, a number of its host."""
        return self._hosts

    def describe(self) -> str:
        """Return how many ranks there are, on how many hosts, and the medium of their messages, as a text."""
        ranks, hosts = len(self._hosts), len(set(self._hosts))
        counts = f"{ranks} rank{'s' * (ranks > 1)} on {hosts} host{'s' * (hosts > 1)}"
        sockets = "" if self._endpoint is None else "; large data between hosts by sockets"
        return f"{counts} ({self._transport.medium}{sockets})"

    def group(self, process_set: ProcessSet | None = None) -> Group:
        """Return the group of a process set; the group of all ranks if None.

        Raises:
            ArgumentError: The set is not in effect, or this rank is not in it.
        """
        return self.groups.everybody if process_set is None else self.groups.of(process_set)

    def engine(self, process_set: ProcessSet | None = None) -> Engine:
        """Return the engine of a process set; the engine of all ranks if None.

        Raises:
            ArgumentError: See `group`.
        """
        return (self.groups.everybody if process_set is None else self.groups.of(process_set)).engine

    def ranks(self, process_set: ProcessSet | None = None) -> tuple[int, ...]:
        """Return the world ranks of a process set, even if it does not contain this rank; all ranks if None."""
        return self.groups.everybody.ranks if process_set is None else process_set.members

    @property
    def kinds(self) -> set[str]:
        """The kinds of the operations that this rank has submitted."""
        return self.communicators.kinds.union(*(group.engine.kinds for group in self.groups))

    def start_timeline(self, path: str, mark_cycles: bool) -> None:
        """Begin to record what every rank does. All ranks of the job call this; only the arguments of rank 0 are used.

        Raises:
            ArgumentError: A recording has begun already, or a rank cannot write its file. Raised on all ranks.
        """
        # Nothing else uses this transport while all ranks are here.
        start = functools.partial(self.timeline.start, self._transport, path, mark_cycles)
        self.groups.everybody.engine.run(Agreement("start_timeline", [], lambda _: start()))

    def stop_timeline(self) -> None:
        """End the recording, if there is one, and merge the ranks' records into one trace. All ranks of the job call this.

        Raises:
            HvdliteError: The trace could not be written. Raised on all ranks.
        """
        if self.timeline.started:
            self.groups.everybody.engine.run(
                Agreement("stop_timeline", [], lambda _: self.timeline.stop(self._transport))
            )

    def shutdown(self, how: str = "it has called shutdown().", for_good: bool = False) -> None:
        """Leave the job: tell the other ranks, wait until all ranks leave, and release everything.

        Args:
            how: Why this rank leaves, for the error texts of ranks that wait for it.
            for_good: Whether the program ends, so that its exchanges need not continue in another world.
        """
        self.watch.leave(how)
        self.over = True
        if self.watch.losses.lost:  # to release something of MPI, or to end it, takes all ranks
            self.abandon()
            never_finalize()
            return
        if self.timeline.started:
            try:
                self.timeline.stop(self._transport)
            except HvdliteError as error:
                tell("timeline", f"hvdlite: {error}", self._transport.rank)
        self.communicators.close()
        self.groups.close_reducers()
        self.devices.close()
        self.groups.close()
        self._control.close()
        self._close_endpoint()
        self._end_pulse()
        self._transport.close()
        if not for_good:
            for exchange in self.groups.left():
                exchange.leave()

    def _end_pulse(self) -> None:
        if self._pulse is not None:
            self._pulse.stop()

    def _close_endpoint(self) -> None:
        if self._endpoint is not None:
            self._endpoint.close()
            if self._endpoint.strangers:
                tell(
                    "hosts",
                    f"hvdlite: connections from outside of this job: {self._endpoint.strangers}. They were closed.",
                    self.topology.rank,
                )
            self._endpoint = None

    def binds(self) -> str:
        """Say what this rank has that ends with this world, so that another world cannot take its place; empty if nothing."""
        if self.interrupt is None:
            return "its waits cannot be interrupted"
        if self.has_servers or self.watch.losses.lost:
            return "it trains with a parameter server"
        if self.devices.in_use:
            return "it uses a GPU"
        if self.communicators.open:
            return "it has a process group of torch.distributed"
        if self.groups.has_sets:
            return "it has process sets"
        return "a timeline is recorded" if self.timeline.started else ""

    def become_child(self) -> None:
        """Note that this process was forked from the rank: it can ask which rank that was, but must not disturb the rank."""
        self.is_childs_copy = True
        error = HvdliteError(
            f"this process (pid {os.getpid()}) was forked from rank {self.topology.rank} (pid {os.getppid()}) after "
            "hvdlite.init(), so it is no rank and cannot take part in operations. Let the rank call them; or begin a process "
            "that is to be a rank with hvdliterun."
        )
        self.timeline.on = False
        self.watch.become_child(error)
        for group in self.groups:
            group.engine.become_child(error)

    def abandon(self) -> None:
        """Stop this rank's threads and tell nobody, because the job is over already."""
        self._close_endpoint()
        self._end_pulse()
        self.watch.abandon()
        self.timeline.abandon()
        for group in self.groups:
            group.engine.stop()
