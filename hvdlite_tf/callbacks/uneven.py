"""A callback that lets ranks with different numbers of batches end each epoch together."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import hvdlite
from hvdlite import ProcessSet
from hvdlite.adapter.gradient_memory import Registry
from hvdlite.adapter.identity import agree, check_rates
from hvdlite.api import world
from hvdlite_tf.callbacks.base import Callback, ranks_of
from hvdlite_tf.callbacks.checks import refuse_servers
from hvdlite_tf.callbacks.start import build_alike, state_of
from hvdlite_tf.gradients.optimizer_parts import (
    identities_in,
    local_steps_in,
    local_steps_of,
    optimizers_in,
    passes_of,
    rates_of,
    summed_passes_of,
)
from hvdlite_tf.gradients.own_variables import has_own_sums, own_of, settle, without
from hvdlite_tf.variables import plain_variable


class UnevenDataCallback(Callback):
    """Lets a rank without further batches join (`hvdlite.join`) until the epoch is over on all ranks.

    Meanwhile the rank takes part in the steps of the others, and the gradients of these steps are averages over the ranks that
    have data. Before validation and before the next epoch, every rank gets the weights and the optimizer state of the rank that
    went furthest. This includes variables that steps change without gradients, such as the moving statistics of
    BatchNormalization, so that all ranks validate and save the same model. With ``local_steps=`` the ranks bring their
    parameters together before that.

    Args:
        local_variables: Variables that are not broadcast. See `BroadcastGlobalVariablesCallback`.
        process_set: The ranks that train together; None means all ranks.

    Examples:
        >>> def trained():
        ...     layer = keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")
        ...     model = keras.Sequential([keras.Input((1,)), layer])
        ...     model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.5)), "mse", run_eagerly=True)
        ...     y = np.full((1 + hvd.rank(), 1), hvd.rank())  # rank 1 has one batch more
        ...     callbacks = [hvd.callbacks.UnevenDataCallback()]
        ...     model.fit(np.ones_like(y), y, batch_size=1, callbacks=callbacks, verbose=0)
        ...     return layer.kernel.numpy().item()
        >>> on_ranks(2, trained)  # half of the way to 1 by both ranks, and the rest by rank 1
        [1.0, 1.0]
    """

    def __init__(self, *, local_variables: Iterable[Any] | None = None, process_set: ProcessSet | None = None) -> None:
        super().__init__()
        self._process_set = process_set
        self._local = [plain_variable(variable) for variable in local_variables or ()]
        self._training = False
        self._steps = self._epoch = 0

    def on_train_begin(self, logs: Any = None) -> None:
        """Make what a rank without data needs to take part: the registry of gradients, and equal numbers of the optimizers.

        Raises:
            ArgumentError: The optimizer of the model trains with a parameter server.
        """
        refuse_servers(self.model, self)
        here = world("fit()")
        registry = Registry.of(here, self._process_set)
        agree(here.group(self._process_set), identities_in(self.model), self._process_set)
        for identity in identities_in(self.model):
            if identity.optimizer is not None and identity.optimizer.hvdlite_rounds() is not None:
                registry.add(identity)  # no exchange of gradients would add it

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Note the number of steps at the beginning of the epoch."""
        self._training, self._epoch = True, epoch
        # Keras may count one step too many if it does not know the number of batches.
        self._steps = self._count()

    def on_test_begin(self, logs: Any = None) -> None:
        """Join, if this is the validation of an epoch, which has no more batches then.

        Raises:
            MismatchError: The ranks' learning rates differ. All ranks raise it.
        """
        self._wait_for_all()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Join, unless the epoch's validation has done so.

        Raises:
            MismatchError: The ranks' learning rates differ. All ranks raise it.
        """
        self._wait_for_all()

    def _wait_for_all(self) -> None:
        """Join until all ranks have joined, and give all ranks the same state.

        Raises:
            MismatchError: Ranks with equal numbers of steps have different learning rates. All ranks raise it.
        """
        if not self._training:
            return
        self._training = False
        # These are read before `join`, which gives every rank the values of the rank that went furthest.
        optimizer = getattr(self.model, "optimizer", None)
        for steps in local_steps_in(self.model):
            steps.average()
        mine = self._count() - self._steps, rates_of(optimizer)
        last = hvdlite.join(self._process_set)
        told = hvdlite.allgather_object(mine, process_set=self._process_set)
        by_rank = dict(zip(ranks_of(self._process_set), told, strict=True))
        for steps in {steps for steps, _ in told}:  # a schedule by batches has another rate after fewer batches
            rates = {rank: rates for rank, (made, rates) in by_rank.items() if made == steps}
            check_rates(f"after epoch {self._epoch + 1}", rates)
        missed = len({steps for steps, _ in told}) > 1 or any(world("join()").group(self._process_set).missed)
        for passes in filter(None, map(summed_passes_of, optimizers_in(self.model))):
            passes.settle()
        if missed:
            build_alike(self.model, self._process_set)
            self._settle(last)
            shared = state_of(self.model)
        else:
            own = [variable for each in optimizers_in(self.model) for variable in own_of(each)]
            shared = [plain_variable(each) for each in without(self.model.non_trainable_weights, own)]
        if shared := without(shared, self._local):
            hvdlite.broadcast(shared, last, inplace=True, process_set=self._process_set)

    def _settle(self, last: int) -> None:
        """Let the gradients that ranks have added up count, where `join` could not: some rank had no variables for them."""
        for optimizer in filter(has_own_sums, optimizers_in(self.model)):
            passes = hvdlite.allgather_object(passes_of(optimizer), process_set=self._process_set)
            if len(set(passes)) > 1:
                settle(optimizer, passes, last)

    def _count(self) -> int:
        """Return the number of steps of this rank so far."""
        optimizer = getattr(self.model, "optimizer", None)
        steps = local_steps_of(optimizer)
        return steps.rounds.made if steps is not None else 0 if optimizer is None else passes_of(optimizer)
