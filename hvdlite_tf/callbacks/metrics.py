"""A callback that averages the metrics of each epoch over the ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

import hvdlite
from hvdlite import ProcessSet
from hvdlite_tf.callbacks.base import Callback, list_with, refuse_together


class MetricAverageCallback(Callback):
    """Replaces the metrics of each epoch by their averages over the ranks, for the callbacks after it and for the history.

    Each rank is weighted by the number of its samples, so the average of a mean over samples (a loss, an accuracy) is the mean
    over all ranks' data. Training data and validation data have weights of their own. A metric that is not a mean over samples,
    such as an AUC, is averaged in the same way. If the model's `train_step` does not update Keras' loss metric, the number of
    samples is not known, and all ranks have the same weight. A metric that only some ranks have is averaged over these.

    A callback cannot change what `model.evaluate` returns: it is about the rank's own data.

    Args:
        device: Horovod's argument, which has no effect.
        process_set: The ranks that take part; None means all ranks.

    Examples:
        >>> def measured():
        ...     model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, kernel_initializer="zeros")])
        ...     model.compile(keras.optimizers.SGD(0.0), "mse", run_eagerly=True)
        ...     y = np.full((1 + 2 * hvd.rank(), 1), hvd.rank())  # rank 0 has one sample, rank 1 has three
        ...     history = model.fit(np.ones_like(y), y, callbacks=[hvd.callbacks.MetricAverageCallback()], verbose=0)
        ...     return history.history["loss"]
        >>> on_ranks(2, measured)
        [[0.75], [0.75]]
    """

    def __init__(self, device: str = "", *, process_set: ProcessSet | None = None) -> None:
        super().__init__()
        self._process_set = process_set
        self._problem = ""
        self._samples: dict[str, float] = {}

    def set_model(self, model: Any) -> None:
        """Take the model, and check the position in the list of callbacks."""
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
        """Raise the problem that `set_model` found.

        Raises:
            ArgumentError: A callback that decides by metrics comes before this one. All ranks raise it.
        """
        refuse_together(self._problem, self._process_set)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Reset the numbers of samples."""
        self._samples = {}

    def on_test_begin(self, logs: Any = None) -> None:
        """Note the number of training samples, because Keras resets its metrics after this."""
        self._samples.setdefault("", _samples_of(self.model))

    def on_test_end(self, logs: Any = None) -> None:
        """Note the number of validation samples."""
        self._samples["val_"] = _samples_of(self.model)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Replace this rank's metrics by the averages.

        Args:
            epoch: The number of the epoch.
            logs: The metrics, numbers or arrays by name, which are changed in place.
        """
        self._samples.setdefault("", _samples_of(self.model))
        if logs is not None:
            logs.update(average(logs, self._samples, self._process_set))


def average(logs: Mapping[str, Any], samples: Mapping[str, float], process_set: ProcessSet | None) -> dict[str, Any]:
    """Average metrics over the ranks. Every rank calls this, and all get the same averages.

    Args:
        logs: This rank's metrics, numbers or arrays by name. Values of other types are left out.
        samples: This rank's numbers of samples: "val_" for metrics whose names begin with that, "" for all others.
        process_set: The ranks that take part; None means all ranks.

    Returns:
        The averages by name. They are computed as float64, in the order of the ranks; scalars are Python floats.
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
        parts = [part for part in parts if part[1]]  # metrics of no samples may have any value, also NaN
        mean = sum(value * count for value, count in parts) / sum(count for _, count in parts)
        averages[name] = float(mean) if np.ndim(mean) == 0 else mean
    return averages


def _samples_of(model: Any) -> float:
    """Return how many samples the model's metrics have seen since their reset; 1 if the model does not count them."""
    for metric in model.metrics:
        if metric.name == "loss" and hasattr(metric, "count"):
            return float(metric.count.numpy())
    return 1.0


def _place(callbacks: Sequence[Any], callback: Any) -> int:
    return next((number for number, each in enumerate(callbacks) if each is callback), 0)


def _decides(callback: Any) -> bool:
    """Return whether a callback acts on the value of a metric, as EarlyStopping, ReduceLROnPlateau and ModelCheckpoint do."""
    return hasattr(callback, "monitor") and getattr(callback, "save_best_only", True)
