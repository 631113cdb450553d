"""`Reducers`: the reducers of one group of ranks. All ranks of the group make them together, or raise a mismatch together."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from hvdlite.comm.gpu.groups import Devices
from hvdlite.comm.hierarchical import HierarchicalCollectives
from hvdlite.gradients.aggregator import Aggregator, name_of
from hvdlite.gradients.device.announced import AnnouncedReducer
from hvdlite.gradients.layout import digest_of
from hvdlite.gradients.reducer import Reducer, ReducerContext
from hvdlite.gradients.sharded_reducer import Place, ShardedReducer, place_of
from hvdlite.gradients.shared_reducers import Layout, SharedReducers
from hvdlite.operations import Agreement
from hvdlite.protocols import Plan, ReduceOp, TensorInfo

R = TypeVar("R", bound=Reducer)


class Reducers:
    """Makes the reducers of one group on one rank, and closes them.

    Args:
        run: Runs an operation with the other ranks of the group, by its name if one is given.
        context: What all reducers of the group have.
        plan: The plan of a reducer that is made without one.
        devices: The devices of this rank.

    Attributes:
        plan: The plan of a reducer that is made without one.
        shared: The reducers that are found again by their layouts.
        aggregator_of: Returns the aggregator of a shared reducer; None for a weighted sum. An adapter sets it.
    """

    def __init__(
        self,
        run: Callable[..., Any],
        context: ReducerContext,
        plan: Plan,
        devices: Devices,
    ) -> None:
        self._run, self._context, self.plan, self._devices = run, context, plan, devices
        self._open: list[Reducer] = []
        self._made = 0
        self.shared = SharedReducers(run, self._make_shared)
        self.aggregator_of: Callable[[Layout], Aggregator | None] = lambda layout: None

    def make(
        self,
        infos: Sequence[TensorInfo],
        op: ReduceOp = ReduceOp.AVERAGE,
        plan: Plan | None = None,
        settings: Sequence[tuple[str, Any]] = (),
        aggregator: Aggregator | None = None,
        name: str | None = None,
    ) -> Reducer:
        """Make flat memory for the gradients of tensors. All ranks of the group call this, with equal arguments.

        Args:
            infos: Dtype and shape of each tensor.
            op: SUM or AVERAGE.
            plan: How gradients are exchanged; `self.plan` if None.
            settings: What else must be the same on all ranks, by name.
            aggregator: Combines the gradients; None for their weighted sum.
            name: A name that the owner has on all ranks, so that threads make memory in any order.

        Raises:
            MismatchError: The ranks have different arguments. Raised on all ranks.
        """
        how = plan or self.plan

        def make(own: HierarchicalCollectives) -> Reducer:
            return Reducer(infos, own, op, how, self._context, aggregator)

        return self._agree(infos, op, how, [*settings, ("aggregator", name_of(aggregator))], make, name)

    def make_sharded(
        self,
        infos: Sequence[TensorInfo],
        op: ReduceOp = ReduceOp.AVERAGE,
        plan: Plan | None = None,
        whole: bool = False,
        name: str | None = None,
    ) -> ShardedReducer:
        """Make flat memory for gradients and parameters, of which each rank owns a shard. All ranks of the group call this.

        Args:
            infos: Dtype and shape of each tensor.
            op: SUM or AVERAGE.
            plan: How gradients are exchanged; `self.plan` if None.
            whole: Never cut a tensor between ranks.
            name: See `make`.

        Raises:
            MismatchError: The ranks have different arguments. Raised on all ranks.
        """
        how = plan or self.plan

        def make(own: HierarchicalCollectives) -> ShardedReducer:
            return ShardedReducer(infos, own, op, how, self._context, whole)

        return self._agree(infos, op, how, [("whole", whole)], make, name)

    def place(self, settings: Sequence[tuple[str, Any]] = ()) -> Place:
        """Return this rank's place among those that have shards. All ranks of the group call this.

        Args:
            settings: What must be the same on all ranks, by name.

        Raises:
            MismatchError: It is not. Raised on all ranks.
        """
        found: Place = self._run(Agreement("shards of parameters", list(settings), place_of))
        return found

    def _agree(
        self,
        infos: Sequence[TensorInfo],
        op: ReduceOp,
        plan: Plan,
        settings: Sequence[tuple[str, Any]],
        make: Callable[[HierarchicalCollectives], R],
        name: str | None,
    ) -> R:
        arguments = [
            ("tensors", len(infos)),
            ("elements", sum(math.prod(info.shape) for info in infos)),
            ("op", op.value),
            ("bucket_bytes", plan.message_bytes),
            *settings,
            ("layout", digest_of(([tuple(info) for info in infos], plan))),
        ]
        agreement = Agreement(
            "gradient buckets", arguments, lambda collectives: self._enter(make(collectives.duplicate()))
        )
        reducer: R = self._run(agreement, None if name is None else f"memory of {name}")
        return reducer

    def _enter(self, reducer: R) -> R:
        """Number a reducer and keep it. All ranks do this in the order of their agreements."""
        self._made += 1
        reducer.number = self._made
        self._open.append(reducer)
        return reducer

    def _make_shared(self, layout: Layout, plan: Plan, collectives: HierarchicalCollectives) -> Reducer:
        own, infos, op = collectives.duplicate(), layout.infos, layout.op
        return self._enter(
            AnnouncedReducer(infos, own, op, plan, self._context, layout.device, self._devices)
            if layout.device
            else Reducer(infos, own, op, plan, self._context, self.aggregator_of(layout))
        )

    @property
    def stood_in(self) -> int:
        """In how many exchanges of other ranks this rank has taken part without data, with all reducers."""
        return sum(reducer.stood_in for reducer in self._open)

    @property
    def nbytes(self) -> int:
        """The bytes that the reducers hold on this rank."""
        return sum(reducer.nbytes for reducer in self._open)

    def release(self, reducer: Reducer) -> None:
        """Close a reducer that is not used again. All ranks of the group do this."""
        self._open.remove(reducer)
        reducer.close()

    def close(self) -> None:
        """Close all reducers. All ranks of the group do this."""
        while self._open:
            self._open.pop(0).close()
