"""A callback that averages the metrics of each epoch over the ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np

import hvdlite
from hvdlite import ProcessSet
from hvdlite.adapter.arguments import rank_in
from hvdlite.protocols import Array
from hvdlite_tf.callbacks.base import Callback, list_with, ranks_of, refuse_together
from hvdlite_tf.variables import replaced


class Counts(NamedTuple):
    """What the metrics of a model have counted since their reset.

    Attributes:
        values: The values of the variables of metrics that count sums.
        results: The results that these metrics give for them, by the names of the logs.
    """

    values: list[Array]
    results: dict[str, Any]

    @classmethod
    def of(cls, model: Any) -> Counts:
        """Read the metrics of a model. They are empty under a strategy, whose metrics are those of all ranks already."""
        if getattr(getattr(model, "distribute_strategy", None), "hvdlite_combines_gradients", False):
            return cls([], {})
        results = _results_of(model)  # empty on a rank without data, which has not built them
        return cls([np.array(each.numpy()) for each in _counting(model)] if results else [], results)


class MetricAverageCallback(Callback):
    """Replaces the metrics of each epoch by those of all ranks' data, for the callbacks after it and for the history.

    The metrics of Keras, and classes that are made of them, count sums: of values and weights, of right answers, of confusions.
    The ranks' counts are added up, and the metric gives its result for the sum, as it would in one process. All other logs (of
    a direct subclass of `Metric`, or a number that a `train_step` computes) are averaged over the ranks, each weighted by the
    number of its samples; if the model does not update Keras' loss metric, all ranks have the same weight. Training data and
    validation data count apart. A log that only some ranks have is averaged over these.

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
        self._counts: dict[str, Counts] = {}

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
        self._samples, self._counts = {}, {}

    def on_test_begin(self, logs: Any = None) -> None:
        """Note what the metrics have counted in training, because Keras resets them after this."""
        self._note("")

    def on_test_end(self, logs: Any = None) -> None:
        """Note what the metrics have counted in the validation."""
        self._note("val_")

    def _note(self, prefix: str) -> None:
        self._samples[prefix] = _samples_of(self.model)
        self._counts[prefix] = Counts.of(self.model)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Replace this rank's metrics by those of all ranks.

        Args:
            epoch: The number of the epoch.
            logs: The metrics, numbers or arrays by name, which are changed in place.
        """
        if "" not in self._counts:
            self._note("")
        if logs is not None:
            averages = average(logs, self._samples, self._process_set)
            logs.update(averages | over_all_counts(self.model, logs, self._counts, self._process_set))


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


def over_all_counts(
    model: Any, logs: Mapping[str, Any], own: Mapping[str, Counts], process_set: ProcessSet | None
) -> dict[str, Any]:
    """Return the results of metrics for what all ranks have counted. Every rank calls this, and all get the same results.

    Args:
        model: The model.
        logs: This rank's logs.
        own: What this rank has counted: "val_" in the validation, "" in the training.
        process_set: The ranks that take part; None means all ranks.

    Returns:
        The logs that are results of metrics on every rank that has them, by their names.
    """
    found: dict[str, Any] = {}
    for prefix in ("", "val_"):
        counts = own.get(prefix, Counts([], {}))
        # A log of the same name may be something else: then it is not what the metric says.
        names = {name for name, result in counts.results.items() if _is_same(logs.get(prefix + name), result)}
        others = {name.removeprefix(prefix) for name in logs if name.startswith(prefix)} - names
        everybody = hvdlite.allgather_object((counts.values, names, others), process_set=process_set)
        told = [values for values, *_ in everybody if values]
        shapes = {tuple(value.shape for value in values) for values in told}
        if len(shapes) != 1:  # nobody counts, or the ranks have different metrics
            continue
        first = next(rank for rank, (values, *_) in enumerate(everybody) if values)
        results: dict[str, Any] = {}
        if rank_in(process_set) == first:
            results = _results_for(model, [sum(each) for each in zip(*told, strict=True)])
        alike = set().union(*(names for _, names, _ in everybody)) - set().union(*(rest for *_, rest in everybody))
        shared = hvdlite.broadcast_object(results, ranks_of(process_set)[first], process_set=process_set)
        found |= {prefix + name: value for name, value in shared.items() if name in alike}
    return found


def _is_same(logged: Any, result: Any) -> bool:
    return logged is not None and np.shape(logged) == np.shape(result) and np.allclose(logged, result, equal_nan=True)


def _metrics_in(model: Any) -> list[Any]:
    """Return the metrics of a model; those of `compile` one by one, which Keras 3 has in one object."""
    return [one for each in model.metrics for one in (getattr(each, "metrics", None) or [each])]


def _counts_sums(metric: Any) -> bool:
    """Return whether the variables of a metric are sums over samples: whether it is of Keras, or made of one that is."""
    return any(
        kind.__module__.startswith(("keras.src.metrics.", "tf_keras.src.metrics.")) and kind.__name__ != "Metric"
        for kind in type(metric).__mro__
    )


def _counting(model: Any) -> list[Any]:
    return [variable for metric in _metrics_in(model) if _counts_sums(metric) for variable in metric.variables]


_UNKNOWN = object()


def _results_of(model: Any) -> dict[str, Any]:
    """Return the results of the metrics that count sums, by the names of the logs."""
    if not hasattr(model, "get_metrics_result"):  # the program's own, not Keras'
        return {}
    others = [metric for metric in _metrics_in(model) if not _counts_sums(metric)]
    with contextlib.ExitStack() as stack:
        for metric in others:  # they may be slow, or not built
            stack.enter_context(replaced(metric, "result", lambda: _UNKNOWN))
        try:
            results = model.get_metrics_result()
        except ValueError:  # they are not built
            return {}
    known = {name: value for name, value in results.items() if value is not _UNKNOWN}
    return {name: np.asarray(keras.ops.convert_to_numpy(value)) for name, value in known.items()}


def _results_for(model: Any, values: Sequence[Any]) -> dict[str, Any]:
    """Return the results of metrics for other values of their variables."""
    variables = _counting(model)
    before = [np.array(each.numpy()) for each in variables]
    for variable, value in zip(variables, values, strict=True):
        variable.assign(value)
    try:
        results = _results_of(model)
    finally:
        for variable, value in zip(variables, before, strict=True):
            variable.assign(value)
    return {name: float(value) if value.ndim == 0 else value for name, value in results.items()}


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
