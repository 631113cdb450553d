"""The process of a replica: it imports the program's function, warms up, and computes one batch after the other.

Its first argument is the number of a socket, which is its only line to the server; the second, if there is one, that of a file
in memory for the weights that all replicas have alike. When the server is gone, it ends at once, also in the middle of a batch.
"""

from __future__ import annotations

import faulthandler
import gc
import importlib
import os
import pickle
import select
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hvdlite.errors import ArgumentError, HvdliteError
from hvdlite.protocols import Array
from hvdlite.serving.replicas.computing import OutputError, compute
from hvdlite.serving.servable import Servable, Spec
from hvdlite.serving.wire import frame, pack, receive, send, unpack


@dataclass(frozen=True)
class Begin:
    """The first message to a replica.

    Attributes:
        predict: ``module:name``, or a function that cloudpickle has pickled.
        path: `sys.path` of the server, which the replica uses too.
        max_batch: The most inputs of a batch.
    """

    predict: str | bytes
    path: list[str]
    max_batch: int


@dataclass(frozen=True)
class Ready:
    """A replica can compute.

    Attributes:
        spec: What its inputs must be.
        times: Of the warm-up: sizes of batches, and the seconds that each took the second time; empty without a warm-up.
        sample: The output of one input of the warm-up; None without one.
    """

    spec: Spec
    times: tuple[tuple[int, float], ...]
    sample: Any = None


@dataclass(frozen=True)
class NotReady:
    """A replica cannot start: `text` says why, and what to do."""

    text: str


@dataclass(frozen=True)
class Compute:
    """A batch for a replica. `how` says what the bytes behind it are."""

    how: Any


@dataclass(frozen=True)
class Computed:
    """The outputs of a batch. `how` says what the bytes behind it are."""

    how: Any


@dataclass(frozen=True)
class Raised:
    """A batch has no outputs: `text` says why; `blame` says whether single inputs may be the cause."""

    text: str
    blame: bool


def main() -> None:
    """Run a replica until the server is gone."""
    faulthandler.enable()  # where it is if it crashes,
    faulthandler.register(signal.SIGURG)  # and if the server asks because it takes too long
    connection = socket.socket(fileno=int(sys.argv[1]))
    threading.Thread(target=_end_with_server, args=(connection.fileno(),), daemon=True).start()
    try:
        begin, _ = receive(connection)
        try:
            servable = load(begin)
            for descriptor in sys.argv[2:]:
                servable.share(int(descriptor))
            ready = Ready(servable.spec, *warm_up(servable, begin.max_batch))
        except BaseException as error:
            send(connection, frame(NotReady(str(error) if isinstance(error, HvdliteError) else _traceback(error))))
            raise SystemExit(1) from None
        gc.collect()
        gc.freeze()  # a collection of garbage does not go through what the modules and the model consist of
        send(connection, frame(ready))
        while True:
            message, data = receive(connection)
            send(connection, _answer(servable, unpack(message.how, data)))
    except (EOFError, OSError):  # the server is gone
        os._exit(0)


def _end_with_server(descriptor: int) -> None:
    gone = select.poll()
    gone.register(descriptor, 0)  # that the other side has hung up is always reported
    gone.poll()
    os._exit(0)


def _answer(servable: Servable, inputs: Sequence[Any] | Array) -> list[Any]:
    try:
        how, buffers = pack(compute(servable, inputs))
    except OutputError as error:
        print(f"hvdlite serve: {error}", file=sys.stderr, flush=True)
        return frame(Raised(str(error), blame=False))
    except Exception as error:
        if len(inputs) == 1:  # of a larger batch, the server asks again for each half
            print(_traceback(error), file=sys.stderr, flush=True)
        return frame(Raised(f"predict raised {type(error).__name__}; the log of the server has its traceback.", True))
    return frame(Computed(how), buffers)


def load(begin: Begin) -> Servable:
    """Return what a replica serves.

    Raises:
        ArgumentError: It is not there, or it is no function.
        Exception: What its module raises when it is imported.
    """
    sys.path[:] = begin.path
    found = pickle.loads(begin.predict) if isinstance(begin.predict, bytes) else _find(begin.predict)
    return found if isinstance(found, Servable) else Servable(found)


def _find(name: str) -> Callable[[Any], Any]:
    """Return the object that ``module:name`` means.

    Raises:
        ArgumentError: There is none, or it cannot be called.
        Exception: What the module raises when it is imported.
    """
    module_name, _, attribute = name.partition(":")
    try:
        found: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise  # the module is there, and imports one that is not
        raise ArgumentError(
            f"there is no module {error.name!r} for {name!r}: it is looked for in the current folder, in PYTHONPATH, and where "
            "packages are installed."
        ) from None
    for part in attribute.split("."):
        try:
            found = getattr(found, part)
        except AttributeError:
            raise ArgumentError(
                f"the module {module_name!r} has no {attribute!r}: give the name of a function that takes a batch of inputs "
                "and returns as many outputs."
            ) from None
    if not callable(found):
        raise ArgumentError(f"{name} is a {type(found).__name__}: expected a function, or what hvd.servable returns.")
    return found  # type: ignore[no-any-return]


def warm_up(servable: Servable, max_batch: int) -> tuple[tuple[tuple[int, float], ...], Any]:
    """Compute a batch of one input and a full one, each twice. Return how long each took the second time, and an output.

    Raises:
        ArgumentError: One of them failed.
    """
    example = servable.example
    if example is None:
        return (), None
    times, outputs = [], None
    for size in sorted({1, max_batch}):
        for _ in range(2):
            # A new one each time: predict may keep it.
            inputs = [example] * size if servable.spec.inputs else np.stack([example] * size)
            begin = time.perf_counter()
            try:
                outputs = compute(servable, inputs)
            except OutputError:
                raise
            except Exception as error:
                raise ArgumentError(_why_no_warm_up(error, size, servable)) from error
            seconds = time.perf_counter() - begin
        times.append((size, seconds))
    assert outputs is not None
    return tuple(times), outputs[0]


def _why_no_warm_up(error: Exception, size: int, servable: Servable) -> str:
    if size > 1 and (isinstance(error, MemoryError) or "out of memory" in str(error).lower()):
        way_out = "A batch of this size does not fit into memory: give a smaller --max-batch, or fewer --replicas."
    else:
        way_out = "Give hvd.servable an example=… that is a valid input, or the right dtype=… and shape=…."
    example = servable.example
    what = f"({servable.spec})" if servable.spec.inputs else f"{example.dtype} {example.shape}"
    return f"{_traceback(error)}\npredict raised on its warm-up batch of {size} × {what}. {way_out}"


def _traceback(error: BaseException) -> str:
    return "".join(traceback.format_exception(error)).rstrip()
