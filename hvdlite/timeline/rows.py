"""The rows of a trace, and the record that an operation gets when it is submitted."""

from __future__ import annotations

import enum


class Row(enum.IntEnum):
    """A row of the picture of one rank: events of one kind."""

    STEP = 1
    """A step: from the end of one gradient exchange to the end of the next, with the parts of its time."""
    PROGRAM = 2
    """The program waits for an operation or a gradient exchange. Between these events the program computes."""
    NEGOTIATION = 3
    """Negotiation: from the moment at which this rank is ready for something until all ranks are."""
    QUEUE = 4
    """The queue: from the moment at which an operation may run until it runs."""
    COPY = 5
    """Copies between tensors and the buffers of an exchange."""
    EXCHANGE = 6
    """A collective runs: the ranks exchange data."""


class OperationRecord:
    """The record of one named operation, made when the operation is submitted."""

    __slots__ = ("kind", "name", "nbytes", "number", "runs", "submitted")

    def __init__(self, kind: str, name: str, number: int, nbytes: int, submitted: int) -> None:
        self.kind, self.name, self.number, self.nbytes, self.submitted = kind, name, number, nbytes, submitted
        self.runs = False
