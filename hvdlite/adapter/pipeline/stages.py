"""`StageRanks`: a model whose layers are on different ranks. What looks across its parameters asks the other ranks by it."""

from __future__ import annotations

import itertools
from collections.abc import Collection
from typing import Any

import numpy as np

from hvdlite.api import Sum, allgather_object, allreduce
from hvdlite.errors import ArgumentError, ranks_text
from hvdlite.ranks.process_set import ProcessSet

_numbers = itertools.count()


class StageRanks:
    """The ranks that have the layers of one model.

    Args:
        kind: What the program has made, such as "Pipeline", for messages.
        process_set: The ranks that have the model together.

    Attributes:
        kind, process_set: The arguments.
        number: All ranks of the process set make their models in the same order, and so count them alike.
    """

    def __init__(self, kind: str, process_set: ProcessSet) -> None:
        self.kind, self.process_set = kind, process_set
        self.number = next(_numbers)

    def gather(self, value: Any, what: str) -> list[Any]:
        """Return the values of all ranks of the model. All of them call this.

        Args:
            value: This rank's value, which can be pickled.
            what: What it is, for messages.
        """
        return allgather_object(value, f"{what} of all stages of a {self.kind}", process_set=self.process_set)

    def sum(self, value: float, what: str) -> float:
        """Return the sum of a number over the ranks of the model. All of them call this, and get the same bits."""
        name = f"{what} of all stages of a {self.kind}"
        return float(allreduce(np.array(value, np.float64), Sum, name, process_set=self.process_set))

    def check_apart(self, name: str, ranks: Collection[int], own: int) -> None:
        """Raise ArgumentError if ranks that exchange a parameter of a stage have different stages.

        Args:
            name: The name of the parameter.
            ranks: The world ranks that exchange it.
            own: This rank.
        """
        together = sorted(set(self.process_set.members) & set(ranks))
        if together != [own]:
            raise ArgumentError(
                f"{name!r} is a parameter of a stage of a {self.kind} on {ranks_text(list(self.process_set.members))}, and "
                f"{ranks_text(together)} of this process set have different stages. Pass the ranks that have the same one: "
                'process_set=grid["dp"] of hvd.ProcessGrid(dp=…, pp=…).'
            )
