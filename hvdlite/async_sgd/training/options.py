"""The arguments of `AsyncDistributedOptimizer`, checked."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from hvdlite.api import world
from hvdlite.async_sgd.compensation import NO_COMPENSATION, DelayCompensation
from hvdlite.async_sgd.server import Mode
from hvdlite.async_sgd.training.failures import check_failures
from hvdlite.errors import ArgumentError
from hvdlite.ranks.process_set import ProcessSet

Servers = int | Literal["sharded"]


@dataclass(frozen=True)
class AsyncOptions:
    """The arguments.

    Attributes:
        mode, staleness, push_every, process_set: See `AsyncDistributedOptimizer`.
        servers: The ranks that hold parameters, as numbers in the process set.
        workers: The ranks that train, likewise.
        compensation: What servers do about old gradients.
        overlap: Whether gradients travel while the backward pass goes on; None for: where each rank has a core to spare.
        overlap_pull: Whether values come while the program goes on.
        goes_on: Whether the training goes on without workers that fail.
        checkpoint: The file in which a worker saves the values that it has pulled last, if the job fails; None for none.
        refuses_nan: Whether a step with NaN or infinite elements raises an error; else it is pushed like any other.
        hogwild: The parameters lie in memory that the ranks share; `servers` is one rank, which serves meetings only.
    """

    mode: Mode
    staleness: int | None
    servers: tuple[int, ...]
    workers: tuple[int, ...]
    push_every: int
    process_set: ProcessSet
    compensation: DelayCompensation
    overlap: bool | None
    hogwild: bool = False
    goes_on: bool = False
    checkpoint: Path | None = None
    refuses_nan: bool = True
    overlap_pull: bool = False

    def lines(self) -> list[str]:
        """Return the arguments in words, which must be the same on all ranks."""
        names = (
            "mode",
            "staleness",
            "servers",
            "workers",
            "push_every",
            "compensation",
            "overlap",
            "hogwild",
            "goes_on",
            "checkpoint",
            "refuses_nan",
            "overlap_pull",
        )
        return [f"{name}={getattr(self, name)!r}" for name in names]


def make_options(
    mode: str,
    staleness: int | None,
    servers: Servers | None,
    push_every: int,
    process_set: ProcessSet,
    size: int,
    delay_compensation: DelayCompensation | None = None,
    overlap: bool | None = False,
    hogwild: bool = False,
    on_worker_loss: str = "end",
    checkpoint: str | os.PathLike[str] | None = None,
    on_nan: str = "raise",
    overlap_pull: bool = False,
) -> AsyncOptions:
    """Check the arguments and return them.

    Args:
        mode, staleness, servers, push_every, process_set, delay_compensation, overlap, hogwild, on_worker_loss, checkpoint,
            on_nan, overlap_pull: See `AsyncDistributedOptimizer`.
        size: The number of ranks in the process set.

    Raises:
        ArgumentError: An argument is wrong.
    """
    known = [each.value for each in Mode]
    if mode not in known:
        raise ArgumentError(f"mode={mode!r}: expected one of {', '.join(map(repr, known))}.")
    if mode == "ssp" and (not _is_count(staleness) or staleness is None or staleness < 0):
        raise ArgumentError(
            f'staleness={staleness!r}: mode="ssp" needs the number of steps that a rank may be ahead of the slowest, 0 or '
            "more, such as staleness=3."
        )
    if mode != "ssp" and staleness is not None:
        raise ArgumentError(
            f'staleness={staleness!r} is for mode="ssp"; got mode={mode!r}. Leave it out, or use mode="ssp".'
        )
    if not _is_count(push_every) or push_every < 1:
        raise ArgumentError(f"push_every={push_every!r}: expected a number of steps, 1 or more.")
    if delay_compensation is not None and not isinstance(delay_compensation, DelayCompensation):
        raise ArgumentError(
            f"delay_compensation={delay_compensation!r}: expected None, hvd.StalenessRate() or hvd.DCASGD(strength=0.04)."
        )
    if delay_compensation is not None and mode == "sync":
        raise ArgumentError(
            f'delay_compensation={delay_compensation!r} is for mode="ssp" and mode="async": with mode="sync" no gradient is '
            "old. Leave it out."
        )
    if overlap not in (None, True, False):
        raise ArgumentError(f"overlap={overlap!r}: expected None, True or False.")
    if push_every > 1 and overlap:
        raise ArgumentError(
            f"overlap=True sends the gradients of one step while they are made, and with push_every={push_every} those of "
            "several steps are added up first: leave out one of them."
        )
    if push_every > 1:
        overlap = False
    if on_nan not in ("raise", "pass on"):
        raise ArgumentError(f"on_nan={on_nan!r}: expected 'raise' or 'pass on'.")
    refuses_nan = on_nan == "raise"
    if overlap_pull and checkpoint is not None:
        raise ArgumentError(
            "overlap_pull=True with checkpoint=: a rank has old and new parameters while values come, so it could not save any "
            "state that a server had. Leave out one of the two."
        )
    everybody = tuple(range(size))
    if hogwild:
        number = world().config.servers
        for name, value, expected, reason in (
            ("mode", mode, "async", "no rank waits for another"),
            (
                "push_every",
                push_every,
                1,
                "each step changes the parameters: call step() after several backward passes",
            ),
            ("delay_compensation", delay_compensation, None, "there are no servers, and each step is made at once"),
            ("on_worker_loss", on_worker_loss, "end", "what a rank that fails has half written, nobody knows"),
            ("overlap_pull", overlap_pull, False, "nothing is pulled"),
            ("checkpoint", checkpoint, None, "there are no servers, and each rank has the parameters"),
            ("servers", servers, None, "there are no servers: the ranks share the parameters"),
            ("--servers", number, 0, "there are no servers: start the job without (HVDLITE_SERVERS)"),
        ):
            if value != expected:
                raise ArgumentError(f"hogwild=True with {name}={value!r}: {reason}. Leave out one of the two.")
        return AsyncOptions(
            *(Mode.ASYNC, None, everybody[:1], everybody, 1, process_set, NO_COMPENSATION, False, True),
            refuses_nan=refuses_nan,
        )
    goes_on, path = check_failures(on_worker_loss, checkpoint, process_set)
    servers = _as_launched(servers, process_set)
    compensation = delay_compensation or NO_COMPENSATION
    if servers != "sharded" and (not _is_count(servers) or isinstance(servers, str) or not 1 <= servers < size):
        raise ArgumentError(
            f'servers={servers!r}: expected "sharded" (every rank serves a part beside its training), or how many of the '
            f"{size} ranks only serve: 1 to {size - 1}, so that a rank is left to train."
        )
    if servers == "sharded" and goes_on:
        raise ArgumentError(
            'on_worker_loss="go on" with servers="sharded": each rank holds a part of the parameters, so any loss ends the '
            "training. Let some ranks only serve: hvdliterun --servers 1, or servers=1."
        )
    holders, workers = (everybody, everybody) if servers == "sharded" else (everybody[-servers:], everybody[:-servers])
    return AsyncOptions(
        Mode(mode),
        staleness,
        holders,
        workers,
        push_every,
        process_set,
        compensation,
        overlap,
        goes_on=goes_on,
        checkpoint=path,
        refuses_nan=refuses_nan,
        overlap_pull=overlap_pull,
    )


def _as_launched(servers: Servers | None, process_set: ProcessSet) -> Servers:
    """Return who serves: what the program says, or what the job was started with."""
    here = world()
    number, size = here.config.servers, here.topology.size
    launched = sum(rank >= size - number for rank in here.ranks(process_set))
    if servers is None:
        return launched or "sharded"
    if number and servers != launched:
        where = "" if launched == number else f" ({launched} of them are in {process_set})"
        raise ArgumentError(
            f"servers={servers!r}: this job was started with --servers {number} (HVDLITE_SERVERS){where}. Leave out servers=, "
            "or start the job without --servers."
        )
    return servers


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
