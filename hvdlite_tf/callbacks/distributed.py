"""`Distributed`: one callback with all that most programs need on several ranks."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

import keras

import hvdlite
from hvdlite import ProcessSet
from hvdlite.adapter.identity import check_rates
from hvdlite.errors import MismatchError
from hvdlite_tf.callbacks.base import Callback, list_with, ranks_of, refuse_together
from hvdlite_tf.callbacks.checks import problem_of, problem_of_backups, refuse_servers
from hvdlite_tf.callbacks.elements import SameElementsCallback
from hvdlite_tf.callbacks.metrics import MetricAverageCallback
from hvdlite_tf.callbacks.start import BroadcastGlobalVariablesCallback
from hvdlite_tf.callbacks.uneven import UnevenDataCallback
from hvdlite_tf.gradients.optimizer_parts import rates_of, whole_state_in


class Distributed(Callback):
    """All that `fit` needs on several ranks, in one callback. It is the first callback in the list of every rank::

        model.fit(data, callbacks=[hvd.callbacks.Distributed(checkpoint="model.keras"), EarlyStopping()])

    - Every rank starts with the root's weights and optimizer state (`BroadcastGlobalVariablesCallback`).
    - The callbacks after it and the history see the metrics of all ranks' data (`MetricAverageCallback`).
    - The ranks may have different numbers of batches, also 0 (`UnevenDataCallback`). Ranks that make steps of their own
      (``local_steps=``) bring their parameters together at the end of each epoch, before validation.
    - If a callback sets ``model.stop_training`` on one rank, all ranks stop at the end of the epoch.
    - Only the root shows Keras' progress bar. Other callbacks may still print on each rank.
    - Only the root saves the model after each epoch, if `checkpoint` is given.

    Args:
        root_rank: The rank in the job of the root, which gives the weights, shows the progress bar and saves the model; also
            with a process set.
        checkpoint: The file in which the root saves the model after each epoch, such as ``"model.keras"``. The name may contain
            ``{epoch}`` and names of metrics. None means that no file is saved.
        local_variables: Variables that are not broadcast.
        process_set: The ranks that train together; None means all ranks.

    Raises:
        NotInitializedError: `init` has not been called.

    Examples:
        >>> def trained():
        ...     layer = keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")
        ...     model = keras.Sequential([keras.Input((1,)), layer])
        ...     model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse", run_eagerly=True)
        ...     x = np.full((1, 1), 1.0 + hvd.rank())
        ...     history = model.fit(x, 2 * x, callbacks=[hvd.callbacks.Distributed()], verbose=0)
        ...     return history.history["loss"], round(layer.kernel.numpy().item(), 6)
        >>> on_ranks(2, trained)  # the losses of the ranks are 4 and 16, their gradients are -4 and -16
        [([10.0], 1.0), ([10.0], 1.0)]
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
        self._callbacks: list[Any] = []
        local = list(local_variables or ())
        self._on_all: list[Any] = [
            BroadcastGlobalVariablesCallback(root_rank, local_variables=local, process_set=process_set),
            SameElementsCallback(process_set=process_set),
            UnevenDataCallback(local_variables=local, process_set=process_set),
            MetricAverageCallback(process_set=process_set),
        ]
        # Every rank makes it, so that every rank checks the path.
        self._on_root = [] if checkpoint is None else [keras.callbacks.ModelCheckpoint(checkpoint)]

    @property
    def _is_root(self) -> bool:
        return hvdlite.rank() == self._root_rank

    @property
    def _parts(self) -> list[Any]:
        return self._on_all + (self._on_root if self._is_root else [])

    def set_model(self, model: Any) -> None:
        """Take the model, and check the list of callbacks.

        Raises:
            ArgumentError: The optimizer of the model trains with a parameter server.
        """
        refuse_servers(model, self)
        super().set_model(model)
        callbacks = list_with(self)
        self._callbacks = list(callbacks or ())
        if callbacks is not None:
            self._problem = (
                f"hvd.callbacks.Distributed comes after {type(callbacks[0]).__name__} in the list of callbacks: put it first, "
                "so that the others see the metrics of all ranks."
                if callbacks[0] is not self
                else ""
            )
            if not any(isinstance(each, AgreementCallback) for each in callbacks):  # a program may reuse a CallbackList
                callbacks.append(AgreementCallback(self._process_set))  # Keras' loop over the list reaches it too
        for part in self._parts:
            part.set_model(model)

    def set_params(self, params: dict[str, Any]) -> None:
        """Take the parameters of `fit`, and silence the progress bar, which gets the same dict after this callback."""
        if params and not self._is_root:
            params["verbose"] = 0
        super().set_params(params)
        for part in self._parts:
            part.set_params(params)

    def on_train_begin(self, logs: Any = None) -> None:
        """Check the callbacks, the optimizer and the model, and give all ranks the same start.

        Raises:
            ArgumentError: On some rank this callback is not the first in the list, or the optimizer is not a distributed one of
                the same process set, or the model is not built; or ranks make backups in one folder. All ranks raise it.
            MismatchError: The ranks have different models. All ranks raise it.
        """
        backups = problem_of_backups(self._callbacks, self._process_set)
        refuse_together(self._problem or problem_of(self.model, self._process_set) or backups, self._process_set)
        for part in self._parts:
            part.on_train_begin(logs)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Tell the parts that an epoch begins."""
        for part in self._parts:
            part.on_epoch_begin(epoch, logs)

    def on_test_begin(self, logs: Any = None) -> None:
        """Tell the parts that a validation begins."""
        for part in self._parts:
            part.on_test_begin(logs)

    def on_test_end(self, logs: Any = None) -> None:
        """Tell the parts that a validation is over."""
        for part in self._parts:
            part.on_test_end(logs)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Tell the parts that an epoch is over.

        Args:
            epoch: The number of the epoch.
            logs: This rank's metrics, which are replaced by the metrics of all ranks' data.
        """
        for part in self._on_all:
            part.on_epoch_end(epoch, logs)
        if self._on_root:
            with whole_state_in(self.model):
                for part in self._on_root if self._is_root else ():
                    part.on_epoch_end(epoch, logs)

    def on_train_end(self, logs: Any = None) -> None:
        """Tell the parts that the training is over."""
        for part in self._parts:
            part.on_train_end(logs)


class AgreementCallback(Callback):
    """Stops all ranks at the end of an epoch if a callback of one rank wants to stop. It is the last in every rank's list.

    Args:
        process_set: The ranks that take part; None means all ranks.
    """

    def __init__(self, process_set: ProcessSet | None) -> None:
        super().__init__()
        self._process_set = process_set

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Compare the ranks, and stop on this rank if any rank wants to stop.

        Raises:
            MismatchError: The ranks' learning rates differ, because a callback changed them on some ranks only; or the numbers
                of their epochs differ. All ranks raise it.
        """
        rates = rates_of(getattr(self.model, "optimizer", None))
        own = bool(self.model.stop_training), rates, (epoch, (self.params or {}).get("epochs"))
        told = dict(
            zip(ranks_of(self._process_set), hvdlite.allgather_object(own, process_set=self._process_set), strict=True)
        )
        if len({epochs for _, _, epochs in told.values()}) > 1:
            where = ", ".join(f"{now + 1} of {end} on rank {rank}" for rank, (_, _, (now, end)) in told.items())
            raise MismatchError(
                f"the ranks are in different epochs, or would train for different numbers of them: {where}. Call fit() with "
                "the same epochs and initial_epoch on all ranks; what one rank restores from a file it has to tell the rest."
            )
        check_rates(f"after epoch {epoch + 1}", {rank: rates for rank, (_, rates, _) in told.items()})
        if any(stop for stop, _, _ in told.values()):
            self.model.stop_training = True
