"""Which of the waits is best, and a text that says why."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hvdlite.serving.chooser.arrivals import Arrivals
from hvdlite.serving.chooser.predictions import Predictions
from hvdlite.serving.chooser.service_time import ServiceTime

MARGIN = 0.06  # of the bound: for what the prediction does not know
SAME_LOAD, SAME_DISPERSION, SAME_TIME = 0.03, 0.3, 0.02  # up to such parts, nothing has changed
SAME_SHARE = 0.03  # of a key
ALIKE = 0.01  # waits that differ by less than this are equally good
NOISE = 0.03  # of two simulations of the same: a wait that is worse by less than this is kept
ALIKE_ROUNDS = 0.05  # for clients that wait: of a round, with thinking, which has the server's own work for a request


@dataclass(frozen=True)
class Choice:
    """A wait, and what it was chosen from.

    Attributes:
        index: The chosen one of `predictions.waits`.
        predictions: What the queue would do with each wait.
        slo_p99: The bound of the 99th percentile of the latency, in seconds; None if there is none.
        meets: Whether the bound is met. True if there is none.
        arrivals: How requests came.
        service: How long batches took.
        replicas: The number of replicas.
    """

    index: int
    predictions: Predictions
    slo_p99: float | None
    meets: bool
    arrivals: Arrivals
    service: ServiceTime
    replicas: int

    @property
    def wait(self) -> float:
        """The chosen wait in seconds."""
        return float(self.predictions.waits[self.index])

    @property
    def p99(self) -> float:
        """The predicted 99th percentile of the latency, in seconds."""
        return float(self.predictions.p99[self.index])

    @property
    def compute(self) -> float:
        """The predicted seconds of a replica for each request."""
        return float(self.predictions.compute[self.index])

    @property
    def load(self) -> float:
        """The rate divided by the largest that the replicas can serve."""
        return self.arrivals.rate / self.service.capacity(self.replicas)

    def is_of(self, arrivals: Arrivals, service: ServiceTime) -> bool:
        """Return whether it was made from about the same arrivals and service times as these."""
        old, new = self.service.mean_seconds, service.mean_seconds
        before, now = self.load, arrivals.rate / service.capacity(self.replicas)
        return (
            abs(now - before)
            <= SAME_LOAD * min(before, abs(1 - before))  # near 1, a little more load is much more waiting
            and _alike(arrivals, self.arrivals)
            and len(old) == len(new)
            and bool(np.all(np.abs(new - old) <= SAME_TIME * old))
        )

    def figures(self) -> dict[str, float]:
        """Return the choice in figures, by the names of `hvdlite.serving.metrics.CHOICE`."""
        return {
            "predicted_p99_seconds": self.p99,
            "predicted_mean_seconds": float(self.predictions.mean[self.index]),
            "predicted_compute_seconds": self.compute,
            "bound_met": float(self.meets),
            "arrival_rate": self.arrivals.rate,
            "load_ratio": self.load,
            "service_fixed_seconds": self.service.fixed,
            "service_request_seconds": self.service.per_request,
        }

    def summary(self) -> str:
        """Say what was chosen in a sentence."""
        return f"At {self.arrivals.rate:.4g} requests/s the oldest waits up to {_ms(self.wait)} ms for others: {self._why()}."

    def explain(self) -> str:
        """Say what was chosen and why, in several lines for a person."""
        service, arrivals = self.service, self.arrivals
        return "\n".join(
            (
                self.summary(),
                f"Service time: {_ms(service.fixed)} ms + {_ms(service.per_request)} ms for each request of a batch, fitted to "
                f"{service.batches} batches of {service.sizes[0]} to {service.sizes[1]} requests.",
                f"Arrivals: {arrivals.rate:.4g} requests/s in the last {arrivals.seconds:.2g} s, "
                f"{_kind(arrivals)}; {self.load:.0%} of what {_replicas(self.replicas)} can serve.",
                *_keys(arrivals),
                *self._table(),
            )
        )

    def _why(self) -> str:
        if self.slo_p99 is None:
            return "this makes the mean latency least"
        bound = f"a p99 of at most {_ms(self.slo_p99)} ms"
        if self.meets:
            return f"this needs the least compute for each request, with {bound}"
        return f"no wait meets {bound} at this load, and this comes closest"

    def _table(self) -> list[str]:
        """The chosen wait among others that are near, and the two ends."""
        last = len(self.predictions.waits) - 1
        rows = sorted({0, *range(max(self.index - 2, 0), min(self.index + 2, last) + 1), last})
        return [
            "  wait ms    p99 ms   mean ms  batch size  compute ms/request",
            *(
                f"{_ms(row[0]):>9}{_ms(row[1]):>10}{_ms(row[2]):>10}{row[3]:>12.1f}{_ms(row[4]):>20}"
                + ("  <- chosen" if number == self.index else "")
                for number in rows
                for p in [self.predictions]
                for row in [tuple(a[number] for a in (p.waits, p.p99, p.mean, p.batch, p.compute))]
            ),
        ]


def candidates(
    arrivals: Arrivals, service: ServiceTime, slo_p99: float | None, max_batch: int
) -> npt.NDArray[np.float64]:
    """Return the waits to compare, in seconds, in rising order from 0.

    With a bound, they end where a wait alone would use it up. Without one, they end with twice the longest service time: the
    mean latency only gains where others come meanwhile. No wait is longer than what a batch takes to fill, by far; with several
    keys, a batch of a key that a twentieth of the requests have.
    """
    shares = arrivals.shares
    rate = arrivals.rate * float(shares[shares >= 0.05].min(initial=float(shares[0])))
    end = float(slo_p99 if slo_p99 is not None else 2 * service.seconds[-1])
    end = min(end, 4 * max_batch / rate)
    return np.concatenate([[0.0], np.geomspace(end / 500, end / 33, 6), np.linspace(end / 25, end, 25)])


def choose(
    predictions: Predictions,
    slo_p99: float | None,
    arrivals: Arrivals,
    service: ServiceTime,
    replicas: int,
    present: int | None = None,
) -> Choice:
    """Choose the wait that needs the least compute under the bound; without a bound, the one with the least mean latency.

    Among those that are equally good up to 1 %, or up to 5 % for clients that wait, it is the one that is best in the other
    respect. If no wait meets the bound, it is the one with the least p99. The present wait (its index) stays if no other one is
    better by more than the noise.
    """
    everything = np.arange(len(predictions.waits))
    meets = True
    if slo_p99 is None and arrivals.clients is not None:
        rounds = predictions.mean + arrivals.clients.mean_think
        index = _least(everything, rounds, predictions.compute, ALIKE_ROUNDS, present)
    elif slo_p99 is None:
        index = _least(everything, predictions.mean, predictions.compute, present=present)
    else:
        allowed = everything[predictions.p99 <= (1 - MARGIN) * slo_p99]
        meets = len(allowed) > 0
        if meets:
            if present is not None and predictions.p99[present] <= (1 - MARGIN / 2) * slo_p99:
                allowed = np.union1d(allowed, present)
            index = _least(allowed, predictions.compute, predictions.p99, present=present)
        else:
            index = _least(everything, predictions.p99, predictions.compute, present=present)
    return Choice(index, predictions, slo_p99, meets, arrivals, service, replicas)


def _least(
    among: npt.NDArray[np.intp],
    cost: npt.NDArray[np.float64],
    second: npt.NDArray[np.float64],
    alike: float = ALIKE,
    present: int | None = None,
) -> int:
    least = cost[among].min()
    if present is not None and present in among and cost[present] <= (1 + max(NOISE, alike)) * least:
        return present
    good = among[cost[among] <= (1 + alike) * least]
    return int(good[second[good].argmin()])


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g}" if seconds < 1 else f"{seconds * 1e3:.0f}"


def _alike(arrivals: Arrivals, others: Arrivals) -> bool:
    if arrivals.clients is not None and others.clients is not None:
        return arrivals.clients.count == others.clients.count
    return (
        arrivals.clients is others.clients
        and len(arrivals.shares) == len(others.shares)
        and bool(np.all(np.abs(arrivals.shares - others.shares) <= SAME_SHARE))
        and abs(arrivals.dispersion - others.dispersion) <= SAME_DISPERSION * others.dispersion
    )


def _kind(arrivals: Arrivals) -> str:
    clients, dispersion = arrivals.clients, arrivals.dispersion
    if clients is not None:
        each = "one client that sends" if clients.count == 1 else f"{clients.count} clients that each send"
        return f"from {each} again {_ms(clients.mean_think)} ms after an answer"
    if dispersion < 3:
        return "one by one"
    return f"in bursts (their number varies {dispersion:.0f} times as much as by chance)"


def _keys(arrivals: Arrivals) -> list[str]:
    shares = arrivals.shares
    if len(shares) == 1:
        return []
    return [
        f"Their shapes and dtypes are {len(shares)} or more, of which each is in batches of its own: the most frequent one has "
        f"{shares[0]:.0%} of the requests."
    ]


def _replicas(count: int) -> str:
    return "one replica" if count == 1 else f"{count} replicas"
