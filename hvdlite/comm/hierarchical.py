"""The collectives of a group: through shared memory within a host, by slices between hosts, or by messages alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from hvdlite.algorithms.adasum import adasum, check_adasum
from hvdlite.algorithms.slices import check_counts, slices
from hvdlite.comm.between_hosts import reduce_between_hosts
from hvdlite.comm.hierarchy import HostHierarchy, MakeCollectives
from hvdlite.comm.host_collectives import HostCollectives
from hvdlite.errors import ArgumentError, HvdliteError
from hvdlite.protocols import Array, Collectives, ReduceOp, Transport
from hvdlite.tensors.numpy_adapter import check_dtype
from hvdlite.tensors.reduction import Reduction, average_long, reduction

_TINY_BYTES = 2**12
"""The largest array that is sent by messages on one host: for so few bytes MPI is faster than Python with shared memory."""
_ONE_SHOT_BYTES = 2**15
"""The largest array that every rank reduces whole: for so few bytes a second meeting costs more than the arithmetic."""


class HierarchicalCollectives:
    """`Collectives` that accumulate float16 and bfloat16 in float32 and can scale the result at the end.

    Operations and gradients run on these collectives.

    Args:
        transport: A transport over the group, for this object alone.
        hosts: For each rank of the group, a number of its host.
        make_flat: A function that makes collectives by messages over the ranks of a transport.
        shared_memory: Whether the ranks of one host may share memory.

    Attributes:
        rank, size: See `Collectives`.
        host: The ranks of this rank's host.
        hosts: The number of hosts.
        host_of: For each rank of the group, the number of its host, counted from 0 in the order of the ranks.
        owners: The number of slice owners on each host: the first `owners` ranks of a host own a slice of inter-host data.
        flat: Collectives over the same group by messages alone.
        between_hosts: Collectives over the ranks that have this rank's number on their hosts; None if there is one host only,
            or this rank owns no slice.
    """

    def __init__(
        self, transport: Transport, hosts: Sequence[int], make_flat: MakeCollectives, shared_memory: bool = True
    ) -> None:
        self.rank, self.size = transport.rank, transport.size
        self._transport, self._given_hosts, self._make_flat = transport, hosts, make_flat
        self._shared_memory = shared_memory
        self._hierarchy = hierarchy = HostHierarchy(transport, hosts, make_flat, shared_memory)
        self.host, self.hosts, self.owners = hierarchy.host, hierarchy.hosts, hierarchy.owners
        self.between_hosts: Collectives | None = hierarchy.inter_host
        self.host_of = [position.host for position in hierarchy.positions]
        self.flat: Collectives = make_flat(transport)
        self._here: HostCollectives | None = None
        """The collectives of this rank's host; None if no two ranks of the group share memory."""
        if self.hosts < self.size:
            self._here = HostCollectives(self.host)
        self._one_host = self.hosts == 1 and self._here is not None
        self._tiny_bytes = 0 if transport.polls else _TINY_BYTES

    def allreduce(self, data: Array, op: ReduceOp | Reduction, algorithm: str = "auto") -> None:
        """Reduce `data` over the ranks, in place.

        Args:
            data: An array of shape ``(n,)``, the same shape on every rank. If `op` is a `Reduction` that scales its input, the
                caller has applied that factor.
            op: A `ReduceOp` other than AVERAGE, for the dtype of `data`. Or a `Reduction`: its dtype replaces that of `data`
                (bfloat16 values are passed as their bits in uint16), and its final division or factor is applied here.
            algorithm: "auto", "shared_memory", or an algorithm of the collectives by messages.

        Raises:
            ArgumentError: This group cannot use the algorithm.
        """
        how = op if isinstance(op, Reduction) else reduction(check_dtype(data.dtype), op)
        is_tiny = (
            data.nbytes <= self._tiny_bytes and how.divide_by == 1
        )  # averages have the same bits by all ways of a host
        if self._one_host and algorithm == "auto" and how.exact and is_tiny:
            self.flat.allreduce(data, how.combining)
            if how.finishes:
                how.finish(data)
            return
        if algorithm == "shared_memory" and self._here is None and self.size > 1:
            raise ArgumentError(
                "algorithm='shared_memory': no two ranks of this group share memory (they are alone on their hosts, or "
                "cannot; hvdlite has said so when it started). Use 'auto'."
            )
        with np.errstate(all="ignore"):  # the caller checks gradients for overflow, as in torch
            if self._here is not None and algorithm in ("auto", "shared_memory"):
                self._allreduce_in_memory(self._here, data, how)
            elif self.size > 1 or how.finishes:
                self._allreduce_by_messages(data, how, algorithm)

    def _allreduce_in_memory(self, here: HostCollectives, data: Array, how: Reduction) -> None:
        inter_host = self.between_hosts
        if self._one_host and (data.nbytes <= _ONE_SHOT_BYTES or (self.size == 2 and how.exact)):
            here.allreduce(data, how)
        else:
            here.allreduce_by_slices(data, how, self.owners, inter_host)

    def _allreduce_by_messages(self, data: Array, how: Reduction, algorithm: str) -> None:
        by_default = algorithm in ("auto", "shared_memory")

        def total(part: Array) -> Array:
            self.flat.allreduce(part, ReduceOp.SUM, "auto" if by_default else algorithm)
            return part

        if how.is_long_average:
            average_long(how, (data,), data, total)
            return
        wide = data if how.exact else np.empty(data.size, how.wide_dtype)
        how.partial((data,), wide)
        if self.size > 1 and by_default:
            reduce_between_hosts(self.flat, how, wide, data, how.conclude)
            return
        if self.size > 1:
            self.flat.allreduce(wide, how.combining, algorithm)
        how.conclude(wide)
        if not how.exact:
            how.narrow(wide, data)

    def start_sum(self, data: Array) -> Callable[[], bool]:
        """Start to sum a small array over the ranks by messages. See `Collectives`."""
        return self.flat.start_sum(data)

    def adasum(self, tensors: Sequence[Array], dtype: str | None = None) -> None:
        """Combine tensors over the ranks by Adasum, each tensor by itself, in place (see `hvdlite.algorithms.adasum`).

        The tensors travel together, by messages alone: a host cannot combine its own ranks first, for Adasum is no plain sum.

        Args:
            tensors: Arrays of one dtype and of shapes ``(n,)``; n may differ between the tensors, not between the ranks.
                bfloat16 values are passed as their bits in uint16.
            dtype: The name of the dtype; None for that of the arrays. float16 and bfloat16 are combined as float32 and rounded
                once.

        Raises:
            UnsupportedTensorError: The dtype is no real floating-point type.
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
        position = self._hierarchy.positions[root]
        if self._here is None or position.number >= self.owners:
            self.flat.broadcast(data, root)
            return
        if self.between_hosts is not None and self.host.rank == position.number:
            self.between_hosts.broadcast(data, self._hierarchy.peers(root).index(root))
        self._here.broadcast(data, position.number)

    def alltoall(self, data: Array, send_counts: Sequence[int], out: Array, recv_counts: Sequence[int]) -> None:
        """See `Collectives.alltoall`. The ranks first see whether their counts fit together.

        Raises:
            MismatchError: A rank sends another number of elements than its receiver expects. All ranks raise it.
        """
        if self._one_host and self._here is not None:
            self._here.alltoall(data, send_counts, out, recv_counts)
            return
        counts = np.array([send_counts, recv_counts], np.int64)
        table = np.empty((self.size, *counts.shape), np.int64)
        self.flat.allgather(counts.ravel(), table.ravel(), [counts.size] * self.size)
        check_counts(table)
        self.flat.alltoall(data, send_counts, out, recv_counts)

    def reduce_scatter(self, data: Array, out: Array, counts: Sequence[int], op: ReduceOp | Reduction) -> None:
        """Reduce `data` over the ranks and keep slice `rank` of it in `out`, which must not overlap `data`.

        `op` is that of `allreduce`: a `Reduction` is finished, and `out` has the dtype of `data`.
        """
        how = op if isinstance(op, Reduction) else reduction(check_dtype(data.dtype), op)

        def kept(whole: Array) -> Array:
            own = np.empty_like(out)
            self.flat.reduce_scatter(whole, own, counts, ReduceOp.SUM)
            return own

        with np.errstate(all="ignore"):
            if self._one_host and self._here is not None:
                self._here.reduce_scatter(data, out, counts, how)
                return
            if how.is_long_average:
                average_long(how, (data,), out, kept)
                return
            wide, part = data, out
            if not how.exact:
                part = np.empty(out.size, how.wide_dtype)
            if not how.exact or how.shift != 1.0:
                wide = np.empty(data.size, how.wide_dtype)
                how.partial((data,), wide)
            self.flat.reduce_scatter(wide, part, counts, how.combining)
            how.conclude(part)
            if not how.exact:
                how.narrow(part, out)

    def barrier(self) -> None:
        if self._one_host:
            self.host.meet()
        else:
            self.flat.barrier()

    def duplicate(self) -> HierarchicalCollectives:
        return HierarchicalCollectives(
            self._transport.duplicate(), self._given_hosts, self._make_flat, self._shared_memory
        )

    def stop(self, error: HvdliteError | None = None) -> None:
        """Fail every wait for other ranks: see `Host.stop`; between hosts, as far as the medium allows it."""
        self.host.stop(error)
        error = error or HvdliteError("the hosts do not exchange data any more: hvdlite has been shut down.")
        for each in (self.flat, self.between_hosts):
            if each is not None:
                each.stop(error)

    def close(self) -> None:
        self._hierarchy.close()
        self.flat.close()
