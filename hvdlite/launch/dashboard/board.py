"""What hvdliterun knows of a running job. Its own thread writes, and those that serve the page read."""

from __future__ import annotations

import re
import time
import unicodedata
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from hvdlite.errors import ranks_text
from hvdlite.launch.job.job import Job
from hvdlite.launch.job.ranks import Rank

COLUMNS = tuple(
    ["rank", "host", "state", "step", "step time", "computing", "waiting", "for rank", "exchanging", "given", "memory"]
)
_EVERY_SECONDS = 0.5
_SILENT_SECONDS = 5.0
_LONG_SECONDS = 2.0
"""From so long a wait on, the ranks that do not wait are those that are missing."""
_LITTLE = 0.05
"""A smaller share of the time is not worth a search for who was late."""
_KEPT = 8
_LONGEST = 300
_WARNING = re.compile(r"warn|error|hvdlite:", re.IGNORECASE)
_ENDED = ("ended", "failed", "lost")


def plain(text: str) -> str:
    """Return a text without what would move a terminal's cursor or hide other text, and not too long."""
    text = text if len(text) <= _LONGEST else text[:_LONGEST] + " …"
    return "".join("�" if unicodedata.category(each)[0] == "C" else each for each in text)


def seconds_text(seconds: float | None) -> str:
    """Return a time in three figures or so; empty if it is not known."""
    if seconds is None:
        return ""
    for unit, factor in (("µs", 1e6), ("ms", 1e3)):
        if seconds * factor < 1000:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds:.3g} s" if seconds < 100 else f"{seconds:.0f} s"


def bytes_text(count: float | None) -> str:
    """Return a number of bytes in three figures or so; empty if it is not known."""
    if count is None:
        return ""
    for unit in ("B", "kB", "MB"):
        if count < 999.5:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} GB"


@dataclass(frozen=True)
class View:
    """What there is to see at one moment.

    Attributes:
        title: What the job runs.
        ended: The job has ended.
        state: How the job is, in a sentence.
        rows: The cells of each rank, as `COLUMNS` says.
        waits: Sentences about ranks that have waited for long.
        warnings: The last warnings, each with its time.
        events: The last words of hvdliterun itself, such as failures and restarts, in the same way.
    """

    title: str
    ended: bool = False
    state: str = ""
    rows: Sequence[Sequence[str]] = ()
    waits: Sequence[str] = ()
    warnings: Sequence[tuple[str, str]] = ()
    events: Sequence[tuple[str, str]] = ()


@dataclass
class Board:
    """What is known of a job.

    Args:
        title: What the job runs.
    """

    title: str
    _began: float = field(default_factory=time.monotonic)
    _looked: float = 0.0
    _job: Job | None = None
    _starts: int = 0
    _warnings: deque[tuple[str, str]] = field(default_factory=lambda: deque(maxlen=_KEPT))
    _events: deque[tuple[str, str]] = field(default_factory=lambda: deque(maxlen=_KEPT))

    def __post_init__(self) -> None:
        self.view = View(plain(self.title), state="starts")
        """What there is to see now. It is replaced as a whole, so any thread may read it."""

    def hear(self, rank: int | None, text: str) -> None:
        """Keep what is worth it of lines that a rank has written to stderr, or that hvdliterun itself says (None)."""
        now = time.strftime("%H:%M:%S")
        for line in text.splitlines():
            if not line or line.startswith(
                (" ", "Traceback")
            ):  # of a warning, the first line; of a traceback, the last
                continue
            if rank is not None and _WARNING.search(line):
                self._warnings.append((now, plain(f"rank {rank}: {line}")))
            elif rank is None:
                self._events.append((now, plain(line)))

    def look(self, job: Job) -> None:
        """Look at the job, or at its next start. hvdliterun calls this many times a second."""
        now = time.monotonic()
        if job is not self._job:
            self._job, self._starts = job, self._starts + 1
        elif now < self._looked + _EVERY_SECONDS:
            return
        self._looked = now
        ranks = sorted(job.ranks, key=lambda rank: rank.number)
        late = waited_for(ranks)
        rows = [_row(rank, late, now) for rank in ranks]
        rows += [(str(number), "", "starts", *[""] * (len(COLUMNS) - 3)) for number in job.ranks.missing]
        hosts = len({rank.host for rank in ranks})
        restarts = f"; start number {self._starts}" if self._starts > 1 else ""
        self.view = replace(
            self.view,
            state=f"{len(job.ranks.left)} ranks on {hosts} host{'s' * (hosts != 1)}, running for {self._age(now)}{restarts}",
            rows=rows,
            waits=[_wait(rank, late) for rank in ranks if _lasts(rank) > _LONG_SECONDS],
            warnings=tuple(self._warnings),
            events=tuple(self._events),
        )

    def end(self, words: str, failed: bool) -> None:
        """Note that the job has ended, with the last words of hvdliterun."""
        self.hear(None, words)
        self._looked = 0.0
        if self._job is not None:
            self.look(self._job)
        how = "has failed" if failed else "has ended"
        state = f"the job {how} after {self._age(time.monotonic())}"
        self.view = replace(
            self.view, ended=True, state=state, waits=(), warnings=tuple(self._warnings), events=tuple(self._events)
        )

    def _age(self, now: float) -> str:
        minutes, seconds = divmod(int(now - self._began), 60)
        return f"{minutes // 60}:{minutes % 60:02}:{seconds:02}"


def _lasts(rank: Rank) -> float:
    return 0.0 if _state(rank) in _ENDED else float(rank.pulses.last.get("lasts", 0.0))


def _state(rank: Rank) -> str:
    if rank.lost:
        return "lost"
    if rank.exited or rank.gone:
        return "ended" if rank.finished else "failed"
    return "stopped" if rank.stopped_at is not None else "at its end" if rank.finished else "runs"


def waited_for(ranks: Sequence[Rank]) -> list[int]:
    """Return the ranks for which the others wait: those that are in no long wait, or else have waited far less than others.

    Who waits least is who comes last. Waiting times alone do not show more; `hvdlite timeline summarize` knows each exchange.
    """
    alive = [rank for rank in ranks if _state(rank) not in _ENDED]
    stuck = [rank for rank in alive if _lasts(rank) > _LONG_SECONDS]
    if stuck:
        return [rank.number for rank in alive if rank not in stuck]
    shares = {rank.number: _waiting(rank) or 0.0 for rank in alive if rank.pulses.last}
    most = max(shares.values(), default=0.0)
    return [number for number, share in shares.items() if share < most / 2] if most > _LITTLE else []


def _waiting(rank: Rank) -> float | None:
    """Return the share of the time in which other ranks were not ready; None if it is not known."""
    waited, exchanged = rank.pulses.rate("waited"), rank.pulses.rate("exchanged")
    return None if waited is None or exchanged is None else min(1.0, max(0.0, waited - exchanged))


def _row(rank: Rank, late: Sequence[int], now: float) -> Sequence[str]:
    pulses, state = rank.pulses, _state(rank)
    if state == "runs" and pulses.heard is not None and now > pulses.heard + _SILENT_SECONDS:
        state = f"silent for {seconds_text(now - pulses.heard)}"
    computes = waits = exchanges = whom = ""
    waiting, exchange = _waiting(rank), pulses.rate("exchanged")
    if waiting is not None and exchange is not None and pulses.last["waited"]:  # on a GPU no thread waits
        exchange = min(max(0.0, exchange), 1.0 - waiting)
        computes, waits, exchanges = (f"{share:.0%}" for share in (max(0.0, 1 - waiting - exchange), waiting, exchange))
        if waiting > _LITTLE and rank.number not in late:
            whom = ", ".join(map(str, late[:3])) + (" …" if len(late) > 3 else "")
    speed = pulses.rate("bytes")
    return (
        str(rank.number),
        plain(rank.host),
        state,
        str(pulses.last["step"]) if pulses.last.get("step") else "",
        seconds_text(pulses.step_seconds),
        computes,
        waits,
        whom,
        exchanges,
        f"{bytes_text(speed)}/s" if speed else "",
        bytes_text(pulses.last.get("memory")),
    )


def _wait(rank: Rank, late: Sequence[int]) -> str:
    missing = f"; not there: {ranks_text(late)}" if late and rank.number not in late else ""
    return plain(f"rank {rank.number} has waited {seconds_text(_lasts(rank))} for {rank.pulses.last['what']}{missing}")
