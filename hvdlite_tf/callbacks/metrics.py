"""Metrics of all ranks' data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

import hvdlite
from hvdlite import ProcessSet
from hvdlite_tf.callbacks.base import Callback, list_with, refuse_together


class MetricAverageCallback(Callback):
    """Replaces the metrics of each epoch by their averages over the ranks: for the callbacks after it, and the history.

    A rank counts with the number of its samples, so that the average of a mean over samples (a loss, an accuracy) is that of
    the joined data; for training and validation data apart. What is no mean over samples, such as an AUC, is averaged all the
    same. A model whose `train_step` keeps no loss of Keras' own does not say how many samples there were: its ranks count
    alike. A value that only some ranks have is the average of theirs.

    What `model.evaluate` returns is out of a callback's reach: it is of the rank's own data.

    Args:
        device: Horovod's. Means nothing here.
        process_set: The ranks that take part; all by default.
    """

    def __init__(self, device: str = "", *, process_set: ProcessSet | None = None) -> None:
        super().__init__()
        self._process_set = process_set
        self._problem = ""
        self._samples: dict[str, float] = {}

    def set_model(self, model: Any) -> None:
        """Take the model, and look at the place in the list of callbacks."""
        super().set_model(model)
        callbacks = list_with(self) or []
        early = [type(each).__name__ for each in callbacks[: _place(callbacks, self)] if _decides(each)]
        self._problem = ""
        if early:
            self._problem = (
                f"{early[0]} comes before {type(self).__name__} in the list of callbacks, and would decide by the metrics of "
                f"one rank: put {type(self).__name__} before it."
            )

    def on_train_begin(self, logs: Any = None) -> None:
        """Check.

        Raises:
            ArgumentError: A callback that decides by metrics comes before this one. Raised on all ranks.
        """
        refuse_together(self._problem, self._process_set)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Count anew."""
        self._samples = {}

    def on_test_begin(self, logs: Any = None) -> None:
        """Count what the epoch has trained on; Keras sets its metrics back after this."""
        self._samples.setdefault("", _samples_of(self.model))

    def on_test_end(self, logs: Any = None) -> None:
        """Count what it was validated on."""
        self._samples["val_"] = _samples_of(self.model)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Put the averages in the place of this rank's metrics.

        Args:
            epoch: Its number.
            logs: Numbers or arrays by name, changed in place.
        """
        self._samples.setdefault("", _samples_of(self.model))
        if logs is not None:
            logs.update(average(logs, self._samples, self._process_set))


def average(logs: Mapping[str, Any], samples: Mapping[str, float], process_set: ProcessSet | None) -> dict[str, Any]:
    """Averages over the ranks, the same on all of them. Every rank calls this.

    Args:
        logs: Numbers or arrays by name. Other things are left out.
        samples: How many samples they are the means of: by prefix of the name, "" for all others.
        process_set: The ranks that take part; all if None.

    Returns:
        Averages by name, numbers as float, of float64 sums in the order of the ranks.
    """
    own = {name: np.asarray(value) for name, value in logs.items()}
    own = {name: array.astype(np.float64) for name, array in own.items() if array.dtype.kind in "biuf"}
    everybody: Sequence[tuple[dict[str, Any], dict[str, float]]] = hvdlite.allgather_object(
        (own, dict(samples)), process_set=process_set
    )
    averages = {}
    for name in dict.fromkeys(name for values, _ in everybody for name in values):
        prefix = "val_" if name.startswith("val_") else ""
        parts = [(values[name], counts.get(prefix, 0.0)) for values, counts in everybody if name in values]
        if not any(count for _, count in parts):
            parts = [(value, 1.0) for value, _ in parts]
        parts = [part for part in parts if part[1]]  # the metrics of no samples may be anything, NaN too
        mean = sum(value * count for value, count in parts) / sum(count for _, count in parts)
        averages[name] = float(mean) if np.ndim(mean) == 0 else mean
    return averages


def _samples_of(model: Any) -> float:
    """How many samples the model's metrics have seen since they were set back; 1 if it does not count them."""
    for metric in model.metrics:
        if metric.name == "loss" and hasattr(metric, "count"):
            return float(metric.count.numpy())
    return 1.0


def _place(callbacks: Sequence[Any], callback: Any) -> int:
    return next((number for number, each in enumerate(callbacks) if each is callback), 0)


def _decides(callback: Any) -> bool:
    """Whether a callback does something by the value of a metric: EarlyStopping, ReduceLROnPlateau, the best checkpoint."""
    return hasattr(callback, "monitor") and getattr(callback, "save_best_only", True)
