"""The connection of a rank to its launcher while an elastic function runs: how it goes on when other ranks fail.

launcher          rank 0                      rank 1                              rank 2
  │ ◀── outlives ── run(train) … ◀── outlives ── run(train) … ◀── outlives ── run(train) …
  │                                                                              ✗ killed
  │ ── lost ──────▶ every wait raises, here and there
  │ ◀── again ─────── the error has left the function
  │ ── generation ─▶ number 2, of ranks 0 and 1: a new world
  │ ◀── together ──── newest commit, sync, train
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Sequence
from dataclasses import replace

from hvdlite import api
from hvdlite.comm.interrupt import Interrupt
from hvdlite.errors import HvdliteError, PeerLeftError
from hvdlite.launch.worker.rank_environment import renumber_horovod_variables
from hvdlite.launcher_link.generation import CommitId, Generation
from hvdlite.launcher_link.line import Line
from hvdlite.launcher_link.link import Address
from hvdlite.launcher_link.session import Message

_WORD_SECONDS = 1.0
"""So long after a rank has found another one missing, the launcher says whether that one has failed."""


class Lifeline:
    """What one rank tells the launcher of one call of ``elastic.run``, and hears from it.

    Args:
        control: The setting ``control``.
        call: The number of the call of ``elastic.run`` in the program, from 0 on.

    Attributes:
        has_committed: Whether the call has committed a state, from which the ranks can go on.
        has_lost: Whether other ranks have failed, so that every wait of this rank has ended.

    Raises:
        HvdliteError: The launcher does not answer, or its job has other ranks than this one.
    """

    def __init__(self, control: str, call: int) -> None:
        here = api.world("elastic.run()")
        self._config, self._interrupt = here.config, here.interrupt
        self._hosts = dict(zip(here.job_ranks, here.hosts, strict=True))
        self._updates = 0
        self._generation: Generation | None = None
        self._ranks: Sequence[int] = ()
        self._changed = threading.Condition()  # also orders what is heard, by whichever thread
        self._is_over = False
        self._process = os.getpid()
        self._thread: threading.Thread | None = None
        self.has_committed = self.has_lost = False
        try:
            self._line = Line(Address.parse(control))
            if self._interrupt is not None:
                self._line.ask("outlives", rank=here.job_ranks[api.rank()], call=call)
        except (OSError, ValueError) as error:
            raise _no_answer(error) from error
        if self._interrupt is not None:
            # A rank that waits for one that has failed would not look by itself.
            self._thread = threading.Thread(target=self._listen, name="hvdlite-lifeline", daemon=True)
            self._thread.start()

    # What rank 0 says for all ranks

    def speak(self) -> None:
        """Note that this rank speaks for the present generation.

        Raises:
            HvdliteError: The launcher does not answer, or its job has other ranks than this one.
        """
        try:
            self._line.ask("elastic", rank=api.rank(), size=api.size())
        except OSError as error:
            raise _no_answer(error) from error

    def tell_commit(self, call: int, number: int) -> None:
        """Tell the launcher that all hosts have a commit."""
        self._line.tell("committed", call=call, number=number)

    def leave(self) -> None:
        """Tell the launcher that the ranks end, so that the job goes on with other hosts."""
        self._line.ask("leaving")

    @property
    def updates(self) -> int:
        """What the launcher has said of the hosts."""
        with contextlib.suppress(OSError):  # if the launcher is gone, all ranks end
            self._hear()
        return self._updates

    # When ranks fail

    def explains(self, error: Exception) -> bool:
        """Tell whether `error` has been raised because other ranks have failed, so that this rank can go on without them.

        A rank may find another one missing before the launcher says that it has failed.
        """
        if isinstance(error, PeerLeftError) and self._thread is not None:
            with self._changed:
                self._changed.wait_for(lambda: self.has_lost or self._is_over, _WORD_SECONDS)
        return self.has_lost

    def end(self) -> bool:
        """Tell the launcher that the function has returned on this rank.

        Returns:
            False if other ranks have failed meanwhile: they need this rank to go on.
        """
        if self._thread is not None:
            with contextlib.suppress(OSError):
                self._line.ask("over")
                self._hear()
        return not self.has_lost

    def go_on(self) -> None:
        """Join the next generation, with the ranks that are left. Return when the new world is made.

        Raises:
            HvdliteError: The launcher is gone.
        """
        while True:
            self._line.tell("again")
            with self._changed:
                self._changed.wait_for(lambda: self._generation is not None or self._is_over)
                generation, ranks, interrupt = self._generation, self._ranks, self._interrupt
                self._generation = None
            if generation is None or interrupt is None:
                raise HvdliteError("other ranks have failed, and hvdliterun does not answer.")
            config = replace(self._config, generation=str(generation))
            try:
                api.go_on({rank: self._hosts[rank] for rank in ranks}, generation.number, config, interrupt)
            except PeerLeftError as error:
                if not self.explains(error):
                    raise
                continue
            renumber_horovod_variables(api.rank(), api.size(), api.local_rank(), api.local_size())
            self._line.tell("together")
            return

    def close(self) -> None:
        """End the connection."""
        if self._thread is not None and os.getpid() == self._process:
            self._line.tell("over")  # unless it has been said: an exception has left the function
            self._line.hang_up()
            self._thread.join()
        self._line.close()

    def _listen(self) -> None:
        try:
            while True:
                self._line.wait()
                self._hear()
        except OSError:
            with self._changed:
                self._is_over = True
                self._changed.notify_all()

    def _hear(self) -> None:
        with self._changed:
            for message in self._line.hear():
                self._take(message)
            self._changed.notify_all()

    def _take(self, message: Message) -> None:
        if message.kind == "hosts":
            self._updates |= message.fields["update"]
        elif message.kind == "lost":
            self._lose(message.fields["text"])
        elif message.kind == "generation":
            committed = tuple(CommitId(*each) for each in message.fields["committed"])
            before = Generation.parse(self._config.generation)
            self._generation = replace(before, number=message.fields["number"], committed=committed)
            self._ranks = message.fields["ranks"]
            self._interrupt, self.has_lost, self._updates = Interrupt(), False, 0

    def _lose(self, text: str) -> None:
        """End every wait of this rank, because another one has failed; or say why this rank cannot go on without it."""
        assert self._interrupt is not None
        why = "" if self.has_committed else "nothing has been committed yet"
        if not why and api.is_initialized():
            why = api.world().binds()
        if why:
            self._line.tell("cannot", why=why)
        else:
            self.has_lost = True
            self._interrupt.set(text)


def _no_answer(error: Exception) -> HvdliteError:
    return HvdliteError(
        f"hvdliterun does not answer rank {api.rank()} of {api.size()} ({error}). Under hvdliterun call hvdlite.init() "
        "without comm, so that the job has all ranks."
    )
