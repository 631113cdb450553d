"""`Replica`: what a framework adds to a training with a parameter server."""

from __future__ import annotations

from typing import Any, BinaryIO, Protocol, TypeVar

from hvdlite.async_sgd.compensation import DelayCompensation
from hvdlite.async_sgd.deal import ServerLayout
from hvdlite.async_sgd.part import ServerPart
from hvdlite.async_sgd.rows import Rows
from hvdlite.protocols import Array

Gradient = TypeVar("Gradient", contravariant=True)


class StatefulPart(ServerPart, Protocol):
    """A part of the parameters, and the optimizer's state for it."""

    def state(self) -> Any:
        """Return the optimizer's state, in a form that can be pickled."""
        ...

    def load(self, state: Any) -> None:
        """Take over the present values of this rank's replica, and the optimizer's state.

        Args:
            state: The state of all parameters, in the form that the framework gives to `AsyncTraining.load`.
        """
        ...


class Replica(Protocol[Gradient]):
    """This rank's copy of the parameters that are trained, and the program's optimizer. Parameters are known by their numbers.

    The bytes of a parameter are those of its elements in C order, in its own dtype: uint8, shape ``(sizes[number],)``.
    A framework gives sparse gradients as `Rows`, if it has any.
    """

    @property
    def names(self) -> list[str]:
        """The names of the parameters, for error texts."""
        ...

    @property
    def sizes(self) -> list[int]:
        """The bytes of each parameter."""
        ...

    @property
    def clipping(self) -> str:
        """How a program clips gradients, for error texts."""
        ...

    def part(self, layout: ServerLayout, compensation: DelayCompensation) -> StatefulPart:
        """Make the part of a server, with the present values, settings and state of the program's optimizer.

        Args:
            layout: Its tensors.
            compensation: What it does about old gradients.
        """
        ...

    def settings(self) -> bytes:
        """Return the learning rates and other settings of the next step, for `Push.settings`."""
        ...

    def is_finite(self, number: int, gradient: Gradient | Rows) -> bool:
        """Return whether no element of the gradient of a parameter is NaN or infinite."""
        ...

    def put(self, number: int, gradient: Gradient | Rows, into: Array, add: bool) -> None:
        """Write the gradient of a parameter to bytes, or add it to the gradient that is there. Rows are added only."""
        ...

    def is_there(self, number: int, gradient: Gradient, there: Array) -> bool:
        """Return whether the gradient of a parameter is the one in these bytes, bit for bit."""
        ...

    def read(self, number: int, into: Array) -> None:
        """Write the present value of a parameter to bytes."""
        ...

    def save(self, file: BinaryIO) -> None:
        """Write the present values with the names of their parameters to a file."""
        ...

    def take(self, number: int, value: Array) -> None:
        """Give a parameter the value of these bytes, which are valid until this method returns."""
        ...
