"""`Run`: pieces of small parameters that lie side by side, which the optimizer steps as one.

torch takes about 6 µs of Python and of allocations for each parameter that it steps, whatever its size. An optimizer that steps
each element by itself does the same to one flat tensor, if all its elements have the same options and have been stepped equally
often. So a rank steps its small parameters in one run for each group. Between them lie up to 15 elements that belong to no
parameter: their gradients are 0, and nobody reads them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from hvdlite.gradients.layout import Piece
from hvdlite_torch.tensors.sliced import State, copy_of, is_elementwise


class Member:
    """A piece in a run.

    Args:
        piece: The piece.
        parameter: The parameter that the optimizer steps if the run is apart.
        start: The first element of the piece in the run.
    """

    def __init__(self, piece: Piece, parameter: torch.nn.Parameter, start: int) -> None:
        self.piece = piece
        self.parameter = parameter
        self._start, self._stop = start, start + parameter.numel()

    def of(self, flat: torch.Tensor) -> torch.Tensor:
        """Return this piece of a tensor of the run, as a view in the shape of the parameter."""
        return flat[self._start : self._stop].view(self.parameter.shape)


class Run:
    """Pieces that are stepped together, as long as they are alike; from then on one by one, until shards are dealt out anew.

    Args:
        members: The pieces.
        values: The values of the parameters from the first piece to the last one: a flat tensor.
        gradients: For each buffer of this rank, the same range of the combined gradients.

    Attributes:
        parameter: The parameter that the optimizer steps if the run is together.
        together: Whether the state is that of `parameter`, and not that of the pieces.
    """

    def __init__(self, members: Sequence[Member], values: torch.Tensor, gradients: Sequence[torch.Tensor]) -> None:
        self._members = members
        self._gradients = gradients
        self._numbers = [member.piece.tensor for member in members]
        self._may_join = True
        self.parameter = torch.nn.Parameter(values)
        self.together = False

    @property
    def pieces(self) -> list[Piece]:
        """The pieces, in the order in which they lie."""
        return [member.piece for member in self._members]

    def give(self, there: Sequence[bool], buffer: int, state: State) -> bool:
        """Give what is stepped its combined gradient.

        Args:
            there: For each parameter that is trained, whether any rank has a gradient of it.
            buffer: The number of the buffer that this rank uses.
            state: The state of the optimizer. If the run joins or comes apart, its state moves.

        Returns:
            Whether the run has joined or come apart.
        """
        found = {there[number] for number in self._numbers}
        before = self.together
        if len(found) > 1:  # the optimizer leaves out a parameter without a gradient, whose step count then is behind
            self.part_for_good(state)
        elif not before and self._may_join:
            self._may_join = self._join(state)
        flat = self._gradients[buffer].data  # a new object: a step may give it other memory (``p.grad.data = …``)
        if self.together:
            self.parameter.grad = flat if True in found else None
        else:
            for member in self._members:
                member.parameter.grad = member.of(flat) if there[member.piece.tensor] else None
        return self.together is not before

    def gradients(self) -> Iterator[tuple[Piece, torch.Tensor]]:
        """Yield the combined gradient of each piece, if the run is together and has gradients."""
        if self.parameter.grad is not None:
            for member in self._members:
                yield member.piece, member.of(self.parameter.grad)

    def _join(self, state: State) -> bool:
        """Give the state of the pieces to `parameter`. Return False, and change nothing, if the pieces are not alike."""
        states = [state.get(member.parameter, {}) for member in self._members]
        if not all(self._are_alike(member, states[0], its) for member, its in zip(self._members, states, strict=True)):
            return False
        joint: dict[str, Any] = {}
        for name, value in states[0].items():
            if is_elementwise(value, self._members[0].parameter):
                joint[name] = torch.zeros_like(self.parameter.data, dtype=value.dtype)
                for member, its in zip(self._members, states, strict=True):
                    member.of(joint[name]).copy_(its[name])
            else:
                joint[name] = value
        for member in self._members:
            state.pop(member.parameter, None)
        if joint:
            state[self.parameter] = joint
        self.together = True
        return True

    def _are_alike(self, member: Member, first: dict[str, Any], its: dict[str, Any]) -> bool:
        """Return whether a state has the names, kinds and numbers of that of the first piece."""
        if list(first) != list(its):
            return False
        for name, value in first.items():
            other = its[name]
            elementwise = is_elementwise(value, self._members[0].parameter)
            if elementwise != is_elementwise(other, member.parameter) or type(value) is not type(other):
                return False
            if elementwise:
                if value.dtype is not other.dtype:
                    return False
            elif isinstance(value, torch.Tensor):
                if value.shape != other.shape or value.dtype is not other.dtype or not torch.equal(value, other):
                    return False
            elif value is not None and not (isinstance(value, (int, float)) and value == other):
                return False
        return True

    def part(self, state: State) -> None:
        """Give the pieces their state, each a copy of its own, if the run is together."""
        if not self.together:
            return
        self.together = False
        self.parameter.grad = None
        for name, value in state.pop(self.parameter, {}).items():
            elementwise = is_elementwise(value, self.parameter)
            for member in self._members:
                own = member.of(value).clone() if elementwise else copy_of(value)
                state.setdefault(member.parameter, {})[name] = own

    def part_for_good(self, state: State) -> None:
        """Part, and do not join again."""
        self.part(state)
        self._may_join = False
