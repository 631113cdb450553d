"""`Pull`: the values of a push come while the program goes on::

    step        └ push ┐
    forward            ├── layer 0 ──┬── layer 1 ──┬── layer 2 ──
    messages           └── chunk 0 ──┴── chunk 1 ──┴── chunk 2 ──┘

A thread receives them (`Pull`), and the program waits for those that it needs next (`Values`).
"""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from hvdlite.async_sgd.deal import ServerLayout
from hvdlite.async_sgd.training.gradients import slices
from hvdlite.async_sgd.training.replica import Replica
from hvdlite.protocols import Array


class Pull:
    """What a thread receives after one push.

    Args:
        numbers: The numbers of the tensors that will come.
        receive: Receives all values. It calls its argument with the numbers of each chunk that is there.
    """

    def __init__(self, numbers: Iterable[int], receive: Callable[[Callable[[Iterable[int]], None]], None]) -> None:
        self._left, self._receive = set(numbers), receive
        self._arrived = threading.Condition()
        self._error: BaseException | None = None
        context = contextvars.copy_context()
        self._thread = threading.Thread(target=context.run, args=(self._run,), name="hvdlite-pull", daemon=True)
        self._thread.start()

    def wait(self, numbers: Iterable[int]) -> None:
        """Wait until the values of these tensors are there. The thread that receives owns the wait.

        Raises:
            HvdliteError: They will not come: a server has failed, or a rank has left the job.
        """
        wanted = set(numbers)
        with self._arrived:
            while not self._error and wanted & self._left:
                self._arrived.wait()
            if wanted & self._left and self._error:
                raise self._error

    def end(self) -> None:
        """Wait until all is over: all values are there, and all messages of the push are gone.

        Raises:
            HvdliteError: See `wait`.
        """
        self._thread.join()
        if self._error:
            raise self._error

    def _run(self) -> None:
        try:
            self._receive(self._note)
        except BaseException as error:  # for the program, which asks later
            with self._arrived:
                self._error = error
                self._arrived.notify_all()

    def _note(self, numbers: Iterable[int]) -> None:
        with self._arrived:
            self._left.difference_update(numbers)
            self._arrived.notify_all()


class Values:
    """The latest values that one rank has pulled, and how its replica gets them.

    Args:
        replica: The replica.
        layouts: The servers' parts.
        memory: For each server, the memory in which its values come.

    Attributes:
        lock: Held while the replica gets all values, for those who read them then.
    """

    def __init__(self, replica: Replica[Any], layouts: Sequence[ServerLayout], memory: Sequence[Array]) -> None:
        self._replica = replica
        self.lock = threading.Lock()
        self._values: dict[int, Array] = {}
        for layout, data in zip(layouts, memory, strict=True):
            self._values |= slices(data, layout, replica.sizes)
        self._pull: Pull | None = None
        self._pending: set[int] = set()
        self._taking = threading.RLock()

    def take_latest(self) -> None:
        """Give the replica all values, which are there."""
        with self.lock:
            for number, value in self._values.items():
                self._replica.take(number, value)

    def pull(self, receive: Callable[[Callable[[Iterable[int]], None]], None], late: bool) -> None:
        """Receive values. `take_latest` gives them to the replica; if they come late, `take` and `take_all`.

        Args:
            receive: See `Pull`.
            late: Whether to return before they are there.

        Raises:
            HvdliteError: A server has failed, or a rank has left the job.
        """
        if not late:
            receive(lambda numbers: None)
            return
        self._pending = set(self._values)
        self._pull = Pull(self._pending, receive)

    def take(self, numbers: Iterable[int]) -> None:
        """Give the replica the values of these tensors that are under way. Wait until they are there.

        Raises:
            HvdliteError: A server has failed, or a rank has left the job.
        """
        with self._taking:
            wanted = self._pending.intersection(numbers)
            if not wanted or self._pull is None:
                return
            self._pull.wait(wanted)
            for number in sorted(wanted):
                self._replica.take(number, self._values[number])
            self._pending -= wanted

    def take_all(self) -> None:
        """Give the replica all values that are under way, and wait until the last push is over.

        Raises:
            HvdliteError: See `take`.
        """
        with self._taking:
            pull = self._pull
            if pull is None:
                return
            try:
                pull.end()
                self.take(self._pending)
            finally:
                self._pull = None

    def is_pending(self, number: int) -> bool:
        """Return whether the replica has an old value of a tensor, because the new one is under way."""
        return number in self._pending
