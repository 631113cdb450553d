"""`ShardedBuckets`: the memory of one sharded optimizer: gradients, and the parameters of a few steps in turn."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

from hvdlite.adapter.buckets import ROOMS, HostBuckets
from hvdlite.gradients.layout import Piece
from hvdlite.gradients.reducers import Reducers
from hvdlite.gradients.sharded_reducer import ShardedReducer
from hvdlite.gradients.shared_reducers import Layout
from hvdlite.protocols import Array
from hvdlite.ranks.process_set import ProcessSet
from hvdlite.runtime.world import World


class ShardedBuckets(HostBuckets):
    """The buckets of one sharded optimizer in one world.

    Args:
        here, layout, process_set: See `Buckets`.
        whole: Never cut a parameter between ranks.
        owner: The object that uses them. They are dropped when it is.
    """

    def __init__(self, here: World, layout: Layout, process_set: ProcessSet | None, whole: bool, owner: object) -> None:
        self._whole, self._owner = whole, weakref.ref(owner)
        self.reducer: ShardedReducer
        super().__init__(here, layout, process_set)

    def _make_reducer(self, reducers: Reducers, layout: Layout) -> ShardedReducer:
        plan = reducers.plan._replace(lend=ROOMS)
        self.reducer = reducers.make_sharded(layout.infos, layout.op, plan, self._whole)
        return self.reducer

    @property
    def dropped(self) -> bool:  # type: ignore[override]
        return self._owner() is None

    def keep(self) -> object:
        return self._owner()

    def release(self) -> None:
        self._group.reducers.release(self.reducer)

    @property
    def lends(self) -> bool:
        """Whether the parameters that were published last lie in memory that is theirs while the framework holds them."""
        return self.reducer.is_lent(0)

    def _result(self, index: int) -> Array:
        """Return the flat memory in which this rank's shard of the gradients lies, until `publish` writes over it."""
        return self.reducer.result_of(index).view(self._dtypes[index])

    def publish(self, pieces: Sequence[Piece], values: Sequence[Array]) -> list[Array]:
        """See `hvdlite.adapter.sharded.sync.ShardedSync.publish`."""
        for piece, value in zip(pieces, values, strict=True):
            self._result(piece.tensor)[piece.start : piece.stop] = value.reshape(-1)
        self.reducer.publish()
        return [super(ShardedBuckets, self)._result(index) for index in range(len(self._infos))]
