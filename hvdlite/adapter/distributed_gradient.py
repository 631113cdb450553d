"""Gradients of programs without a framework's optimizer: NumPy's, JAX', anybody's.

The ranks agree once on what there is to exchange; a step sends no message for that. A rank whose gradients do not fit says so
in the header of the exchange, which is then put off on all ranks alike::

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
from hvdlite.adapter.options import Options
from hvdlite.adapter.tree import Flat, flatten
from hvdlite.api import Adasum, Average, allgather_object, world
from hvdlite.errors import ArgumentError, MismatchError
from hvdlite.process_set import ProcessSet
from hvdlite.protocols import ReduceOp, TensorInfo
from hvdlite.tensors.compression import Compression, Compressor
from hvdlite.tensors.registry import adapter_for, device_kind_of

Tree = TypeVar("Tree")

MIXED = "mixed"


class Layout(NamedTuple):
    """What the ranks exchange.

    Attributes:
        kinds: The containers, as `hvdlite.adapter.tree.Flat` has them.
        paths: Where each gradient is.
        infos: Dtype and shape of each gradient; None where no rank has had one.
        place: `Device.kind` of where all gradients are; empty for host memory; `MIXED` if they are not all in one kind of
            memory, and so travel by way of the host's; None if there is none.
    """

    kinds: str
    paths: tuple[str, ...]
    infos: tuple[TensorInfo | None, ...]
    place: str | None

    def covers(self, own: Layout) -> bool:
        """Whether the gradients of a rank are of this layout. A rank may have fewer."""
        return (
            (self.kinds, self.paths) == (own.kinds, own.paths)
            and (own.place is None or self.place in (MIXED, own.place))
            and all(mine in (None, info) for mine, info in zip(own.infos, self.infos, strict=True))
        )

    @property
    def device(self) -> str:
        """`Device.kind` of where all gradients are; empty if they are, or go, through host memory."""
        return "" if self.place in (None, MIXED) else str(self.place)


class DistributedGradient:
    """Combines the gradients of all ranks. A program makes one, and calls it in each step::

        combine = hvd.DistributedGradient()
        for x, y in batches:
            gradients = combine(gradient(weights, x, y), weight=len(x))

    For gradients of NumPy, JAX, or any library whose arrays hvdlite reads. All gradients of a step travel together: those that
    are large are summed where they are, in memory that the ranks of a host share. A loop that trains two models in turn makes
    one object for each.

    Args:
        op: Average, Sum, or Adasum of the gradients.
        process_set: The ranks that take part; all if None.
        compression: How gradients travel: `hvdlite.Compression.none`, ``fp16``, ``bf16``, or a `Compressor` of the program's.
        gradient_predivide_factor: With compression and Average: gradients are divided by it before they are compressed, and
            multiplied by it in the end.
        inplace: Write the combined gradients into the arrays that the program gives.

    Raises:
        ArgumentError: The arguments do not fit together, or this rank is not in `process_set`.
        NotInitializedError: Before `init`.
    """

    def __init__(
        self,
        op: ReduceOp = Average,
        process_set: ProcessSet | None = None,
        compression: Compressor = Compression.none,
        gradient_predivide_factor: float = 1.0,
        *,
        inplace: bool = False,
    ) -> None:
        self._options = Options(op, process_set, compression, gradient_predivide_factor=gradient_predivide_factor)
        self._inplace = inplace
        here = world("DistributedGradient()")
        self._identity = Identity(here)
        self._sync = EagerSync(self._options, self._identity)
        self._registry()  # a rank may join without a single gradient

    def __call__(self, gradients: Tree, weight: float | None = None) -> Tree:
        """The gradients of all ranks. Every rank calls this, with the same structure; `hvdlite.join` ends it for a rank.

        Args:
            gradients: An array, or arrays in nested dicts, lists and tuples. (Where JAX is loaded, in any container that it
                knows.) Floating-point numbers of any shape. None where this rank has no gradient: it then counts as zero if
                another rank has one.
            weight: The number of samples that these gradients are the mean of, for Average; 1 if None. The result is then the
                mean over the samples of all ranks. A rank without samples says 0, and its gradients may be anything.

        Returns:
            The same structure, with arrays of the same kind: new ones, or with ``inplace=True`` those that were given. None
            where no rank has a gradient.

        Raises:
            ArgumentError: A weight without Average, or a negative one.
            UnsupportedTensorError: A leaf is no array of floating-point numbers; or, with ``inplace=True``, it cannot be
                written.
            MismatchError: The ranks have gradients of different structures, shapes or dtypes. Raised on all of them.
            HvdliteError: The weights of all ranks are 0. Raised on all of them.
        """
        if weight is not None:
            self._options.check_weighted()
            if not weight >= 0:
                raise ArgumentError(f"weight={weight!r}: expected the number of this rank's samples, 0 or more.")
        flat = flatten(gradients)
        about = [_info_and_place(leaf) for leaf in flat.leaves]
        infos, places = tuple(info for info, _ in about), {place for _, place in about}
        own = Layout(flat.kinds, tuple(flat.paths), infos, _joint_place(places))
        if self._inplace:
            for leaf in flat.leaves:
                if leaf is not None:
                    adapter_for(leaf).check_writable(leaf)
        if world("DistributedGradient()").engine(self._options.process_set).size == 1:
            combined = flat.leaves if self._inplace else [_copy(leaf) for leaf in flat.leaves]
        else:
            combined = self._exchange(flat, own, weight)
        found: Tree = flat.rebuild(combined)
        return found

    def _exchange(self, flat: Flat, own: Layout, weight: float | None) -> list[Any]:
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

    def _known_layout(self) -> Layout | None:
        """What the ranks agreed on; None if they did not, or where no exchange would tell that a rank has something else."""
        layout: Layout | None = self._registry().layouts.get(self._identity.number)
        if layout is None or self._options.op is Adasum or not any(layout.infos):
            return None
        return layout

    def _agree(self, own: Layout) -> Layout:
        """What all ranks have together. Every rank that has data calls this.

        Raises:
            MismatchError: Structures, shapes or dtypes differ. Raised on all of them.
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
        agreed = registry.layouts[self._identity.number] = Layout(wanted.kinds, wanted.paths, tuple(infos), place)
        return agreed


def _other_structure(first: int, wanted: Layout, rank: int, layout: Layout) -> str:
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
    """Of an array: dtype and shape; and `Device.kind` of where it is, empty for host memory. Both None if there is none."""
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
