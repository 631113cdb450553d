"""Measures what messages cost on this machine, and what they add up to, on ranks of MPI: for `benchmarks.many_ranks`."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from mpi4py import MPI

from benchmarks.figures import until_all_are_done
from benchmarks.scaling import make_controllers
from hvdlite.algorithms.choose import choose
from hvdlite.comm.hierarchical import HierarchicalCollectives
from hvdlite.comm.mpi.transport import MpiTransport
from hvdlite.comm.point_to_point import PointToPointCollectives
from hvdlite.operations import Signature
from hvdlite.operations.negotiation.controller import Controller
from hvdlite.operations.negotiation.messages import READY_ONE, READY_ONE_KIND
from hvdlite.protocols import Array, ReduceOp, TensorInfo
from hvdlite.ranks.own_core import home
from hvdlite.tools.advise.calibrate import measure_hosts

SIZES = (2**12, 2**20, 2**24)
"""The bytes of the sums that are measured."""
SIGNATURE: Signature = ("allreduce", (TensorInfo("float32", (1,)),), (("op", "sum"),))
_ROUNDS, _MESSAGES, _CHILDREN = 200, 20, 8
_MESSAGE = READY_ONE.pack(READY_ONE_KIND, 1, -1, 1)


def measure(elements: int) -> dict[str, Any]:
    """Measure on this rank. All ranks call this.

    Args:
        elements: The number of parameters of the model whose memory is copied.

    Returns:
        On rank 0: the fields of `benchmarks.virtual_ranks.Costs`, in seconds; ``latency`` of a control message, apart from the
        work of both ranks; by the bytes of a sum, latency and seconds per byte of messages (``links``), and the seconds to add
        a byte (``adds``); ``agreement``: the seconds until the ranks have agreed on an operation; ``sums``: the seconds of an
        allreduce, by its bytes.
    """
    transport = MpiTransport(MPI.COMM_WORLD.Dup())
    core = home(os.sched_getaffinity(0), transport.rank, transport.size)
    if core is not None:  # on one core, ranks that offer it to each other would measure how long that takes
        os.sched_setaffinity(0, {core})
    post, poll, latency = _messages(transport)
    announce, handling = _handling()
    step = _seconds(Controller(transport.duplicate(), lambda keys: [keys]).step)
    look = _seconds(transport.poll)
    here = HierarchicalCollectives(transport.duplicate(), [0] * transport.size, PointToPointCollectives)
    copy, meeting, _ = measure_hosts(elements, here)
    return {
        **{
            "announce": announce,
            "step": max(0.0, step - look),
            "look": look,
            "take": poll + handling,
            "post": post,
            "copy": copy,
            "meeting": meeting,
        },
        **{"latency": latency, "links": _links(transport), "adds": _adds()},
        **{"agreement": _agreement(transport), "sums": {nbytes: _sum(transport, nbytes) for nbytes in SIZES}},
    }


def _usual(times: Sequence[float]) -> float:
    """Return the time that a tenth of the samples does not reach: whatever else runs makes the others longer, never shorter."""
    return float(np.quantile(times, 0.1))


def _seconds(call: Callable[[], object], rounds: int = _ROUNDS) -> float:
    """Return the usual time of a call."""
    times = []
    for _ in range(rounds):
        began = time.perf_counter()
        call()
        times.append(time.perf_counter() - began)
    return _usual(times)


def _together(call: Callable[[], object], rounds: int = 50) -> float:
    """Return the usual time of a call that all ranks begin at once, until the last one is done."""
    times = []
    for _ in range(rounds):
        MPI.COMM_WORLD.Barrier()
        began = time.perf_counter()
        call()
        times.append(time.perf_counter() - began)
    return _usual(until_all_are_done(times))


def _messages(transport: MpiTransport) -> tuple[float, float, float]:
    """Return the seconds to post a control message, to take one that is there, and of its way between two ranks."""
    rank, peer = transport.rank, 1 - transport.rank
    posts, polls = [], []
    for _ in range(_ROUNDS):
        began = time.perf_counter()
        if rank == 0:
            for _ in range(_MESSAGES):
                transport.post(_MESSAGE, 1)
        posts.append((time.perf_counter() - began) / _MESSAGES)
        MPI.COMM_WORLD.Barrier()
        left = _MESSAGES if rank == 1 else 0
        began = time.perf_counter()
        while left:
            left -= transport.poll() is not None
        polls.append((time.perf_counter() - began) / _MESSAGES)
        MPI.COMM_WORLD.Barrier()

    def turn() -> None:
        if rank == 0:
            transport.post(_MESSAGE, peer)
        while transport.poll() is None:
            pass
        if rank == 1:
            transport.post(_MESSAGE, peer)

    way = (_seconds(turn) if rank < 2 else 0.0) / 2
    post = MPI.COMM_WORLD.bcast(_usual(posts), 0)
    poll = MPI.COMM_WORLD.bcast(_usual(polls), 1)
    return post, poll, max(0.0, way - post - poll - _seconds(transport.poll) / 2)


def _handling() -> tuple[float, float]:
    """Return the seconds of `Controller.announce`, and those to do what a message says, without the way of the message."""

    def agree(ranks: int) -> tuple[float, float, float, float]:
        """Return the time to announce, of a rank's first step, of the root's step, and of a rank's last step."""
        transports, controllers = make_controllers(ranks)
        announced: list[float] = []
        first: list[float] = []
        decided: list[float] = []
        last: list[float] = []
        for number in range(_ROUNDS):
            for controller in reversed(controllers):
                began = time.perf_counter()
                controller.announce(number, SIGNATURE)
                announced.append(time.perf_counter() - began)
                began = time.perf_counter()
                controller.step()
                (first if controller is not controllers[0] else decided).append(time.perf_counter() - began)
            for controller in controllers[1:]:
                began = time.perf_counter()
                controller.step()
                last.append(time.perf_counter() - began)
        assert all(not transport.has_message() for transport in transports)
        return tuple(map(_usual, (announced, first, decided, last)))  # type: ignore[return-value]

    announce, _, few, _ = agree(2)
    _, _, many, _ = agree(1 + _CHILDREN)
    transports, _ = make_controllers(2)

    def travel() -> None:
        transports[0].post(_MESSAGE, 1)
        transports[1].poll()

    # For each more child, the root takes a report and posts a plan.
    return announce, max(0.0, (many - few) / (_CHILDREN - 1) - _seconds(travel))


def _links(transport: MpiTransport) -> dict[int, tuple[float, float]]:
    """Return latency and seconds per byte of messages that two ranks send each other at once, by the bytes of a sum.

    The messages are as long as in an allreduce of two ranks, and lie in as much memory: it may be more than the cache holds.
    """
    peer = transport.rank ^ 1
    one, other = np.ones((2, 1), np.float32)
    latency = _together(lambda: transport.sendrecv(one, peer, other, peer))
    found = {}
    for nbytes in SIZES:
        parts = itertools.cycle(_parts(nbytes))

        def swap(parts: Iterator[tuple[Array, Array]] = parts) -> None:
            given, taken = next(parts)
            transport.sendrecv(given, peer, taken, peer)

        found[nbytes] = (latency, max(0.0, _together(swap) - latency) / _message(nbytes))
    return found


def _parts(nbytes: int) -> list[tuple[Array, Array]]:
    """Return the parts of two arrays as long as a sum, of which a message has one."""
    data, scratch = np.ones((2, nbytes // 4), np.float32)
    length = _message(nbytes) // 4
    return [(data[at : at + length], scratch[at : at + length]) for at in range(0, data.size, length)]


def _message(nbytes: int) -> int:
    """Return the bytes of the first message in a sum of two ranks."""
    return nbytes if choose(2, nbytes) == "butterfly" else nbytes // 2


def _adds() -> dict[int, float]:
    """Return the seconds to add a byte, on all ranks at once, by the bytes of a sum."""
    found = {}
    for nbytes in SIZES:
        parts = itertools.cycle(_parts(nbytes))

        def add(parts: Iterator[tuple[Array, Array]] = parts) -> None:
            into, other = next(parts)
            np.add(into, other, out=into)

        found[nbytes] = _together(add) / _message(nbytes)
    return found


def _agreement(transport: MpiTransport) -> float:
    """Return the seconds until all ranks have agreed on an operation that they have agreed on before."""
    controller, numbers = Controller(transport.duplicate(), lambda keys: [keys]), iter(range(10 * _ROUNDS))

    def agree() -> None:
        controller.announce(next(numbers), SIGNATURE)
        while not controller.step():
            pass

    agree()
    return _together(agree)


def _sum(transport: MpiTransport, nbytes: int) -> float:
    collectives, data = PointToPointCollectives(transport.duplicate()), np.zeros(nbytes // 4, np.float32)
    collectives.allreduce(data, ReduceOp.SUM)
    return _together(lambda: collectives.allreduce(data, ReduceOp.SUM), 20)
