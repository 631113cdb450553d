"""The names of ``horovod.keras.callbacks`` under `hvdlite.compat` that differ from `hvdlite_tf.callbacks`."""

from __future__ import annotations

from typing import Any

import hvdlite
from hvdlite_tf.callbacks import start

__all__ = ["BroadcastGlobalVariablesCallback"]


class BroadcastGlobalVariablesCallback(start.BroadcastGlobalVariablesCallback):
    """The callback of `hvdlite_tf`, which also takes models that have no weights yet on some rank.

    For such a model it broadcasts after the first batch, as Horovod does. The first step then uses the gradients of models with
    different weights.
    """

    _waits = False

    def on_train_begin(self, logs: Any = None) -> None:
        """Broadcast if the model is built on all ranks; otherwise wait for the first batch.

        Raises:
            MismatchError: The ranks have different models. All ranks raise it.
        """
        built = bool(self.model.built)
        self._waits = not all(hvdlite.allgather_object(built, process_set=self._process_set))
        if not self._waits:
            super().on_train_begin(logs)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Broadcast, unless `on_train_begin` has done so.

        Raises:
            MismatchError: The ranks have different models. All ranks raise it.
        """
        if self._waits:
            self._waits = False
            super().on_train_begin(logs)
