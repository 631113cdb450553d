"""A server from its start to its end: the port, the replicas, HTTP, signals, and its line on a terminal."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import errno
import gc
import logging
import math
import re
import resource
import signal
import socket
import ssl
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import uvicorn
import uvloop

from hvdlite.config import environment
from hvdlite.errors import ArgumentError, LaunchError
from hvdlite.serving.chooser import AutoWait, ModelProcess, choosing
from hvdlite.serving.chooser import Model as QueueModel
from hvdlite.serving.http.app import App
from hvdlite.serving.http.connections import Places, protocol_class
from hvdlite.serving.http.predict_endpoint import Intake
from hvdlite.serving.metrics import Metrics
from hvdlite.serving.models import Model, Models
from hvdlite.serving.options import Options
from hvdlite.serving.replicas.devices import devices_of
from hvdlite.serving.replicas.fleet import Fleet
from hvdlite.serving.servable import Spec
from hvdlite.serving.waiting import FixedWait, WaitChooser

_LOOPBACK = ("127.", "::1", "localhost")
_LINE_EVERY = 1.0
_GARBAGE = 50_000
"""So many more objects start a collection of garbage."""
_PATIENCE = 10.0
"""Seconds until the server says that it still waits for its first replica."""
_LAST_ANSWERS = 2.0
"""Seconds in which requests that are given up get their answers."""
_UNDER_A_LAUNCHER = 1.0
"""Under hvdliterun, the most seconds from SIGTERM until the port closes."""
_TIDY_EVERY, _TIDY_OBJECTS, _TIDY_BYTES = 5.0, 1000, 2**25
"""So many seconds between two looks at the memory, which is given back after so many objects or bytes of bodies."""
_OWN_DESCRIPTORS = 256
"""How many file descriptors the server needs besides its connections: replicas, and connections that it refuses."""

_NAME = r"[\w.-]+"
"""What the name of a model is made of: it is a part of paths."""
Served = str | Callable[[Any], Any]
"""What is served: ``module:name``, or a function."""

log = logging.getLogger(__name__)


class Server:
    """One server. Its port is taken when it is made.

    Args:
        predict: ``module:name``, or a function, which cloudpickle pickles; or several of these, by the names of their models.
        options: The settings.

    Attributes:
        url: Where it listens.

    Raises:
        ArgumentError: `predict` is none of these, or a name is none, or the devices are not there.
        LaunchError: The port or the connections cannot be had, or the function cannot be pickled.
    """

    def __init__(self, predict: Served | Mapping[str, Served], options: Options) -> None:
        self._options = options
        _allow_descriptors(options.max_connections + _OWN_DESCRIPTORS)
        _check_certificate(options)
        self._predict = {name: _sendable(each) for name, each in _by_name(predict).items()}
        self._devices = devices_of(options.devices, options.replicas, environment())
        self._fleets: weakref.WeakSet[Fleet] = weakref.WeakSet()
        self._socket = _listen(options.host, options.port)
        host = f"[{options.host}]" if ":" in options.host else options.host
        self.url = f"{'https' if options.certfile else 'http'}://{host}:{self._socket.getsockname()[1]}"
        self._stop: Callable[[], None] | None = None

    @property
    def pids(self) -> list[int]:
        """The numbers of the processes of all replicas."""
        return [pid for fleet in list(self._fleets) for pid in fleet.pids]

    def run(self, ready: Callable[[], None] = lambda: None) -> None:
        """Serve until SIGTERM or SIGINT comes, or `stop` is called, and answer what is there before the end.

        SIGHUP loads all models anew while it serves.

        Args:
            ready: Called when each model has a replica that is ready.

        Raises:
            LaunchError: The replicas cannot start.
        """
        with contextlib.ExitStack() as stack:
            stack.enter_context(contextlib.closing(self._socket))
            models = [self._model(name, stack.enter_context(_chooser(self._options))) for name in self._predict]
            uvloop.run(self._serve(Models(models), ready))

    def stop(self) -> None:
        """End the server, from any thread."""
        if self._stop is not None:
            self._stop()

    def _model(self, name: str, chooser: WaitChooser) -> Model:
        def make_fleet() -> Fleet:
            fleet = Fleet(self._predict[name], self._options, self._devices)
            self._fleets.add(fleet)
            return fleet

        return Model(name, make_fleet, self._options, chooser, Metrics())

    async def _serve(self, models: Models, ready: Callable[[], None]) -> None:
        app = App(models, self._options)
        for model in models:
            model.metrics.show_devices(self._devices)
        config: dict[str, Any] = {"log_config": None, "log_level": "error", "access_log": False}
        config |= {"server_header": False, "lifespan": "off", "ws": "none", "proxy_headers": False}
        config["timeout_keep_alive"] = self._options.keep_alive
        config["timeout_graceful_shutdown"] = self._options.drain + _LAST_ANSWERS
        places = Places()
        if self._options.certfile:
            config |= {"ssl_certfile": self._options.certfile, "ssl_keyfile": self._options.keyfile or None}
        http = _Http(uvicorn.Config(app, http=protocol_class(self._options, app.connections, places), **config))
        loop = asyncio.get_running_loop()
        ending = _Ending(self._options, models, http, places)

        def end_soon() -> None:
            loop.call_soon_threadsafe(ending.end)

        self._stop = end_soon
        thresholds = gc.get_threshold()
        handlers: dict[int, Callable[[], None]]
        handlers = {signal.SIGTERM: ending.say_and_end, signal.SIGINT: ending.end, signal.SIGHUP: models.load_soon}
        with _signals(loop, handlers):
            async with contextlib.AsyncExitStack() as stack:
                for model in models:
                    await stack.enter_async_context(model)
                serving = loop.create_task(http.serve([self._socket]))
                others = [loop.create_task(each) for each in (self._report(models, ready), _tidy(app.intake))]
                try:
                    any_of: set[asyncio.Future[Any]] = {serving, *(model.failed for model in models)}
                    await asyncio.wait(any_of, return_when=asyncio.FIRST_COMPLETED)
                    if not serving.done():  # a model has failed
                        http.should_exit = http.force_exit = True
                    await serving
                finally:
                    for task in others:
                        task.cancel()
                    gc.unfreeze()
                    gc.set_threshold(*thresholds)
                    self._stop = None
        for model in models:
            if model.failed.done():
                raise LaunchError(f"{self._what(model.name)} cannot be served: {model.failed.result()}")

    async def _report(self, models: Models, ready: Callable[[], None]) -> None:
        """Say what is served; then, on a terminal, write a line again and again."""
        options = self._options
        threads = f"{options.threads} thread{'s' * (options.threads > 1)} each"
        for model in models:
            what = (self.url, _count(options.replicas, "replica"), self._what(model.name), model.name, threads)
            log.info("%s: %s for %s (model %s), %s%s.", *what, _on_devices(self._devices))
        if not options.host.startswith(_LOOPBACK) and not options.api_key:
            log.warning("Whoever reaches %s may use it: --api-key-env NAME asks for a key.", options.host)
        for model in models:
            await self._know(model)
        # What is here now stays. If collections of garbage went through it, they would stop the server for 15 ms each second.
        # Requests leave no cycles. With Python's threshold, a batch of them would start a collection each time.
        gc.collect()
        gc.freeze()
        gc.set_threshold(_GARBAGE, *gc.get_threshold()[1:])
        for model in models:
            _check_body(model.service.spec, options.max_body)
        log.info(
            "Ready. %s",
            models.text(lambda model: f"An input is {model.service.spec}. {model.service.explanation}", "\n"),
        )
        ready()
        if not sys.stderr.isatty():
            return
        while True:
            await asyncio.sleep(_LINE_EVERY)
            sys.stderr.write(f"\r\x1b[K{models.text(lambda model: model.metrics.line(), '; ')}")
            sys.stderr.flush()

    async def _know(self, model: Model) -> None:
        """Wait until a replica is ready, and say again and again that none is."""
        limit, waited = self._options.start_timeout, 0.0
        while True:
            try:
                await asyncio.wait_for(model.service.known.wait(), _PATIENCE)
                return
            except asyncio.TimeoutError:
                waited += _PATIENCE
                log.info(
                    "After %g s no replica is ready: each imports %s and warms up. It gets %g s (--start-timeout).",
                    *(waited, self._what(model.name), limit),
                )

    def _what(self, name: str) -> str:
        predict = self._predict[name]
        return predict if isinstance(predict, str) else "a function"


def _check_body(spec: Spec | None, limit: int) -> None:
    """Say so if no body may have an input."""
    if spec is None or spec.shape is None or spec.dtype is None or None in spec.shape:
        return
    need = math.prod(size for size in spec.shape if size is not None) * np.dtype(spec.dtype).itemsize
    if need > limit:
        log.warning(
            "An input has %d bytes, and a body may have %d: requests are answered 413. Give a larger --max-body.",
            need,
            limit,
        )


@contextlib.contextmanager
def _chooser(options: Options) -> Iterator[WaitChooser]:
    if options.max_wait is not None:
        yield FixedWait(options.max_wait)
        return
    model = ModelProcess(QueueModel(options.max_batch, options.replicas, options.slo_p99))
    auto = AutoWait(model.update)
    with contextlib.ExitStack() as stack:
        stack.callback(model.close)
        stack.enter_context(choosing(auto, hang_up=model.hang_up))
        yield auto


class _Ending:
    """The end of a server, step by step.

    ```
    SIGTERM ─▶ /readyz says 503, all is served ─▶ the port closes, what is there is answered ─▶ the rest is given up
                                   Ctrl-C, stop() ─▶                          a second one ─▶
    ```
    """

    def __init__(self, options: Options, models: Models, http: uvicorn.Server, places: Places) -> None:
        self._options, self._models, self._http, self._places = options, models, http, places
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None

    def say_and_end(self) -> None:
        """Let a load balancer see that the server ends, and end it later."""
        seconds = self._options.lame_duck
        if environment().get("HVDLITE_CONTROL"):  # hvdliterun kills it after three seconds
            seconds = min(seconds, _UNDER_A_LAUNCHER)
        if self._timer is not None or self._http.should_exit or not seconds:
            self.end()
            return
        log.info("The server ends in %g s (--lame-duck): until then it answers all, and /readyz says 503.", seconds)
        self._models.is_ending = self._places.is_ending = True
        self._timer = self._loop.call_later(seconds, self.end)

    def end(self) -> None:
        """Take no more connections, and answer what is there; the second time, give it up."""
        if self._timer is not None:
            self._timer.cancel()
        if self._http.should_exit:
            self._models.give_up()
            return
        log.info("The server ends when it has answered what is there (at most %g s).", self._options.drain)
        self._models.drain()
        self._http.should_exit = True
        self._loop.call_later(self._options.drain, self._models.give_up)


async def _tidy(intake: Intake) -> None:
    """Give memory back, again and again.

    Connections that are over are cycles of references, with what their clients have sent last. A server that has nothing to do
    makes no objects, and would not collect them. What is freed stays with the C library in parts, behind smaller blocks.
    """
    trim: Callable[[int], int] = getattr(ctypes.CDLL(None), "malloc_trim", lambda _: 0)  # glibc has it
    while True:
        await asyncio.sleep(_TIDY_EVERY)
        if gc.get_count()[0] > _TIDY_OBJECTS or intake.peak > _TIDY_BYTES:
            intake.peak = intake.memory
            gc.collect()  # what was frozen at the start is left out
            await asyncio.to_thread(trim, 0)


class _Http(uvicorn.Server):
    """uvicorn without its handlers of signals, which end the process by the signal in the end."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@contextlib.contextmanager
def _signals(loop: asyncio.AbstractEventLoop, handlers: Mapping[int, Callable[[], None]]) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    for number, handler in handlers.items():
        loop.add_signal_handler(number, handler)
    try:
        yield
    finally:
        for number in handlers:
            loop.remove_signal_handler(number)


def _by_name(predict: Served | Mapping[str, Served]) -> Mapping[str, Served]:
    """Return what is served by the names of the models.

    Raises:
        ArgumentError: There is none, or a name is none.
    """
    if isinstance(predict, Mapping):
        names = list(predict)
        if not names or not all(isinstance(name, str) and re.fullmatch(_NAME, name) for name in names):
            raise ArgumentError(
                f"serve: the names of models are {', '.join(map(repr, names)) or 'none'}: expected letters, digits, '.', '_' "
                "and '-', and at least one model."
            )
        return predict
    if isinstance(predict, str):
        return {predict.partition(":")[0].rpartition(".")[2] or predict: predict}
    name = getattr(predict, "__name__", "model")
    return {name if re.fullmatch(_NAME, name) else "model": predict}


def _sendable(predict: Served) -> str | bytes:
    if isinstance(predict, str):
        module, _, name = predict.partition(":")
        if not all(part.isidentifier() for part in (*module.split("."), *name.split("."))):
            raise ArgumentError(f"serve({predict!r}): expected module:name, such as my_model:predict.")
        return predict
    if not callable(predict):
        raise ArgumentError(f"serve({predict!r}): expected a function, or module:name of one.")
    import cloudpickle

    try:
        data: bytes = cloudpickle.dumps(predict)
    except Exception as error:  # many kinds, by what the function refers to
        raise LaunchError(
            f"the function cannot be sent to the replicas: {error}. Put it into a module, and serve 'module:name'."
        ) from error
    return data


def _check_certificate(options: Options) -> None:
    """Raise if TLS cannot work.

    Raises:
        LaunchError: The certificate and its key are no pair, or cannot be read.
    """
    if not options.certfile:
        return
    try:
        ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(options.certfile, options.keyfile or None)
    except OSError as error:
        files = f"--certfile {options.certfile}" + (f" and --keyfile {options.keyfile}" if options.keyfile else "")
        raise LaunchError(f"{files}: {error}. Expected a certificate and its key, as PEM.") from None


def _allow_descriptors(count: int) -> None:
    """Allow this process so many file descriptors.

    Raises:
        LaunchError: The system allows fewer.
    """
    now, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if now < count and most != resource.RLIM_INFINITY and most < count:
        raise LaunchError(
            f"{count - _OWN_DESCRIPTORS} connections need {count} file descriptors, and this process may have {most}: give a "
            "smaller --max-connections, or raise the hard limit (ulimit -Hn)."
        )
    if now < count:
        resource.setrlimit(resource.RLIMIT_NOFILE, (count, most))


def _listen(host: str, port: int) -> socket.socket:
    """Return a socket that has the port, but does not listen yet.

    Raises:
        LaunchError: The port cannot be had.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        found = socket.socket(family, kind, protocol)
        try:
            found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            found.bind(address)
            found.listen(1024)
        except OSError:
            found.close()
            raise
    except OSError as error:
        way_out = "Give another --host or --port."
        if error.errno == errno.EADDRINUSE:
            way_out = (
                f"Another program listens there (ss -ltnp 'sport = :{port}' names it): end it, or give another --port."
            )
            if environment().get("HVDLITE_CONTROL"):
                way_out = (
                    "Another rank of this job listens there, or another program: hvdliterun starts a server on each rank. "
                    "Start one on each host (-H node1:1,node2:1), with --replicas for more processes, or give another --port."
                )
        elif error.errno == errno.EACCES:
            way_out = "Ports below 1024 are for root: give another --port."
        raise LaunchError(f"cannot listen on {host}, port {port}: {error.strerror or error}. {way_out}") from None
    return found


def _on_devices(devices: list[str]) -> str:
    """Say which replica has which GPU."""
    if not any(devices):
        return ""
    shares = "; some share one" if len(set(devices)) < len(devices) else ""
    return f"; replica on GPU: {', '.join(f'{place} on {name}' for place, name in enumerate(devices))}{shares}"


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'s' * (number != 1)}"
