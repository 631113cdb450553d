"""The requests of one rank to all servers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np

from hvdlite.async_sgd import messages
from hvdlite.async_sgd.deal import ServerLayout
from hvdlite.async_sgd.messages import Purpose, ServerAnswer
from hvdlite.async_sgd.rows import Rows, pack_rows
from hvdlite.errors import CommunicationError
from hvdlite.protocols import Array, Channel, Request, WaitKind


class Worker:
    """One rank's end of the connections to all servers. One thread at a time uses it.

    Args:
        channel: The channel of the group.
        begin: Begins a message that goes on while the program computes: its data, the rank that gets it, and the tag.
        layouts: The servers and their tensors.
        names: For each rank of the group, its number in the job, for messages.
        in_chunks: Whether values come in chunks.

    Attributes:
        gradients: For each server, the memory in which the caller puts gradients: uint8, shape ``(nbytes,)``.
        values: For each server, the latest values, likewise.
        pushes: The number of pushes so far.
        early_chunks: How many chunks were sent before their pushes.
        missed: In how many pushes of others the pushes were behind, added up: the mean of all servers.
    """

    def __init__(
        self,
        channel: Channel,
        begin: Callable[[Array, int, int], Request],
        layouts: Sequence[ServerLayout],
        names: Sequence[int],
        in_chunks: bool = False,
    ) -> None:
        self._channel, self._begin, self._layouts, self._names = channel, begin, layouts, names
        self._under_way: list[Request] = []
        self._sends: list[Request] = []
        self._pieces = [layout.answers(in_chunks) for layout in layouts]
        self.gradients = [np.zeros(layout.nbytes, np.uint8) for layout in layouts]
        self.values = [np.empty(layout.nbytes, np.uint8) for layout in layouts]
        self.pushes = self.early_chunks = 0
        self.missed = 0.0

    def send_early(self, server: int, chunk: int) -> None:
        """Begin to send a chunk of the next push. It must not change before `settle` or `push`.

        Args:
            server: The place of the server in `layouts`.
            chunk: The number of the chunk there.

        Raises:
            HvdliteError: The server has left the job, or the channel is closed.
        """
        layout = self._layouts[server]
        _, start, end = layout.chunks[chunk]
        request = messages.WorkerRequest(Purpose.EARLY, self.pushes, chunk)
        self._under_way += [
            self._begin(request.pack(), layout.server, messages.REQUEST),
            self._begin(self.gradients[server][start:end], layout.server, messages.BODY),
        ]
        self.early_chunks += 1

    def settle(self) -> None:
        """Wait until the servers have taken the chunks that were sent early.

        Raises:
            HvdliteError: A server has left the job, or the channel is closed.
        """
        with self._channel.guarded("the parameter server to take gradients that were sent early", beside_threads=True):
            while self._under_way:
                self._under_way.pop(0).wait()

    def push(
        self,
        present: Sequence[Array],
        early: Sequence[Array],
        rows: Sequence[Mapping[int, Rows]],
        settings: bytes,
        weight: float,
    ) -> None:
        """Begin to push `gradients` to all servers. They must not change before `pull` returns, which comes next.

        Args:
            present: For each server, which of its tensors have a gradient there: bool, shape ``(tensors,)``.
            early: For each server, which chunks it has: bool, shape ``(chunks,)``.
            rows: For each server, sparse gradients by the places of their tensors.
            settings: The settings of the step, for all servers.
            weight: The number of samples.

        Raises:
            HvdliteError: A server has left the job, or the channel is closed.
        """
        sends = self._sends
        for number, layout in enumerate(self._layouts):
            used = np.array([present[number][chunk.places].any() for chunk in layout.chunks])
            follows = used & ~early[number]
            head = np.concatenate([present[number], follows, np.frombuffer(settings, np.uint8)])
            body = [head, pack_rows(rows[number]), *(self.gradients[number][run] for run in layout.runs(follows))]
            request = messages.WorkerRequest(
                Purpose.PUSH, self.pushes, head=len(head), rows=len(body[1]), weight=weight
            )
            sends.append(self._channel.isend(request.pack(), layout.server, messages.REQUEST))
            sends += [self._channel.isend(each, layout.server, messages.BODY) for each in body if len(each)]
        self.pushes += 1

    def pull(self, hint: str, note: Callable[[Iterable[int]], None]) -> None:
        """Wait for `values` after a push. Another thread than that of the other calls may do this, while they are not called.

        Args:
            hint: A description of the wait, for reports of the watchdog and errors.
            note: It is called with the numbers of tensors whose values are there, in about the order of the tensors.

        Raises:
            CommunicationError: A server has failed.
            HvdliteError: A server has left the job, or the channel is closed.
        """
        with self._channel.guarded(hint, beside_threads=True, asks_all=True):
            answers = self._answers(note)
            self.settle()
            while self._sends:
                self._sends.pop(0).wait()
        self.missed += sum(answer.missed for answer in answers) / len(answers)

    def meet(self, purpose: Purpose, kind: WaitKind) -> Purpose:
        """Meet all ranks, and get the same `values` as they.

        Args:
            purpose: What for.
            kind: Whether the others are expected to come soon.

        Returns:
            What the meeting is for: `purpose`, unless that is `Purpose.SERVE`.

        Raises:
            CommunicationError: A server has failed, or the ranks meet for different purposes.
            HvdliteError: A server has left the job, or the channel is closed.
        """
        self.settle()
        for layout in self._layouts:
            self._channel.isend(messages.WorkerRequest(purpose).pack(), layout.server, messages.REQUEST)
        with self._channel.guarded(f"all ranks to call {purpose.text or Purpose.FINISH.text}", kind, True, True):
            return Purpose(self._answers()[0].purpose)

    def _answers(self, note: Callable[[Iterable[int]], None] = lambda numbers: None) -> list[ServerAnswer]:
        """Receive an answer of every server, and the values. All answers are taken before an error is raised."""
        answers, texts = [], []
        receives: list[tuple[tuple[int, ...], Request]] = []
        for layout, values, pieces in zip(self._layouts, self.values, self._pieces, strict=True):
            data = np.empty(len(ServerAnswer(0)), np.int64)
            self._channel.irecv(data, layout.server, messages.ANSWER).wait()
            answer = ServerAnswer.unpack(data)
            answers.append(answer)
            if answer.error:
                text = np.empty(answer.error, np.uint8)
                self._channel.irecv(text, layout.server, messages.VALUES).wait()
                texts.append(f"the server on rank {self._names[layout.server]}: {text.tobytes().decode()}")
            else:
                for places, start, end in pieces:
                    request = self._channel.irecv(values[start:end], layout.server, messages.VALUES)
                    receives.append((layout.tensors[places.start : places.stop], request))
        for numbers, receive in sorted(receives, key=lambda each: each[0]):
            receive.wait()
            note(numbers)
        if texts:
            raise CommunicationError(texts[0])
        return answers
