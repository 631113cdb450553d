"""How the ranks of a group come to speak by their GPUs: they compare what they have, and all go on, or all raise the same.

::

    every rank   a card: its GPU, its NCCL, what is wrong with them; rank 0 adds the id of the new communicator
                 ──── gathered over the host's collectives; each rank draws the same conclusion from the cards ────
    every rank   NCCL's own start, and a first sum, in a thread
                 ──── until that is over everywhere, or has failed anywhere: nobody is left waiting in it unnoticed ────
"""

from __future__ import annotations

import pickle
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np

from hvdlite.algorithms.gather_bytes import allgather_bytes
from hvdlite.comm.hierarchical import HierarchicalCollectives
from hvdlite.config import Config
from hvdlite.errors import DeviceError, HvdliteError, NcclError
from hvdlite.gpu.abandonable import AbandonableCall
from hvdlite.gpu.collectives import DeviceCollectives, on_device
from hvdlite.gpu.nccl import DTYPES, OPS, Communicator, Library, in_words
from hvdlite.gpu.nccl_collectives import NcclCollectives
from hvdlite.gpu.staged import StagedCollectives
from hvdlite.protocols import Device, ReduceOp

T = TypeVar("T")

Load = Callable[[], Library | None]
FindDevice = Callable[[str], Device]

_FIRST_NAP, _LONGEST_NAP = 1e-3, 0.1


class DeviceReport(NamedTuple):
    """What the other ranks must know of one.

    Attributes:
        problem: Why it cannot take part; empty if it can.
        way: "nccl" or "staged": what it wants to do.
        device: Its GPU as its framework calls it, "cuda:0".
        identity: See `Device.identity`.
        visible: How many GPUs it sees.
        version: NCCL's; 0 without.
        library: Where that was found.
        shares: Several ranks may use one GPU.
        unique_id: Of the new communicator; rank 0's only.
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
    """Collectives of a group on its GPUs. All ranks of the group call this, at the same point of their sequence.

    Args:
        host: The group; for the new collectives alone if they have to go through the host.
        hosts: For each rank of the group, some number of its host.
        kind: `Device.kind`.
        device: This rank's; None where it has joined and has no tensors.
        config: This rank's settings.
        load: Loads NCCL.
        find_device: Finds the device of a kind, for a rank that has no tensors.

    Returns:
        The device, and the collectives.

    Raises:
        DeviceError: A rank cannot take part. The same text on all ranks.
        NcclError: NCCL could not connect the ranks. The same text on all ranks.
    """
    library: Library | None = None
    try:
        device = device or find_device(kind)
        card, library = _card(host, device, config, load)
    except HvdliteError as error:
        card = DeviceReport(problem=str(error))
    cards: list[DeviceReport] = _gather(host, card)
    _check(cards, hosts)
    assert device is not None
    if host.size == 1:
        return device, DeviceCollectives(device)
    way = cards[0].way
    if way == "staged" or all(each.version == 0 for each in cards):
        if way == "nccl" and host.rank == 0:
            warnings.warn(
                "NCCL was not found, so GPU tensors go through host memory, which is slower: pip install 'hvdlite[gpu]'. "
                "HVDLITE_NCCL=0 says so in advance.",
                RuntimeWarning,
                stacklevel=2,
            )
        return device, StagedCollectives(device, host)
    assert library is not None
    communicator = _start(host, device, library, cards[0].unique_id, config.nccl_start_seconds)
    return device, NcclCollectives(device, host.rank, host.size, communicator, library.version)


def _card(
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


def _check(cards: Sequence[DeviceReport], hosts: Sequence[int]) -> None:
    """Raise what is wrong with the ranks together."""
    problems = _by_text({rank: card.problem for rank, card in enumerate(cards) if card.problem})
    if problems:
        raise DeviceError(f"GPU tensors cannot be exchanged:\n{problems}")
    ways = {rank: f"{card.way}" for rank, card in enumerate(cards)}
    if len(set(ways.values())) > 1:
        raise DeviceError(
            f"the ranks want to exchange GPU tensors in different ways; set HVDLITE_NCCL alike:\n{_by_text(ways)}"
        )
    found = {
        rank: f"NCCL {in_words(card.version)} at {card.library}" if card.version else "no NCCL"
        for rank, card in enumerate(cards)
    }
    if len({card.version for card in cards}) > 1:
        raise DeviceError(f"the ranks need the same NCCL; install one version everywhere:\n{_by_text(found)}")
    users: dict[tuple[int, str], list[int]] = {}
    for rank, card in enumerate(cards):
        users.setdefault((hosts[rank], card.identity), []).append(rank)
    for ranks in users.values():
        if len(ranks) > 1 and not all(cards[rank].shares for rank in ranks):
            first = cards[ranks[0]]
            here = sum(host == hosts[ranks[0]] for host in hosts)
            advice = (
                f"Start at most {first.visible} ranks on this host, or let them share by HVDLITE_SHARE_GPU=1 on every "
                "rank (which NCCL has to be told too, see docs/gpu.md)."
                if here > first.visible > 0
                else "Choose by local_rank() before the first tensor is made: torch.cuda.set_device(hvd.local_rank())."
            )
            raise DeviceError(
                f"ranks {', '.join(map(str, ranks))} use the same GPU, {first.identity} ({first.device} to rank {ranks[0]}; it "
                f"sees {first.visible}). {advice}"
            )


def _by_text(texts: dict[int, str]) -> str:
    """A line for each different text, with the ranks that have it."""
    ranks: dict[str, list[int]] = {}
    for rank, text in texts.items():
        ranks.setdefault(text, []).append(rank)
    return "\n".join(
        f"  rank{'s' if len(each) > 1 else ''} {', '.join(map(str, each))}: {text}" for text, each in ranks.items()
    )


def _gather(host: HierarchicalCollectives, value: T) -> list[T]:
    mine = np.frombuffer(bytearray(pickle.dumps(value)), np.uint8)
    return [pickle.loads(data.tobytes()) for data in allgather_bytes(host, mine)]


def _start(
    host: HierarchicalCollectives, device: Device, library: Library, unique_id: bytes, limit: float
) -> Communicator:
    """NCCL's own start, and a first sum, so that what does not work shows here and on all ranks."""
    made: list[Communicator] = []

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

    attempt = AbandonableCall(start, "hvdlite-nccl-start")
    outcome = _await(host, attempt, limit)
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


def _await(host: HierarchicalCollectives, attempt: AbandonableCall[Any], limit: float) -> str:
    """Wait until the attempt is over on all ranks, has failed on one, or has taken too long.

    All ranks stay in step, so all leave together: who waits inside of NCCL waits in the attempt's own thread.

    Returns:
        What went wrong on this rank; empty if nothing.
    """
    nap, until = _FIRST_NAP, time.monotonic() + limit
    while True:
        over = attempt.is_over(nap)
        text = ""
        if over:
            try:
                attempt.result()
            except Exception as error:
                text = str(error) or repr(error)
        pending, failed, late = not over, bool(text), time.monotonic() > until
        state = np.array([pending, failed, late], np.int64)
        host.allreduce(state, ReduceOp.MAX)
        if state[1] or state[2] or not state[0]:
            return _WAITING if pending and (state[1] or state[2]) else text
        nap = min(2 * nap, _LONGEST_NAP)
