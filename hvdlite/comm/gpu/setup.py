"""The ranks of a group start NCCL together. They compare their GPUs first: all of them go on, or all raise the same error.

::

    every rank   makes a report of its GPU, its NCCL, and its problems; rank 0 adds the id of the new communicator
                 ──── the host's collectives gather the reports; every rank draws the same conclusion from them ────
    every rank   starts NCCL and makes a first sum, in a thread
                 ──── all ranks wait until this is over everywhere, has failed anywhere, or takes too long ────
"""

from __future__ import annotations

import pickle
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np

from hvdlite.algorithms.gather_bytes import allgather_bytes
from hvdlite.comm.gpu.abandonable import AbandonableCall
from hvdlite.comm.gpu.collectives import DeviceCollectives, on_device
from hvdlite.comm.gpu.nccl import DTYPES, OPS, DeviceCommunicator, Library, in_words, wheel
from hvdlite.comm.gpu.nccl_collectives import NcclCollectives
from hvdlite.comm.gpu.staged import StagedCollectives
from hvdlite.comm.hierarchical import HierarchicalCollectives
from hvdlite.config import Config
from hvdlite.errors import DeviceError, HvdliteError, NcclError
from hvdlite.protocols import Device, ReduceOp
from hvdlite.protocols.device import SLICE
from hvdlite.ranks.together import ranks_by

T = TypeVar("T")

Load = Callable[[], Library | None]
FindDevice = Callable[[str], Device]

_FIRST_NAP, _LONGEST_NAP = 1e-3, 0.1


class DeviceReport(NamedTuple):
    """What one rank tells the others about its GPU and its NCCL.

    Attributes:
        problem: The reason why the rank cannot take part; empty if it can.
        way: The way that the rank's settings ask for: "nccl", or "staged" for host memory.
        device: The name of the GPU in its framework, such as "cuda:0".
        identity: See `Device.identity`.
        visible: The number of GPUs that the rank sees.
        version: The number of NCCL's version; 0 without NCCL.
        library: The path of NCCL; empty without NCCL.
        shares: True if several ranks may use one GPU.
        unique_id: The id of the new communicator, on rank 0; empty on the others.
    """

    problem: str = ""
    way: str = ""
    device: str = ""
    identity: str = ""
    visible: int = 0
    version: int = 0
    library: str = ""
    shares: bool = False
    unique_id: bytes = b""


def connect(
    host: HierarchicalCollectives,
    hosts: Sequence[int],
    kind: str,
    device: Device | None,
    config: Config,
    load: Load,
    find_device: FindDevice,
) -> tuple[Device, DeviceCollectives]:
    """Make the device collectives of a group. All ranks of the group call this, at the same point of their sequence.

    Args:
        host: The collectives of the group on host memory. The new collectives keep them if they go through host memory.
        hosts: For each rank of the group, a number of its host.
        kind: The kind of the devices, as in `Device.kind`.
        device: The device of this rank; None for a rank that has joined and has no tensors.
        config: The settings of this rank.
        load: A function that loads NCCL.
        find_device: A function that finds the device of a kind, for a rank that has no tensors.

    Returns:
        The device of this rank, and the collectives.

    Raises:
        DeviceError: A rank cannot take part. All ranks raise the same text.
        NcclError: NCCL could not connect the ranks. All ranks raise the same text.
    """
    library: Library | None = None
    try:
        device = device or find_device(kind)
        report, library = _report_of(host, device, config, load)
    except Exception as error:  # whatever keeps this rank away: the others must hear of it, or they would wait for it
        report = DeviceReport(problem=_problem_of(error))
    reports: list[DeviceReport] = _gather(host, report)
    _check(reports, hosts)
    assert device is not None
    if host.size == 1:
        return device, DeviceCollectives(device)
    way = reports[0].way
    if way == "staged" or all(each.version == 0 for each in reports):
        if way == "nccl" and host.rank == 0:
            warnings.warn(
                f"NCCL was not found, so GPU tensors go through host memory, which is slower: pip install {wheel()}. "
                "HVDLITE_NCCL=0 says so in advance.",
                RuntimeWarning,
                stacklevel=2,
            )
        return device, StagedCollectives(device, host)
    assert library is not None
    communicator = _start(host, device, library, reports[0].unique_id, config.nccl_start_seconds)
    return device, NcclCollectives(device, host.rank, host.size, communicator, library.version)


def _report_of(
    host: HierarchicalCollectives, device: Device, config: Config, load: Load
) -> tuple[DeviceReport, Library | None]:
    library: Library | None = None
    way = "nccl" if config.nccl else "staged"
    if way == "nccl" and host.size > 1:
        library = load()
    return DeviceReport(
        way=way,
        device=f"{device.kind}:{device.index}",
        identity=device.identity,
        visible=device.visible,
        version=0 if library is None else library.version,
        library="" if library is None else library.path,
        shares=config.share_gpu,
        unique_id=library.unique_id() if library is not None and host.rank == 0 else b"",
    ), library


def _problem_of(error: Exception) -> str:
    """Return an error in words. Those of a framework get its class, and what is known about their cause."""
    if isinstance(error, HvdliteError):
        return str(error)
    text = f"{type(error).__name__}: {' '.join(str(error).split()) or 'no reason given'}"
    if "busy or unavailable" in text:
        text += (
            " (another process uses this GPU, which is in exclusive mode: `nvidia-smi -q -d COMPUTE` says so, and "
            "`nvidia-smi -c DEFAULT` ends it)"
        )
    return text


def _check(reports: Sequence[DeviceReport], hosts: Sequence[int]) -> None:
    """Raise DeviceError if a report has a problem, or if the reports do not fit together."""
    problems = _by_text({rank: report.problem for rank, report in enumerate(reports) if report.problem})
    if problems:
        raise DeviceError(f"GPU tensors cannot be exchanged:\n{problems}")
    ways = {rank: f"{report.way}" for rank, report in enumerate(reports)}
    if len(set(ways.values())) > 1:
        raise DeviceError(
            f"the ranks want to exchange GPU tensors in different ways; set HVDLITE_NCCL alike:\n{_by_text(ways)}"
        )
    found = {
        rank: f"NCCL {in_words(report.version)} at {report.library}" if report.version else "no NCCL"
        for rank, report in enumerate(reports)
    }
    if len({report.version for report in reports}) > 1:
        raise DeviceError(f"the ranks need the same NCCL; install one version everywhere:\n{_by_text(found)}")
    users: dict[tuple[int, str], list[int]] = {}
    for rank, report in enumerate(reports):
        users.setdefault((hosts[rank], report.identity), []).append(rank)
    for ranks in users.values():
        if len(ranks) > 1 and not all(reports[rank].shares for rank in ranks):
            first = reports[ranks[0]]
            here = sum(host == hosts[ranks[0]] for host in hosts)
            advice = (
                f"Start at most {first.visible} ranks on this host, or let them share by HVDLITE_SHARE_GPU=1 on every "
                "rank (which NCCL has to be told too, see hvdlite docs gpu)."
                if here > first.visible > 0
                else "Choose by local_rank() before the first tensor is made: torch.cuda.set_device(hvd.local_rank())."
            )
            if SLICE in first.identity:
                advice += (
                    " NCCL does not connect slices of one card (MIG): with HVDLITE_NCCL=0 they go through host memory."
                )
            raise DeviceError(
                f"ranks {', '.join(map(str, ranks))} use the same GPU, {first.identity} ({first.device} to rank {ranks[0]}; it "
                f"sees {first.visible}). {advice}"
            )


def _by_text(texts: dict[int, str]) -> str:
    """Return a line for each different text, with the ranks that have this text."""
    ranks = ranks_by(texts.items())
    return "\n".join(
        f"  rank{'s' if len(each) > 1 else ''} {', '.join(map(str, each))}: {text}" for text, each in ranks.items()
    )


def _gather(host: HierarchicalCollectives, value: T) -> list[T]:
    mine = np.frombuffer(bytearray(pickle.dumps(value)), np.uint8)
    return [pickle.loads(data.tobytes()) for data in allgather_bytes(host, mine)]


def _start(
    host: HierarchicalCollectives, device: Device, library: Library, unique_id: bytes, limit: float
) -> DeviceCommunicator:
    """Start NCCL and make a first sum, so that every problem shows here and on all ranks."""
    made: list[DeviceCommunicator] = []

    def start() -> None:
        stream = device.side()
        with device.on(stream):
            communicator = library.connect(unique_id, host.size, host.rank)
            made.append(communicator)
            probe = device.empty([1], "float32")
            device.fill(probe, 1.0)
            where = device.pointer(probe)
            communicator.all_reduce(where, where, 1, DTYPES["float32"], OPS[ReduceOp.SUM], stream.handle)
            got = device.to_host(probe)
        if got.tolist() != [host.size]:
            raise NcclError(f"NCCL's first sum of a one from each rank is {got.tolist()}; expected [{host.size}].")

    starting = AbandonableCall(start, "hvdlite-nccl-start")
    outcome = _await(host, starting, limit)
    outcomes = _gather(host, outcome)
    if any(outcomes):
        for communicator in made:
            AbandonableCall(on_device(device, communicator.abort), "hvdlite-nccl-abort")
        missing = [rank for rank, text in enumerate(outcomes) if text == _WAITING]
        texts = {rank: text for rank, text in enumerate(outcomes) if text}
        fault = f" after {limit:g} s (HVDLITE_NCCL_START_SECONDS)" if len(missing) == len(texts) else ""
        raise NcclError(
            f"NCCL {in_words(library.version)} could not connect the ranks{fault}; NCCL_DEBUG=INFO says more, and "
            f"HVDLITE_NCCL=0 does without it:\n{_by_text(texts)}"
        )
    return made[0]


_WAITING = "waits for the others"


def _await(host: HierarchicalCollectives, starting: AbandonableCall[Any], limit: float) -> str:
    """Wait until the start of NCCL is over on all ranks, has failed on one, or has taken longer than `limit` seconds.

    All ranks leave this function together. Only the thread of `starting` may wait inside of NCCL.

    Returns:
        The problem of this rank; empty if it has none.
    """
    nap, until = _FIRST_NAP, time.monotonic() + limit
    while True:
        over = starting.is_over(nap)
        text = ""
        if over:
            try:
                starting.result()
            except Exception as error:
                text = str(error) or repr(error)
        pending, failed, late = not over, bool(text), time.monotonic() > until
        state = np.array([pending, failed, late], np.int64)
        host.allreduce(state, ReduceOp.MAX)
        if state[1] or state[2] or not state[0]:
            return _WAITING if pending and (state[1] or state[2]) else text
        nap = min(2 * nap, _LONGEST_NAP)
