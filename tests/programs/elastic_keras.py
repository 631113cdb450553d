"""An elastic training with Keras, three epochs in `fit`. Rank 1 is killed once, in the second epoch.

argv: a folder in which the fault leaves a file; without it there is no fault. Rank 0 prints the epochs and the weights.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np

import hvdlite_tf as hvd

EPOCHS = 3


class FailOnce(keras.callbacks.Callback):  # type: ignore[misc]  # mypy does not see Keras
    def __init__(self, folder: str, state: Any) -> None:
        super().__init__()
        self.folder, self.state = folder, state

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if hvd.rank() == 1 and self.state.epoch == 1 and batch == 1:
            try:
                (Path(self.folder) / "killed").touch(exist_ok=False)
            except FileExistsError:
                return
            os.kill(os.getpid(), signal.SIGKILL)


def main(folder: str = "") -> tuple[int, list[float]]:
    """Train, and return how many epochs were trained, and the weights."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(24, 5)).astype("float32")
    y = x[:, :1] * 2
    start = [keras.initializers.RandomNormal(seed=seed) for seed in (1, 2)]
    layers = [keras.layers.Dense(7, kernel_initializer=start[0]), keras.layers.Dense(1, kernel_initializer=start[1])]
    model = keras.Sequential([keras.layers.Input((5,)), *layers])
    model.compile(hvd.DistributedOptimizer(keras.optimizers.Adam(0.01)), loss="mse")
    state = hvd.elastic.KerasState(model, epoch=0, batch=0)

    @hvd.elastic.run
    def train(state: hvd.elastic.KerasState) -> None:
        mine = slice(hvd.rank(), None, hvd.size())
        callbacks: list[Any] = [
            hvd.elastic.CommitStateCallback(state, batches_per_commit=100),  # after each epoch
            hvd.elastic.UpdateBatchStateCallback(state),
            hvd.elastic.UpdateEpochStateCallback(state),
            *([FailOnce(folder, state)] if folder else []),
        ]
        more = {"batch_size": 8 // hvd.size(), "verbose": 0, "shuffle": False}
        model.fit(x[mine], y[mine], epochs=EPOCHS, initial_epoch=state.epoch, callbacks=callbacks, **more)

    train(state)
    weights = np.concatenate([weight.reshape(-1) for weight in model.get_weights()])
    return state.epoch, weights.tolist()


if __name__ == "__main__":
    hvd.init()
    epochs, weights = main(*sys.argv[1:])
    if hvd.rank() == 0:
        print(f"epochs {epochs}\nweights {weights}")
