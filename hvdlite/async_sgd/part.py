"""The contract of a part of the parameters, which a framework implements; and what one worker pushes to it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

from hvdlite.async_sgd.rows import Rows
from hvdlite.protocols import Array


class Push(NamedTuple):
    """What one worker has pushed to one part.

    Attributes:
        gradients: The gradients of the part's tensors, each at its place of the `ServerLayout`: uint8, shape ``(nbytes,)``.
        present: For each tensor whether there is such a gradient: bool, shape ``(tensors,)``. The bytes of the others mean
            nothing.
        follows: For each chunk whether it has come with the push: bool, shape ``(chunks,)``. The others have come before it, or
            have no gradient.
        rows: The gradients that are sparse, by the places of their tensors. These are not `present`.
        settings: The learning rates and other settings of the step, in a form that the framework's `ServerPart` reads.
        weight: The number of samples.
        rate: The learning rates are multiplied by this number (`compensation`).
        pulled: The values with which the gradients were computed: uint8, shape ``(nbytes,)``. None if nobody needs them.
    """

    gradients: Array
    present: Array
    follows: Array
    rows: Mapping[int, Rows]
    settings: bytes
    weight: float
    rate: float = 1.0
    pulled: Array | None = None


class ServerPart(Protocol):
    """The parameters of one server, and their optimizer. One thread at a time calls these methods."""

    def step(self, pushes: Sequence[Push]) -> None:
        """Make one step of the optimizer with the mean of the pushes by their weights; of one push, with its gradients.

        In a mean, a tensor that is absent from some pushes counts as zero there. A tensor that is absent from all pushes keeps
        its value. The pushes are in the order of the workers, and their memory is valid until this method returns.

        Raises:
            Exception: The optimizer has raised it. Nobody uses the part after that.
        """
        ...

    def read(self, into: Array) -> None:
        """Write the present values to `into`: uint8, shape ``(nbytes,)``, each tensor at its place of the `ServerLayout`."""
        ...
