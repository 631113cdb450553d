"""`SteppedGroups`: during a step the groups of a sharded optimizer hold this rank's pieces, and whole parameters otherwise."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from hvdlite.errors import ArgumentError
from hvdlite.gradients.layout import Piece
from hvdlite_torch.tensors.adapter import are_same
from hvdlite_torch.tensors.runs import Run
from hvdlite_torch.tensors.sliced import local_of


def groups_of(optimizer: torch.optim.Optimizer, parameters: Sequence[torch.Tensor]) -> dict[int, int]:
    """Return the number of the group that a parameter is in, by the number of the parameter; only of those in a group.

    Args:
        optimizer: The optimizer, whose groups hold whole parameters.
        parameters: Some parameters; of sliced ones, this rank's slices.
    """
    groups = enumerate(optimizer.param_groups)
    group_of = {id(local_of(parameter)): at for at, group in groups for parameter in group["params"]}
    return {number: group_of[id(p)] for number, p in enumerate(parameters) if id(p) in group_of}


class SteppedGroups:
    """The parameters in an optimizer's groups, and what the optimizer steps of them.

    Args:
        optimizer: The optimizer whose groups are changed.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._whole: list[list[torch.Tensor]] | None = None
        """The parameters of each group, while the groups hold pieces."""
        self._given: list[list[torch.Tensor]] = []
        """The parameters of each group, as they were when pieces were last chosen for the groups."""
        self._stepped: list[list[torch.Tensor]] | None = None
        self._left_out: list[torch.Tensor] = []
        """The parameters in the groups that were not dealt out, such as frozen ones."""

    def _present(self) -> list[list[torch.Tensor]]:
        return [group["params"] for group in self._optimizer.param_groups]

    @property
    def are_as_given(self) -> bool:
        """Whether the groups hold the same parameters as when pieces were last chosen for them."""
        groups = self._present()
        return len(groups) == len(self._given) and all(map(are_same, groups, self._given))

    @property
    def are_chosen(self) -> bool:
        """Whether it is known what the optimizer steps of the parameters that are in the groups now."""
        return self._stepped is not None and self.are_as_given

    def forget(self) -> None:
        """Note that other pieces or runs are to be stepped from now on."""
        self._stepped = None

    def choose(
        self, parameters: Sequence[torch.Tensor], pieces: Mapping[Piece, torch.nn.Parameter], runs: Sequence[Run]
    ) -> None:
        """Find out what the optimizer steps of the parameters in its groups.

        Args:
            parameters: All parameters that were dealt out.
            pieces: This rank's pieces.
            runs: The runs of some of these pieces.
        """
        groups = self._present()
        self._given = list(map(list, groups))
        dealt_out = set(map(id, parameters))
        self._left_out = [p for group in groups for p in group if id(local_of(p)) not in dealt_out]
        group_of = groups_of(self._optimizer, parameters)
        stepped: list[list[torch.Tensor]] = [[] for _ in groups]
        joined = {piece for run in runs if run.together for piece in run.pieces}
        for piece, parameter in pieces.items():
            if piece.tensor in group_of and piece not in joined:
                stepped[group_of[piece.tensor]].append(parameter)
        for run in runs:
            if run.together:
                stepped[group_of[run.pieces[0].tensor]].append(run.parameter)
        self._stepped = stepped

    def put_in(self) -> None:
        """Let the groups hold what is stepped, until `put_back`. It must have been chosen.

        Raises:
            ArgumentError: A parameter that was not dealt out has a gradient, so torch would step it.
        """
        assert self._stepped is not None
        if any([parameter.grad is not None for parameter in self._left_out]):
            shape = next(tuple(p.shape) for p in self._left_out if p.grad is not None)
            raise ArgumentError(
                f"a parameter of shape {shape} is frozen (requires_grad=False) and has a gradient, maybe of zeros: torch steps "
                "it all the same, by its momentum and decay, which a sharded optimizer does not. Set its p.grad to None: "
                "zero_grad() does, without set_to_none=False."
            )
        self._whole = self._present()
        for group, stepped in zip(self._optimizer.param_groups, self._stepped, strict=True):
            group["params"] = stepped

    def put_back(self) -> None:
        """Let the groups hold whole parameters again, if they hold pieces."""
        if self._whole is not None:
            for group, parameters in zip(self._optimizer.param_groups, self._whole, strict=True):
                group["params"] = parameters
            self._whole = None
