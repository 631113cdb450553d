"""A process of a data loader dies while its loop ends: torch raises an error in a finalizer, where Python ignores the error."""

import os
import signal
import time
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

import hvdlite as hvd


class Rows:
    def __init__(self, loader: Any) -> None:
        self._rows = iter(loader)
        self._workers = [worker.pid for worker in self._rows._workers]

    def __iter__(self) -> "Rows":
        return self

    def __next__(self) -> Any:
        return next(self._rows)

    def __del__(self) -> None:
        os.kill(self._workers[0], signal.SIGKILL)
        while True:  # torch's handler of SIGCHLD ends this
            time.sleep(0.1)


hvd.init()
for _ in Rows(DataLoader(TensorDataset(torch.zeros(8, 1)), num_workers=1)):
    raise ConnectionResetError("the connection to the data loader")
