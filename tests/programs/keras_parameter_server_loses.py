"""Trains a Keras model with a parameter server on the last rank: ``keras_parameter_server_loses.py CHECKPOINT``.

In the first `fit` ranks 1 and 2 fail, and rank 0 goes on. In the second one the server is killed, and rank 0 saves.
"""

import hashlib
import os
import signal
import sys
import time
from typing import Any

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"

import keras
import numpy as np

import hvdlite_tf as hvd

hvd.init()
model = keras.Sequential([keras.layers.Input((20,)), keras.layers.Dense(50), keras.layers.Dense(1)])
optimizer = hvd.AsyncDistributedOptimizer(
    keras.optimizers.SGD(0.01), model, on_worker_loss="go on", checkpoint=sys.argv[1]
)
pids = hvd.allgather_object(os.getpid())
if hvd.is_server():
    hvd.serve_parameters()
    sys.exit()


def kill(pid: int) -> None:
    print(f"failing at {time.time()}", flush=True)
    os.kill(pid, signal.SIGKILL)


def fail(batch: int, logs: Any) -> None:
    if (hvd.rank(), batch) == (1, 2):
        os.kill(os.getpid(), signal.SIGKILL)
    if (hvd.rank(), batch) == (2, 4):
        raise ValueError("the reason of rank 2")


def pulled(batch: int, logs: Any) -> None:
    print("pulled", hashlib.sha256(b"".join(w.tobytes() for w in model.get_weights())).hexdigest(), flush=True)
    if batch == 3:
        kill(pids[-1])


model.compile(optimizer, loss="mse")
for at_end in (fail, pulled):
    callback = keras.callbacks.LambdaCallback(on_train_batch_end=at_end)
    model.fit(np.ones((400, 20)), np.ones((400, 1)), batch_size=4, verbose=0, callbacks=[callback])
    print(f"rank {hvd.rank()} has trained", flush=True)
