"""`DistributedGradient`: combines gradients in programs without a framework's optimizer, such as those of NumPy and JAX.

The ranks agree once on the layout of the gradients, and steps send no message for that. If the gradients of a rank do not fit,
the rank says so in the header of the exchange, and all ranks postpone that exchange::

    first call ─▶ all ranks gather paths, dtypes, shapes ─▶ layout ─▶ exchange
    later calls ─▶ fits? ─▶ exchange in the buckets of the layout
                     └─ no ─▶ "news" in the header ─▶ all ranks gather again ─▶ another layout, or MismatchError on all
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple, TypeVar

import numpy as np

from hvdlite.adapter.array_sync import NewLayout
from hvdlite.adapter.eager_sync import EagerSync, check_floating
from hvdlite.adapter.gradient_memory import Registry
from hvdlite.adapter.identity import Identity
from hvdlite.adapter.options import ExchangeOptions, combined_by
from hvdlite.adapter.tree import Flat, flatten
from hvdlite.api import Adasum, Average, allgather_object, world
from hvdlite.errors import ArgumentError, MismatchError
from hvdlite.gradients.aggregator import Aggregator
from hvdlite.protocols import ReduceOp, TensorInfo
from hvdlite.ranks.process_set import ProcessSet
from hvdlite.tensors.compression import Compression, Compressor
from hvdlite.tensors.registry import adapter_for, device_kind_of

Tree = TypeVar("Tree")

MIXED = "mixed"


class TreeLayout(NamedTuple):
    """The layout of the gradients that the ranks exchange.

    Attributes:
        kinds: The kinds of the containers; see `hvdlite.adapter.tree.Flat`.
        paths: The path of each gradient in its containers.
        infos: Dtype and shape of each gradient; None if no rank has had the gradient.
        place: The `Device.kind` of the memory of all gradients; empty for host memory; `MIXED` if the gradients lie in
            different kinds of memory, and so are exchanged in host memory; None without any gradient.
    """

    kinds: str
    paths: tuple[str, ...]
    infos: tuple[TensorInfo | None, ...]
    place: str | None

    def covers(self, own: TreeLayout) -> bool:
        """Return whether the gradients of a rank fit into this layout. A rank may have fewer gradients."""
        return (
            (self.kinds, self.paths) == (own.kinds, own.paths)
            and (own.place is None or self.place in (MIXED, own.place))
            and all(mine in (None, info) for mine, info in zip(own.infos, self.infos, strict=True))
        )

    @property
    def device(self) -> str:
        """The `Device.kind` of the memory in which gradients are exchanged; empty for host memory."""
        return "" if self.place in (None, MIXED) else str(self.place)


class DistributedGradient:
    """Combines the gradients of all ranks. A program makes one object, and calls it in each step::

        combine = hvd.DistributedGradient()
        for x, y in batches:
            gradients = combine(gradient(weights, x, y), weight=len(x))

    The gradients may be arrays of NumPy, JAX, or any library whose arrays hvdlite reads. All gradients of a step travel
    together, in memory that the ranks of a host share; a part of each large gradient is summed where it lies. A loop that
    trains two models in turn makes one object for each model.

    Args:
        op: The reduction of the gradients: Average, Sum, or Adasum.
        process_set: The ranks that participate; all if None.
        compression: The compression of gradients that travel: `hvdlite.Compression.none`, ``fp16``, ``bf16``, or the program's
            own `Compressor`; or ``Compression.powersgd(rank=4)`` or ``Compression.topk(0.01)``, which are aggregators.
        gradient_predivide_factor: With compression and Average, gradients are divided by this factor before the compression,
            and multiplied by it in the end.
        inplace: Whether the combined gradients overwrite the arrays that the program gives.
        aggregator: Combines the gradients in the program's own way, in host memory, also on one rank. An aggregator has a
            memory, so make one for each model.

    Raises:
        ArgumentError: The arguments do not fit together, or this rank is not in `process_set`.
        NotInitializedError: `init` has not been called.

    Examples:
        >>> def step():
        ...     combine = hvdlite.DistributedGradient()
        ...     rows = 1 + 2 * hvdlite.rank()  # one rank has 1 row, the other 3
        ...     return combine({"w": np.array([float(rows)])}, weight=rows)["w"].item()
        >>> on_ranks(2, step)  # (1 × 1 + 3 × 3) / 4
        [2.5, 2.5]
    """

    def __init__(
        self,
        op: ReduceOp = Average,
        process_set: ProcessSet | None = None,
        compression: Compressor | Aggregator = Compression.none,
        gradient_predivide_factor: float = 1.0,
        *,
        inplace: bool = False,
        aggregator: Aggregator | None = None,
    ) -> None:
        compressor, aggregator = combined_by(compression, aggregator)
        self._options = ExchangeOptions(
            op, process_set, compressor, gradient_predivide_factor=gradient_predivide_factor, aggregator=aggregator
        )
        self._inplace = inplace
        world("DistributedGradient()")
        self._identity = Identity(process_set)
        self._sync = EagerSync(self._options, self._identity)
        self._registry()  # a rank may join before it has any gradient

    def __call__(self, gradients: Tree, weight: float | None = None) -> Tree:
        """Return the gradients of all ranks. Every rank calls this with the same structure, until it calls `hvdlite.join`.

        Args:
            gradients: An array, or arrays in nested dicts, lists and tuples (if JAX is loaded, in any container that JAX
                knows). The arrays hold floating-point numbers and have any shape. None stands for a gradient that this rank
                does not have; the gradient counts as zero if another rank has it.
            weight: With Average, the number of samples that these gradients are the mean of; 1 if None. The result is then the
                mean over the samples of all ranks. A rank without samples passes 0, and its gradients may have any values.

        Returns:
            The same structure with arrays of the same kind: new arrays, or with ``inplace=True`` the given ones. An element is
            None if no rank has the gradient.

        Raises:
            ArgumentError: There is a weight and `op` is not Average, or the weight is negative.
            UnsupportedTensorError: A leaf is not an array of floating-point numbers; or, with ``inplace=True``, it cannot be
                written.
            MismatchError: The ranks have gradients of different structures, shapes or dtypes. Raised on all ranks.
            HvdliteError: The weights of all ranks are 0. Raised on all ranks.
        """
        if weight is not None:
            self._options.check_weighted()
            if not weight >= 0:
                raise ArgumentError(f"weight={weight!r}: expected the number of this rank's samples, 0 or more.")
        flat = flatten(gradients)
        about = [_info_and_place(leaf) for leaf in flat.leaves]
        infos, places = tuple(info for info, _ in about), {place for _, place in about}
        own = TreeLayout(flat.kinds, tuple(flat.paths), infos, _joint_place(places))
        if self._inplace:
            for leaf in flat.leaves:
                if leaf is not None:
                    adapter_for(leaf).check_writable(leaf)
        size = world("DistributedGradient()").engine(self._options.process_set).size
        if size == 1 and self._options.aggregator is None:
            combined = flat.leaves if self._inplace else [_copy(leaf) for leaf in flat.leaves]
        else:
            combined = self._exchange(flat, own, weight)
        found: Tree = flat.rebuild(combined)
        return found

    def _exchange(self, flat: Flat, own: TreeLayout, weight: float | None) -> list[Any]:
        layout = self._known_layout()
        while True:
            if layout is None:
                layout = self._agree(own)
            chosen = [i for i, info in enumerate(layout.infos) if info is not None]
            try:
                found = self._sync.combine_like(
                    [info for info in layout.infos if info is not None],
                    [flat.leaves[i] for i in chosen] if layout.covers(own) else [None] * len(chosen),
                    weight,
                    inplace=self._inplace,
                    refuse=not layout.covers(own),
                    kind=layout.device,
                    numbers=chosen,
                )
                break
            except NewLayout:
                layout = None
        results = dict(zip(chosen, found, strict=True))
        return [results.get(i) for i in range(len(flat.leaves))]

    def _registry(self) -> Registry:
        here = world("DistributedGradient()")
        registry = Registry.of(here, self._options.process_set)
        registry.add(self._identity)
        return registry

    def _known_layout(self) -> TreeLayout | None:
        """Return the layout that the ranks have agreed on.

        Return None if there is none, or if the exchange would not notice that a rank has other gradients: Adasum has no
        header, and without any gradient there is no exchange.
        """
        layout: TreeLayout | None = self._registry().layouts.get(self._identity.number)
        if layout is None or self._options.op is Adasum or not any(layout.infos):
            return None
        return layout

    def _agree(self, own: TreeLayout) -> TreeLayout:
        """Return the layout of the gradients that the ranks have together. Every rank that has data calls this.

        Raises:
            MismatchError: The structures, shapes or dtypes of the ranks differ. Raised on all ranks.
        """
        registry = self._registry()
        name = f"layout of gradients {self._identity.number}"
        everybody = allgather_object(own, name, process_set=self._options.process_set)
        ranks = world("DistributedGradient()").ranks(self._options.process_set)
        told = [(rank, layout) for rank, layout in zip(ranks, everybody, strict=True) if layout is not None]
        infos = []
        first, wanted = told[0]
        for rank, layout in told:
            if (layout.kinds, layout.paths) != (wanted.kinds, wanted.paths):
                raise MismatchError(_other_structure(first, wanted, rank, layout))
        for number, path in enumerate(wanted.paths):
            there = [(rank, layout.infos[number]) for rank, layout in told if layout.infos[number] is not None]
            infos.append(there[0][1] if there else None)
            for rank, info in there:
                if info != there[0][1]:
                    raise MismatchError(
                        f"the ranks have different gradients{path and f' at {path}'}: {_text(there[0][1])} on rank "
                        f"{there[0][0]}, and {_text(info)} on rank {rank}. Give all ranks the same model, and the mean "
                        "(or sum) of the gradients over their samples."
                    )
        place = _joint_place(layout.place for _, layout in told)
        agreed = TreeLayout(wanted.kinds, wanted.paths, tuple(infos), place)
        registry.agree_on_layout(self._identity.number, agreed)
        return agreed


def _other_structure(first: int, wanted: TreeLayout, rank: int, layout: TreeLayout) -> str:
    only = sorted(set(wanted.paths) ^ set(layout.paths))
    if only:
        where = first if only[0] in wanted.paths else rank
        what = f"{only[0] or 'a single array'} is on rank {where} and not on rank {rank if where == first else first}"
    else:
        what = f"{wanted.kinds or 'an array'} on rank {first}, {layout.kinds or 'an array'} on rank {rank}"
    return (
        f"the ranks have gradients of different structures: {what}. Pass the same dicts, lists and tuples on all ranks, with "
        "None where a rank has no gradient."
    )


def _info_and_place(leaf: Any) -> tuple[TensorInfo | None, str | None]:
    """Return dtype and shape of a leaf, and its `Device.kind` (empty for host memory); None for both if the leaf is None."""
    if leaf is None:
        return None, None
    adapter = adapter_for(leaf)
    info = adapter.info(leaf)
    check_floating(info)
    return info, device_kind_of(leaf, adapter) or ""


def _joint_place(places: Iterable[str | None]) -> str | None:
    found = {place for place in places if place is not None}
    return MIXED if len(found) > 1 else next(iter(found), None)


def _text(info: TensorInfo | None) -> str:
    return "none" if info is None else f"{info.dtype} of shape {info.shape}"


def _copy(leaf: Any) -> Any:
    return leaf.copy() if isinstance(leaf, np.ndarray) else leaf
