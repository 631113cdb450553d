"""A callback that saves the best model on rank 0."""

from __future__ import annotations

import os
from typing import Any

import keras

import hvdlite
from hvdlite.errors import ArgumentError
from hvdlite_tf.callbacks.base import ForBothKerases
from hvdlite_tf.gradients.optimizer_parts import whole_state_in


class BestModelCheckpoint(ForBothKerases, keras.callbacks.ModelCheckpoint):  # type: ignore[misc]  # mypy does not see Keras
    """Saves the best model so far, on rank 0. Every rank passes it to `fit`, after MetricAverageCallback or Distributed.

    Args:
        monitor: The metric by which models are compared.
        verbose: 1 means that rank 0 prints when it saves.
        save_weights_only: Whether only the weights are saved (``model.save_weights``), and not the whole model.
        mode: "min" or "max": which value of the metric is best; "auto" means that its name decides.
        save_freq: "epoch", or a number of batches.
        filepath: The file, whose name ends with ``.keras`` (or ``.weights.h5`` with `save_weights_only`), and may contain
            ``{epoch}`` and names of metrics. Horovod's class does not have this argument; there and here a program can set
            ``callback.filepath = …`` before `fit`.

    Examples:
        >>> import os, tempfile
        >>> def saved(folder):
        ...     model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
        ...     model.compile(keras.optimizers.SGD(0.0), "mse", run_eagerly=True)
        ...     path = f"{folder}/best-of-rank-{hvd.rank()}.keras"
        ...     callbacks = [hvd.callbacks.BestModelCheckpoint("loss", filepath=path)]
        ...     model.fit(np.ones((1, 1)), np.ones((1, 1)), callbacks=callbacks, verbose=0)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     done = on_ranks(2, saved, folder)
        ...     os.listdir(folder)
        ['best-of-rank-0.keras']
    """

    def __init__(
        self,
        monitor: str = "val_loss",
        verbose: int = 0,
        save_weights_only: bool = False,
        mode: str = "auto",
        save_freq: str | int = "epoch",
        *,
        filepath: str | os.PathLike[str] | None = None,
    ) -> None:
        super().__init__(
            filepath=f"unset{'.weights.h5' if save_weights_only else '.keras'}" if filepath is None else filepath,
            monitor=monitor,
            verbose=verbose,
            save_best_only=True,
            save_weights_only=save_weights_only,
            mode=mode,
            save_freq=save_freq,
        )
        if filepath is None:
            self.filepath = None

    def on_train_begin(self, logs: Any = None) -> None:
        """Check that there is a file.

        Raises:
            ArgumentError: The program has not set a file.
        """
        if self.filepath is None:
            raise ArgumentError(
                'BestModelCheckpoint has no file to save to: pass filepath="best.keras", or set callback.filepath.'
            )
        super().on_train_begin(logs)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Save on rank 0, if it is time and the model is the best."""
        if hvdlite.rank() == 0:
            super().on_train_batch_end(batch, logs)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Save on rank 0, if it is time and the model is the best. With ``shard=True`` all ranks send their state."""
        with whole_state_in(self.model):
            if hvdlite.rank() == 0:
                super().on_epoch_end(epoch, logs)
