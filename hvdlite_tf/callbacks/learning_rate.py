"""Learning rates that change while `fit` runs."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import hvdlite
from hvdlite import ProcessSet
from hvdlite.adapter.arguments import rank_in, size_of
from hvdlite.errors import ArgumentError
from hvdlite_tf.callbacks.base import Callback, refuse_together
from hvdlite_tf.gradients.optimizer_parts import learning_rate_of, velocities_of


class LearningRateScheduleCallback(Callback):
    """Sets the learning rate to `initial_lr` × `multiplier` in the epochs from `start_epoch` to before `end_epoch`.

    On every rank. Several of them, for epochs that follow each other, make a schedule. With ``steps_per_execution`` the rate
    changes once per execution.

    Args:
        initial_lr: The rate that is multiplied.
        multiplier: A number, or a function of the epoch: from 0, with a fractional part if not `staircase`.
        start_epoch: The first epoch, from 0.
        end_epoch: The first epoch that is left alone again; None for no end.
        staircase: Change the rate at the first batch of each epoch only, and not at every batch. So is a number in any case.
        momentum_correction: When the rate changes, scale the momentum that has gathered by new rate ÷ old rate (Goyal et al.,
            "Accurate, large minibatch SGD", arXiv:1706.02677, section 3). For SGD and RMSprop, whose momentum is a sum of
            steps; others need none.
        steps_per_epoch: Batches in an epoch, for fractional epochs; by default what Keras knows of the data, the largest number
            of all ranks.
        process_set: The ranks that train together; all by default.

    Raises:
        ArgumentError: An argument that makes no sense.
    """

    def __init__(
        self,
        initial_lr: float,
        multiplier: float | Callable[[float], float],
        start_epoch: int = 0,
        end_epoch: int | None = None,
        staircase: bool = True,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
        *,
        process_set: ProcessSet | None = None,
    ) -> None:
        super().__init__()
        self._process_set = process_set
        if initial_lr is None or not math.isfinite(initial_lr):
            raise ArgumentError(f"initial_lr={initial_lr!r}: expected the learning rate that is to be multiplied.")
        if steps_per_epoch is not None and steps_per_epoch < 1:
            raise ArgumentError(f"steps_per_epoch={steps_per_epoch!r}: expected at least 1.")
        self.initial_lr = initial_lr
        self.multiplier: Callable[[float], float] = multiplier if callable(multiplier) else lambda epoch: multiplier
        self.start_epoch = start_epoch
        self.end_epoch = end_epoch
        self.staircase = staircase or not callable(multiplier)
        self.momentum_correction = momentum_correction
        self.steps_per_epoch = steps_per_epoch
        self.current_epoch = 0
        self._steps: int = steps_per_epoch or 0

    def on_train_begin(self, logs: Any = None) -> None:
        """Look at the optimizer, and at the number of batches.

        Raises:
            ArgumentError: The optimizer's rate is a schedule's, or Keras does not know the number of batches and it is needed.
                Raised on all ranks.
        """
        problem = ""
        try:
            learning_rate_of(self.model.optimizer)
        except ArgumentError as error:
            problem = str(error)
        if not self.staircase and not self.steps_per_epoch:
            # The ranks' numbers may differ, and their rates must not.
            own = (self.params or {}).get("steps")
            known = [steps for steps in hvdlite.allgather_object(own, process_set=self._process_set) if steps]
            self._steps = max(known, default=0)
            if not known:
                problem = problem or (
                    f"Keras does not know how many batches an epoch has: pass steps_per_epoch to {type(self).__name__}."
                )
        refuse_together(problem, self._process_set)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Remember the epoch."""
        self.current_epoch = epoch

    def on_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Set the rate of this batch."""
        if self.current_epoch < self.start_epoch or (
            self.end_epoch is not None and self.current_epoch >= self.end_epoch
        ):
            return
        if not self.staircase:
            self._set(self.current_epoch + batch / self._steps)
        elif batch == 0:
            self._set(self.current_epoch)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Put the rate in the history, as "lr"."""
        if logs is not None:
            logs["lr"] = float(learning_rate_of(self.model.optimizer).numpy())

    def _set(self, epoch: float) -> None:
        variable = learning_rate_of(self.model.optimizer)
        old, new = float(variable.numpy()), self.initial_lr * self.multiplier(epoch)
        variable.assign(new)
        # In the paper's terms, v ← m·(new/old)·v + new·g for one batch. Scaling v is the same, and reaches into a compiled
        # step, where m is a constant. A rate of 0 has left no trace in v.
        if self.momentum_correction and old > 0 and new != old:
            for velocity in velocities_of(self.model.optimizer, self.model.trainable_variables):
                velocity.assign(velocity * (new / old))


class LearningRateWarmupCallback(LearningRateScheduleCallback):
    """Raises the learning rate batch by batch, from that of one rank to that of all.

    A large rate at once would throw the first weights too far.
    At the end of batch b of epoch e (both from 0; S batches in an epoch, P ranks) the rate is
    `initial_lr` ÷ P × (1 + (P - 1) × (e + (b + 1) ÷ S) ÷ `warmup_epochs`): `initial_lr` in the last batch of the last epoch.
    (Goyal et al., arXiv:1706.02677, section 2.2.)

    Args:
        initial_lr: The rate to arrive at: that of one rank × size().
        warmup_epochs: How long it takes. 0 for none.
        momentum_correction: As in `LearningRateScheduleCallback`.
        steps_per_epoch: As in `LearningRateScheduleCallback`.
        verbose: 1 to print the rate when it has been reached, on the first rank.
        process_set: As in `LearningRateScheduleCallback`.

    Raises:
        ArgumentError: An argument that makes no sense.
    """

    def __init__(
        self,
        initial_lr: float,
        warmup_epochs: int = 5,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
        verbose: int = 0,
        *,
        process_set: ProcessSet | None = None,
    ) -> None:
        def multiplier(epoch: float) -> float:
            size = size_of(process_set)
            return (1 + (size - 1) * (epoch + 1 / self._steps) / warmup_epochs) / size

        super().__init__(
            initial_lr,
            multiplier,
            end_epoch=warmup_epochs,
            staircase=False,
            momentum_correction=momentum_correction,
            steps_per_epoch=steps_per_epoch,
            process_set=process_set,
        )
        self.warmup_epochs = warmup_epochs
        self.verbose = verbose

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Put the rate in the history, as "lr", and say when it has been reached."""
        super().on_epoch_end(epoch, logs)
        if epoch == self.warmup_epochs - 1 and self.verbose and rank_in(self._process_set) == 0:
            rate = float(learning_rate_of(self.model.optimizer).numpy())
            print(f"\nEpoch {epoch + 1}: the warm-up has reached a learning rate of {rate:g}.")
