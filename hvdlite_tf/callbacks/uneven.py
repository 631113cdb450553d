"""Ranks with different numbers of batches end each epoch together."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import hvdlite
from hvdlite import ProcessSet
from hvdlite.api import world
from hvdlite_tf.callbacks.agreement import check_rates
from hvdlite_tf.callbacks.base import Callback, ranks_of
from hvdlite_tf.callbacks.optimizers import exchange_zeros, innermost, local_state_of, rates_of
from hvdlite_tf.callbacks.start import build_alike, state_of
from hvdlite_tf.tensor import plain_variable


class UnevenDataCallback(Callback):
    """Lets a rank that has run out of batches stand in, in the steps of the others, until the epoch is over for all.

    The gradients of these steps are averages over the ranks that have data. Before validation, and before the next epoch, every
    rank has the weights and the optimizer state of the rank that was the last: also what steps change without gradients, such
    as the moving statistics of BatchNormalization, so that all ranks validate and save the same model.

    Args:
        local_variables: Variables that every rank keeps as they are, as for `BroadcastGlobalVariablesCallback`.
        process_set: The ranks that train together; all by default.
    """

    def __init__(self, *, local_variables: Iterable[Any] | None = None, process_set: ProcessSet | None = None) -> None:
        super().__init__()
        self._process_set = process_set
        self._local = [plain_variable(variable) for variable in local_variables or ()]
        self._training = False
        self._steps = self._epoch = 0

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
        self._training, self._epoch = True, epoch
        self._steps = self._count()

    def on_test_begin(self, logs: Any = None) -> None:
        """The epoch has no more batches, if this is its validation.

        Raises:
            MismatchError: The learning rates differ. Raised on all ranks.
        """
        self._wait_for_all()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """The epoch has no more batches.

        Raises:
            MismatchError: The learning rates differ. Raised on all ranks.
        """
        self._wait_for_all()

    def _wait_for_all(self) -> None:
        """Stand in until all have arrived, and have one state from then on.

        Raises:
            MismatchError: Ranks that made equally many steps have different learning rates. Raised on all of them.
        """
        if not self._training:
            return
        self._training = False
        # Looked at before `join`, which gives every rank the values of the last one.
        mine = self._count() - self._steps, rates_of(getattr(self.model, "optimizer", None))
        last = hvdlite.join(self._process_set)
        told = hvdlite.allgather_object(mine, process_set=self._process_set)
        by_rank = dict(zip(ranks_of(self._process_set), told, strict=True))
        for steps in {steps for steps, _ in told}:  # a schedule by batches is not as far where there were fewer
            rates = {rank: rates for rank, (made, rates) in by_rank.items() if made == steps}
            check_rates(f"after epoch {self._epoch + 1}", rates)
        missed = len({steps for steps, _ in told}) > 1 or any(world("join()").missed)
        if missed:
            build_alike(self.model, self._process_set)
        found = state_of(self.model) if missed else map(plain_variable, self.model.non_trainable_weights)
        local = {id(variable) for variable in [*self._local, *local_state_of(self.model)]}
        shared = [variable for variable in found if id(variable) not in local]
        if shared:
            hvdlite.broadcast(shared, last, inplace=True, process_set=self._process_set)

    def _count(self) -> int:
        """The steps of this rank so far."""
        optimizer = getattr(self.model, "optimizer", None)
        return 0 if optimizer is None else int(innermost(optimizer).iterations.numpy())
