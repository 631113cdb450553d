"""`AsyncTraining`: one rank's part in a training with a parameter server."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping
from typing import Any, Generic

import numpy as np

from hvdlite.api import allgather_object, rank, world
from hvdlite.async_sgd.deal import deal
from hvdlite.async_sgd.early import EarlyChunks
from hvdlite.async_sgd.messages import Purpose, receive_object, send_object
from hvdlite.async_sgd.rows import Rows
from hvdlite.async_sgd.server import Mode, ParameterServer
from hvdlite.async_sgd.service import ParameterService
from hvdlite.async_sgd.training import unfinished
from hvdlite.async_sgd.training.failures import Failing
from hvdlite.async_sgd.training.gradients import LocalGradients
from hvdlite.async_sgd.training.options import AsyncOptions
from hvdlite.async_sgd.training.pull import Values
from hvdlite.async_sgd.training.replica import Gradient, Replica, StatefulPart
from hvdlite.async_sgd.worker import Worker
from hvdlite.errors import ArgumentError, CommunicationError
from hvdlite.protocols import Array, WaitKind

_HINTS = {
    Mode.SYNC: "it waits for the gradients of all ranks that still train; a rank whose loop is over calls optimizer.finish()",
    Mode.SSP: "this rank is `staleness` steps ahead of the slowest; a rank whose loop is over calls optimizer.finish()",
    Mode.ASYNC: "it applies each push at once",
}
_HINT = "the parameter server to take this rank's gradients and answer ({})"


class AsyncTraining(Generic[Gradient]):
    """What one rank does in the training of one optimizer. All ranks of the process set make it, with equal parameters.

    Args:
        replica: The parameters of this rank, and its optimizer.
        options: The arguments.

    Attributes:
        options: The arguments.
        is_server: Whether this rank only serves.
        is_over: Whether the ranks have met to finish.
        worker: The connection to the servers.
        overlaps: Whether the framework calls `ready`.
        early: What is sent before a push.
        values: What was pulled, and what is under way.
    """

    def __init__(self, replica: Replica[Gradient], options: AsyncOptions) -> None:
        self.options, self._replica, self._world = options, replica, world()
        ranks = self._world.ranks(options.process_set)
        self._group = self._world.communicators.new(ranks, "a parameter server")
        channel, me = self._group.channel, self._group.rank
        self.is_server = me not in options.workers
        self._layouts = deal(replica.sizes, options.servers)
        self.overlaps = self._group.begins_at_once if options.overlap is None else options.overlap
        self._part: StatefulPart | None = None
        self._service: ParameterService | None = None
        for layout in self._layouts:
            if layout.server == me:
                part = self._part = replica.part(layout, options.compensation)
                others = set(range(len(ranks))).difference(options.workers)
                rules = options.mode, options.staleness, ranks, options.compensation
                server = ParameterServer(part, layout, options.workers, others, *rules)
                keeps = options.mode is Mode.SYNC or self.overlaps
                self._service = ParameterService(channel, server, layout, options.workers, keeps, options.overlap_pull)
        self.worker = Worker(channel, self._group.isend, self._layouts, ranks, options.overlap_pull)
        self.values = Values(replica, self._layouts, self.worker.values)
        early = self.early = EarlyChunks(self.worker, self._layouts)
        self._gradients = LocalGradients(
            replica, self._layouts, self.worker.gradients, ranks[me], early, options.refuses_nan
        )
        self.is_over, self._failure = False, ""
        lose = None if self._service is None else self._service.lose
        self._failing = Failing(
            options.goes_on,
            options.checkpoint,
            replica,
            ranks,
            self._world.watch.losses,
            lose,
            not self.is_server,
            self.values.lock,
        )
        if self._service is not None:
            self._service.start()
        unfinished.note(self._world, self)

    def check_open(self, call: str) -> None:
        """Raise an error if the training is over.

        Args:
            call: The call of the program, for the error.

        Raises:
            ArgumentError: It is over.
        """
        if self.is_over:
            raise ArgumentError(
                f"{call}: finish() was called, so the servers are gone. To go on, wrap a new optimizer of the same parameters."
            )

    def check_trains(self, call: str) -> None:
        """Raise an error unless this rank may make steps.

        Args:
            call: The call of the program, for the error.

        Raises:
            ArgumentError: This rank only serves, or the training is over.
        """
        self.check_open(call)
        if self.is_server:
            raise ArgumentError(
                f"{call}: rank {rank()} only serves parameters (servers={len(self.options.servers)}): call "
                "hvd.serve_parameters() instead of the training loop, if optimizer.is_server."
            )

    def ready(self, number: int, gradient: Gradient) -> None:
        """Send a gradient before the step, if that makes sense: the backward pass has just made it. It may change until then.

        Args:
            number: The number of the parameter.
            gradient: Its gradient.

        Raises:
            HvdliteError: A server has failed, or a rank has left the job.
        """
        self.values.take_all()
        with self._in_step():
            self._gradients.ready(number, gradient)

    def add(self, gradients: Mapping[int, Gradient | Rows], weight: float) -> bool:
        """Add gradients to the next push; push and pull if it is time to. A rank that trains calls this.

        Args:
            gradients: The gradients of a step, by the numbers of the parameters. Parameters may be missing.
            weight: The number of samples. A step of 0 samples has no gradients, whatever is given.

        Returns:
            Whether it has pulled, or with `overlap_pull` has begun to: `values` gives the replica the new values.

        Raises:
            ArgumentError: A gradient has NaN or infinite elements, and ``on_nan="raise"``.
            HvdliteError: A server has failed, or a rank has left the job.
        """
        self.values.take_all()
        with self._in_step(ArgumentError):
            self._gradients.add(gradients, weight)
        if self._gradients.steps < self.options.push_every:
            return False
        self._push()
        return True

    def synchronize(self) -> None:
        """Meet all ranks, and get the same parameters as they. All ranks call this."""
        self.check_open("synchronize()")
        self._meet(Purpose.PULL, WaitKind.PEER)

    def finish(self) -> None:
        """Meet all ranks in the end, and get the final parameters. Until then, a rank that only serves answers the workers."""
        if self.is_over:
            return
        if self.is_server:
            while (purpose := self._meet(Purpose.SERVE, WaitKind.SERVICE)) is not Purpose.FINISH:
                if purpose is Purpose.STATE:
                    self._gather_state()
                elif purpose is Purpose.LOAD:
                    self._load(None)
        else:
            self._meet(Purpose.FINISH, WaitKind.SERVICE)  # others may train much longer
        self._before_parting()
        self.is_over = True
        unfinished.forget(self._world, self)
        self._failing.end()
        if self._service is not None:
            self._service.join()
        self._group.close()

    def _before_parting(self) -> None:
        """Do what a framework needs all ranks for in the end. All ranks that live call this, after their last meeting."""

    def state(self, kind: WaitKind = WaitKind.PEER) -> list[Any]:
        """Return the state of the optimizer of each part. All ranks call this.

        Args:
            kind: Whether the others are expected to come soon.
        """
        if self.is_over:
            own = [] if self._part is None else [self._part.state()]
            return [each for there in allgather_object(own, process_set=self.options.process_set) for each in there]
        self._meet(Purpose.STATE, kind)
        return self._gather_state()

    def load(self, state: Any) -> None:
        """Give the servers this state, and the parameters, of the first rank. All ranks call this.

        Args:
            state: What each part's `load` gets. It can be pickled.
        """
        self.check_open(Purpose.LOAD.text)
        values = self._read()
        self._meet(Purpose.LOAD, WaitKind.PEER)
        self._load((state, values))

    def _push(self) -> None:
        mine = self._gradients
        hint = _HINT.format(_HINTS[self.options.mode])
        with self._in_step():
            self.worker.push(mine.present, self.early.end_step(), mine.rows, self._replica.settings(), mine.weight)
        mine.clear()
        self.values.pull(self._in_step()(functools.partial(self.worker.pull, hint)), self.options.overlap_pull)

    def _meet(self, purpose: Purpose, kind: WaitKind) -> Purpose:
        if self._gradients.steps:  # fewer than `push_every`
            self._push()
        self.values.take_all()
        with self._in_step():
            met = self.worker.meet(purpose, kind)
        self.values.take_latest()
        return met

    def _read(self) -> list[Array]:
        """Return the bytes of the replica's values."""
        self.values.take_all()
        values = [np.empty(size, np.uint8) for size in self._replica.sizes]
        for number, value in enumerate(values):
            self._replica.read(number, value)
        return values

    def _gather_state(self) -> list[Any]:
        """Return the state of each part, in the order of the servers. All ranks call this after a meeting."""
        states = []
        for layout in self._layouts:
            mine = self._part.state() if self._part is not None and layout.server == self._group.rank else None
            states.append(self._share(mine, layout.server))
        return states

    def _load(self, given: tuple[Any, list[Array]] | None) -> None:
        """Give the servers the state and values of the first worker that lives. All ranks call this after a meeting.

        Args:
            given: The state and values of this rank; None if it only serves.
        """
        # The ranks hear of losses at different times, so one of them says which worker is the first.
        first = self._share(
            next(each for each in self.options.workers if each in self._failing.living), self._layouts[0].server
        )
        state, values = self._share(given, first)
        with self.values.lock:
            for number, value in enumerate(values):
                self._replica.take(number, value)
        if self._part is not None:
            self._part.load(state)
        # Nobody pushes before all parts are ready.
        with self._in_step():
            self.worker.meet(Purpose.SERVE if self.is_server else Purpose.PULL, WaitKind.PEER)

    def _share(self, value: Any, root: int) -> Any:
        """Return the value of one rank on all ranks. All of them call this."""
        channel = self._group.channel
        with (
            self._in_step(),
            channel.guarded(f"rank {root} of a parameter server to send what it has", beside_threads=True),
        ):
            if root != self._group.rank:
                return receive_object(channel, root)
            send_object(channel, value, [each for each in self._failing.living if each != root])
            return value

    @contextlib.contextmanager
    def _in_step(self, *harmless: type[Exception]) -> Iterator[None]:
        """Tell the others if this rank leaves the body in the middle: its next message would not be what they wait for.

        Args:
            harmless: Errors after which it may go on.
        """
        if self._failure:
            raise CommunicationError(f"this training with a parameter server has failed before: {self._failure}")
        try:
            yield
        except harmless:
            raise
        except BaseException as error:
            self._failure = str(error) or type(error).__name__
            unfinished.forget(self._world, self)
            self._group.channel.break_off("a training with a parameter server", error)
            raise
