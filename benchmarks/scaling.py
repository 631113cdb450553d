"""Count the cost of negotiation as the work grows: control messages and their bytes per step and rank, and memory.

    python -m benchmarks.scaling
    python -m benchmarks.scaling --ranks 2 64 --tensors 1000 --json scaling.json

The ranks are simulated in this process, so the counts are exact and need no network. The program counts one step, after some
equal steps. Negotiation sends control messages. A message counts for the rank that sends it.

gradients   A training step through `Reducer`. Each rank is a thread on a host of its own.
operations  Every rank submits all tensors by name, in an order of its own, and waits for them. The program drives each rank's
            `Controller` in turn, children before parents, so that a step is one batch. (In a job, negotiation begins as soon
            as a rank submits a tensor, so a step may have several batches, with messages for each.)
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import statistics
import tracemalloc
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tqdm import tqdm

from hvdlite.comm.hierarchical import HierarchicalCollectives
from hvdlite.comm.local import LocalFabric, LocalTransport
from hvdlite.comm.point_to_point import PointToPointCollectives
from hvdlite.config import Config
from hvdlite.errors import HvdliteError
from hvdlite.gradients.reducer import Reducer, ReducerContext
from hvdlite.operations import Signature
from hvdlite.operations.negotiation.controller import Controller
from hvdlite.operations.negotiation.messages import Key
from hvdlite.protocols import Plan, ReduceOp, TensorInfo
from hvdlite.ranks.topology import Members
from hvdlite.timeline import Timeline
from hvdlite.watchdog.watchdog import Watchdog

RANKS = (2, 8, 64, 256, 1024)
TENSORS = (10, 100, 1000, 10_000)
MOST_GRADIENTS = 110_000
"""The largest product of ranks and tensors: the gradients of all ranks are in the memory of this process."""
MOST_OPERATIONS = 1_100_000
MEMORY_RANKS = 8

_WARM_UP = 2
_FUSED = 500
"""The number of tensors in one fused operation. In a job, the bytes of the tensors decide."""
_ELEMENTS = 16


class Sent(NamedTuple):
    """The messages that each rank sent in one step.

    Attributes:
        control_messages: The number of messages of the negotiation.
        control_bytes: The bytes of these messages.
        messages: The number of messages with tensors; None if tensors were negotiated but not exchanged.
        message_bytes: The bytes of the messages with tensors; None if tensors were negotiated but not exchanged.
    """

    control_messages: list[int]
    control_bytes: list[int]
    messages: list[int] | None = None
    message_bytes: list[int] | None = None


class CountingTransport(LocalTransport):
    """The transport of one rank, which also counts the control messages and their bytes."""

    control_messages = 0
    control_bytes = 0

    def post(self, message: bytes, dest: int) -> None:
        self.control_messages += 1
        self.control_bytes += len(message)
        super().post(message, dest)


# Named operations


def make_controllers(ranks: int) -> tuple[list[CountingTransport], list[Controller]]:
    """Return the transports and the controllers of all ranks. No threads drive the controllers."""
    fabric = LocalFabric(ranks)
    transports = [CountingTransport(fabric, tuple(range(ranks)), rank, channel=()) for rank in range(ranks)]
    return transports, [Controller(transport, _fuse) for transport in transports]


def _fuse(keys: Sequence[Key]) -> Iterable[Sequence[Key]]:
    return [keys[start : start + _FUSED] for start in range(0, len(keys), _FUSED)]


def agree(controllers: Sequence[Controller], tensors: int, draw: random.Random) -> None:
    """Make one step: every rank submits all tensors by name, and its controller decides when to run them.

    Raises:
        AssertionError: The decisions lack a tensor, or differ between ranks.
    """
    order = list(range(tensors))
    for controller in reversed(controllers):
        draw.shuffle(order)
        for number in order:
            controller.announce(f"tensor {number}", _signature(number))
        decided = controller.step()
    plan = [decision.keys for decision in decided]
    assert sorted(key for keys in plan for key in keys) == sorted(f"tensor {number}" for number in range(tensors))
    for controller in controllers[1:]:
        decided = controller.step()
        assert [decision.keys for decision in decided] == plan


def _signature(number: int) -> Signature:
    return ("allreduce", (TensorInfo("float32", (_ELEMENTS, 1 + number % 10)),), (("op", "sum"),))


def operations(ranks: int, tensors: int) -> Sent:
    """Return the messages that one step of named operations sends."""
    draw = random.Random(0)
    transports, controllers = make_controllers(ranks)
    for _ in range(_WARM_UP):
        agree(controllers, tensors, draw)
    before = [(transport.control_messages, transport.control_bytes) for transport in transports]
    agree(controllers, tensors, draw)
    after = [(transport.control_messages, transport.control_bytes) for transport in transports]
    control_messages, control_bytes = (
        [b - a for a, b in zip(*column, strict=True)]
        for column in zip(zip(*before, strict=True), zip(*after, strict=True), strict=True)
    )
    return Sent(control_messages, control_bytes)


def operations_memory(tensors: int) -> int:
    """Return the bytes that a rank holds for negotiation between steps, with names and signatures.

    The result is the mean of `MEMORY_RANKS` ranks.
    """
    agree(make_controllers(MEMORY_RANKS)[1], tensors, random.Random(0))  # makes all that exists once per process
    gc.collect()
    tracemalloc.start()
    made = make_controllers(MEMORY_RANKS)
    for _ in range(_WARM_UP):
        agree(made[1], tensors, random.Random(0))
    gc.collect()
    held = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    return held // MEMORY_RANKS


# Gradients


def _reducer(transport: LocalTransport, tensors: int) -> Reducer:
    """Return a reducer like that of a `World`. There is no world here: a world has two threads for each rank."""

    def end_job(text: str) -> None:
        transport.fabric.abort(transport.rank, HvdliteError(text))

    members = Members(0, tuple(range(transport.size)))
    collectives = HierarchicalCollectives(
        transport.duplicate(), members.ranks, PointToPointCollectives, shared_memory=False
    )
    watch = Watchdog(transport.subgroup([transport.rank]), Config(), end_job)
    infos = [TensorInfo("float32", (_ELEMENTS,))] * tensors
    context = ReducerContext(members, watch, Timeline(transport.rank, transport.size))
    return Reducer(infos, collectives, ReduceOp.AVERAGE, Plan(), context)


def gradients(ranks: int, tensors: int) -> Sent:
    """Return the messages that one training step of a model sends.

    Raises:
        AssertionError: The exchange does not give the mean, or sends control messages.
    """
    fabric = LocalFabric(ranks)

    def train(transport: LocalTransport) -> tuple[int, int, int]:
        reducer = _reducer(transport, tensors)
        for step in range(_WARM_UP + 1):
            before = fabric.traffic(transport.rank)
            for index in range(tensors):
                reducer.memory_of(index)[:] = transport.rank + step
            assert all(reducer.exchange([True] * tensors))
            expected = (ranks - 1) / 2 + step
            assert all(abs(reducer.memory_of(index) - expected).max() < 1e-3 for index in range(tensors))
        after = fabric.traffic(transport.rank)
        return (
            after.control_messages - before.control_messages,
            after.messages - before.messages,
            after.bytes - before.bytes,
        )

    control_messages, messages, message_bytes = (list(column) for column in zip(*fabric.run(train), strict=True))
    # The fabric does not count the bytes of control messages, but without messages there are no bytes.
    assert not any(control_messages), (
        f"a step of gradients sent {sum(control_messages)} control messages; it needs no agreement"
    )
    return Sent(control_messages, [0] * ranks, messages, message_bytes)


def gradients_memory(tensors: int) -> tuple[int, int]:
    """Return the bytes of arrays (exact) and of Python objects (approximate) in a reducer of `tensors` gradients on a rank."""

    def make(transport: LocalTransport) -> tuple[int, int]:
        _reducer(transport, 1).exchange([True])
        gc.collect()
        tracemalloc.start()
        reducer = _reducer(transport, tensors)
        reducer.exchange([True] * tensors)
        gc.collect()
        held = tracemalloc.get_traced_memory()[0]
        tracemalloc.stop()
        return reducer.nbytes, held - reducer.nbytes

    (memory,) = LocalFabric(1).run(make)
    return memory


# The program


def measure(ranks: Sequence[int], tensors: Sequence[int]) -> dict[str, Any]:
    """Return all figures as values that are valid in JSON."""
    parts = (("gradients", gradients, MOST_GRADIENTS), ("operations", operations, MOST_OPERATIONS))
    cases = [(name, count, n, t) for name, count, most in parts for n in ranks for t in tensors if n * t <= most]
    figures = []
    for name, count, n, t in tqdm(cases, "counting", unit="case", leave=False, disable=None):
        figure: dict[str, Any] = {"what": name, "ranks": n, "tensors": t}
        for what, values in count(n, t)._asdict().items():
            if values is not None:
                figure[what] = {"mean": statistics.fmean(values), "max": max(values)}
        figures.append(figure)
    memory = []
    for t in tqdm(tensors, "memory", unit="case", leave=False, disable=None):
        arrays, objects = gradients_memory(t)
        memory.append(
            {
                "tensors": t,
                "gradient_bytes": 4 * _ELEMENTS * t,
                "reducer_arrays": arrays,
                "reducer_objects": objects,
                "controller": operations_memory(t),
            }
        )
    return {"sent": figures, "memory": memory}


def tables(results: dict[str, Any]) -> str:
    """Return the figures as text."""
    lines = ["Sent for each step: mean over the ranks (largest of a rank)"]
    lines.append(
        f"{'':<12}{'ranks':>6}{'tensors':>9}{'control messages':>19}{'control bytes':>22}{'data messages':>19}"
    )
    for figure in results["sent"]:
        cells = [f"{figure['what']:<12}{figure['ranks']:>6}{figure['tensors']:>9}"]
        for what, width in (("control_messages", 19), ("control_bytes", 22), ("messages", 19)):
            value = figure.get(what)
            cells.append(f"{'' if value is None else _pair(value):>{width}}")
        lines.append("".join(cells))
    lines += ["", f"Held by each rank, bytes (controllers: mean of {MEMORY_RANKS} ranks)"]
    names = ("tensors", "gradient_bytes", "reducer_arrays", "reducer_objects", "controller")
    lines.append("".join(f"{name.replace('_', ' '):>17}" for name in names))
    lines += ["".join(f"{row[name]:>17,}" for name in names) for row in results["memory"]]
    return "\n".join(lines)


def _pair(value: dict[str, float]) -> str:
    return f"{value['mean']:,.1f} ({value['max']:,})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=RANKS)
    parser.add_argument("--tensors", type=int, nargs="+", default=TENSORS)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    options = parser.parse_args()
    results = measure(options.ranks, options.tensors)
    print(tables(results))
    if options.json:
        options.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
