"""The calls of one rank to a communicator, in their order. Whoever waits for a call runs it, and those before it.

So a blocking call costs no change of threads. A thread in the background runs what nobody waits for. It lets the program's
thread go first, unless each rank has a core to spare: then it begins at once, and the program computes meanwhile.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, NamedTuple

from hvdlite.comm.hierarchical import HierarchicalCollectives
from hvdlite.errors import CommunicationError, HvdliteError

_GRACE_SECONDS = 5e-3
"""How long the background thread leaves a call to the program's thread."""
_JOIN_SECONDS = 1.0
"""How long `close` waits for the background thread, which is about to end."""


class CollectiveCall(NamedTuple):
    """One collective.

    Attributes:
        text: What must be equal on all ranks, in words, such as "all_reduce(float32[1024], SUM)".
        run: Runs it. Every rank calls this at the same point of its sequence.
    """

    text: str
    run: Callable[[HierarchicalCollectives], Any]

    @property
    def kind(self) -> str:
        """The name of the function in `text`, such as "all_reduce"."""
        return self.text.partition("(")[0]


class Pending:
    """A call that was submitted.

    Attributes:
        call: The call.
        done: Whether the call is over.
        error: The error by which it has failed; None if it has not.
        result: What `CollectiveCall.run` has returned.
        then: What to do when it is over.
    """

    __slots__ = ("call", "done", "error", "result", "then")

    def __init__(self, call: CollectiveCall) -> None:
        self.call = call
        self.done = False
        self.error: BaseException | None = None
        self.result: Any = None
        self.then: list[Callable[[], None]] = []


class Calls:
    """The queue of calls. Any thread may submit and wait.

    Args:
        run: Runs one call and returns its result; the second argument says whether in the background.
        guard: Returns a context manager for the time in which a thread waits until another one has run a call.
        begins_at_once: Whether the background thread begins a call at once.
        prepare_thread: Called by the background thread when it begins.
    """

    def __init__(
        self,
        run: Callable[[CollectiveCall, bool], Any],
        guard: Callable[[CollectiveCall], AbstractContextManager[None]],
        begins_at_once: bool,
        prepare_thread: Callable[[], None],
    ) -> None:
        self._run, self._guard, self._prepare_thread = run, guard, prepare_thread
        self._grace = 0.0 if begins_at_once else _GRACE_SECONDS
        self._queue: deque[Pending] = deque()
        # Reentrant, because a thread that is interrupted in `_wait_for_another_thread` lets the queue fail.
        self._lock = threading.RLock()
        self._something_to_do = threading.Condition(self._lock)
        self._something_is_over = threading.Condition(self._lock)
        self._waiting = 0
        self._runner = 0
        """The number of the thread that runs a call; 0 if none does."""
        self._thread: threading.Thread | None = None
        self._closed = False

    def submit(self, call: CollectiveCall, background: bool = True) -> Pending:
        """Append a call.

        Args:
            call: The call.
            background: Whether the background thread may run it; False if the caller waits at once.

        Raises:
            HvdliteError: This thread is in the middle of a call.
        """
        if self._runner == threading.get_ident():
            # At which point of the sequence this call comes depends on when that one ends, which differs between ranks.
            raise HvdliteError(
                f"{call.text} was called in the middle of another collective: in a signal handler, or by a callback of a "
                "future that was not over yet. On other ranks it may have been over, and then the ranks call things in "
                "different orders. Set HVDLITE_OVERLAP=off: then a collective is over when the program gets its future."
            )
        pending = Pending(call)
        with self._lock:
            self._queue.append(pending)
            if background:
                if self._thread is None:
                    self._thread = threading.Thread(target=self._work, name="hvdlite-calls", daemon=True)
                    self._thread.start()
                self._something_to_do.notify()
        return pending

    def then(self, pending: Pending, act: Callable[[], None]) -> None:
        """Call `act` when a call is over: now, if it is; else in the thread that runs it, before the next call runs."""
        with self._lock:
            if not pending.done:
                pending.then.append(act)
                return
        act()

    def wait(self, pending: Pending, seconds: float | None = None) -> Any:
        """Run what is in the queue until a call is over, or wait for another thread that runs it.

        Args:
            pending: The call.
            seconds: How long to wait for another thread. What this thread runs itself is not interrupted.

        Returns:
            The result of the call.

        Raises:
            CommunicationError: The time is over.
            Exception: The call has failed.
        """
        deadline = None if seconds is None else time.monotonic() + seconds
        while not pending.done:
            with self._lock:
                following = self._take()
                if following is None and not pending.done:
                    self._wait_for_another_thread(pending, seconds, deadline)
            if following is not None:
                self._run_taken(following, False)
        if pending.error is not None:
            raise pending.error
        return pending.result

    def _wait_for_another_thread(self, pending: Pending, seconds: float | None, deadline: float | None) -> None:
        left = None if deadline is None else deadline - time.monotonic()
        if left is not None and left <= 0:
            raise CommunicationError(f"{pending.call.text} is not over after {seconds:g} s.")
        self._waiting += 1
        try:
            with self._guard(pending.call):
                self._something_is_over.wait(left)
        finally:
            self._waiting -= 1

    def fail(self, error: BaseException) -> None:
        """Let all calls in the queue fail."""
        with self._lock:
            waiting, self._queue = list(self._queue), deque()
            for pending in waiting:
                pending.error, pending.done = error, True
            self._something_is_over.notify_all()
        for pending in waiting:
            for act in pending.then:
                act()

    def finish(self, seconds: float) -> bool:
        """Let the calls in the queue run, for at most some seconds. Return whether none is left."""
        with self._lock:
            self._waiting += 1
            try:
                return self._something_is_over.wait_for(lambda: not (self._queue or self._runner), seconds)
            finally:
                self._waiting -= 1

    def close(self) -> None:
        """End the background thread, and wait for its end, unless it is in the middle of a call.

        Were it to end while Python ends, then what it holds would end with it; and a thread that lets go of a tensor of torch's
        then aborts the process.
        """
        with self._lock:
            self._closed = True
            self._something_to_do.notify()
            runner, thread = self._runner, self._thread
        if thread is not None and thread.ident not in (runner, threading.get_ident()):
            thread.join(_JOIN_SECONDS)

    def _take(self) -> Pending | None:
        """Take the first call of the queue, if no thread runs one. The caller holds the lock, and runs the call."""
        if self._runner or not self._queue:
            return None
        self._runner = threading.get_ident()
        return self._queue.popleft()

    def _run_taken(self, pending: Pending, in_background: bool) -> None:
        try:
            try:
                pending.result = self._run(pending.call, in_background)
            except BaseException as error:
                pending.error = error
                if not isinstance(error, Exception):  # Ctrl-C
                    raise
            finally:
                with self._lock:
                    pending.done = True
                for act in pending.then:
                    act()
        finally:
            with self._lock:
                self._runner = 0
                if self._queue:
                    self._something_to_do.notify()
                if self._waiting:
                    self._something_is_over.notify_all()

    def _work(self) -> None:
        self._prepare_thread()
        while not self._closed:
            if (taken := self._take_when_left()) is not None:
                self._run_taken(taken, True)
            del taken  # this thread must not keep the tensors of the call while it waits for the next one

    def _take_when_left(self) -> Pending | None:
        """Wait for a call that the program leaves to the background thread, and take it; None if there is none to take."""
        with self._lock:
            self._something_to_do.wait_for(lambda: self._closed or (self._queue and not self._runner))
            if self._closed:
                return None
            first = self._queue[0]
            if self._grace and self._something_to_do.wait_for(partial(self._is_taken, first), self._grace):
                return None
            return self._take()

    def _is_taken(self, first: Pending) -> bool:
        return self._closed or not self._queue or self._queue[0] is not first
