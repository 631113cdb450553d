"""The thread in which a rank serves its part: it receives requests, and sends the answers of a `Server`."""

from __future__ import annotations

import threading
from collections.abc import Collection

import numpy as np

from hvdlite.async_sgd import messages
from hvdlite.async_sgd.messages import Answer, Purpose
from hvdlite.async_sgd.part import Part, Push
from hvdlite.async_sgd.server import Reply, Server
from hvdlite.errors import HvdliteError
from hvdlite.protocols import ANY, Array, Channel, Request, WaitKind


class Service:
    """Serves one part until the ranks have met to finish, or the channel ends.

    Args:
        channel: The channel of the group.
        server: What answers the requests.
        part: The parameters of the server.
        nbytes: The size of the part's values, and of its gradients.
        tensors: The number of its tensors.
        workers: The ranks that train.
        keeps_pushes: Whether the server keeps a push after the call in which it gets it.
    """

    def __init__(
        self,
        channel: Channel,
        server: Server,
        part: Part,
        nbytes: int,
        tensors: int,
        workers: Collection[int],
        keeps_pushes: bool,
    ) -> None:
        self._channel, self._server, self._part = channel, server, part
        self._nbytes, self._tensors = nbytes, tensors
        # Each worker has at most one push here. One buffer for all will do where a push is applied as soon as it is there.
        one = np.empty(nbytes, np.uint8)
        self._gradients = {rank: np.empty(nbytes, np.uint8) if keeps_pushes else one for rank in workers}
        self._values: dict[int, Array] = {}
        self._sends: dict[int, list[Request]] = {}
        self._thread = threading.Thread(target=self._run, name="hvdlite-parameters", daemon=True)

    def start(self) -> None:
        """Begin to serve."""
        self._thread.start()

    def join(self) -> None:
        """Wait until the service is over. The ranks have met to finish, so this takes a moment."""
        self._thread.join()

    def _run(self) -> None:
        try:
            while not self._server.is_over:
                self._serve()
            for requests in self._sends.values():
                _wait_all(requests)
        except HvdliteError:
            # The job ends, or its ranks leave: those that wait for this server learn that from the channel, with the reason.
            return

    def _serve(self) -> None:
        asked = np.empty(len(messages.Request(0)), np.float64)
        with self._channel.guarded("the next push of any rank", WaitKind.SERVICE, beside_threads=True):
            receive = self._channel.irecv(asked, ANY, messages.REQUEST)
            receive.wait()
        rank = receive.source
        assert rank is not None
        request = messages.Request.unpack(asked)
        if request.purpose == Purpose.PUSH:
            replies = self._server.push(rank, request.number, self._body(rank, request))
        else:
            replies = self._server.meet(rank, Purpose(request.purpose))
        for reply in replies:
            self._answer(reply)

    def _body(self, rank: int, request: messages.Request) -> Push:
        head, gradients = np.empty(request.head, np.uint8), self._gradients[rank]
        receives = [self._channel.irecv(head, rank, messages.BODY)]
        if request.has_gradients:
            receives.append(self._channel.irecv(gradients, rank, messages.BODY))
        _wait_all(receives)
        return Push(gradients, head[: self._tensors] != 0, head[self._tensors :].tobytes(), request.weight)

    def _answer(self, reply: Reply) -> None:
        rank = reply.rank
        # The rank has the last answer, for it has asked again: so this does not wait, and the buffer is free.
        _wait_all(self._sends.pop(rank, []))
        if reply.error:
            values = np.frombuffer(reply.error.encode(), np.uint8)
        else:
            if rank not in self._values:
                self._values[rank] = np.empty(self._nbytes, np.uint8)
            values = self._values[rank]
            self._part.read(values)
        answer = Answer(reply.purpose, len(values) if reply.error else 0, reply.missed)
        self._sends[rank] = [
            self._channel.isend(answer.pack(), rank, messages.ANSWER),
            self._channel.isend(values, rank, messages.VALUES),
        ]


def _wait_all(requests: list[Request]) -> None:
    for request in requests:
        request.wait()
