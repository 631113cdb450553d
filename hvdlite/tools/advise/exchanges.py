"""`ExchangeCost`: what an operation of all hosts sends, and how long it takes. `EqualRanks` notes what code would send."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from hvdlite.algorithms.choose import choose
from hvdlite.algorithms.cost import predict, sent
from hvdlite.algorithms.slices import slices
from hvdlite.comm.between_hosts import reduce_between_hosts
from hvdlite.errors import HvdliteError
from hvdlite.protocols import Array, ReduceOp
from hvdlite.tensors.reduction import Reduction
from hvdlite.tools.advise.link import NetworkLink

KINDS = "allreduce", "reduce_scatter", "allgather", "alltoall"


class ExchangeCost(NamedTuple):
    """An operation among hosts.

    Attributes:
        kind: One of `KINDS`.
        nbytes: The bytes of the vector that is reduced; of the result of an allgather; of what a host gives to an alltoall.
    """

    kind: str
    nbytes: float

    def seconds(self, hosts: int, link: NetworkLink) -> float:
        """Return how long the operation takes on some hosts, if all of them begin at once."""
        alpha, beta, gamma = link.latency, link.seconds_per_byte, link.reduction
        if self.kind == "allreduce":
            return predict(choose(hosts, int(self.nbytes)), hosts, self.nbytes, alpha, beta, gamma)
        reduced = gamma if self.kind == "reduce_scatter" else 0.0
        return (hosts - 1) * alpha + (hosts - 1) / hosts * self.nbytes * (beta + reduced)

    def sent(self, hosts: int) -> float:
        """Return how many bytes a host sends, as the mean of all hosts."""
        if self.kind == "allreduce":
            return sent(choose(hosts, int(self.nbytes)), hosts, self.nbytes) / hosts
        return (hosts - 1) / hosts * self.nbytes


class EqualRanks:
    """`hvdlite.protocols.Collectives` of ranks that all have the same data as this one. They send nothing.

    Code that runs on them does all its work on this rank, and shows what it would send. So the bytes of a way to compress
    gradients, and the time of its computation, come from its own code.

    Args:
        size: The number of ranks.

    Attributes:
        exchanges: What the ranks would have sent so far.
    """

    rank = 0

    def __init__(self, size: int) -> None:
        self.size = size
        self.exchanges: list[ExchangeCost] = []

    def allreduce(self, data: Array, op: ReduceOp | Reduction, algorithm: str = "auto") -> None:
        """Reduce equal values: a SUM, as everywhere where gradients are combined; or as the hosts do by a `Reduction`."""
        if isinstance(op, Reduction):
            wide = data if op.exact else np.empty(data.size, op.wide_dtype)
            op.combine((data,), wide)
            reduce_between_hosts(self, op, wide, data, op.finish)
            return
        assert op is ReduceOp.SUM
        self.exchanges.append(ExchangeCost("allreduce", data.nbytes))
        data *= self.size

    def start_sum(self, data: Array) -> Callable[[], bool]:
        """See `hvdlite.protocols.Collectives`."""
        self.allreduce(data, ReduceOp.SUM)
        return lambda: True

    def allgather(self, data: Array, out: Array, counts: Sequence[int]) -> None:
        """See `hvdlite.protocols.Collectives`. A rank that has fewer elements has the first ones."""
        self.exchanges.append(ExchangeCost("allgather", out.nbytes))
        for part, count in zip(slices(counts), counts, strict=True):
            out[part][: data.size] = data[:count]

    def broadcast(self, data: Array, root: int) -> None:
        """Do nothing: the others have the same."""

    def alltoall(self, data: Array, send_counts: Sequence[int], out: Array, recv_counts: Sequence[int]) -> None:
        """See `hvdlite.protocols.Collectives`."""
        self.exchanges.append(ExchangeCost("alltoall", data.nbytes))
        own = data[: send_counts[0]]
        for part, count in zip(slices(recv_counts), recv_counts, strict=True):
            out[part] = own[:count]

    def reduce_scatter(self, data: Array, out: Array, counts: Sequence[int], op: ReduceOp) -> None:
        """See `hvdlite.protocols.Collectives`. `op` is SUM."""
        assert op is ReduceOp.SUM
        self.exchanges.append(ExchangeCost("reduce_scatter", data.nbytes))
        np.multiply(data[: counts[0]], self.size, out=out)

    def barrier(self) -> None:
        """Do nothing: nobody is late."""

    def stop(self, error: HvdliteError) -> None:
        """Do nothing: nobody waits."""

    def duplicate(self) -> EqualRanks:
        """Return other collectives of as many ranks, which have sent nothing yet."""
        return EqualRanks(self.size)

    def close(self) -> None:
        """Do nothing."""
