"""Ranks with different numbers of batches end each epoch together."""

from __future__ import annotations

from typing import Any

import hvdlite
from hvdlite import ProcessSet
from hvdlite_tf.callbacks.base import Callback
from hvdlite_tf.callbacks.optimizers import exchange_zeros, innermost
from hvdlite_tf.callbacks.start import state_of


class UnevenDataCallback(Callback):
    """Lets a rank that has run out of batches stand in, in the steps of the others, until the epoch is over for all.

    The gradients of these steps are averages over the ranks that have data. Before validation, and before the next epoch, every
    rank has the weights and the optimizer state of the rank that was the last.

    Args:
        process_set: The ranks that train together; all by default.
    """

    def __init__(self, *, process_set: ProcessSet | None = None) -> None:
        super().__init__()
        self._process_set = process_set
        self._training = False
        self._steps = 0

    def on_train_begin(self, logs: Any = None) -> None:
        """Have memory for the gradients: ranks that have no data, and have joined, cannot help to make it.

        Raises:
            MismatchError: The ranks have different variables. Raised on all of them.
        """
        optimizer = getattr(self.model, "optimizer", None)
        if optimizer is not None:
            exchange_zeros(optimizer, self.model.trainable_variables)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """There are batches from now on."""
        self._training = True
        self._steps = self._count()

    def on_test_begin(self, logs: Any = None) -> None:
        """The epoch has no more batches, if this is its validation."""
        self._wait_for_all()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """The epoch has no more batches."""
        self._wait_for_all()

    def _wait_for_all(self) -> None:
        if not self._training:
            return
        self._training = False
        last = hvdlite.join(self._process_set)
        steps = hvdlite.allgather_object(self._count() - self._steps, process_set=self._process_set)
        if len(set(steps)) > 1:
            hvdlite.broadcast(state_of(self.model), last, inplace=True, process_set=self._process_set)

    def _count(self) -> int:
        """The steps of this rank so far."""
        optimizer = getattr(self.model, "optimizer", None)
        return 0 if optimizer is None else int(innermost(optimizer).iterations.numpy())
