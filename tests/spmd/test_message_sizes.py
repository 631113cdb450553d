"""Messages of every size, awaited in every order: MPI sends small ones at once, and asks for the receiver before larger ones.

Where that border is depends on the transport of MPI (`ompi_info --all`: btl_self_eager_limit 1024, btl_sm_eager_limit 4096,
btl_tcp_eager_limit 65,536), and its own header counts. A rank may wait for any message first, so no order may hang.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np
import pytest

import hvdlite as hvd
from hvdlite.api import world
from hvdlite.comm.hierarchical import HierarchicalCollectives
from hvdlite.comm.ordered.calls import CollectiveCall
from hvdlite.protocols import ANY, Array, ReduceOp, Request

Ranks = Callable[..., list[Any]]
LIMIT = 20.0
"""Seconds after which a wait ends with an error, so that a hang says where it is."""

BORDERS = (64, 256, 1024, 2048, 4096, 8192, 16_384, 32_768, 65_536, 131_072)
SIZES = sorted({0, 1, 2**20, *(max(border + by, 1) for border in BORDERS for by in (-64, -32, -8, 0, 1, 64))})
SIZES += [*range(4096 - 200, 4096 + 200, 8), *range(65_536 - 128, 65_536 + 128, 16)]
FEW = (1, 1024, 4032, 4064, 4096, 4160, 65_472, 65_536, 2**18)
"""For what takes a collective for each size, which between hosts takes milliseconds."""
ORDERS: dict[str, Callable[[list[Request]], list[Request]]] = {
    "sends first": lambda requests: requests,
    "receives first": lambda requests: requests[::-1],
    "shuffled": lambda requests: random.Random(hvd.rank()).sample(requests, len(requests)),
}


class Messages(Protocol):
    def isend(self, data: Array, dest: int, tag: int = 0) -> Request: ...
    def irecv(self, data: Array, source: int = ANY, tag: int = 0) -> Request: ...


@contextmanager
def opened(kind: str) -> Iterator[Messages]:
    """A channel, whose messages go on while a rank waits for one, or a communicator, whose messages go on by themselves."""
    group = world().communicators.new(range(hvd.size()), "all", LIMIT)
    yield group.channel if kind == "channel" else group
    group.run(CollectiveCall("the end", lambda _: None))
    group.close()


def pattern(size: int, source: int, dest: int) -> Array:
    return np.full(size, 1 + source + 16 * dest, np.uint8)


@pytest.mark.parametrize("kind", ["channel", "communicator"])
@pytest.mark.parametrize("order", ORDERS)
def test_of_every_size_to_everybody(ranks: Ranks, kind: str, order: str) -> None:
    def check() -> None:
        rank, size = hvd.rank(), hvd.size()
        with opened(kind) as group:
            for nbytes in SIZES:
                sends = [group.isend(pattern(nbytes, rank, dest), dest) for dest in range(size)]
                got = [np.zeros(nbytes, np.uint8) for _ in range(size)]
                receives = [group.irecv(each, source) for source, each in enumerate(got)]
                for request in ORDERS[order]([*sends, *receives]):
                    request.wait()
                for source, each in enumerate(got):
                    assert (each == pattern(nbytes, source, rank)).all(), (nbytes, source)

    ranks(check)


@pytest.mark.parametrize("kind", ["channel", "communicator"])
def test_several_at_once_in_any_order(ranks: Ranks, kind: str) -> None:
    """Each rank has many messages under way, of mixed sizes and two tags, and waits for them in an order of its own."""

    def check() -> None:
        rank, size = hvd.rank(), hvd.size()
        draw, own = random.Random(7), random.Random(rank)
        with opened(kind) as group:
            for _ in range(8):
                chosen = [(draw.choice(SIZES), draw.randrange(2)) for _ in range(12)]
                got = [[np.zeros(nbytes, np.uint8) for nbytes, _ in chosen] for _ in range(size)]
                pending: list[Request] = []
                for peer in own.sample(range(size), size):
                    for sends in own.sample([True, False], 2):
                        for number, (nbytes, tag) in enumerate(chosen):  # messages of one pair and tag keep their order
                            if sends:
                                pending.append(group.isend(pattern(nbytes, rank, peer), peer, tag))
                            else:
                                pending.append(group.irecv(got[peer][number], peer, tag))
                for request in own.sample(pending, len(pending)):
                    request.wait()
                for peer, arrays in enumerate(got):
                    for array in arrays:
                        assert (array == pattern(len(array), peer, rank)).all()

    ranks(check)


@pytest.mark.parametrize("first", [True, False])
def test_a_collective_between_the_receive_and_its_wait(ranks: Ranks, first: bool) -> None:
    """The receiver waits for its message after a collective; the sender comes to that when its message has gone."""

    def total(collectives: HierarchicalCollectives) -> None:
        collectives.allreduce(np.ones(4), ReduceOp.SUM)

    def check() -> None:
        rank = hvd.rank()
        receiver, sender = (0, hvd.size() - 1) if first else (hvd.size() - 1, 0)
        group = world().communicators.new(range(hvd.size()), "all", LIMIT)
        for nbytes in FEW:
            got = np.zeros(nbytes, np.uint8)
            received = group.irecv(got, sender) if rank == receiver else None
            if rank == sender:
                sent = group.isend(pattern(nbytes, sender, receiver), receiver)
                if rank != receiver:
                    sent.wait()
            group.run(CollectiveCall("total", total))
            if received is not None:
                received.wait()
                assert (got == pattern(nbytes, sender, receiver)).all()
        group.run(CollectiveCall("the end", lambda _: None))
        group.close()

    ranks(check)
