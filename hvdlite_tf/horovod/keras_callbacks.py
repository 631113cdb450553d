"""What ``import horovod.keras.callbacks`` gives under `hvdlite.compat` in the place of our own."""

from __future__ import annotations

from typing import Any

import hvdlite
from hvdlite_tf.callbacks import start

__all__ = ["BroadcastGlobalVariablesCallback"]


class BroadcastGlobalVariablesCallback(start.BroadcastGlobalVariablesCallback):
    """Our own; for a model that has no weights yet on some rank, after the first batch, when all have: as Horovod does it.

    The first step of these models is then made with the gradients of models that differ.
    """

    _waits = False

    def on_train_begin(self, logs: Any = None) -> None:
        """Broadcast, or wait for the first batch.

        Raises:
            MismatchError: The ranks have different models. Raised on all of them.
        """
        built = bool(self.model.built)
        self._waits = not all(hvdlite.allgather_object(built, process_set=self._process_set))
        if not self._waits:
            super().on_train_begin(logs)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Broadcast, if that has not been done.

        Raises:
            MismatchError: The ranks have different models. Raised on all of them.
        """
        if self._waits:
            self._waits = False
            super().on_train_begin(logs)
