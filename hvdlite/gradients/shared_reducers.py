"""`SharedReducers`: reducers that are also made on ranks that have joined.

A rank that has run out of data submits nothing. The others may need memory for gradients that they have not exchanged before: a
second optimizer makes its first step, or a function is traced again. Then the rank makes the same memory from the agreement of
the others, and one of its threads takes part in their exchanges without data::

    the others: get() ─▶ agreement, with the whole layout in its signature ─▶ reducer
    a rank that has joined:          make_late() ─▶ reducer, a thread that stands in ─▶ get(), when its program asks for it
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import NamedTuple

from hvdlite.comm.hierarchical import HierarchicalCollectives
from hvdlite.gradients.reducer import Reducer
from hvdlite.operations import SHARED_BUCKETS, Agreement, Operation, Signature
from hvdlite.protocols import Plan, ReduceOp, TensorInfo


class Layout(NamedTuple):
    """What the ranks that use a shared reducer have in common.

    Attributes:
        infos: The dtypes and shapes of the gradients.
        op: The operation that combines them.
        device: Their `Device.kind`; empty for host memory.
        aggregator: The number by which the ranks know the aggregator that combines them; 0 for their weighted sum.
        numbers: The number by which the aggregator knows each gradient; empty without an aggregator.
    """

    infos: tuple[TensorInfo, ...]
    op: ReduceOp
    device: str = ""
    aggregator: int = 0
    numbers: tuple[int, ...] = ()


Make = Callable[[Layout, Plan, HierarchicalCollectives], Reducer]


class SharedReducers:
    """The shared reducers of one group of ranks, on one rank.

    Args:
        run: Runs an operation with the other ranks.
        make: Makes a reducer.

    Attributes:
        late: The reducers that were made while this rank had joined, and that its program has not asked for yet, in the order
            in which all ranks made them.
    """

    def __init__(self, run: Callable[[Operation], Reducer], make: Make) -> None:
        self._run = run
        self._make = make
        self._threads: list[threading.Thread] = []
        self.late: dict[Layout, Reducer] = {}

    def get(self, layout: Layout, plan: Plan) -> Reducer:
        """Return a reducer of this layout. Every rank calls this; a rank that has joined calls it later, if ever.

        Args:
            layout: What the ranks have in common.
            plan: How gradients are exchanged.

        Raises:
            MismatchError: The ranks have different layouts. The error is raised on all ranks.
        """
        if layout in self.late:
            return self.late.pop(layout)
        kind, _, arguments = signature = _signature(layout, plan)
        agreement = Agreement(kind, arguments, lambda collectives: self._make(layout, plan, collectives))
        agreement.signature = signature
        return self._run(agreement)

    def make_late(self, signature: Signature) -> Operation:
        """Return what this rank, which has joined, must run when the other ranks call `get`."""
        _, tensors, given = signature
        arguments = dict(given)
        infos = tuple(TensorInfo(dtype, tuple(length or 0 for length in shape)) for dtype, shape in tensors)
        plan, of = Plan(*arguments.pop("plan")), ReduceOp(arguments.pop("op"))
        layout = Layout(infos, of, **arguments)

        def create(collectives: HierarchicalCollectives) -> None:
            reducer = self.late[layout] = self._make(layout, plan, collectives)
            thread = threading.Thread(target=stand_in, args=(reducer,), name="hvdlite-join", daemon=True)
            self._threads.append(thread)
            thread.start()

        return Agreement(SHARED_BUCKETS, given, create)

    def wait(self) -> None:
        """Wait for the threads to end, after all ranks have joined."""
        while self._threads:
            self._threads.pop().join()


def stand_in(reducer: Reducer) -> None:
    """Take part in the exchanges of the other ranks without data, until all ranks have joined."""
    while reducer.try_to_stand_in() is not None:
        pass


def _signature(layout: Layout, plan: Plan) -> Signature:
    where = (("device", layout.device),) if layout.device else ()
    how = (("aggregator", layout.aggregator), ("numbers", layout.numbers)) if layout.aggregator else ()
    return (
        SHARED_BUCKETS,
        tuple((info.dtype, info.shape) for info in layout.infos),
        (("op", layout.op.value), ("plan", tuple(plan)), *where, *how),
    )
