"""A simulation of the batching queue with a line for each key, for many waits at once."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from hvdlite.serving.chooser.predictions import Predictions
from hvdlite.serving.chooser.service_time import ServiceTime

Floats = npt.NDArray[np.float64]
RATIOS = 256  # service times that are drawn at once
WARM_UP = 0.1  # the part of each stream that is left out, because the queue starts empty
APART = 1e4  # seconds between the lines, which lie behind each other on one axis


def predict_mixture(
    times: Floats,
    kinds: npt.NDArray[np.int64],
    service: ServiceTime,
    waits: Floats,
    max_batch: int,
    replicas: int,
    random: np.random.Generator,
) -> Predictions:
    """Simulate the queue with each of the waits, all on the same arrivals.

    It is the queue of `hvdlite.serving.chooser.queue.predict`, but the requests of each key have a line of their own. The next
    batch is of the key whose time is up first: its line has max_batch requests, or its oldest one has waited for so long.

    Args:
        times: Streams of arrivals, in seconds. Shape (streams, length).
        kinds: The numbers of their keys, from 0 on. Shape (streams, length).
        service: The service time, which is that of all keys together.
        waits: The waits in seconds. Shape (waits,).
        max_batch: The largest batch.
        replicas: The number of replicas.
        random: Where chance comes from.
    """
    streams, length = times.shape
    count = int(kinds.max()) + 1
    # All lines on one axis: those of a stream follow each other, each with places at its end where nobody comes.
    line = np.arange(streams)[:, None] * count + kinds
    order = np.argsort(line.ravel(), kind="stable")
    sizes = np.bincount(line.ravel(), minlength=streams * count)
    ends = np.cumsum(sizes + max_batch)
    begins = ends - sizes - max_batch
    apart = APART + float(times.max())
    axis = np.repeat((np.arange(streams * count) + 1) * apart, sizes + max_batch) - 1  # of the places at the ends
    place = np.arange(streams * length) + np.repeat(np.arange(streams * count) * max_batch, sizes)
    axis[place] = times.ravel()[order] + np.repeat(np.arange(streams * count) * apart, sizes)
    when = np.full(len(axis), np.inf)
    when[place] = times.ravel()[order]
    counted = np.zeros(len(axis), bool)
    counted[place] = (np.tile(np.arange(length), streams) >= WARM_UP * length)[order]

    lanes = len(waits) * streams
    lane, stream = np.arange(lanes), np.tile(np.arange(streams), len(waits))
    wait = np.repeat(waits, streams)[:, None]
    first = begins.reshape(streams, count)[stream]
    idle = np.full((lanes, replicas), -np.inf)
    taken: list[tuple[npt.NDArray[np.intp], npt.NDArray[np.intp], Floats, Floats]] = []
    while True:
        if len(taken) % RATIOS == 0:  # the same for all waits
            ratios = np.tile(service.draw_ratios(random, (RATIOS, streams)), len(waits))
        due = np.minimum(when[first] + wait, when[first + max_batch - 1])
        key = due.argmin(axis=1)
        up = due[lane, key]
        if np.isinf(up).all():
            break
        replica = idle.argmin(axis=1)
        goes = np.where(np.isinf(up), 0.0, np.maximum(up, idle[lane, replica]))
        begin = first[lane, key]
        here = np.searchsorted(axis, goes + (stream * count + key) * apart, side="right")
        there = np.minimum(here, ends[stream * count + key] - max_batch) - begin
        size = np.minimum(there, max_batch) * np.isfinite(up)
        busy = service.seconds[size] * ratios[len(taken) % RATIOS]
        end = goes + busy
        idle[lane, replica] = np.where(size > 0, end, idle[lane, replica])
        first[lane, key] += size
        taken.append((begin, size, end, busy))
    begun, number, over, computed = (np.array(each).T.reshape(len(waits), -1) for each in zip(*taken, strict=True))
    results = []
    for places, size, end, busy in zip(begun, number, over, computed, strict=True):
        inside = np.repeat(places - np.cumsum(size) + size, size) + np.arange(size.sum())  # the places of all requests
        latency = (np.repeat(end, size) - when[inside])[counted[inside]]
        warm = (size > 0) & counted[places]
        results.append(
            (np.quantile(latency, 0.99), latency.mean(), busy[warm].sum() / size[warm].sum(), size[warm].mean())
        )
    return Predictions(waits, *np.array(results).T)
