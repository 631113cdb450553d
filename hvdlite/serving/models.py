"""The models of a server by name. Each has replicas, a batcher, a chooser and metrics of its own, and can be loaded anew.

```
 load ─▶ new replicas start ─▶ all are ready ─▶ requests go to them ─▶ the old version answers what it has, and ends
                  └─ one fails ─▶ they end; the old version has never stopped
```
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence

from hvdlite.serving.metrics import Metrics
from hvdlite.serving.options import Options
from hvdlite.serving.replicas.contract import Replicas
from hvdlite.serving.service import RefusedError, Service
from hvdlite.serving.waiting import WaitChooser

log = logging.getLogger(__name__)


class Version:
    """A model as it was loaded once. It is a context: as long as one is entered, the version does not end.

    Args:
        number: How often the model was loaded, with this time.
        service: Computes.
    """

    def __init__(self, number: int, service: Service) -> None:
        self.number, self.service = number, service
        self._users = 0
        self._unused = asyncio.Event()
        self._unused.set()

    def __enter__(self) -> Version:
        """Begin to use it."""
        self._users += 1
        self._unused.clear()
        return self

    def __exit__(self, *error: object) -> None:
        """Use it no more."""
        self._users -= 1
        if not self._users:
            self._unused.set()

    async def retire(self, limit: float) -> None:
        """Answer what is there, and end.

        Args:
            limit: After so many seconds, requests that are not answered are given up.
        """
        self.service.drain()
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._unused.wait(), limit)
        self.service.give_up()
        await self.service.__aexit__()


class Model:
    """A model of a server. All methods run in the thread of the event loop.

    Args:
        name: Its name in the paths.
        make_replicas: Makes the replicas of a version, which are not started yet.
        options: The settings.
        chooser: Says how long batches wait.
        metrics: Counts what happens, in all versions.
    """

    def __init__(
        self,
        name: str,
        make_replicas: Callable[[], Replicas],
        options: Options,
        chooser: WaitChooser,
        metrics: Metrics,
    ) -> None:
        self.name, self.metrics, self._options = name, metrics, options
        self._make_replicas, self._chooser = make_replicas, chooser
        self._loading: asyncio.Task[None] | None = None
        self._next_load: asyncio.Task[None] | None = None
        self._retiring: dict[asyncio.Task[None], Version] = {}

    async def __aenter__(self) -> Model:
        """Start the replicas of the first version."""
        self._lock = asyncio.Lock()
        self.failed: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        """Done, with the reason, if the replicas cannot start, or are not kept running any more."""
        self._present = Version(1, self._new_service())
        self._show(self._present)
        await self._present.service.__aenter__()
        self._watch(self._present)
        return self

    async def __aexit__(self, *error: object) -> None:
        """End the replicas of all versions."""
        self._cancel_loads()
        for task in (self._loading, self._next_load):
            if task is not None:
                await asyncio.wait({task})
        await self._present.service.__aexit__()
        if self._retiring:
            await asyncio.wait(self._retiring)

    @property
    def present(self) -> Version:
        """The version that answers."""
        return self._present

    @property
    def service(self) -> Service:
        """What computes at present."""
        return self._present.service

    @property
    def is_ready(self) -> bool:
        """Whether it can compute, and will go on to do so."""
        return self.service.ready_replicas > 0 and not self.service.is_draining

    def version(self, number: str | None) -> Version:
        """Return the version of a number; without one, the present version.

        Raises:
            RefusedError: It is not there.
        """
        if number is not None and number != str(self._present.number):
            raise RefusedError(
                f"the model {self.name!r} has no version {number!r}: there is {self._present.number}. Each load makes a new "
                "one, which takes the place of the one before.",
                404,
            )
        return self._present

    def drain(self) -> None:
        """Let batches wait for no more requests: none will come. Load no more."""
        self._cancel_loads()
        self.service.drain()

    def give_up(self) -> None:
        """Answer all requests that are here, for the server cannot wait for them."""
        for version in (self._present, *self._retiring.values()):
            version.service.give_up()

    async def load(self) -> None:
        """Start replicas beside those that are there, which import the model anew, and let them take over when all are ready.

        Raises:
            RefusedError: One of them cannot start, and nothing has changed; or the server ends.
        """
        # A load that waits for another one begins later than this call.
        if not self.service.is_draining and self._next_load is None:
            self._next_load = asyncio.get_running_loop().create_task(self._load())
            # Whoever waits for it may be gone when it fails, and asyncio would complain that nobody has looked.
            self._next_load.add_done_callback(lambda task: task.cancelled() or task.exception())
        task = self._next_load
        if task is not None:
            await asyncio.wait({task})
        if task is None or task.cancelled():
            raise RefusedError("the server ends, and loads no more.", 503)
        task.result()

    async def _load(self) -> None:
        async with self._lock:
            self._loading, self._next_load = self._next_load, None
            new = Version(self._present.number + 1, self._new_service())
            new.service.is_trial = True
            log.info(
                "%s: version %d is loaded, and version %d answers meanwhile.", self.name, new.number, new.number - 1
            )
            try:
                await new.service.__aenter__()
                await self._all_ready(new.service)
            except BaseException as error:
                await new.service.__aexit__()
                if isinstance(error, RefusedError):
                    log.error("%s: version %d cannot be loaded: %s", self.name, new.number, error)
                raise
            new.service.is_trial = False
            old, self._present = self._present, new
            self._show(new)
            self._watch(new)
            log.info("%s: version %d answers now. An input is %s.", self.name, new.number, new.service.spec)
            task = asyncio.get_running_loop().create_task(old.retire(self._options.drain))
            self._retiring[task] = old
            task.add_done_callback(self._retiring.pop)

    def _cancel_loads(self) -> None:
        for task in (self._loading, self._next_load):
            if task is not None:
                task.cancel()

    def _new_service(self) -> Service:
        return Service(self._make_replicas(), self._options, self._chooser, self.metrics)

    async def _all_ready(self, service: Service) -> None:
        complete = asyncio.get_running_loop().create_task(service.complete.wait())
        either: set[asyncio.Future[object]] = {complete, service.failed}  # type: ignore[arg-type]
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        finally:
            complete.cancel()
        if service.failed.done():
            raise RefusedError(
                f"the model {self.name!r} cannot be loaded, and version {self._present.number} goes on: "
                f"{service.failed.result()}",
                400,
            )

    def _show(self, version: Version) -> None:
        service = version.service
        self.metrics.watch(service.batcher, self._chooser, service.there)

    def _watch(self, version: Version) -> None:
        def pass_on(done: asyncio.Future[str]) -> None:
            if not done.cancelled() and version is self._present and not self.failed.done():
                self.failed.set_result(done.result())

        version.service.failed.add_done_callback(pass_on)


class Models:
    """All models of a server.

    Args:
        models: At least one. The first is the one that is meant where no name is given.

    Attributes:
        is_ending: Whether the server has been told to end, and still serves.
    """

    def __init__(self, models: Sequence[Model]) -> None:
        self._by_name = {model.name: model for model in models}
        self.first = models[0]
        self.is_ending = False
        self._loads: set[asyncio.Task[None]] = set()

    def __iter__(self) -> Iterator[Model]:
        """Return the models, in the order in which they were given."""
        return iter(self._by_name.values())

    def __len__(self) -> int:
        """Return how many there are."""
        return len(self._by_name)

    def named(self, name: str) -> Model:
        """Return a model.

        Raises:
            RefusedError: There is none of this name.
        """
        if name not in self._by_name:
            raise RefusedError(f"there is no model {name!r}: there are {', '.join(map(repr, self._by_name))}.", 404)
        return self._by_name[name]

    def text(self, of: Callable[[Model], str], between: str) -> str:
        """Return a text about each model, with its name before it if there are several."""
        if len(self) == 1:
            return of(self.first)
        return between.join(f"{model.name}: {of(model)}" for model in self)

    def load_soon(self) -> None:
        """Load all models anew, one after the other. The log says how it ends."""
        task = asyncio.get_running_loop().create_task(self._load_all())
        self._loads.add(task)
        task.add_done_callback(self._loads.discard)

    async def _load_all(self) -> None:
        for model in self:
            with contextlib.suppress(RefusedError):  # the log has it
                await model.load()

    @property
    def is_draining(self) -> bool:
        """Whether the server ends."""
        return self.is_ending or self.first.service.is_draining

    @property
    def are_ready(self) -> bool:
        """Whether each can compute, and the server will go on."""
        return not self.is_ending and all(model.is_ready for model in self)

    def drain(self) -> None:
        """Let batches wait for no more requests: none will come."""
        for model in self:
            model.drain()

    def give_up(self) -> None:
        """Answer all requests that are here, for the server cannot wait for them."""
        for model in self:
            model.give_up()
