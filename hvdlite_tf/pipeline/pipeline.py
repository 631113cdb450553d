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
from hvdlite.api import world
from hvdlite.checks import check_count
from hvdlite.errors import ArgumentError, ranks_text
from hvdlite.process_set import ProcessSet
from hvdlite_tf.pipeline.checks import check_compiled, own_stage, rows_of
from hvdlite_tf.pipeline.messages import Messages
from hvdlite_tf.pipeline.stage import Stage, one_forward_one_backward


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
        microbatches: How many equal parts of a batch go through the stages one after the other; 1 means that the stages take
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
        self.stage = own_stage(stages, place, places, process_set)
        ranks = list(process_set.members)
        name = f"the pipeline of {ranks_text(ranks)}"
        messages = Messages(world("Pipeline()").communicators.new(ranks, name))
        self._place, self._places, self._microbatches, self._process_set = place, places, microbatches, process_set
        self._bubble = Bubble()
        self._passes = Stage(self.stage, messages, self._bubble, place, places)
        self._counts_here = False
        self.built = True

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

    # Keras calls these for each batch

    def train_step(self, data: Any) -> dict[str, Any]:
        """Train on one batch, and return the metrics so far. All ranks of the pipeline are called with the same batch."""
        x, y, weights = keras.utils.unpack_x_y_sample_weight(data)
        is_sum = check_compiled(self)
        rows_of(x, self._microbatches)
        parts = _cut((x, y, weights), self._microbatches)
        begin = time.perf_counter()
        stage, share = self._passes, is_sum or 1 / self._microbatches
        stage.begin()
        for is_forward, number in one_forward_one_backward(self._place, self._places, self._microbatches):
            if is_forward:
                self._forward(number, parts[number], share)
            else:
                stage.backward(number)
        stage.finish()
        self._bubble.total += time.perf_counter() - begin
        self.optimizer.apply(stage.gradients, self.trainable_variables)
        return self.get_metrics_result()

    def _forward(self, number: int, part: Any, share: float) -> None:
        x, y, weights = part

        def loss(output: Any) -> Any:
            return self.compute_loss(x=x, y=y, y_pred=output, sample_weight=weights, training=True)

        found = self._passes.forward(number, x, loss, share)
        if found is not None:
            self._count(part, *found)

    def test_step(self, data: Any) -> dict[str, Any]:
        """Evaluate one batch, and return the metrics so far."""
        x, y, weights = keras.utils.unpack_x_y_sample_weight(data)
        for part in _cut((x, y, weights), self._microbatches):
            output, extra = self._passes.evaluate(part[0])
            if self._passes.is_last:
                loss = self.compute_loss(x=part[0], y=part[1], y_pred=output, sample_weight=part[2], training=False)
                self._count(part, output, loss + tf.cast(extra, loss.dtype))
        self._passes.finish()
        return self.get_metrics_result()

    def _count(self, part: Any, output: Any, loss: Any) -> None:
        """Update the metrics by a micro-batch, on the rank of the last stage."""
        x, y, weights = part
        self._loss_tracker.update_state(loss, sample_weight=keras.tree.flatten(x)[0].shape[0])
        self._counts_here = True
        try:
            self.compute_metrics(x, y, output, weights)
        finally:
            self._counts_here = False

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
        outputs = [self._passes.evaluate(part)[0] for part in _cut(x, self._microbatches)]
        self._passes.finish()
        whole = None
        if self._passes.is_last:
            whole = keras.tree.map_structure(lambda *parts: np.concatenate([part.numpy() for part in parts]), *outputs)
        found = hvdlite.broadcast_object(whole, self._places - 1, process_set=self._process_set)
        return keras.tree.map_structure(tf.convert_to_tensor, found)

    # The weights

    def full_weights(self) -> list[list[np.ndarray]]:
        """Return the weights of all stages, on every rank of the pipeline: for each stage what its `set_weights` takes."""
        return hvdlite.allgather_object(self.stage.get_weights(), process_set=self._process_set)

    def save(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raise ArgumentError: each rank has a stage only."""
        raise ArgumentError(
            "a pipeline is not saved, for each rank has one stage only. pipeline.full_weights() returns the weights of all "
            "stages on every rank: put them into a whole model on one rank, and save that; or save pipeline.stage on each rank."
        )

    save_weights = export = save

    def report(self) -> str:
        """Return the share of the bubble in the steps so far, and the theoretical one. All ranks of the pipeline call this."""
        return self._bubble.report(self._process_set, self._places, self._microbatches, 1, "1f1b")


def _cut(nested: Any, count: int) -> list[Any]:
    """Return a batch cut along the first axis of its tensors into at most `count` parts of nearly equal size."""
    rows = int(keras.tree.flatten(nested)[0].shape[0])
    count = max(1, min(count, rows))
    bounds = [rows * number // count for number in range(count + 1)]

    def part(number: int) -> Any:
        rows = slice(bounds[number], bounds[number + 1])
        return keras.tree.map_structure(
            lambda tensor: None if tensor is None else tf.convert_to_tensor(tensor[rows]), nested, none_is_leaf=True
        )

    return [part(number) for number in range(count)]
