"""A simulation of the batching queue for many waits at once."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from hvdlite.serving.chooser.arrivals import Arrivals
from hvdlite.serving.chooser.closed_queue import predict_closed
from hvdlite.serving.chooser.mixture import RATIOS, WARM_UP, predict_mixture
from hvdlite.serving.chooser.predictions import Predictions
from hvdlite.serving.chooser.service_time import ServiceTime

Floats = npt.NDArray[np.float64]
Indices = npt.NDArray[np.intp]

STREAMS = 3
BATCHES = 1000  # in each stream, for the wait that makes the smallest batches
MOST_REQUESTS = 32000  # in each stream
MOST_REQUESTS_OF_KINDS = 4000  # which takes longer
LOOKED_AT = 12000  # requests of all streams together whose latency is computed


def predict(
    arrivals: Arrivals,
    service: ServiceTime,
    waits: Floats,
    max_batch: int,
    replicas: int,
    random: np.random.Generator,
) -> Predictions:
    """Simulate the queue with each of the waits, all on the same arrivals.

    The queue has one line, served in the order of arrival by replicas that take batches. A batch goes as soon as a replica is
    idle, and either max_batch requests are there or the oldest one has waited for the given time. This is the queue with bulk
    service of Bailey ("On Queueing Processes with Bulk Service", Journal of the Royal Statistical Society B 16, 1954), with a
    time-out in place of the least batch size of Neuts ("A General Class of Bulk Queues with Poisson Input", Annals of
    Mathematical Statistics 38, 1967). Its percentiles have no closed form for bursts and several servers. Servers with
    such a time-out are in Crankshaw et al., "Clipper" (NSDI 2017). Ali et al., "BATCH" (SC 2020), choose the time-out for the
    least cost under a bound of a percentile, too, from an analytical model of one server for each batch.

    If requests of several keys come, there is a line for each (`predict_mixture`). If they come from clients that wait for
    their answers, the queue is closed (`predict_closed`).

    Args:
        arrivals: The arrivals to simulate more of.
        service: The service time.
        waits: The waits in seconds. Shape (waits,).
        max_batch: The largest batch.
        replicas: The number of replicas.
        random: Where chance comes from.
    """
    if arrivals.clients is not None:
        return predict_closed(arrivals.clients, service, waits, max_batch, replicas, random)
    at_once = _batch_without_wait(arrivals.rate, service, max_batch, replicas)
    most = MOST_REQUESTS if arrivals.kinds is None else MOST_REQUESTS_OF_KINDS
    length = int(min(BATCHES * at_once, most))
    times, kinds = arrivals.streams(random, STREAMS, length)
    if kinds is not None:
        return predict_mixture(times, kinds, service, waits, max_batch, replicas, random)
    length = times.shape[1]
    # The streams follow each other on one axis, far enough apart for each to find an empty queue.
    apart = np.arange(STREAMS)[:, None] * (times.max() + 1e4)
    begins = np.arange(STREAMS) * length
    run = _Run((times + apart).ravel(), begins, length, service, waits, max_batch, replicas, random)
    return run.predictions()


def _batch_without_wait(rate: float, service: ServiceTime, max_batch: int, replicas: int) -> float:
    """Return about how large batches become by themselves: as many requests as come while the replicas compute one."""
    size = 1.0
    for _ in range(50):
        grown = rate * float(np.interp(size, np.arange(len(service.seconds)), service.mean_seconds)) / replicas
        size = min(max(grown, 1.0), max_batch)
    return size


class _Run:
    """Simulates every wait on every stream, in lanes that advance together by a batch at a time."""

    def __init__(
        self,
        times: Floats,
        begins: Indices,
        length: int,
        service: ServiceTime,
        waits: Floats,
        max_batch: int,
        replicas: int,
        random: np.random.Generator,
    ) -> None:
        self._times, self._length, self._waits = times, length, waits
        self._padded = np.concatenate([times, np.full(max_batch, np.inf)])
        lanes = len(waits) * len(begins)
        ends = np.tile(begins + length, len(waits))
        first = np.tile(begins, len(waits))
        wait = np.repeat(waits, len(begins))
        idle = np.full((lanes, replicas), -np.inf)
        lane = np.arange(lanes)
        ratios = np.empty((0, lanes))
        self._firsts: list[Indices] = []
        self._sizes: list[Indices] = []
        self._ends: list[Floats] = []
        self._busy: list[Floats] = []
        step = 0
        while True:
            running = first < ends
            if not running.any():
                break
            if step % RATIOS == 0:  # the same for all waits
                ratios = np.tile(service.draw_ratios(random, (RATIOS, len(begins))), len(waits))
            replica = idle.argmin(axis=1)
            due = np.minimum(self._padded[first] + wait, self._padded[first + max_batch - 1])
            goes = np.maximum(due, idle[lane, replica])
            here = np.searchsorted(times, goes, side="right")
            size = np.minimum(np.minimum(here, ends) - first, max_batch) * running
            busy = service.seconds[size] * ratios[step % RATIOS]
            answered = goes + busy
            idle[lane, replica] = answered
            self._firsts.append(first)
            self._sizes.append(size)
            self._ends.append(answered)
            self._busy.append(busy)
            first = first + size
            step += 1

    def predictions(self) -> Predictions:
        """Summarize the lanes by wait."""
        streams = len(self._firsts[0]) // len(self._waits)
        shape = (len(self._firsts), len(self._waits), streams)
        # By wait, stream and batch. The requests of one wait are then in the order of their numbers.
        firsts, sizes, ends, busy = (
            np.reshape(each, shape).transpose(1, 2, 0) for each in (self._firsts, self._sizes, self._ends, self._busy)
        )
        warm = (sizes > 0) & (firsts % self._length >= WARM_UP * self._length)
        looked_at = np.arange(0, len(self._times), max(1, len(self._times) // LOOKED_AT))
        looked_at = looked_at[looked_at % self._length >= WARM_UP * self._length]
        results = []
        for number, inside in enumerate(warm):
            size, began = sizes[number][inside], firsts[number][inside]
            batch = np.searchsorted(began, looked_at, side="right") - 1
            known = (batch >= 0) & (
                looked_at < (began + size)[batch]
            )  # the others share a batch with one that is left out
            latency = ends[number][inside][batch[known]] - self._times[looked_at[known]]
            compute = busy[number][inside].sum() / size.sum()
            results.append((np.quantile(latency, 0.99), latency.mean(), compute, size.mean()))
        return Predictions(self._waits, *np.array(results).T)
