"""What belongs together in a trace, and what is noted of an operation when it is submitted."""

from __future__ import annotations

import enum


class Row(enum.IntEnum):
    """What belongs together in the picture of a rank."""

    STEP = 1
    """From the end of one gradient exchange to that of the next, with its shares."""
    PROGRAM = 2
    """Where the program waits for an operation or an exchange; between these it computes."""
    NEGOTIATION = 3
    """From the moment that this rank is ready for something until all are."""
    QUEUE = 4
    """From the moment that something may run until it does."""
    COPY = 5
    """Copies between tensors and the memory that is exchanged."""
    EXCHANGE = 6
    """Data of all ranks becomes one."""


class OperationRecord:
    """One named operation, from its submission on."""

    __slots__ = ("kind", "name", "nbytes", "number", "runs", "submitted")

    def __init__(self, kind: str, name: str, number: int, nbytes: int, submitted: int) -> None:
        self.kind, self.name, self.number, self.nbytes, self.submitted = kind, name, number, nbytes, submitted
        self.runs = False
