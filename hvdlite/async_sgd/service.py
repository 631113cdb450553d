"""The thread in which a rank serves its part: it receives requests, and sends the answers of a `ParameterServer`."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Collection, Sequence

import numpy as np

from hvdlite.async_sgd import messages
from hvdlite.async_sgd.deal import ServerLayout
from hvdlite.async_sgd.messages import Purpose, ServerAnswer
from hvdlite.async_sgd.part import Push
from hvdlite.async_sgd.rows import unpack_rows
from hvdlite.async_sgd.server import ParameterServer, Reply
from hvdlite.errors import HvdliteError, PeerLeftError
from hvdlite.protocols import ANY, Channel, Request, WaitKind


class ParameterService:
    """Serves one part until the ranks have met to finish, or the channel ends.

    Args:
        channel: The channel of the group.
        server: What answers the requests.
        layout: The tensors of the server's part.
        workers: The ranks that train.
        keeps_pushes: Whether the server keeps a push after the call in which it gets it, or workers send chunks early.
        in_chunks: Whether values are sent in chunks.
    """

    def __init__(
        self,
        channel: Channel,
        server: ParameterServer,
        layout: ServerLayout,
        workers: Collection[int],
        keeps_pushes: bool,
        in_chunks: bool,
    ) -> None:
        self._channel, self._server, self._layout = channel, server, layout
        self._pieces = [slice(piece.start, piece.end) for piece in layout.answers(in_chunks)]
        # Each worker has at most one push here. One buffer for all will do where a push is applied as soon as it is there.
        one = np.empty(layout.nbytes, np.uint8)
        self._gradients = {rank: np.empty(layout.nbytes, np.uint8) if keeps_pushes else one for rank in workers}
        self._sends: dict[int, list[Request]] = {}
        self._lost: set[int] = set()
        self._thread = threading.Thread(target=self._run, name="hvdlite-parameters", daemon=True)

    def start(self) -> None:
        """Begin to serve."""
        self._thread.start()

    def lose(self, worker: int) -> None:
        """Let the service go on without a worker whose process has ended. Any thread may call this.

        What the worker has not sent as a whole is dropped.
        """
        self._lost.add(worker)
        request = messages.WorkerRequest(Purpose.LOST, worker)
        with contextlib.suppress(HvdliteError):  # the service is over
            self._channel.isend(request.pack(), self._channel.rank, messages.REQUEST)

    def join(self) -> None:
        """Wait until the service is over. The ranks have met to finish, so this takes a moment."""
        self._thread.join()

    def _run(self) -> None:
        try:
            while not self._server.is_over:
                self._serve()
            for rank, requests in self._sends.items():
                if rank not in self._lost:
                    _wait_all(requests)
        except HvdliteError:
            # The job ends, or its ranks leave: those that wait for this server learn that from the channel, with the reason.
            return
        except BaseException as error:  # without this thread, the others would wait for ever
            self._channel.break_off("a parameter server", error)
            raise

    def _serve(self) -> None:
        asked = np.empty(len(messages.WorkerRequest(0)), np.float64)
        with self._channel.guarded("the next push of any rank", WaitKind.SERVICE, beside_threads=True):
            receive = self._channel.irecv(asked, ANY, messages.REQUEST)
            receive.wait()
        rank = receive.source
        assert rank is not None
        request = messages.WorkerRequest.unpack(asked)
        if request.purpose == Purpose.LOST:
            self._answer_all(self._server.lose(request.number))
        elif rank not in self._lost:
            try:
                self._answer_all(self._replies(rank, request))
            except PeerLeftError:
                if rank not in self._lost:
                    raise
                # MPI may still know of the memory for the rest of its message, which may be that of other ranks too.
                old, new = self._gradients[rank], np.empty(self._layout.nbytes, np.uint8)
                for other, memory in self._gradients.items():
                    self._gradients[other] = new if memory is old else memory

    def _replies(self, rank: int, request: messages.WorkerRequest) -> list[Reply]:
        # The rank has the last answer, for it has asked again: so this does not wait, and the memory of the values is free.
        _wait_all(self._sends.pop(rank, []))
        if request.purpose == Purpose.EARLY:
            chunk = self._layout.chunks[request.chunk]
            self._channel.irecv(self._gradients[rank][chunk.start : chunk.end], rank, messages.BODY).wait()
            return self._server.early(rank, request.number, request.chunk)
        if request.purpose == Purpose.PUSH:
            return self._server.push(rank, request.number, self._body(rank, request))
        return self._server.meet(rank, Purpose(request.purpose))

    def _body(self, rank: int, request: messages.WorkerRequest) -> Push:
        layout, gradients = self._layout, self._gradients[rank]
        head, rows = np.empty(request.head, np.uint8), np.empty(request.rows, np.uint8)
        receives = [self._channel.irecv(head, rank, messages.BODY)]
        if len(rows):
            receives.append(self._channel.irecv(rows, rank, messages.BODY))
        receives[0].wait()
        present, follows, settings = np.split(head, np.cumsum([len(layout.tensors), len(layout.chunks)]))
        receives += [self._channel.irecv(gradients[run], rank, messages.BODY) for run in layout.runs(follows)]
        _wait_all(receives)
        return Push(gradients, present != 0, follows != 0, unpack_rows(rows), settings.tobytes(), request.weight)

    def _answer_all(self, replies: Sequence[Reply]) -> None:
        for reply in replies:
            if reply.rank not in self._lost:
                self._answer(reply)

    def _answer(self, reply: Reply) -> None:
        text = np.frombuffer(reply.error.encode(), np.uint8)
        answer = ServerAnswer(reply.purpose, len(text), reply.missed)
        follow = [text] if reply.error else [reply.values[piece] for piece in self._pieces]
        self._sends[reply.rank] = [
            self._channel.isend(answer.pack(), reply.rank, messages.ANSWER),
            *(self._channel.isend(each, reply.rank, messages.VALUES) for each in follow),
        ]


def _wait_all(requests: list[Request]) -> None:
    for request in requests:
        request.wait()
