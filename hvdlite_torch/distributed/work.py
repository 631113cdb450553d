"""What torch waits for: the `Work` of a collective, of a message, and of several of them."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from hvdlite.comm.ordered.calls import Pending
from hvdlite.comm.ordered.communicator import Communicator
from hvdlite.errors import NotYetError
from hvdlite.protocols import Request
from hvdlite_torch.distributed.operands import Operand


class CollectiveWork(dist.Work):
    """A collective that was submitted.

    Args:
        communicator: The group.
        pending: The collective.
        results: The tensors that hold the result when it is over: the value of the future.
    """

    def __init__(self, communicator: Communicator, pending: Pending, results: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self._communicator, self._pending, self._results = communicator, pending, list(results)

    def wait(self, timeout: timedelta | None = None) -> bool:
        self._communicator.wait(self._pending, timeout.total_seconds() if timeout else None)
        return True

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        return self._pending.done

    def is_success(self) -> bool:
        return self._pending.done and self._pending.error is None

    def exception(self) -> BaseException | None:
        return self._pending.error

    def result(self) -> list[torch.Tensor]:
        return self._results

    def get_future(self) -> torch.futures.Future[Any]:
        """Return a future with the tensors.

        Python code may add callbacks that call collectives (PowerSGD does). They must run at the same point of the program on
        every rank, so the future is over when Python code gets it, and callbacks run at once. C++ code (the reducer of DDP)
        only waits for its futures, and gets them while the collective runs. A wrong guess of who asks is safe: it costs the
        overlap, or `Calls.submit` refuses the callback's collective.
        """
        asked_by_python = "get_future" in sys._getframe(1).f_code.co_names
        if (asked_by_python or not self._communicator.begins_at_once) and not self._pending.done:
            self.wait()
        future: torch.futures.Future[Any] = torch.futures.Future()

        def complete() -> None:
            error = self._pending.error
            if error is None:
                future.set_result(self._results)
            else:
                future.set_exception(error)

        self._communicator.then(self._pending, complete)
        return future


class MessageWork(dist.Work):
    """A message that was begun.

    Args:
        request: The message.
        operand: The tensor that is sent, or that receives.
        receives: Whether it receives.
    """

    def __init__(self, request: Request, operand: Operand, receives: bool) -> None:
        super().__init__()
        self._request, self._operand, self._receives = request, operand, receives

    def wait(self, timeout: timedelta | None = None) -> bool:
        self._request.wait()
        self._deliver()
        return True

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        done = self._request.test()
        if done:
            self._deliver()
        return done

    def is_success(self) -> bool:
        return self.is_completed()

    def source_rank(self) -> int:
        source = self._request.source
        return -1 if source is None else source

    _source_rank = source_rank

    def get_future(self) -> torch.futures.Future[Any]:
        raise NotYetError(
            "a message has no future in the backend hvdlite: call wait() of what isend or irecv returned."
        )

    def _deliver(self) -> None:
        if self._receives:
            self._receives = False
            self._operand.write_back()


class SeveralWorks(dist.Work):
    """Several works, for coalesced calls."""

    def __init__(self, works: Sequence[dist.Work]) -> None:
        super().__init__()
        self._works = list(works)

    def wait(self, timeout: timedelta | None = None) -> bool:
        for work in self._works:
            work.wait() if timeout is None else work.wait(timeout)
        return True

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        return all([work.is_completed() for work in self._works])  # a list, because each call makes a message go on

    def is_success(self) -> bool:
        return all([work.is_success() for work in self._works])
