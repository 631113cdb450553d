"""A callback of rank 1 fails, while the other ranks are in a training step, or wait at the end of an epoch."""

import os
import sys
from typing import Any

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"

import keras
import numpy as np

import hvdlite_tf as hvd


class Fails(keras.callbacks.Callback):  # type: ignore[misc]  # mypy does not see Keras
    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if sys.argv[1] == "batch" and batch == 2:
            self.fail()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if sys.argv[1] == "epoch" and epoch == 1:
            self.fail()

    def fail(self) -> None:
        if hvd.rank() == 1:
            raise ValueError("the reason of rank 1")


hvd.init()
model = keras.Sequential([keras.layers.Input((3,)), keras.layers.Dense(1)])
model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse")
x, y = np.ones((20, 3)), np.ones((20, 1))
model.fit(x, y, batch_size=4, epochs=3, verbose=0, callbacks=[hvd.callbacks.Distributed(), Fails()])
