"""`KerasTraining`: one rank's part in a training with a parameter server, for Keras."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

from hvdlite.api import rank
from hvdlite.async_sgd.training.options import AsyncOptions
from hvdlite.async_sgd.training.training import AsyncTraining
from hvdlite.protocols import Array, TensorInfo, WaitKind
from hvdlite.tensors.numpy_adapter import dtype_of
from hvdlite_tf.async_sgd.replica import KerasReplica
from hvdlite_tf.async_sgd.state import assign_state, state_of, together
from hvdlite_tf.optimizers import backends
from hvdlite_tf.variables import is_slices


class KerasTraining(AsyncTraining[Array]):
    """What one rank does in the training of one optimizer of Keras.

    Args:
        optimizer: The program's optimizer, which is built. The servers get copies of it.
        options: The arguments.

    Attributes:
        weight: The number of samples of a step.
        knows_state: Whether the program's optimizer has the state that the servers had after this rank's last push.
    """

    def __init__(self, optimizer: Any, options: AsyncOptions) -> None:
        self._optimizer, self._backend = optimizer, backends.current()
        self._keras = KerasReplica(optimizer, options.checkpoint is not None)
        super().__init__(self._keras, options)
        self.weight = 1.0
        self.knows_state = True
        self._has_pulled = False

    def step(self, numbers: Sequence[int], gradients: Sequence[Any], rate: Any) -> None:
        """Add gradients to the next push; push and pull if it is time to. A graph does this each time it runs.

        Args:
            numbers: The numbers of the variables that have a gradient.
            gradients: Their gradients: tensors of the backend, or tf.IndexedSlices.
            rate: The learning rate: a number, a variable, or a tensor.

        Raises:
            ArgumentError: This rank only serves, or the training is over, or a gradient has NaN or infinite elements, or
                another shape than its variable.
            HvdliteError: A server has failed, or a rank has left the job.
        """
        infos = self._keras.served.infos
        always = self.options.push_every == 1
        sparse = [is_slices(gradient) for gradient in gradients]
        tensors = [
            tensor for each in gradients for tensor in ((each.indices, each.values) if is_slices(each) else (each,))
        ]

        def run(rate: Array, *arrays: Array) -> list[Array]:
            self.check_trains("apply()")
            self._keras.rate = float(rate)
            found = iter(arrays)
            given = {
                number: self._keras.rows(number, next(found), next(found))
                if is_sparse
                else self._keras.dense(number, next(found))
                for number, is_sparse in zip(numbers, sparse, strict=True)
            }
            pulled = self.add(given, self.weight)
            self.knows_state = False
            values = self._pulled() if pulled else [np.zeros(0, dtype_of(info)) for info in infos]
            return [np.asarray(pulled), *values]

        results: list[TensorInfo | str] = ["bool", *(infos if always else (info.dtype for info in infos))]
        pulled, *values = self._backend.call(run, [keras.ops.convert_to_tensor(rate), *tensors], results)

        def take() -> None:
            for number, (info, value) in enumerate(zip(infos, values, strict=True)):
                self._keras.served.assign(number, keras.ops.reshape(value, info.shape))

        if always:
            take()
        else:
            keras.ops.cond(pulled, take, lambda: None)

    def get_state(self) -> None:
        """Meet all ranks, and get the variables and the optimizer's state. All ranks call this."""
        self._warn_of_changes()
        self._receive(self.state(WaitKind.SERVICE))

    def finish(self) -> None:
        """Meet all ranks in the end, and get the final variables and the optimizer's final state."""
        if not self.is_over:
            self._warn_of_changes()
            super().finish()

    def _before_parting(self) -> None:
        self._receive(self._gather_state())

    def put_state(self) -> None:
        """Give the servers the variables and the optimizer's state of the first rank. All ranks call this."""
        self.load(state_of(self._optimizer, range(self._keras.served.counter)))
        self._receive(self.state())

    def _receive(self, states: Sequence[Any]) -> None:
        assign_state(self._optimizer, together(states), range(self._keras.served.counter))
        self.knows_state = self._has_pulled = True

    def _pulled(self) -> list[Array]:
        """Return copies of the latest values, which TensorFlow may keep, and in which it may write."""
        self._has_pulled = True
        values = self._latest()
        with self.values.lock:
            for number, value in enumerate(values):
                self._keras.keep(number, value)
        return [value.copy() for value in values]

    def _latest(self) -> list[Array]:
        """Return the latest values that were pulled, in the memory in which the next ones come."""
        found: dict[int, Array] = {}
        for layout, data in zip(self._layouts, self.worker.values, strict=True):
            found |= self._keras.served.tensors(data, layout)
        return [found[number] for number in range(len(found))]

    def _warn_of_changes(self) -> None:
        """Warn of weights that the program has changed since the last pull, before the servers' weights replace them."""
        served = self._keras.served
        # After a failure, some of the values may be newer than the variables.
        knows = self._has_pulled and not self._failure
        variables = [*enumerate(self._latest())][: served.counter] if knows else []
        changed = [self._keras.names[n] for n, value in variables if served.read(n).tobytes() != value.tobytes()]
        if changed:
            warnings.warn(
                f"hvdlite: rank {rank()} has changed {changed[0]} since its last step (for example by EarlyStopping with "
                "restore_best_weights), and now gets the weights of the servers instead. To keep those of the first rank, call "
                "optimizer.restart() on all ranks after a change.",
                RuntimeWarning,
                stacklevel=3,
            )
