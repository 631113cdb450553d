"""What the servers of `benchmarks.serving` serve. Every function takes an array with a batch, and returns an array."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np

from hvdlite import servable

SHAPES = {"gpu": (8,), "digits": (1, 8, 8)}


def like_a_gpu(batch: Any) -> Any:
    """Sum each input, in 5 ms and 0.1 ms for each of them. It waits, so it leaves the cores to the servers."""
    time.sleep(0.005 + 0.0001 * len(batch))
    return np.asarray(batch).sum(1)


def digits_network() -> Callable[[Any], Any]:
    """Return a convolutional network for the digits of scikit-learn, with the same random weights in every process."""
    import torch
    from torch import nn

    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = nn.Sequential(
        *(nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(64 * 16, 128), nn.ReLU(), nn.Linear(128, 10)),
    ).eval()

    def predict(batch: Any) -> Any:
        with torch.inference_mode():
            return model(torch.from_numpy(np.ascontiguousarray(batch))).numpy()

    return predict


def load(name: str) -> Callable[[Any], Any]:
    """Return a function by its name in `SHAPES`."""
    return like_a_gpu if name == "gpu" else digits_network()


def __getattr__(name: str) -> Any:
    """Make what ``hvdlite serve benchmarks.serving_models:NAME`` serves, when it is asked for."""
    if name in SHAPES:
        return servable(load(name), dtype="float32", shape=SHAPES[name])
    raise AttributeError(name)
