"""A simulation of the batching queue for clients that wait for their answers, for many waits at once."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from hvdlite.serving.chooser.clients import Clients
from hvdlite.serving.chooser.predictions import Predictions
from hvdlite.serving.chooser.service_time import ServiceTime

BATCHES = 300
FEWEST_BATCHES = 60
PLACES = 20000  # clients times batches
WARM_UP = 0.1  # the part of the batches that is left out, because of how it begins


def predict_closed(
    clients: Clients,
    service: ServiceTime,
    waits: npt.NDArray[np.float64],
    max_batch: int,
    replicas: int,
    random: np.random.Generator,
) -> Predictions:
    """Simulate the queue with each of the waits, all with the same thinking and the same service times.

    It is the queue of `hvdlite.serving.chooser.queue.predict`, closed: a client that is answered thinks, and comes again (the
    machine repair model; Kleinrock, "Queueing Systems" volume 1, section 3.8, 1975). The rate follows from the latency, so a
    wait that fills batches brings more requests, too. A batch goes at once when no client thinks, as `Crowd` lets it.

    It begins with half of the clients in service and the others waiting: two groups that take turns, and meet only if one waits
    for the other.

    Args:
        clients: The clients.
        service: The service time.
        waits: The waits in seconds. Shape (waits,).
        max_batch: The largest batch.
        replicas: The number of replicas.
        random: Where chance comes from.
    """
    count, lanes = clients.count, len(waits)
    batches = int(np.clip(PLACES // count, FEWEST_BATCHES, BATCHES))
    largest = min(max_batch, count)
    lane, places = np.arange(lanes), np.arange(count)
    ratios = service.draw_ratios(random, (batches,))
    first = float(service.seconds[min((count + 1) // 2, max_batch)])
    waits_first = places < count // 2
    comes = np.tile(np.where(waits_first, 0.0, first + np.sort(random.choice(clients.thinks, count))), (lanes, 1))
    answered = np.tile(np.where(waits_first, 0.0, first), (lanes, 1))
    idle = np.full((lanes, replicas), first)
    latencies = np.empty((batches, lanes, largest))
    sizes, busy = np.empty((batches, lanes), int), np.empty((batches, lanes))
    for number in range(batches):
        replica = idle.argmin(axis=1)
        free = np.maximum(idle[lane, replica], comes[:, 0])
        thinking = answered <= free[:, None]  # the others come later, but they are here
        due = np.minimum(comes[:, 0] + waits, np.where(thinking, comes, -np.inf).max(axis=1))
        if largest == max_batch:
            due = np.minimum(due, comes[:, max_batch - 1])
        goes = np.maximum(due, free)
        size = np.minimum((comes <= goes[:, None]).sum(axis=1), largest)
        busy[number], sizes[number] = service.seconds[size] * ratios[number], size
        end = goes + busy[number]
        inside = places < size[:, None]
        latencies[number] = np.where(inside, end[:, None] - comes, np.nan)[:, :largest]
        thinks = random.choice(clients.thinks, count)
        comes = np.where(inside, end[:, None] + thinks, comes)
        answered = np.where(inside, end[:, None], answered)
        idle[lane, replica] = end
        order = comes.argsort(axis=1)
        comes, answered = np.take_along_axis(comes, order, 1), np.take_along_axis(answered, order, 1)
    warm = int(WARM_UP * batches)
    by_wait = latencies[warm:].transpose(1, 0, 2).reshape(lanes, -1)
    requests = sizes[warm:].sum(axis=0)
    return Predictions(
        waits,
        np.nanquantile(by_wait, 0.99, axis=1),
        np.nanmean(by_wait, axis=1),
        busy[warm:].sum(axis=0) / requests,
        sizes[warm:].mean(axis=0),
    )
