"""The kinds of faults, and the expected end of the job for each kind."""

from __future__ import annotations

import signal
from dataclasses import dataclass

INSIDE = "inside"  # a rank causes the fault itself
OUTSIDE = "outside"  # the harness causes the fault in a process of the job
GOES_ON = 0
"""The exit code of kinds after which the job must go on. The harness then tells the job to finish."""

ANY_FAILURE = 256
"""Stands for any exit code of a failed job."""


@dataclass(frozen=True)
class Kind:
    """One kind of fault.

    Attributes:
        name: The name of the kind. The code of the fault is in program.py (inside) or harness.py (outside).
        where: `INSIDE` or `OUTSIDE`.
        code: The expected exit code of hvdliterun.
        words: The expected parts of hvdliterun's last message. ``{rank}`` is the rank to which the fault happens.
        stages: The possible stages: before ``hvdlite.init()`` ("start"), after ``hvdlite.init()`` ("init"), before a training
            step ("step"), or during the exchange of a step ("exchange").
        needs: "torch" if the program must train with torch, "hosts" if the job must run on several hosts, else empty.
        ends_later: Whether hvdliterun may end before its ranks, which end by themselves.
        patience: The seconds until the job's own time limits end the job.
    """

    name: str
    where: str
    code: int
    words: tuple[str, ...] = ()
    stages: tuple[str, ...] = ("step", "exchange")
    needs: str = ""
    patience: float = 0.0
    ends_later: bool = False

    @property
    def goes_on(self) -> bool:
        return self.code == GOES_ON


_ALWAYS = ("start", "init", "step", "exchange")
_RANK = "rank {rank} "
_STALL = 6.0  # seconds: the limit that the harness sets, and some more

KINDS = {
    kind.name: kind
    for kind in (
        Kind("exit0", INSIDE, 1, (_RANK, "ended without finishing"), _ALWAYS),
        Kind("exit7", INSIDE, 7, (_RANK, "exit code 7"), _ALWAYS),
        Kind("sysexit0", INSIDE, 1, (_RANK, "has left")),
        Kind("return", INSIDE, 1, (_RANK, "has left"), ("step",)),
        Kind("sysexit3", INSIDE, 3, (_RANK, "exit code 3"), _ALWAYS),
        Kind("exception", INSIDE, 1, (_RANK, "ValueError: the reason of rank {rank}"), _ALWAYS),
        Kind("memory", INSIDE, 1, (_RANK, "MemoryError: no 99 GiB"), _ALWAYS),
        Kind("recursion", INSIDE, 1, (_RANK, "RecursionError"), _ALWAYS),
        Kind("interrupt", INSIDE, 130, (_RANK,), _ALWAYS),
        Kind("segfault", INSIDE, 139, (_RANK, "SIGSEGV"), _ALWAYS),
        Kind("abort", INSIDE, 134, (_RANK, "SIGABRT"), _ALWAYS),
        Kind("kill_itself", INSIDE, 137, (_RANK, "SIGKILL"), _ALWAYS),
        Kind("leaves_child", INSIDE, 137, (_RANK, "SIGKILL"), _ALWAYS),
        Kind("leaves_session", INSIDE, 137, (_RANK, "SIGKILL"), _ALWAYS),
        Kind("leaves_program", INSIDE, 137, (_RANK, "SIGKILL"), _ALWAYS),
        Kind("sleeps", INSIDE, 1, (_RANK + "is missing", "time.sleep(10_000)"), patience=_STALL),
        Kind("thread_dies", INSIDE, 1, (_RANK + "is missing",), patience=_STALL),
        Kind("keeps_gil", INSIDE, 1, (_RANK + "does not answer",), patience=_STALL),
        Kind("mpi_abort", INSIDE, 9, (), ("init", "step", "exchange")),
        Kind("fork_exits", INSIDE, GOES_ON, (), ("init", "step", "exchange")),
        Kind("fork_raises", INSIDE, GOES_ON, (), ("init", "step", "exchange")),
        Kind("many_words", INSIDE, 1, (_RANK, "ValueError: after many words"), ("init", "step")),
        Kind("kill_rank", OUTSIDE, 137, (_RANK, "SIGKILL")),
        Kind("term_rank", OUTSIDE, 143, (_RANK, "SIGTERM")),
        Kind("int_rank", OUTSIDE, 130, (_RANK,)),
        Kind("stop_rank", OUTSIDE, 147, (_RANK, "is stopped (SIGSTOP)")),
        Kind("pause_rank", OUTSIDE, GOES_ON),
        Kind("kill_two", OUTSIDE, 137, ("SIGKILL",)),
        Kind("kill_worker", OUTSIDE, 1, (_RANK, "DataLoader worker"), needs="torch"),
        Kind("int_launcher", OUTSIDE, 130, ("ended by SIGINT",)),
        Kind("int_launcher_twice", OUTSIDE, 130, ends_later=True),
        Kind("term_launcher", OUTSIDE, 143, ("ended by SIGTERM",)),
        Kind("hup_launcher", OUTSIDE, 129, ("ended by SIGHUP",)),
        Kind("quit_launcher", OUTSIDE, -signal.SIGQUIT, ends_later=True),
        Kind("kill_launcher", OUTSIDE, -signal.SIGKILL, ends_later=True),
        Kind("stop_launcher_kill_rank", OUTSIDE, 137, (_RANK, "SIGKILL")),
        Kind("kill_guard", OUTSIDE, 137, (_RANK, "guard process")),
        Kind("term_guard", OUTSIDE, 143, (_RANK, "SIGTERM")),
        Kind("stop_guard", OUTSIDE, 147, (_RANK, "is stopped")),
        Kind("kill_mpirun", OUTSIDE, 137, ("mpirun was killed by SIGKILL",)),
        Kind("term_mpirun", OUTSIDE, 143, ("mpirun was ended by a signal",)),
        Kind("stop_mpirun", OUTSIDE, 130, ("ended by SIGINT",)),
        Kind("strangers", OUTSIDE, GOES_ON),
        Kind("hosts_exception", INSIDE, 1, (_RANK, "ValueError: the reason of rank {rank}"), _ALWAYS, "hosts"),
        Kind("hosts_exit0", INSIDE, 1, (_RANK, "ended without finishing"), _ALWAYS, "hosts"),
        Kind("hosts_leaves_session", INSIDE, 137, (_RANK, "SIGKILL"), _ALWAYS, "hosts"),
        Kind("hosts_kill_rank", OUTSIDE, 137, (_RANK, "SIGKILL"), needs="hosts"),
        Kind("hosts_stop_rank", OUTSIDE, 147, (_RANK, "is stopped (SIGSTOP)"), needs="hosts"),
        Kind("hosts_int_launcher", OUTSIDE, 130, ("ended by SIGINT",), needs="hosts"),
        Kind("hosts_kill_launcher", OUTSIDE, -signal.SIGKILL, needs="hosts", ends_later=True),
        Kind("hosts_kill_guard", OUTSIDE, 137, (), needs="hosts"),
        Kind("hosts_kill_daemon", OUTSIDE, ANY_FAILURE, (), needs="hosts", patience=5.0, ends_later=True),
        Kind("hosts_cut", OUTSIDE, ANY_FAILURE, (), needs="hosts", patience=10.0, ends_later=True),
    )
}
