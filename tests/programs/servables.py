"""Functions for ``hvdlite serve`` in tests/serving/test_serving.py."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np

from hvdlite import servable

FATAL_ONCE, FATAL, BAD, ENDLESS = 300, 301, 302, 303


def numbers(batch: Any) -> Any:
    """Repeat the numbers, after writing them down. Some of them do what is said above."""
    if "SERVABLES_FOLDER" in os.environ:
        with open(Path(os.environ["SERVABLES_FOLDER"], f"begun-{os.getpid()}"), "ab") as file:
            file.write(batch.tobytes())
    if (batch == FATAL_ONCE).any():
        try:
            Path(os.environ["SERVABLES_FOLDER"], "was-here").touch(exist_ok=False)
            os.kill(os.getpid(), signal.SIGKILL)
        except FileExistsError:
            pass
    if (batch == FATAL).any():
        os._exit(7)
    if (batch == BAD).any():
        raise ValueError("a bad number")
    while (batch == ENDLESS).any():
        time.sleep(1)
    return batch


counted = servable(numbers, dtype="int64", shape=())


def too_few(batch: Any) -> Any:
    return batch[:-1]


def nothing(batch: Any) -> None:
    return None


few = servable(too_few, example=np.zeros(2, np.float32))
none = servable(nothing, example=np.zeros(2, np.float32))


def _in_small_memory(batch: Any) -> Any:
    if len(batch) > 4:
        raise MemoryError("no room for the batch")
    return batch


large = servable(_in_small_memory, dtype="float32", shape=(2,))


def _for_texts(batch: Any) -> Any:
    return [text.upper() for text in batch]


wrong_spec = servable(_for_texts, dtype="float32", shape=(2,))


def _crash(batch: Any) -> Any:
    os.kill(os.getpid(), signal.SIGKILL)


crashes = servable(_crash, dtype="float32", shape=(2,))


def _wait(batch: Any) -> Any:
    time.sleep(1000)


waits = servable(_wait, dtype="float32", shape=(2,))
no_function = 3
