"""The usual things at once."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

import keras

import hvdlite
from hvdlite import ProcessSet
from hvdlite_tf.callbacks.agreement import AgreementCallback
from hvdlite_tf.callbacks.base import Callback, list_with, refuse_together
from hvdlite_tf.callbacks.checks import problem_of
from hvdlite_tf.callbacks.elements import SameElementsCallback
from hvdlite_tf.callbacks.metrics import MetricAverageCallback
from hvdlite_tf.callbacks.start import BroadcastGlobalVariablesCallback
from hvdlite_tf.callbacks.uneven import UnevenDataCallback


class Distributed(Callback):
    """What `fit` on several ranks needs, in one callback. The first in the list of every rank::

        model.fit(data, callbacks=[hvd.callbacks.Distributed(checkpoint="model.keras"), EarlyStopping()])

    - Every rank starts with the root's weights and optimizer state (`BroadcastGlobalVariablesCallback`).
    - Metrics are those of all ranks' data, for the callbacks after it and the history (`MetricAverageCallback`).
    - Ranks may have different numbers of batches, none too (`UnevenDataCallback`).
    - A callback that sets ``model.stop_training`` on one rank stops all of them, at the end of the epoch.
    - One progress bar: the root's. What other callbacks print is their own affair.
    - One file: the root saves the model after each epoch.

    Args:
        root_rank: The rank that has the start, the progress bar and the file; its rank in the job, with a process set too.
        checkpoint: Where to save the model after each epoch, such as ``"model.keras"``; it may contain ``{epoch}`` and names
            of metrics. Nowhere if None.
        local_variables: Variables that every rank keeps as they are.
        process_set: The ranks that train together; all by default.

    Raises:
        NotInitializedError: Before `init`.
    """

    def __init__(
        self,
        root_rank: int = 0,
        *,
        checkpoint: str | os.PathLike[str] | None = None,
        local_variables: Iterable[Any] | None = None,
        process_set: ProcessSet | None = None,
    ) -> None:
        super().__init__()
        self._process_set = process_set
        self._root_rank = root_rank
        hvdlite.rank()  # raises before `init`
        self._problem = ""
        local = list(local_variables or ())
        self._on_all: list[Any] = [
            BroadcastGlobalVariablesCallback(root_rank, local_variables=local, process_set=process_set),
            SameElementsCallback(process_set=process_set),
            UnevenDataCallback(local_variables=local, process_set=process_set),
            MetricAverageCallback(process_set=process_set),
        ]
        # On every rank, which checks the path.
        self._on_root = [] if checkpoint is None else [keras.callbacks.ModelCheckpoint(checkpoint)]

    @property
    def _is_root(self) -> bool:
        return hvdlite.rank() == self._root_rank

    @property
    def _parts(self) -> list[Any]:
        return self._on_all + (self._on_root if self._is_root else [])

    def set_model(self, model: Any) -> None:
        """Take the model, and look at the list of callbacks."""
        super().set_model(model)
        callbacks = list_with(self)
        if callbacks is not None:
            self._problem = (
                f"hvd.callbacks.Distributed comes after {type(callbacks[0]).__name__} in the list of callbacks: put it first, "
                "so that the others see the metrics of all ranks."
                if callbacks[0] is not self
                else ""
            )
            if not any(isinstance(each, AgreementCallback) for each in callbacks):  # a CallbackList may be used again
                callbacks.append(AgreementCallback(self._process_set))  # Keras goes on to it in this very loop
        for part in self._parts:
            part.set_model(model)

    def set_params(self, params: dict[str, Any]) -> None:
        """Take the parameters of `fit`. Keras' progress bar takes the same dict after us."""
        if params and not self._is_root:
            params["verbose"] = 0
        super().set_params(params)
        for part in self._parts:
            part.set_params(params)

    def on_train_begin(self, logs: Any = None) -> None:
        """Check, and make all ranks start alike.

        Raises:
            ArgumentError: On some rank this is not the first in the list, or the optimizer is not a distributed one (of the
                same process set), or the model is not built. Raised on all of them.
            MismatchError: The ranks have different models. Raised on all of them.
        """
        refuse_together(self._problem or problem_of(self.model, self._process_set), self._process_set)
        for part in self._parts:
            part.on_train_begin(logs)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """An epoch begins."""
        for part in self._parts:
            part.on_epoch_begin(epoch, logs)

    def on_test_begin(self, logs: Any = None) -> None:
        """Validation begins."""
        for part in self._parts:
            part.on_test_begin(logs)

    def on_test_end(self, logs: Any = None) -> None:
        """Validation is over."""
        for part in self._parts:
            part.on_test_end(logs)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """An epoch is over.

        Args:
            epoch: Its number.
            logs: This rank's metrics, changed in place to those of all ranks.
        """
        for part in self._parts:
            part.on_epoch_end(epoch, logs)

    def on_train_end(self, logs: Any = None) -> None:
        """Training is over."""
        for part in self._parts:
            part.on_train_end(logs)
