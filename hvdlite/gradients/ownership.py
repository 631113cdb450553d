"""`Ownership`: which elements of a bucket each rank of a host sums."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from hvdlite.comm.hierarchical import HierarchicalCollectives
from hvdlite.gradients.layout import Block, lay_out
from hvdlite.gradients.segments import Owned
from hvdlite.protocols import TensorInfo


class Ownership:
    """The elements of a bucket that this rank owns, so that it sums them.

    Args:
        infos: Dtype and shape of each tensor of the model.
        tensors: The numbers of the tensors in the bucket, in the order in which they lie.
        large: The numbers of the tensors that are looked at one by one.
        collectives: The ranks of the group.
        parts: The number of parts of each block.
        whole: Never cut a tensor between ranks.
        in_place: Whether a result may lie where the gradient lies.

    Attributes:
        blocks: The layout of the bucket: one block for each dtype.
        owned: For each block, the elements that this rank owns.
        in_place: The tensors that this rank owns as a whole, and whose result may lie where its gradient lies.
    """

    def __init__(
        self,
        infos: Sequence[TensorInfo],
        tensors: Sequence[int],
        large: Collection[int],
        collectives: HierarchicalCollectives,
        parts: int,
        whole: bool,
        in_place: bool,
    ) -> None:
        self._collectives = collectives
        self._large = large
        self._parts = parts
        self.blocks = lay_out(infos, parts, whole, tensors)
        self.owned = [list(self._owned_of(block)) for block in self.blocks]
        alone = [
            (block.spans[owned.tensor], owned, owned.tensor)
            for block, some in zip(self.blocks, self.owned, strict=True)
            for owned in some
            if owned.tensor is not None
        ]
        self._parts_of = {tensor: (owned.start - span.start, owned.stop - span.start) for span, owned, tensor in alone}
        self.in_place = {tensor for span, owned, tensor in alone if in_place and span == owned[:2]}

    def part_of_block(self, block: Block) -> tuple[int, int]:
        """Return start and stop of the elements of a block that this rank owns."""
        number, owners = self._collectives.host.rank, self._collectives.owners
        if number >= owners:
            return 0, 0
        each = self._parts // owners
        return block.bounds[number * each], block.bounds[(number + 1) * each]

    def part_of(self, index: int) -> tuple[int, int]:
        """Return start and stop of the elements of tensor `index` that only this rank reads of its own gradient.

        A small tensor has no such elements, and no tensor has some with several hosts: then they are (0, 0).
        """
        return self._parts_of.get(index, (0, 0))

    def _owned_of(self, block: Block) -> Iterator[Owned]:
        begin, end = self.part_of_block(block)
        if self._collectives.hosts > 1:  # few and long messages
            if begin < end:
                yield Owned(begin, end, None)
            return
        small: tuple[int, int] | None = None
        for index, span in block.spans.items():
            start, stop = max(span.start, begin), min(span.stop, end)
            if start >= stop:
                continue
            if index not in self._large:
                small = (small[0] if small else start, stop)
                continue
            if small:
                yield Owned(*small, None)
                small = None
            yield Owned(start, stop, index)
        if small:
            yield Owned(*small, None)
