"""`Pipeline`: a Keras model in stages on several ranks, trained by `fit`."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import keras
import numpy as np
import tensorflow as tf

import hvdlite
from hvdlite.adapter.arguments import Everybody, rank_in, size_of
from hvdlite.adapter.pipeline.bubble import Bubble
from hvdlite.adapter.pipeline.relay import Relay
from hvdlite.adapter.pipeline.schedules import one_forward_one_backward
from hvdlite.adapter.pipeline.stages import StageRanks
from hvdlite.checks import check_count
from hvdlite.errors import ArgumentError
from hvdlite.ranks.process_set import ProcessSet
from hvdlite_tf.pipeline.batch import cut, length_of
from hvdlite_tf.pipeline.checks import check_optimizer, own_stage
from hvdlite_tf.pipeline.joint import join_stages
from hvdlite_tf.pipeline.losses import Shares
from hvdlite_tf.pipeline.stage import KerasStagePasses
from hvdlite_tf.pipeline.values import EagerTensorCodec
from hvdlite_tf.split import note


class Pipeline(keras.Model):  # type: ignore[misc]
    """A Keras model whose stages are on different ranks. Micro-batches go through the stages one after the other, and back.

    Every rank of the process set makes the same pipeline, and keeps its own stage. All ranks call `fit`, `evaluate` and
    `predict` with the same data. The gradients are those of the whole batch, and the metrics are the same on all ranks::

        stages = [lambda: keras.Sequential([keras.Input((8, 8, 1)), ...]), lambda: keras.Sequential([keras.Input(...), ...])]
        model = hvd.Pipeline(stages, microbatches=8, process_set=grid["pp"])
        model.compile(hvd.DistributedOptimizer(keras.optimizers.Adam(), process_set=grid["dp"]), loss="mse")
        model.fit(x, y, batch_size=64, verbose=2 if hvd.rank() == 0 else 0)

    The passes of a stage are compiled; what is between them runs eagerly. The schedule is 1F1B (PipeDream-Flush,
    arXiv:2006.09503). A layer with statistics of the batch, such as BatchNormalization, sees micro-batches.

    Args:
        stages: One for each rank, in order: a built Keras model or layer, or a function that makes it, so that each rank makes
            its own only. Make the weights equal on ranks of equal stages: ``keras.utils.set_random_seed``.
        microbatches: How many parts of a batch go through the stages one after the other; 1 means that the stages take
            turns.
        process_set: The ranks of the pipeline. The ascending ranks have the stages in order.

    Attributes:
        stage: The stage of this rank.

    Raises:
        ArgumentError: A stage is missing, is not built, or has no weights; or `microbatches` is below 1. Raised on all ranks.

    Examples:
        >>> def trained():
        ...     layers = [keras.layers.Dense(1, use_bias=False, kernel_initializer="ones") for stage in range(2)]
        ...     stages = [keras.Sequential([keras.Input((1,)), layer]) for layer in layers]
        ...     model = hvd.Pipeline(stages, microbatches=2)
        ...     model.compile(keras.optimizers.SGD(0.25), loss="mse")
        ...     history = model.fit(np.ones((4, 1)), np.zeros((4, 1)), batch_size=4, epochs=2, verbose=0)
        ...     return history.history["loss"]
        >>> on_ranks(2, trained)
        [[1.0, 0.0625], [1.0, 0.0625]]
    """

    def __init__(
        self,
        stages: Sequence[keras.Model | Callable[[], keras.Model]],
        microbatches: int = 4,
        process_set: ProcessSet = Everybody,
    ) -> None:
        super().__init__()
        check_count("microbatches", microbatches)
        place, places = rank_in(process_set), size_of(process_set)
        self.stage, first = own_stage(stages, place, places, process_set)
        self._split = StageRanks("Pipeline", process_set)
        note(self._split, self.stage.weights, first)
        self._place, self._places, self._microbatches, self._process_set = place, places, microbatches, process_set
        self._bubble = Bubble()
        self._relay = Relay(process_set, place, places, one_forward_one_backward, 1, EagerTensorCodec())
        self._passes = KerasStagePasses(self.stage, self._bubble, place, places)
        self._shares: Shares | None = None
        self._counts_here = self._is_checked = False
        self.built = True

    @property
    def process_set(self) -> ProcessSet:
        """The ranks of the pipeline."""
        return self._process_set

    @property
    def losses(self) -> list[Any]:
        """Empty: each stage counts its regularization losses itself."""
        return []

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """See `keras.Model.compile`. The passes of the stage are compiled in any case; ``jit_compile=True`` is refused."""
        if kwargs.get("jit_compile") is True or kwargs.get("run_eagerly") is False:
            raise ArgumentError(
                "Pipeline.compile: leave out jit_compile and run_eagerly: messages between ranks run eagerly."
            )
        kwargs |= {"run_eagerly": True, "jit_compile": False}
        super().compile(*args, **kwargs)
        self._shares, self._is_checked = None, False

    # Keras calls these for each batch

    def train_step(self, data: Any) -> dict[str, Any]:
        """Train on one batch, and return the metrics so far. All ranks of the pipeline are called with the same batch."""
        begin = time.perf_counter()
        count = self._run(data, trains=True)
        self._bubble.total += time.perf_counter() - begin
        if count is not None and getattr(getattr(self.optimizer, "_hvdlite", None), "weight", None) is not None:
            self.optimizer.set_batch_weight(count)  # so that pipelines side by side count alike
        error = None
        try:
            self.optimizer.apply(self._passes.gradients, self.trainable_variables)
        except Exception as failure:
            error = failure
        self._relay.settle(error, [], "The optimizers of other ranks have made their steps.")
        return self.get_metrics_result()

    def test_step(self, data: Any) -> dict[str, Any]:
        """Evaluate one batch, and return the metrics so far."""
        self._run(data, trains=False)
        return self.get_metrics_result()

    def _run(self, data: Any, trains: bool) -> float | None:
        """Make the passes of a batch, and count its loss and metrics. If a rank fails, all raise.

        Returns:
            What the loss of the batch is a mean over, if that is not its samples.
        """
        parts: list[Any] = []
        error, counted = None, None
        try:
            x, y, weights = keras.utils.unpack_x_y_sample_weight(data)
            if trains:
                if not self._is_checked:
                    check_optimizer(self.optimizer)
                    self._is_checked = True
                join_stages(self.optimizer, self._split)
            parts = cut((x, y, weights), self._microbatches)
            shares = self._shares = self._shares or Shares(self, self._microbatches)
            rows, whole = length_of(x), shares.count(y, weights, length_of(x))
            counted = whole if shares.is_counted else None

            def loss(number: int, output: Any) -> tuple[Any, float]:
                return self._loss_of(parts[number], output, shares, whole, trains)

            scale = float(self.optimizer.scale_loss(1.0)) if trains else 1.0
            samples = [length_of(part[0]) / rows for part in parts]
            self._passes.begin([part[0] for part in parts], samples, loss, trains, scale)
        except Exception as failure:
            error = failure
        error = self._relay.run({self._place: self._passes}, len(parts) or 1, trains, error)
        self._relay.settle(error, [])
        if self._passes.is_last:
            self._loss_tracker.update_state(self._passes.total, sample_weight=rows)
        return counted

    def _loss_of(self, part: Any, output: Any, shares: Shares, whole: float, trains: bool) -> tuple[Any, float]:
        """Return the loss of a micro-batch and its share in the batch's, and count its metrics. The last stage calls this."""
        x, y, weights = part

        def loss(y: Any, output: Any, weights: Any) -> Any:
            return self.compute_loss(x=x, y=y, y_pred=output, sample_weight=weights, training=trains)

        value = loss(y, output, weights)
        shares.look(loss, y, output, weights)
        self._counts_here = True
        try:
            self.compute_metrics(x, y, output, weights)
        finally:
            self._counts_here = False
        return value, 1.0 if shares.is_sum else shares.count(y, weights, length_of(x)) / whole if whole else 0.0

    def get_metrics_result(self) -> dict[str, Any]:
        """Return the metrics that the rank of the last stage has counted. All ranks of the pipeline call this."""
        own = super().get_metrics_result() if self._passes.is_last or self._counts_here else {}
        if self._counts_here or self._places == 1:
            return own
        own = {name: keras.tree.map_structure(np.asarray, value) for name, value in own.items()}
        return hvdlite.broadcast_object(own, self._places - 1, process_set=self._process_set)

    def predict_step(self, data: Any) -> Any:
        """Return the output for a batch, on all ranks of the pipeline."""
        x, _, _ = keras.utils.unpack_x_y_sample_weight(data)
        return self.call(x)

    def call(self, x: Any, training: bool = False) -> Any:
        """Return the output for a batch, on all ranks of the pipeline, without gradients. `fit` trains.

        Raises:
            ArgumentError: ``training=True``.
        """
        if training:
            raise ArgumentError(
                "a pipeline is trained by fit() or train_on_batch(): gradients do not go through its call."
            )
        parts: list[Any] = []
        error, whole = None, None
        try:
            parts = cut(x, self._microbatches)
            self._passes.begin(parts, [0.0] * len(parts), None, False)
        except Exception as failure:
            error = failure
        error = self._relay.run({self._place: self._passes}, len(parts) or 1, False, error)
        if self._passes.is_last and error is None:
            try:
                outputs = self._passes.outputs
                whole = keras.tree.map_structure(
                    lambda *each: np.concatenate([part.numpy() for part in each]), *outputs
                )
            except Exception as failure:
                error = failure
        self._relay.settle(error, [])
        found = hvdlite.broadcast_object(whole, self._places - 1, process_set=self._process_set)
        return keras.tree.map_structure(tf.convert_to_tensor, found)

    # The weights

    def full_weights(self) -> list[list[np.ndarray]]:
        """Return the weights of all stages, on every rank of the pipeline: for each stage what its `set_weights` takes."""
        return hvdlite.allgather_object(self.stage.get_weights(), process_set=self._process_set)

    def save(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raise ArgumentError: each rank has a stage only."""
        raise ArgumentError(
            "a pipeline is not saved by Keras, for each rank has one stage only: call hvd.checkpoint.save(folder, "
            "model=pipeline) on all ranks, which one process can load. Or pipeline.full_weights() returns the weights of all "
            "stages on every rank: put them into a whole model on one rank, and save that."
        )

    save_weights = export = save

    def report(self) -> str:
        """Return the share of the bubble in the steps so far, and the theoretical one. All ranks of the pipeline call this."""
        return self._bubble.report(self._process_set, self._places, self._microbatches, 1, "1f1b")
