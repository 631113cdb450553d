"""The requests of one rank to all servers."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hvdlite.async_sgd import messages
from hvdlite.async_sgd.deal import Layout
from hvdlite.async_sgd.messages import Answer, Purpose
from hvdlite.errors import CommunicationError
from hvdlite.protocols import Array, Channel, WaitKind


class Worker:
    """One rank's end of the connections to all servers. One thread at a time uses it.

    Args:
        channel: The channel of the group.
        layouts: The servers and their tensors.
        names: For each rank of the group, its number in the job, for messages.

    Attributes:
        gradients: For each server, the memory in which the caller puts gradients: uint8, shape ``(nbytes,)``.
        values: For each server, the latest values, likewise.
        pushes: The number of pushes so far.
        missed: In how many pushes of others the pushes were behind, added up: the mean of all servers.
    """

    def __init__(self, channel: Channel, layouts: Sequence[Layout], names: Sequence[int]) -> None:
        self._channel, self._layouts, self._names = channel, layouts, names
        self.gradients = [np.zeros(layout.nbytes, np.uint8) for layout in layouts]
        self.values = [np.empty(layout.nbytes, np.uint8) for layout in layouts]
        self.pushes = 0
        self.missed = 0.0

    def push(self, present: Sequence[Array], settings: bytes, weight: float, hint: str) -> None:
        """Push `gradients` to all servers, and wait for `values`.

        Args:
            present: For each server, which of its tensors have a gradient: bool, shape ``(tensors,)``.
            settings: The settings of the step, for all servers.
            weight: The number of samples.
            hint: A description of the wait, for reports of the watchdog and errors.

        Raises:
            CommunicationError: A server has failed.
            HvdliteError: A server has left the job, or the channel is closed.
        """
        sends = []
        for layout, there, gradients in zip(self._layouts, present, self.gradients, strict=True):
            head = np.concatenate([there.astype(np.uint8), np.frombuffer(settings, np.uint8)])
            request = messages.Request(Purpose.PUSH, self.pushes, len(head), bool(there.any()), weight)
            sends.append(self._channel.isend(request.pack(), layout.server, messages.REQUEST))
            sends.append(self._channel.isend(head, layout.server, messages.BODY))
            if request.has_gradients:
                sends.append(self._channel.isend(gradients, layout.server, messages.BODY))
        self.pushes += 1
        with self._channel.guarded(hint, beside_threads=True, asks_all=True):
            answers = self._answers()
            for send in sends:
                send.wait()
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
        for layout in self._layouts:
            self._channel.isend(messages.Request(purpose).pack(), layout.server, messages.REQUEST)
        with self._channel.guarded(f"all ranks to call {purpose.text or Purpose.FINISH.text}", kind, True, True):
            return Purpose(self._answers()[0].purpose)

    def _answers(self) -> list[Answer]:
        """Receive an answer of every server, and the values. All answers are taken before an error is raised."""
        answers, receives, texts = [], [], []
        for layout, values in zip(self._layouts, self.values, strict=True):
            data = np.empty(len(Answer(0)), np.int64)
            self._channel.irecv(data, layout.server, messages.ANSWER).wait()
            answer = Answer.unpack(data)
            answers.append(answer)
            if answer.error:
                text = np.empty(answer.error, np.uint8)
                self._channel.irecv(text, layout.server, messages.VALUES).wait()
                texts.append(f"the server on rank {self._names[layout.server]}: {text.tobytes().decode()}")
            else:
                receives.append(self._channel.irecv(values, layout.server, messages.VALUES))
        for receive in receives:
            receive.wait()
        if texts:
            raise CommunicationError(texts[0])
        return answers
