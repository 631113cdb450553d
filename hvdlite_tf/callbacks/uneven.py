"""A callback that lets ranks with different numbers of batches end each epoch together."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
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
    accumulated,
    identities_in,
    local_state_of,
    local_steps_in,
    local_steps_of,
    passes_of,
    rates_of,
)
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
        self._steps = self._epoch = self._rest = 0

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
        self._steps, self._rest = self._count(), accumulated(getattr(self.model, "optimizer", None))

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
        rest = accumulated(optimizer)
        mine = self._count() - self._steps, rates_of(optimizer), rest not in (0, self._rest)
        last = hvdlite.join(self._process_set)
        told = hvdlite.allgather_object(mine, process_set=self._process_set)
        by_rank = dict(zip(ranks_of(self._process_set), told, strict=True))
        for steps in {steps for steps, *_ in told}:  # a schedule by batches has another rate after fewer batches
            rates = {rank: rates for rank, (made, rates, _) in by_rank.items() if made == steps}
            check_rates(f"after epoch {self._epoch + 1}", rates)
        self._tell_of_rests([rest for *_, rest in told])
        missed = len({steps for steps, *_ in told}) > 1 or any(world("join()").group(self._process_set).missed)
        if missed:
            build_alike(self.model, self._process_set)
        found = state_of(self.model) if missed else map(plain_variable, self.model.non_trainable_weights)
        local = {id(variable) for variable in [*self._local, *local_state_of(self.model)]}
        shared = [variable for variable in found if id(variable) not in local]
        if shared:
            hvdlite.broadcast(shared, last, inplace=True, process_set=self._process_set)

    def _tell_of_rests(self, has_rest: Sequence[bool]) -> None:
        """Warn of accumulated batches of a rank that joined before the update for which they were accumulated."""
        here = world("fit()").group(self._process_set)
        missed = here.missed or [0] * len(has_rest)
        told = zip(ranks_of(self._process_set), has_rest, missed, strict=True)
        lost = [str(rank) for rank, rest, updates in told if rest and updates]
        if lost and here.rank == 0:
            warnings.warn(
                f"hvdlite: rank{'s' * (len(lost) > 1)} {', '.join(lost)} ran out of data between two updates, with "
                "gradient_accumulation_steps: the batches since the last update do not count. Give each rank a number of "
                "batches that is a multiple of it, or the same number to all.",
                RuntimeWarning,
                stacklevel=2,
            )

    def _count(self) -> int:
        """Return the number of steps of this rank so far."""
        optimizer = getattr(self.model, "optimizer", None)
        steps = local_steps_of(optimizer)
        return steps.rounds.made if steps is not None else 0 if optimizer is None else passes_of(optimizer)
