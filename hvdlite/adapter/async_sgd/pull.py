"""`Pull`: the values of a push come while the program goes on::

    step        └ push ┐
    forward            ├── layer 0 ──┬── layer 1 ──┬── layer 2 ──
    messages           └── chunk 0 ──┴── chunk 1 ──┴── chunk 2 ──┘

A thread receives them, and the program waits for those that it needs next.
"""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable, Iterable


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
