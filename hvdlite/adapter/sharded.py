"""`ShardedSync`: each rank gets its shard of the combined gradients, and gives all ranks the parameters that it has stepped.

This is for frameworks that have gradients and parameters in memory of their own, and whose tensors never change::

    own gradients ─▶ exchange ─▶ this rank's shard of their mean ─▶ (the framework steps it) ─▶ publish ─▶ all parameters

The parameters that `publish` returns lie in memory that the ranks of the host share, and the framework holds them without a
copy. The next step publishes to other memory (`hvdlite.gradients.sharded_reducer`).
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np

from hvdlite.adapter.array_sync import ArraySync
from hvdlite.adapter.buckets import ROOMS, HostBuckets
from hvdlite.adapter.gradient_memory import Registry
from hvdlite.adapter.identity import Identity
from hvdlite.api import Sum, allreduce, world
from hvdlite.errors import ArgumentError, HvdliteError, MismatchError
from hvdlite.gradients.header import Header
from hvdlite.gradients.layout import Piece
from hvdlite.gradients.reducers import Reducers
from hvdlite.gradients.sharded_reducer import Place, ShardedReducer
from hvdlite.gradients.shared_reducers import Layout
from hvdlite.protocols import Array, Device, ReduceOp, TensorInfo
from hvdlite.ranks.process_set import ProcessSet
from hvdlite.ranks.together import Together
from hvdlite.runtime.world import World


class ShardedSync(ArraySync):
    """Exchanges the gradients, and publishes the parameters, of one sharded optimizer. Every rank makes one.

    Args:
        infos: Dtype and shape of each parameter.
        op: Average or Sum.
        process_set: The ranks that participate; all if None.
        identity: The identity of the optimizer.
        whole: Never cut a parameter between ranks.
        place: This rank's place, for which its state of the optimizer is.

    Attributes:
        place: The argument.
        origin: Where this rank's state of the optimizer comes from, in words; it must be the same on all ranks.
    """

    def __init__(
        self,
        infos: Sequence[TensorInfo],
        op: ReduceOp,
        process_set: ProcessSet | None,
        identity: Identity,
        whole: bool,
        place: Place,
    ) -> None:
        self._whole, self.place = whole, place
        self._made: tuple[weakref.ref[Registry], ShardedBuckets] | None = None
        self._published: list[int] = []
        super().__init__(infos, op, process_set, sparse=False, identity=identity)

    def prepare(self, tables: Sequence[int]) -> None:
        """Make the memory now. Every rank calls this.

        Raises:
            MismatchError: The ranks have different parameters. Raised on all ranks.
            ArgumentError: See `_here`.
        """
        self._here(self.enter())

    def _here(self, registry: Registry) -> ShardedBuckets:
        """Return the memory in the present world. Every rank calls this if there is none yet.

        Raises:
            ArgumentError: The world is another one than that in which shards were dealt out, and this rank has another place.
        """
        if self._made is not None and self._made[0]() is registry:
            return self._made[1]
        here = world("the exchange of gradients")
        group = here.group(self._process_set)
        place = group.reducers.place()
        if place != self.place:
            raise ArgumentError(
                f"this rank has the state of shard {self.place.number} of {self.place.shards} of a sharded optimizer, and "
                f"since shutdown() and init() its place is shard {place.number} of {place.shards}: make the optimizer (and "
                "compile the model) anew after init(), and load its state from a checkpoint, which has that of all ranks."
            )
        group.release_dropped()
        layout = Layout(tuple(self._infos), self._op)
        made = ShardedBuckets(here, layout, self._process_set, self._whole, self)
        self._made = weakref.ref(registry), made
        self._published = []
        return made

    def _exchange_dense(
        self,
        registry: Registry,
        layout: Layout,
        own: Sequence[Array | None],
        said: Header,
        device: Device | None,
    ) -> list[Array | None]:
        buckets = self._here(registry)
        found = buckets.exchange(own, said)
        if buckets.joined:
            raise HvdliteError(
                "a rank has run out of data (it has called join(), as hvd.callbacks.Distributed() does at the end of an epoch) "
                "and the others have not, but with shard=True a step needs every rank: each one steps its share of the "
                "parameters. Give all ranks the same number of batches (steps_per_epoch=); a rank without samples makes its "
                "steps with optimizer.set_batch_weight(0). Or leave out shard=True."
            )
        if self._identity is not None and self._identity.first is None:
            self._identity.first = buckets.last
        return found

    def have_changed(self, parameters: Sequence[Array]) -> bool:
        """Return whether the program has given some parameter another value than that which was published last.

        A framework that never changes tensors has given it other memory then. The result is True before the first step.

        Args:
            parameters: The parameters, in the framework's memory.
        """
        return self._published != [_address_of(parameter) for parameter in parameters]

    def publish(self, pieces: Sequence[Piece], values: Sequence[Array]) -> list[Array]:
        """Return all parameters, after each rank has stepped its shard. Every rank calls this after `exchange`.

        Args:
            pieces: What this rank owns, cut further as the caller likes.
            values: The new value of each piece. They must not lie in the memory that `exchange` has returned.

        Returns:
            For each parameter a read-only array that nobody changes.
        """
        buckets = self._here(self.enter())
        found = buckets.publish(pieces, values)
        # The framework may free copies, and other values may come to lie there.
        self._published = [_address_of(parameter) for parameter in found] if buckets.lends else []
        return found

    def sum_over_ranks(self, values: Array) -> Array:
        """Return the sum of an array of float64 over all ranks. Every rank calls this at the same point of its steps."""
        total: Array = allreduce(values, Sum, "sums of a sharded optimizer", process_set=self._process_set)
        return total

    def _refuse(self) -> None:
        everybody = Together(world("the exchange of gradients").ranks(self._process_set), self.gather)
        raise MismatchError(
            "the ranks have not loaded the same state into this sharded optimizer, so nobody has all of it:\n"
            f"{everybody.variants([self.origin])}\n"
            "Load it on every rank; or on one, before fit() with hvd.callbacks.BroadcastGlobalVariablesCallback(that rank)."
        )


def _address_of(array: Any) -> int:
    """Return where an array lies; 0 if it has no elements."""
    return int(np.asarray(array).__array_interface__["data"][0]) if array.size else 0


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
        """See `hvdlite.adapter.sharded.ShardedSync.publish`."""
        for piece, value in zip(pieces, values, strict=True):
            self._result(piece.tensor)[piece.start : piece.stop] = value.reshape(-1)
        self.reducer.publish()
        return [super(ShardedBuckets, self)._result(index) for index in range(len(self._infos))]
