"""The callbacks of elastic training: they commit the state while `fit` trains, and count its batches and epochs."""

from __future__ import annotations

from typing import Any

from hvdlite.elastic import State
from hvdlite.errors import ArgumentError
from hvdlite_tf.callbacks.base import Callback, list_with


class CommitStateCallback(Callback):
    """Commits the state every few batches, and after each epoch. Every rank passes it to `fit`, anywhere in the list.

    It commits after all other callbacks, so that the state has what they have changed.

    Args:
        state: The state of the training.
        batches_per_commit: How many batches lie between two commits. A commit copies the model to host memory.

    Raises:
        ArgumentError: `batches_per_commit` is less than 1.

    Examples:
        >>> def trained():
        ...     model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
        ...     model.compile(keras.optimizers.SGD(0.1), "mse", run_eagerly=True)
        ...     state = hvd.elastic.KerasState(model)
        ...     model.fit(np.ones((1, 1)), np.ones((1, 1)), callbacks=[hvd.elastic.CommitStateCallback(state)], verbose=0)
        ...     committed = model.get_weights()
        ...     model.set_weights([np.zeros((1, 1)), np.zeros(1)])  # and here something fails
        ...     state.restore()
        ...     return all(np.array_equal(*pair) for pair in zip(model.get_weights(), committed))
        >>> on_ranks(1, trained)
        [True]
    """

    def __init__(self, state: State, batches_per_commit: int = 1) -> None:
        super().__init__()
        if batches_per_commit < 1:
            raise ArgumentError(f"batches_per_commit={batches_per_commit}: expected 1 or more.")
        self.state = state
        self.batches_per_commit = batches_per_commit
        self.batches_remaining = batches_per_commit
        self._has_place = False

    def set_model(self, model: Any) -> None:
        """Take the model, and a place after all other callbacks."""
        super().set_model(model)
        callbacks = list_with(self)
        self._has_place = callbacks is not None
        if callbacks is not None:
            callbacks.append(_Last(self))

    def on_train_begin(self, logs: Any = None) -> None:
        """Begin to count batches."""
        self.batches_remaining = self.batches_per_commit

    def on_batch_end(self, batch: int, logs: Any = None) -> None:
        """Commit, if it is time, in a loop that has no list of callbacks."""
        if not self._has_place:
            self.after_batch()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Commit, in a loop that has no list of callbacks."""
        if not self._has_place:
            self.commit()

    def after_batch(self) -> None:
        """Count a batch, and commit if it is time."""
        self.batches_remaining -= 1
        if self.batches_remaining <= 0:
            self.commit()

    def commit(self) -> None:
        """Commit now.

        Raises:
            HostsUpdatedInterrupt: Hosts have come or left; ``elastic.run`` takes it.
            CommitError: The state could not be committed.
        """
        self.batches_remaining = self.batches_per_commit
        self.state.commit()


class _Last(Callback):
    """The last callback of a list, which commits in the place of another one."""

    def __init__(self, owner: CommitStateCallback) -> None:
        super().__init__()
        self._owner = owner

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._owner.after_batch()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._owner.commit()


class UpdateBatchStateCallback(Callback):
    """Counts in ``state.batch`` how many batches of the epoch have been trained; 0 after an epoch.

    After a restart in the middle of an epoch, `fit` makes the rest of it, if told so: ``steps_per_epoch=steps - state.batch``.
    (Horovod has the number of the last batch there, and counts anew after a restart.)

    Args:
        state: The state of the training, with an attribute ``batch``.

    Examples:
        >>> def counted():
        ...     model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
        ...     model.compile(keras.optimizers.SGD(0.1), "mse", run_eagerly=True)
        ...     state, batches = hvd.elastic.KerasState(model, batch=0), []
        ...     watch = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: batches.append(state.batch))
        ...     callbacks = [hvd.elastic.UpdateBatchStateCallback(state), watch]
        ...     model.fit(np.ones((3, 1)), np.ones((3, 1)), batch_size=1, callbacks=callbacks, verbose=0)
        ...     return batches, state.batch
        >>> on_ranks(1, counted)
        [([1, 2, 3], 0)]
    """

    def __init__(self, state: Any) -> None:
        super().__init__()
        self.state = state
        self._before = 0

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Note how many batches of this epoch were trained before."""
        self._before = self.state.batch

    def on_batch_end(self, batch: int, logs: Any = None) -> None:
        """Count a batch."""
        self.state.batch = self._before + batch + 1

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Begin to count anew."""
        self.state.batch = 0


class UpdateEpochStateCallback(Callback):
    """Counts in ``state.epoch`` how many epochs have been trained, over all calls of `fit`.

    Both ``fit(epochs=all - state.epoch)``, as in Horovod, and ``fit(epochs=all, initial_epoch=state.epoch)`` are right.

    Args:
        state: The state of the training, with an attribute ``epoch``.

    Examples:
        >>> def counted():
        ...     model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
        ...     model.compile(keras.optimizers.SGD(0.1), "mse", run_eagerly=True)
        ...     state = hvd.elastic.KerasState(model, epoch=0)
        ...     callbacks = [hvd.elastic.UpdateEpochStateCallback(state)]
        ...     model.fit(np.ones((1, 1)), np.ones((1, 1)), epochs=2, callbacks=callbacks, verbose=0)
        ...     return state.epoch
        >>> on_ranks(1, counted)
        [2]
    """

    def __init__(self, state: Any) -> None:
        super().__init__()
        self.state = state

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Count an epoch."""
        self.state.epoch += 1
