"""The collectives of a group: inside of each host through shared memory, between hosts by slices, or by messages alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from hvdlite.algorithms.adasum import adasum, check_adasum
from hvdlite.algorithms.slices import slices
from hvdlite.comm.hierarchy import HostHierarchy, MakeCollectives
from hvdlite.comm.host_collectives import HostCollectives
from hvdlite.errors import ArgumentError, HvdliteError
from hvdlite.protocols import Array, Collectives, ReduceOp, Transport
from hvdlite.tensors.numpy_adapter import check_dtype
from hvdlite.tensors.reduction import Reduction, reduction

_TINY_BYTES = 2**12
"""Up to here a message is there sooner than Python has looked at its memory."""
_ONE_SHOT_BYTES = 2**15
"""Up to here every rank reduces everything: waiting costs more than arithmetic."""


class HierarchicalCollectives:
    """What operations and gradients are exchanged by: `hvdlite.protocols.Collectives`, with halves and a last touch.

    Args:
        transport: Over the group; this object's alone.
        hosts: For each rank of the group, some number of its host.
        make_flat: Makes collectives by messages over the ranks of a transport.
        shared_memory: Whether ranks of one host may share memory.

    Attributes:
        rank, size: See `Collectives`.
        host: The ranks of this host.
        hosts: The number of hosts.
        owners: The first so many ranks of each host have a part of what goes between the hosts.
        flat: The same group by messages alone.
        between_hosts: The ranks of this number on all hosts; None if there is one host only, or this rank is no owner.
    """

    def __init__(
        self, transport: Transport, hosts: Sequence[int], make_flat: MakeCollectives, shared_memory: bool = True
    ) -> None:
        self.rank, self.size = transport.rank, transport.size
        self._transport, self._host_of, self._make_flat = transport, hosts, make_flat
        self._shared_memory = shared_memory
        self._layers = layers = HostHierarchy(transport, hosts, make_flat, shared_memory)
        self.host, self.hosts, self.owners = layers.host, layers.hosts, layers.owners
        self.between_hosts: Collectives | None = layers.cross
        self.flat: Collectives = make_flat(transport)
        self._here: HostCollectives | None = None
        """None if no two ranks of the group share memory."""
        if self.hosts < self.size:
            self._here = HostCollectives(self.host)
        self._one_host = self.hosts == 1 and self._here is not None

    def allreduce(self, data: Array, op: ReduceOp | Reduction, algorithm: str = "auto") -> None:
        """Reduce `data` over the ranks, in place.

        Args:
            data: Shape ``(n,)``, the same on every rank. Of a `Reduction` that is scaled, each rank has scaled its own.
            op: A `ReduceOp` but AVERAGE, of the dtype of the array; or a `Reduction`, whose dtype may say more (bfloat16 is its
                bits in uint16), and which is finished here.
            algorithm: "auto", "shared_memory", or one of the flat collectives'.

        Raises:
            ArgumentError: The algorithm cannot be used here.
        """
        how = op if isinstance(op, Reduction) else reduction(check_dtype(data.dtype), op)
        if self._one_host and algorithm == "auto" and how.exact and data.nbytes <= _TINY_BYTES:
            self.flat.allreduce(data, how.combining)
            if how.finishes:
                how.finish(data)
            return
        if algorithm == "shared_memory" and self._here is None and self.size > 1:
            raise ArgumentError(
                "algorithm='shared_memory': no two ranks of this group share memory (they are alone on their hosts, or "
                "cannot; hvdlite has said so when it started). Use 'auto'."
            )
        with np.errstate(all="ignore"):  # gradients that overflow are the caller's business, as in torch
            if self._here is not None and algorithm in ("auto", "shared_memory"):
                self._allreduce_in_memory(self._here, data, how)
            elif self.size > 1 or how.finishes:
                self._allreduce_by_messages(data, how, algorithm)

    def _allreduce_in_memory(self, here: HostCollectives, data: Array, how: Reduction) -> None:
        cross = self.between_hosts
        if self._one_host and (data.nbytes <= _ONE_SHOT_BYTES or (self.size == 2 and how.exact)):
            here.allreduce(data, how)
        else:
            between = None if cross is None else lambda wide: cross.allreduce(wide, how.combining)
            here.allreduce_by_slices(data, how, self.owners, between)

    def _allreduce_by_messages(self, data: Array, how: Reduction, algorithm: str) -> None:
        wide = data
        if not how.exact:
            wide = np.empty(data.size, how.wide_dtype)
            how.combine((data,), wide)
        if self.size > 1:
            self.flat.allreduce(wide, how.combining, "auto" if algorithm == "shared_memory" else algorithm)
        how.finish(wide)
        if not how.exact:
            how.narrow(wide, data)

    def start_sum(self, data: Array) -> Callable[[], bool]:
        """Begin to sum a small array over the ranks, by messages. See `Collectives`."""
        return self.flat.start_sum(data)

    def adasum(self, tensors: Sequence[Array], dtype: str | None = None) -> None:
        """Combine tensors over the ranks by Adasum, each by itself, in place (see `hvdlite.algorithms.adasum`).

        They travel together, and all the way as messages: Adasum is no sum that each host could begin by itself.

        Args:
            tensors: Of shape ``(n,)``, n of their own, the same on every rank; of one dtype. bfloat16 as its bits in uint16.
            dtype: The name of their dtype, where the arrays' own says less. float16 and bfloat16 are combined as float32 and
                rounded once.

        Raises:
            UnsupportedTensorError: They are not real floating-point numbers.
        """
        if not tensors:
            return
        dtype = dtype or check_dtype(tensors[0].dtype)
        check_adasum(dtype)
        if self.size == 1:
            return
        how = reduction(dtype, ReduceOp.SUM)
        counts = [tensor.size for tensor in tensors]
        with np.errstate(all="ignore"):
            if how.exact and len(tensors) == 1:
                adasum(self._transport, tensors[0], counts)
                return
            flat = np.empty(sum(counts), how.wide_dtype)
            pieces = [flat[piece] for piece in slices(counts)]
            for tensor, piece in zip(tensors, pieces, strict=True):
                how.combine((tensor,), piece)
            adasum(self._transport, flat, counts)
            for tensor, piece in zip(tensors, pieces, strict=True):
                how.narrow(piece, tensor)

    def allgather(self, data: Array, out: Array, counts: Sequence[int]) -> None:
        if self._one_host and self._here is not None:
            self._here.allgather(data, out, counts)
        else:
            self.flat.allgather(data, out, counts)

    def broadcast(self, data: Array, root: int) -> None:
        place = self._layers.places[root]
        if self._here is None or place.number >= self.owners:
            self.flat.broadcast(data, root)
            return
        if self.between_hosts is not None and self.host.rank == place.number:
            self.between_hosts.broadcast(data, self._layers.peers(root).index(root))
        self._here.broadcast(data, place.number)

    def alltoall(self, data: Array, send_counts: Sequence[int], out: Array, recv_counts: Sequence[int]) -> None:
        self.flat.alltoall(data, send_counts, out, recv_counts)

    def reduce_scatter(self, data: Array, out: Array, counts: Sequence[int], op: ReduceOp) -> None:
        if self._one_host and self._here is not None:
            with np.errstate(all="ignore"):
                self._here.reduce_scatter(data, out, counts, reduction(check_dtype(data.dtype), op))
        else:
            self.flat.reduce_scatter(data, out, counts, op)

    def barrier(self) -> None:
        if self._one_host:
            self.host.meet()
        else:
            self.flat.barrier()

    def duplicate(self) -> HierarchicalCollectives:
        return HierarchicalCollectives(self._transport.duplicate(), self._host_of, self._make_flat, self._shared_memory)

    def stop(self, error: HvdliteError | None = None) -> None:
        """Fail every wait for the other ranks of this host. See `Host.stop`."""
        self.host.stop(error)

    def close(self) -> None:
        self._layers.close()
        self.flat.close()
