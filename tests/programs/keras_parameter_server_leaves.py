"""Trains a Keras model with a parameter server; rank 1 fails: ``keras_parameter_server_leaves.py exception MODE``."""

import os
import sys
import time
from typing import Any

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"

import keras
import numpy as np

import hvdlite_tf as hvd

hvd.init()
_, mode = sys.argv[1:]
model = keras.Sequential([keras.layers.Input((20,)), keras.layers.Dense(50), keras.layers.Dense(1)])
optimizer = hvd.AsyncDistributedOptimizer(
    keras.optimizers.SGD(0.01), model, mode=mode, staleness=1 if mode == "ssp" else None
)


def fail(batch: int, logs: Any) -> None:
    if hvd.rank() == 1 and batch == 5:
        print(f"failing at {time.time()}", flush=True)
        raise ValueError("the reason of rank 1")


if hvd.is_server():
    hvd.serve_parameters()
else:
    model.compile(optimizer, loss="mse")
    callbacks = [keras.callbacks.LambdaCallback(on_train_batch_end=fail)]
    model.fit(np.ones((400, 20)), np.ones((400, 1)), batch_size=4, verbose=0, callbacks=callbacks)
