"""Runs one fault: starts a job, causes the fault, and judges how the job ended."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from tests.faults.kinds import ANY_FAILURE, INSIDE, KINDS, Kind
from tests.faults.places import LAUNCH, Job, job, place

PROGRAM = str(Path(__file__).with_name("program.py"))
RANKS = 3
HOSTS = "node1:2,node2:1"
READY_SECONDS = 120.0  # until the training runs: importing torch takes long on a busy machine
END_SECONDS = 60.0  # only a hang takes that long
GONE_SECONDS = 5.0  # for processes that end after hvdliterun, if that was killed
_STALL = {
    "HVDLITE_STALL_CHECK_TIME_SECONDS": "2",
    "HVDLITE_STALL_SHUTDOWN_TIME_SECONDS": "4",
    "HVDLITE_STOPPED_SECONDS": "1.5",
}


@dataclass(frozen=True)
class Fault:
    """One fault that is to happen.

    Attributes:
        number: The number of the fault in the run.
        kind: The kind of the fault.
        rank: The rank to which the fault happens.
        stage: The stage of the program (see `Kind`) at which a fault from inside happens.
        step: The training step at which a fault from inside happens, for the stages "step" and "exchange".
        training: The training program: "arrays", "torch", "torch shard", "torch loader", ...
        delay: The seconds from the first steps to a fault from outside.
    """

    number: int
    kind: Kind
    rank: int
    stage: str
    step: int
    training: str
    delay: float

    def __str__(self) -> str:
        when = f"{self.stage} {self.step}" if self.kind.where == INSIDE else f"after {self.delay:.2f} s"
        return f"#{self.number} {self.kind.name} rank {self.rank}, {when}, {self.training}"


@dataclass
class Outcome:
    """The outcome of a fault.

    Attributes:
        fault: The fault.
        seconds: The seconds from the fault to the end of hvdliterun, without `Kind.patience`; NaN if unknown.
        wrong: All that was not as expected, as texts; empty if the outcome is as expected.
        last_words: The last message of hvdliterun.
    """

    fault: Fault
    seconds: float = float("nan")
    wrong: list[str] = field(default_factory=list)
    last_words: str = ""


def choose(seed: int, count: int, names: list[str], torch: float) -> list[Fault]:
    """Return the faults of a run: first each kind once, in random order, then random kinds.

    Args:
        seed: The seed. The same seed gives the same faults.
        count: The number of faults.
        names: The names of the kinds to choose from.
        torch: The fraction of the programs that train with torch. Programs with arrays alone start faster.
    """
    rng = random.Random(seed)
    first = rng.sample(names, len(names))
    chosen = [*first[:count], *(rng.choice(names) for _ in range(count - len(first)))]
    return [_draw(rng, number, KINDS[name], torch) for number, name in enumerate(chosen)]


def _draw(rng: random.Random, number: int, kind: Kind, torch: float) -> Fault:
    training = "arrays"
    if kind.needs == "torch" or (rng.random() < torch and kind.needs != "hosts"):
        loader = " loader" if kind.needs == "torch" else rng.choice(["", "", " loader"])
        training = "torch" + rng.choice(["", " shard"]) + loader
    stage = rng.choice(kind.stages)
    step = rng.randrange(3, 60) if stage in ("step", "exchange") else 0
    return Fault(number, kind, rng.randrange(RANKS), stage, step, training, rng.random())


def run(fault: Fault) -> Outcome:
    """Start a job, cause the fault in the job, and return the outcome."""
    outcome = Outcome(fault)
    inside = fault.kind.where == INSIDE
    environ = {
        **_STALL,
        "FAULT": fault.kind.name if inside else "none",
        "FAULT_RANK": str(fault.rank if inside else -1),
        "FAULT_STAGE": fault.stage,
        "FAULT_STEP": str(fault.step),
        "FAULT_TRAINING": fault.training,
    }
    host_count = 2 if fault.kind.needs == "hosts" else 1
    words = [*LAUNCH, "-np", str(RANKS), *(["-H", HOSTS] if host_count > 1 else []), PROGRAM]
    with place(host_count) as on, job(words, environ, on) as running:
        _Case(fault, running, on.cut if on is not None else None, outcome).play()
    return outcome


class _Case:
    """A fault, and the job in which the fault happens."""

    def __init__(self, fault: Fault, running: Job, cut: Callable[[str], None] | None, outcome: Outcome) -> None:
        self._fault = fault
        self._kind = fault.kind
        self._job = running
        self._cut = cut
        self._outcome = outcome
        self._at = float("nan")

    def play(self) -> None:
        if self._kind.where == INSIDE:
            if self._kind.goes_on:
                self._await((lambda: (self._job.folder / "struck").exists()), "the fault never came")
        elif self._await(lambda: self._steps() is not None, "the training did not begin"):
            time.sleep(self._fault.delay)
            self._at = time.time()
            self._strike()
        else:
            self._outcome.last_words = self._job.stderr[-2000:]
            return
        if self._kind.goes_on:
            self._come_to_an_end()
        code = self._job.wait(READY_SECONDS if self._kind.where == INSIDE else END_SECONDS)
        ended = time.time()
        if self._kind.where == INSIDE and not self._kind.goes_on:
            with contextlib.suppress(OSError, ValueError):
                self._at = float((self._job.folder / "struck").read_text())
        self._outcome.seconds = ended - self._at - self._kind.patience
        self._judge(code)

    def _await(self, condition: Callable[[], bool], otherwise: str) -> bool:
        deadline = time.monotonic() + READY_SECONDS
        while not condition():
            if self._job.has_ended or time.monotonic() > deadline:
                self._wrong(otherwise)
                return False
            time.sleep(0.02)
        return True

    def _steps(self) -> list[int] | None:
        """Return the last step of each rank; None before every rank has made a step."""
        try:
            return [int((self._job.folder / f"step.{rank}").read_text()) for rank in range(RANKS)]
        except OSError:
            return None

    def _come_to_an_end(self) -> None:
        """Wait until the job has made steps after the fault, then tell the job to finish."""
        self._await_steps()
        self._at = time.time()
        (self._job.folder / "finish").touch()

    def _await_steps(self) -> None:
        before = self._steps() or [0] * RANKS
        self._await(lambda: min(self._steps() or [0]) > max(before), "the training did not go on")

    # ---- faults from outside ----

    def _strike(self) -> None:
        rank, running = self._fault.rank, self._job
        action, _, target = self._kind.name.removeprefix("hosts_").partition("_")
        number = {
            "kill": signal.SIGKILL,
            "term": signal.SIGTERM,
            "int": signal.SIGINT,
            "hup": signal.SIGHUP,
            "quit": signal.SIGQUIT,
            "stop": signal.SIGSTOP,
        }.get(action, signal.SIGTERM)
        match self._kind.name.removeprefix("hosts_"):
            case "pause_rank":
                os.kill(running.rank(rank), signal.SIGSTOP)
                time.sleep(0.8)
                os.kill(running.rank(rank), signal.SIGCONT)
            case "stop_mpirun":  # the training goes on, but only an interrupt can end the job
                os.kill(running.mpirun, signal.SIGSTOP)
                self._await_steps()
                self._at = time.time()
                os.kill(running.launcher, signal.SIGINT)
            case "kill_two":
                for pid in [running.rank(rank), running.rank((rank + 1) % RANKS)]:
                    os.kill(pid, signal.SIGKILL)
            case "kill_worker":
                own = running.rank(rank)
                workers = [
                    pid for pid in running.descendants(own) if "resource_tracker" not in running.command_line(pid)
                ]
                if not workers:
                    self._wrong("the DataLoader has no workers")
                else:
                    os.kill(workers[0], signal.SIGKILL)
            case "int_launcher_twice":
                for _ in range(2):
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(running.launcher, signal.SIGINT)
                        time.sleep(0.05)
            case "stop_launcher_kill_rank":
                launcher, victim = running.launcher, running.rank(rank)
                os.kill(launcher, signal.SIGSTOP)
                time.sleep(1.5)
                os.kill(victim, signal.SIGKILL)
                time.sleep(1.0)
                os.kill(launcher, signal.SIGCONT)
                self._at = time.time()
            case "strangers":
                self._besiege()
            case "cut":
                assert self._cut is not None
                self._cut("node2")
            case _:
                pid = {
                    "rank": lambda: running.rank(rank),
                    "guard": lambda: running.guard(rank),
                    "launcher": lambda: running.launcher,
                    "mpirun": lambda: running.mpirun,
                    "daemon": lambda: running.daemon,
                }[target]()
                os.kill(pid, number)

    def _besiege(self) -> None:
        """Connect to hvdliterun many times, and send nothing or random bytes."""
        with contextlib.ExitStack() as stack:
            for number in range(300):
                stream = stack.enter_context(socket.create_connection(self._job.address, timeout=5))
                with contextlib.suppress(OSError):
                    stream.sendall(os.urandom(number))
            time.sleep(0.5)

    # ---- judgement ----

    def _judge(self, code: int | None) -> None:
        kind = self._kind
        self._outcome.last_words = self._job.last_words[-2000:]
        if code is None:
            self._wrong("it hangs")
        elif code != kind.code and not (kind.code == ANY_FAILURE and code > 0):
            self._wrong(f"exit code {code}, expected {kind.code}")
        for words in kind.words:
            expected = words.format(rank=self._fault.rank)
            if expected not in self._job.last_words:
                self._wrong(f"last words lack {expected!r}")
        deadline = time.monotonic() + GONE_SECONDS
        while (left := self._job.remains()) and self._kind.ends_later and time.monotonic() < deadline:
            time.sleep(0.05)
        if left:
            self._wrong(f"left behind: {'; '.join(left[:5])}")

    def _wrong(self, text: str) -> None:
        self._outcome.wrong.append(text)
