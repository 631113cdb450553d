"""``mpirun -n 4 hvdlite doctor`` and ``srun … hvdlite doctor``: the ranks are there already, and one of them reports."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any, NoReturn

from hvdlite.comm.mpi.start import is_alone
from hvdlite.config import environment
from hvdlite.launch.worker.rank_environment import find_rank
from hvdlite.tools.doctor import job
from hvdlite.tools.doctor.finding import Finding, error
from hvdlite.tools.doctor.heard import Heard
from hvdlite.tools.doctor.probe import ProbeRequest, examine

_OTHERS = 8
"""Other ranks than rank 0 may be silent for so many times as long: they have to wait for their turns."""


def is_rank() -> bool:
    """Return whether a launcher has started this process as one of several."""
    return not is_alone(environment())


def examine_here(
    request: ProbeRequest, progress: Callable[[str], None], report: Callable[[Heard, list[Finding]], int]
) -> int:
    """Examine as one rank of a job that was started already. Rank 0 reports.

    Args:
        request: What to do.
        progress: Is called on rank 0 with what the ranks do.
        report: Reports, and returns the exit code.

    Returns:
        The exit code, which is 0 on all other ranks.
    """
    own = find_rank(environment()) or 0
    words: list[tuple[str, Any]] = []
    heard, spoken, over = Heard(), [time.monotonic()], threading.Event()

    def say(kind: str, value: Any) -> None:
        spoken[0] = time.monotonic()
        words.append((kind, value))
        heard.take(kind, json.loads(json.dumps(value)))
        if own == 0:
            progress(heard.stage)

    def end(code: int, *problems: Finding) -> NoReturn:
        """End the process at once: MPI would wait for the other ranks. The launcher ends those."""
        if own == 0:
            report(heard, list(problems))
        sys.stdout.flush()
        os._exit(code)

    def end_if_silent() -> None:
        limit = job.SILENCE_SECONDS * (1 if own == 0 else _OTHERS)
        while not over.wait(0.5):
            if time.monotonic() - spoken[0] > limit:
                found = f"the ranks hung while {heard.stage}"
                end(1, error("hanging job", found, "all ranks at the same point", "see firewalls, --network-interface"))

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, interrupt)  # so launchers end ranks if another one has failed
    threading.Thread(target=end_if_silent, name="hvdlite-doctor", daemon=True).start()
    try:
        examine(say, request)
        _gather(words, heard)
    except KeyboardInterrupt:
        end(130)
    except Exception as problem:  # whatever it is, it is a finding
        why = traceback.format_exception_only(problem)[-1].strip()
        end(1, error("failed job", f"rank {own} failed while {heard.stage}: {why}", "no error", "see the error"))
    over.set()
    return report(heard, []) if own == 0 else 0


def _gather(words: list[tuple[str, Any]], heard: Heard) -> None:
    """Give rank 0 the words of the others."""
    if not heard.ranks:
        return
    from mpi4py import MPI

    everybody = MPI.COMM_WORLD.gather(json.dumps(words), 0)
    for text in (everybody or [])[1:]:
        for kind, value in json.loads(text):
            if kind != "stage":
                heard.take(kind, value)
