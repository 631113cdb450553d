"""What is predicted for each of several waits."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Predictions:
    """What the queue would do with each of several waits. Arrays have the shape (waits,).

    Attributes:
        waits: The longest waits of the oldest request of a batch, in seconds.
        p99: The 99th percentile of the latency, from arrival to answer, in seconds.
        mean: The mean latency in seconds.
        compute: The seconds of a replica that a request needs.
        batch: The mean batch size.
    """

    waits: Floats
    p99: Floats
    mean: Floats
    compute: Floats
    batch: Floats
