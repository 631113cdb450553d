"""What came of a load: counts, percentiles, and tables."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

PERCENTILES = (50.0, 90.0, 99.0, 99.9)
NAMES = [f"p{which:g}" for which in PERCENTILES]
TOO_BUSY = 0.85  # of a core
TOO_LATE = 0.002  # seconds


@dataclass
class Results:
    """What came of a load.

    Attributes:
        load: What was sent, in words.
        unit: What `amount` counts: "clients" of a closed loop, or "requests/s" of an open one.
        amount: How large the load was.
        latencies: Of requests that were answered 200, in seconds.
        failures: How often each other outcome came: a status, or what went wrong.
        lateness: How much later than due requests were sent, in seconds. Empty for a closed loop.
        seconds: How long it took.
        cpu: The share of a core that this program used.
    """

    load: str
    unit: str
    amount: float
    latencies: list[float] = field(default_factory=list)
    failures: Counter[int | str] = field(default_factory=Counter)
    lateness: list[float] = field(default_factory=list)
    seconds: float = 0.0
    cpu: float = 0.0

    def add(self, outcome: int | str, latency: float) -> None:
        """Count an answer, or what came in its place."""
        if outcome == 200:
            self.latencies.append(latency)
        else:
            self.failures[outcome] += 1

    @property
    def throughput(self) -> float:
        """Requests answered 200 per second."""
        return len(self.latencies) / self.seconds if self.seconds else 0.0

    @property
    def failed(self) -> int:
        """How many requests were not answered 200."""
        return self.failures.total() if hasattr(self.failures, "total") else sum(self.failures.values())

    def percentiles(self) -> npt.NDArray[np.float64]:
        """Return `PERCENTILES` of the latency in seconds; NaN if nothing was answered. Shape (4,)."""
        if not self.latencies:
            return np.full(len(PERCENTILES), np.nan)
        return np.asarray(np.percentile(self.latencies, PERCENTILES))

    def line(self) -> str:
        """Say in one line how it goes."""
        times = ", ".join(
            f"{name} {value * 1e3:.1f} ms" for name, value in zip(NAMES[:3], self.percentiles(), strict=False)
        )
        failed = f", {self.failed} failed" if self.failed else ""
        return f"{self.load}: {self.seconds:.0f} s, {self.throughput:.0f} requests/s, {times}{failed}"

    def as_dict(self) -> dict[str, Any]:
        """Return the figures as JSON has them. Times are in seconds."""
        values = [float(value) if np.isfinite(value) else None for value in self.percentiles()]
        return {
            **{"load": self.load, self.unit: self.amount, "throughput": self.throughput, "seconds": self.seconds},
            **{"answered": len(self.latencies), "failures": {str(key): count for key, count in self.failures.items()}},
            **{"mean": float(np.mean(self.latencies)) if self.latencies else None},
            **dict(zip(NAMES, values, strict=True)),
            "client_cpu": self.cpu,
        }

    def notes(self) -> list[str]:
        """Say what a reader of the figures must know."""
        notes = []
        if self.failures:
            outcomes = ", ".join(f"{count} × {outcome}" for outcome, count in self.failures.most_common())
            notes.append(f"{self.load}: {self.failed} of {self.failed + len(self.latencies)} failed: {outcomes}.")
        if self.cpu > TOO_BUSY:
            notes.append(
                f"{self.load}: this client has used {self.cpu:.0%} of a core. It may be the limit, and not the server: "
                "divide the load among several clients."
            )
        if self.lateness and (late := float(np.percentile(self.lateness, 99))) > TOO_LATE:
            notes.append(
                f"{self.load}: one request of a hundred was sent {late * 1e3:.1f} ms too late or later, for this client was "
                "busy, or all connections were. The latencies contain this."
            )
        return notes


def table(all_results: Sequence[Results]) -> str:
    """Write the figures of several loads, and what must be known of them."""
    rows = [["load", "requests/s", "mean ms", *(f"{name} ms" for name in NAMES), "failed"]]
    for each in all_results:
        mean = np.mean(each.latencies) if each.latencies else np.nan
        times = [f"{value * 1e3:.2f}" for value in (mean, *each.percentiles())]
        rows.append([each.load, f"{each.throughput:.1f}", *times, str(each.failed)])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(
            [row[0].ljust(widths[0]), *(word.rjust(width) for word, width in zip(row[1:], widths[1:], strict=True))]
        )
        for row in rows
    ]
    return "\n".join([*lines, *(note for each in all_results for note in each.notes())]) + "\n"
