"""Callbacks that change the learning rate while `fit` runs."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import hvdlite
from hvdlite import ProcessSet
from hvdlite.adapter.arguments import rank_in, size_of
from hvdlite.errors import ArgumentError
from hvdlite_tf.callbacks.base import Callback, refuse_together
from hvdlite_tf.gradients.optimizer_parts import has_servers, learning_rate_of, velocities_of


class LearningRateScheduleCallback(Callback):
    """Sets the learning rate to `initial_lr` × `multiplier` from epoch `start_epoch` up to, but not including, `end_epoch`.

    Every rank passes this callback to `fit`. Several callbacks of consecutive epochs make a schedule. With
    ``steps_per_execution`` the rate changes once per execution.

    Args:
        initial_lr: The rate that is multiplied.
        multiplier: A number, or a function of the epoch. Epochs count from 0; without `staircase` they have a fractional part.
        start_epoch: The first epoch in which the rate is set.
        end_epoch: The first epoch in which the rate is not set any more; None means no end.
        staircase: Whether the rate changes only at the first batch of each epoch, and not at every batch. With a number as
            `multiplier` it always does.
        momentum_correction: Whether a change of the rate also scales the accumulated momentum by new rate ÷ old rate (Goyal et
            al., "Accurate, large minibatch SGD", arXiv:1706.02677, section 3). This affects SGD and RMSprop, whose momentum is
            a sum of steps; other optimizers do not need it.
        steps_per_epoch: The number of batches in an epoch, for fractional epochs. None means the number that Keras knows, the
            largest of all ranks.
        process_set: The ranks that train together; None means all ranks.

    Raises:
        ArgumentError: `initial_lr` is not a finite number, or `steps_per_epoch` is less than 1.

    Examples:
        >>> def rates():
        ...     model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
        ...     model.compile(keras.optimizers.SGD(0.0), "mse", run_eagerly=True)
        ...     callbacks = [hvd.callbacks.LearningRateScheduleCallback(0.5, lambda epoch: 0.5**epoch)]
        ...     history = model.fit(np.ones((1, 1)), np.ones((1, 1)), epochs=3, callbacks=callbacks, verbose=0)
        ...     return history.history["lr"]
        >>> on_ranks(1, rates)
        [[0.5, 0.25, 0.125]]
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
        """Check the optimizer, and find the number of batches.

        Raises:
            ArgumentError: The optimizer's rate comes from a schedule, or the number of batches is needed and Keras does not
                know it, or the momentum is on parameter servers. All ranks raise it.
        """
        problem = ""
        try:
            learning_rate_of(self.model.optimizer)
        except ArgumentError as error:
            problem = str(error)
        if self.momentum_correction and has_servers(self.model.optimizer):
            problem = (
                f"{type(self).__name__} scales the accumulated momentum, and the parameter servers have it: pass "
                "momentum_correction=False."
            )
        if not self.staircase and not self.steps_per_epoch:
            # The ranks' numbers of batches may differ, but their rates must be equal.
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
        # In the paper's terms, v ← m·(new/old)·v + new·g for one batch. Scaling v has the same effect, and it works with a
        # compiled step too, in which m is a constant. With an old rate of 0 there is nothing to scale.
        if self.momentum_correction and old > 0 and new != old:
            for velocity in velocities_of(self.model.optimizer, self.model.trainable_variables):
                velocity.assign(velocity * (new / old))


class LearningRateWarmupCallback(LearningRateScheduleCallback):
    """Raises the learning rate batch by batch, from the rate of one rank to the rate of all ranks.

    A large rate in the first steps would move the weights too far. In batch b of epoch e (both from 0; S batches in an epoch, P
    ranks) the rate is `initial_lr` ÷ P × (1 + (P - 1) × (e + (b + 1) ÷ S) ÷ `warmup_epochs`), which is `initial_lr` in the last
    batch of the last epoch. (Goyal et al., arXiv:1706.02677, section 2.2.)

    Args:
        initial_lr: The rate at the end of the warm-up: the rate of one rank × size().
        warmup_epochs: The number of epochs of the warm-up; 0 means no warm-up.
        momentum_correction: See `LearningRateScheduleCallback`.
        steps_per_epoch: See `LearningRateScheduleCallback`.
        verbose: 1 means that the first rank prints the rate at the end of the warm-up.
        process_set: See `LearningRateScheduleCallback`.

    Raises:
        ArgumentError: See `LearningRateScheduleCallback`.

    Examples:
        >>> def rates():
        ...     model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
        ...     model.compile(keras.optimizers.SGD(0.0), "mse", run_eagerly=True)
        ...     callbacks = [hvd.callbacks.LearningRateWarmupCallback(1.0, warmup_epochs=2)]
        ...     history = model.fit(np.ones((1, 1)), np.ones((1, 1)), epochs=2, callbacks=callbacks, verbose=0)
        ...     return history.history["lr"]
        >>> on_ranks(2, rates)
        [[0.75, 1.0], [0.75, 1.0]]
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
        """Put the rate in the history, as "lr", and print it at the end of the warm-up if `verbose`."""
        super().on_epoch_end(epoch, logs)
        if epoch == self.warmup_epochs - 1 and self.verbose and rank_in(self._process_set) == 0:
            rate = float(learning_rate_of(self.model.optimizer).numpy())
            print(f"\nEpoch {epoch + 1}: the warm-up has reached a learning rate of {rate:g}.")
