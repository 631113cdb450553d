"""What the server counts, for Prometheus and for its line on a terminal."""

from __future__ import annotations

import functools
import itertools
import math
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Iterator, Mapping, Sequence, Sized
from typing import Any

import numpy as np
from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest
from prometheus_client.core import HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from hvdlite.serving.batcher import Batch, Batcher
from hvdlite.serving.waiting import WaitChooser

_NAMESPACE = "hvdlite_serve"
_SECONDS = tuple(base * 10.0**power for power in range(-4, 2) for base in (1, 2.5, 5))
_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
_REMEMBERED = 4096
CHOICE = {
    "predicted_p99_seconds": "The 99th percentile of the latency that max_wait_seconds was chosen with.",
    "predicted_mean_seconds": "The mean latency that it was chosen with.",
    "predicted_compute_seconds": "The seconds of a replica for each request that it was chosen with.",
    "bound_met": "1 if the predicted p99 keeps the bound (--slo-p99), or there is none; else 0.",
    "arrival_rate": "Requests per second that it was chosen for.",
    "load_ratio": "This rate divided by the largest one that the replicas can serve.",
    "service_fixed_seconds": "What a batch takes besides its requests, as fitted.",
    "service_request_seconds": "What each request adds to this, as fitted.",
}
"""Gauges that say why the wait was chosen. They are NaN while nothing was chosen."""


def _figure(chooser: WaitChooser, name: str) -> float:
    return chooser.figures.get(name, math.nan)


class _Histogram(Collector):
    """A histogram of Prometheus for one thread. The client library's own takes ten times as long to observe a value.

    Args:
        name: The name of the metric.
        words: What it counts.
        bounds: The upper bounds of its buckets, in rising order.
        registry: Where it is shown.
    """

    def __init__(self, name: str, words: str, bounds: Sequence[float], registry: CollectorRegistry) -> None:
        self._name, self._words, self._bounds = f"{_NAMESPACE}_{name}", words, [*bounds, math.inf]
        self._counts = [0] * len(self._bounds)
        self._sum = 0.0
        registry.register(self)

    def observe(self, value: float) -> None:
        """Count a value."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def collect(self) -> Iterator[HistogramMetricFamily]:
        """Return what was counted, as the registry wants it."""
        totals = itertools.accumulate(self._counts)
        names = ["+Inf" if bound == math.inf else str(float(bound)) for bound in self._bounds]
        buckets = list(zip(names, map(float, totals), strict=True))
        yield HistogramMetricFamily(self._name, self._words, buckets, self._sum)


class Metrics:
    """The metrics of one model."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        about: Any = {"namespace": _NAMESPACE, "registry": self._registry}
        self._requests = Counter("requests", "Requests to /v1/predict that were answered.", ["status"], **about)
        self._by_status: dict[int, Counter] = {}
        self._latency = self._histogram("latency_seconds", "From the whole body to its answer.", _SECONDS)
        self._waits = self._histogram("wait_seconds", "From a request to its batch.", _SECONDS)
        self._sizes = self._histogram("batch_size", "Requests of a batch.", _SIZES)
        self._service = self._histogram("service_seconds", "From a batch to its outputs.", _SECONDS)
        self._again = Counter("recomputed", "Requests that were computed again, and why.", ["reason"], **about)
        self._lost = Counter("replicas_lost", "Replicas that have ended and were replaced.", **about)
        self._queue = Gauge("queue_length", "Requests that wait for a replica.", **about)
        self._computing = Gauge("computing", "Requests that replicas compute.", **about)
        self._replicas = Gauge("replicas", "Replicas that can compute.", **about)
        self._devices = Gauge("replica_device", "1 for each replica and its GPU.", ["replica", "device"], **about)
        self._wait = Gauge("max_wait_seconds", "How long the oldest request of a batch waits for others.", **about)
        self._choice = {name: Gauge(name, words, **about) for name, words in CHOICE.items()}
        self._recent: deque[tuple[float, float]] = deque(maxlen=_REMEMBERED)

    def _histogram(self, name: str, words: str, bounds: Sequence[float]) -> _Histogram:
        return _Histogram(name, words, bounds, self._registry)

    def watch(self, batcher: Batcher, chooser: WaitChooser, replicas: Sized) -> None:
        """Show the present state of these."""
        self._batcher, self._chooser, self._there = batcher, chooser, replicas
        self._queue.set_function(lambda: batcher.waiting)
        self._computing.set_function(lambda: batcher.computing)
        self._replicas.set_function(lambda: len(replicas))
        self._wait.set_function(lambda: chooser.wait_seconds)
        for name, gauge in self._choice.items():
            gauge.set_function(functools.partial(_figure, chooser, name))

    def show_devices(self, devices: Sequence[str]) -> None:
        """Show which GPU each replica has; an empty name is that of none."""
        for place, device in enumerate(devices):
            self._devices.labels(place, device or "none").set(1)

    def answered(self, status: int, seconds: float) -> None:
        """Count an answer, and how long it took, in seconds."""
        counter = self._by_status.get(status)
        if counter is None:
            counter = self._by_status[status] = self._requests.labels(status)
        counter.inc()
        if status == 200:
            self._latency.observe(seconds)
            self._recent.append((time.monotonic(), seconds))

    def batch_sent(self, batch: Batch) -> None:
        """Count a batch that a replica gets."""
        self._sizes.observe(len(batch.requests))
        if batch.again is not None:
            self._again.labels(batch.again.value).inc(len(batch.requests))
            return
        for request in batch.requests:
            self._waits.observe(batch.sent - request.arrived)

    def batch_done(self, size: int, seconds: float) -> None:
        """Count a batch that a replica has computed."""
        self._service.observe(seconds)

    def replica_lost(self) -> None:
        """Count a replica that has ended."""
        self._lost.inc()

    def collect(self, labels: Mapping[str, str]) -> Iterator[Metric]:
        """Return all metrics with further labels."""
        for metric in self._registry.collect():
            metric.samples = [each._replace(labels={**labels, **each.labels}) for each in metric.samples]
            yield metric

    def line(self, over: float = 2.0) -> str:
        """Return one line of what happened in the last seconds."""
        now = time.monotonic()
        latencies = [seconds for at, seconds in self._recent if at > now - over]
        words = [f"{len(latencies) / over:.0f} requests/s"]
        if latencies:
            p50, p99 = np.percentile(latencies, (50, 99)) * 1000
            words.append(f"p50 {p50:.1f} ms, p99 {p99:.1f} ms")
        words += [f"{self._batcher.waiting} wait", f"{self._batcher.computing} in work", f"{len(self._there)} replicas"]
        return ", ".join([*words, f"waits up to {self._chooser.wait_seconds * 1000:.1f} ms for a batch"])


class ConnectionMetrics:
    """The metrics of a server's connections, which are of no single model."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        about: Any = {"namespace": _NAMESPACE, "registry": self.registry}
        words = "Connections that the server has ended because of their clients, and why."
        self._ended = Counter("connections_ended", words, ["reason"], **about)

    def ended(self, reason: str) -> None:
        """Count a connection that the server has ended because of its client."""
        self._ended.labels(reason).inc()


class _Together(Collector):
    """The metrics of several models, in which each metric has the samples of all of them."""

    def __init__(self, models: Mapping[str, Metrics]) -> None:
        self._models = models

    def collect(self) -> Iterator[Metric]:
        """Return the metrics, as a registry wants them."""
        is_one = len(self._models) == 1
        each = [metrics.collect({} if is_one else {"model": name}) for name, metrics in self._models.items()]
        for same in zip(*each, strict=True):
            same[0].samples = [sample for metric in same for sample in metric.samples]
            yield same[0]


def metrics_text(models: Mapping[str, Metrics], connections: ConnectionMetrics) -> bytes:
    """Return all metrics as Prometheus reads them. If there are several models, the label "model" has the name of each."""
    registry = CollectorRegistry()
    registry.register(_Together(models))
    return generate_latest(registry) + generate_latest(connections.registry)
