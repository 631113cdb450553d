"""This rank's share of the parameters and of the optimizer's state: the pieces that a sharded optimizer steps.

For the time of a step the optimizer's groups hold the pieces; for the time of ``state_dict()`` its state is that of whole
parameters, from all ranks.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

import torch

import hvdlite
from hvdlite import ProcessSet
from hvdlite.api import world
from hvdlite.errors import ArgumentError, UnsupportedTensorError, ranks_text
from hvdlite.gradients.layout import Piece
from hvdlite_torch.tensors.adapter import are_same


def refuse_sparse(shape: Sequence[int]) -> None:
    """Raise for a parameter of this shape.

    Raises:
        UnsupportedTensorError: Always.
    """
    raise UnsupportedTensorError(
        f"a parameter of shape {tuple(shape)} has sparse gradients, which cannot be sharded: pass "
        "sparse_as_dense=True, use sparse=False in the embedding, or leave out shard=True."
    )


def refuse_synchronize(what: str) -> NoReturn:
    """Raise.

    Args:
        what: Was called.

    Raises:
        ArgumentError: Always.
    """
    raise ArgumentError(
        f"{what} has no meaning with shard=True: no rank ever has all combined gradients. To clip them, pass "
        "max_grad_norm to DistributedOptimizer."
    )


class ParameterShards:
    """What this rank steps of one optimizer's parameters.

    Args:
        optimizer: Whose groups and state are changed.
        process_set: The ranks that share.

    Attributes:
        pieces: This rank's, each with the parameter that the optimizer steps: a view of the whole one's memory.
        loaded: The state of whole parameters that this rank has loaded, until it is known that all have; else None.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, process_set: ProcessSet) -> None:
        self._optimizer = optimizer
        self._ranks = world("DistributedOptimizer()").ranks(process_set)
        self._process_set = process_set
        self._parameters: Sequence[torch.Tensor] = []
        self._addresses: list[int] = []
        self._whole_groups: list[list[torch.Tensor]] | None = None
        self._cut_groups: list[tuple[list[torch.Tensor], list[torch.Tensor]]] = []
        """Of each group: its parameters, and this rank's pieces of them."""
        self._left_out: list[torch.Tensor] = []
        """Parameters of the groups of which nobody has a piece."""
        self.pieces: dict[Piece, torch.nn.Parameter] = {}
        self.loaded: dict[Any, dict[str, Any]] | None = None

    @torch.no_grad()
    def collect(self) -> None:
        """Make the optimizer's state that of whole parameters, before shares are dealt out anew. Every rank calls this."""
        if self._parameters:
            state = self._gather_state(in_host_memory=False)
            self.pieces = {}
            self._optimizer.state.clear()
            self._optimizer.state.update(state)

    @torch.no_grad()
    def deal(self, parameters: Sequence[torch.Tensor], pieces: Sequence[Piece]) -> None:
        """Take a share.

        Args:
            parameters: All that are trained; contiguous. From now on they may not be given other memory.
            pieces: This rank's.
        """
        self._parameters = list(parameters)
        self._addresses = [parameter.data_ptr() for parameter in parameters]
        self.pieces = {piece: torch.nn.Parameter(cut(parameters[piece.tensor].data, piece)) for piece in pieces}
        self._cut_groups = []
        self.take_share_of_state()

    def check_memory(self) -> None:
        """Raise if a parameter is not where it was.

        Raises:
            ArgumentError: It has moved.
        """
        addresses = [parameter.data_ptr() for parameter in self._parameters]
        if addresses != self._addresses:
            moved = next(p for p, was in zip(self._parameters, self._addresses, strict=True) if p.data_ptr() != was)
            raise ArgumentError(
                f"a parameter of shape {tuple(moved.shape)} was given other memory (by p.data = …, model.to(…) or "
                "the like) after the optimizer was sharded: change models before that."
            )

    def put_in(self) -> None:
        """Let the optimizer's groups hold this rank's pieces, until `put_back`. Nothing if nothing has been dealt out.

        Raises:
            ArgumentError: A parameter that was not dealt out, such as a frozen one, has a gradient: torch would step it.
        """
        if not self._parameters:
            return
        groups = self._optimizer.param_groups
        whole_groups = [group["params"] for group in groups]
        if not self._are_cut(whole_groups):
            self._cut_groups = [(list(whole), self._pieces_of(whole)) for whole in whole_groups]
            dealt_out = set(map(id, self._parameters))
            self._left_out = [p for whole in whole_groups for p in whole if id(p) not in dealt_out]
        if any([parameter.grad is not None for parameter in self._left_out]):
            shape = next(tuple(p.shape) for p in self._left_out if p.grad is not None)
            raise ArgumentError(
                f"a parameter of shape {shape} is frozen (requires_grad=False) and has a gradient, maybe of zeros: torch steps "
                "it all the same, by its momentum and decay, which a sharded optimizer does not. Set its p.grad to None: "
                "zero_grad() does, without set_to_none=False."
            )
        self._whole_groups = whole_groups
        for group, (_, pieces) in zip(groups, self._cut_groups, strict=True):
            group["params"] = pieces

    def _are_cut(self, groups: Sequence[Sequence[torch.Tensor]]) -> bool:
        """Whether these are what was cut in the last step."""
        return len(groups) == len(self._cut_groups) and all(
            are_same(group, whole) for group, (whole, _) in zip(groups, self._cut_groups, strict=True)
        )

    def _pieces_of(self, group: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """This rank's pieces of a group's parameters."""
        numbers = {id(parameter): number for number, parameter in enumerate(self._parameters)}
        mine = {numbers[id(parameter)] for parameter in group if id(parameter) in numbers}
        return [parameter for piece, parameter in self.pieces.items() if piece.tensor in mine]

    def put_back(self) -> None:
        """Let the groups hold whole parameters again, if they do not."""
        if self._whole_groups is not None:
            for group, parameters in zip(self._optimizer.param_groups, self._whole_groups, strict=True):
                group["params"] = parameters
            self._whole_groups = None

    def drop_gradients(self) -> None:
        """What ``zero_grad()`` frees is to be free."""
        for parameter in self.pieces.values():
            parameter.grad = None

    def gradients(self) -> list[torch.Tensor]:
        """Those of the pieces that have one."""
        return [parameter.grad for parameter in self.pieces.values() if parameter.grad is not None]

    # The optimizer's state: of pieces here, of whole parameters for everybody else

    @contextlib.contextmanager
    def whole_state(self) -> Iterator[None]:
        """Let the optimizer have the state of whole parameters, for the body of a with statement. Every rank calls this.

        It is in host memory, for where the shares are there may be no room for all of it.

        Raises:
            ArgumentError: Some ranks lack their part of it. Raised on all of them.
        """
        self.put_back()
        with self._instead(self._gather_state(in_host_memory=True)):
            yield

    @contextlib.contextmanager
    def loaded_state(self) -> Iterator[None]:
        """Let the optimizer have the state that this rank has loaded, for the body of a with statement."""
        assert self.loaded is not None
        self.put_back()
        with self._instead(self.loaded):
            yield

    @contextlib.contextmanager
    def _instead(self, whole: dict[Any, dict[str, Any]]) -> Iterator[None]:
        state = self._optimizer.state
        share = dict(state)
        try:
            state.clear()
            state.update(whole)
            yield
        finally:
            state.clear()
            state.update(share)

    @contextlib.contextmanager
    def loading(self) -> Iterator[None]:
        """Within the body of a with statement the optimizer loads a state, of whole parameters."""
        self.put_back()
        self._optimizer.state.clear()
        yield
        self.loaded = dict(self._optimizer.state)
        self.take_share_of_state()

    @torch.no_grad()
    def take_share_of_state(self) -> None:
        """Cut the state of whole parameters, and keep what belongs to this rank's pieces."""
        optimizer = self._optimizer
        whole = dict(optimizer.state)
        dealt_out = set(self._parameters)
        kept: dict[Any, Any] = {key: state for key, state in whole.items() if key not in dealt_out}
        for piece, parameter in self.pieces.items():
            of = self._parameters[piece.tensor]
            if of in whole:
                kept[parameter] = {
                    name: cut(value.contiguous(), piece).clone() if _is_elementwise(value, of) else _copy(value)
                    for name, value in whole[of].items()
                }
        optimizer.state.clear()
        optimizer.state.update(kept)

    def _gather_state(self, in_host_memory: bool) -> dict[torch.Tensor, dict[str, Any]]:
        """The state of whole parameters, from all ranks; where their parameters are, unless `in_host_memory`. Collective."""
        state = self._optimizer.state
        mine = [
            (piece, {name: _to_send(value, parameter) for name, value in state[parameter].items()})
            for piece, parameter in self.pieces.items()
            if parameter in state
        ]
        pieces = set(self.pieces.values())
        whole: dict[Any, dict[str, Any]] = {key: values for key, values in state.items() if key not in pieces}
        # What is shown of a rank that waits for others, which train on.
        name = "state_dict() of a sharded optimizer, which every rank calls"
        everybody = hvdlite.allgather_object(mine, name=name, process_set=self._process_set)
        self._check_complete(everybody)
        for piece, values in (item for share in everybody for item in share):
            parameter = self._parameters[piece.tensor]
            target = whole.setdefault(parameter, {})
            shape = cut(parameter.data, piece).shape
            for name, (value, follows) in values.items():
                follows = follows and not in_host_memory
                device = parameter.device if follows else None
                if isinstance(value, torch.Tensor) and value.shape == shape and shape:
                    if name not in target:
                        target[name] = torch.empty(parameter.shape, dtype=value.dtype, device=device)
                    cut(target[name], piece).copy_(value)
                else:
                    target[name] = value.to(device) if follows else value
        return whole

    def _check_complete(self, everybody: Sequence[Sequence[tuple[Piece, dict[str, Any]]]]) -> None:
        """Raise if the pieces of state of some parameter are not all there, or not of the same kind.

        Args:
            everybody: Those of each rank.

        Raises:
            ArgumentError: The text says who has some.
        """
        found: dict[int, dict[tuple[str, ...], int]] = {}
        for piece, values in (item for share in everybody for item in share):
            kinds = found.setdefault(piece.tensor, {})
            kind = tuple(sorted(values))
            kinds[kind] = kinds.get(kind, 0) + piece.stop - piece.start
        for tensor, kinds in found.items():
            parameter = self._parameters[tensor]
            if len(kinds) > 1 or sum(kinds.values()) != parameter.numel():
                have = [
                    rank for rank, share in enumerate(everybody) if any(piece.tensor == tensor for piece, _ in share)
                ]
                raise ArgumentError(
                    f"of the optimizer's state of a parameter of shape {tuple(parameter.shape)}, parts are missing: only "
                    f"{ranks_text([self._ranks[rank] for rank in have])} of {len(everybody)} ranks have some. State of a "
                    "sharded optimizer was set or deleted on some ranks only: do that on all of them."
                )


def cut(tensor: torch.Tensor, piece: Piece) -> torch.Tensor:
    """The piece of a parameter, or of something of its shape: a view. In its shape, if it is the whole."""
    if piece.stop - piece.start == tensor.numel():
        return tensor
    return tensor.view(-1)[piece.start : piece.stop]


def squared_norm(gradients: Sequence[torch.Tensor]) -> float:
    """The sum of the squares of all elements, in double precision."""
    norms = map(_norm, gradients)
    return sum((norm * norm for norm in norms), 0.0)  # infinite where ** would be an OverflowError


def _norm(gradient: torch.Tensor) -> float:
    wide = torch.complex128 if gradient.is_complex() else torch.float64
    return float(torch.linalg.vector_norm(gradient, dtype=wide))


def clip_factor(squares: float, max_grad_norm: float) -> float:
    """By what gradients are multiplied so that their norm, the root of `squares`, is at most `max_grad_norm`."""
    factor = max_grad_norm / (math.sqrt(squares) + 1e-6)
    return 1.0 if factor > 1.0 else factor  # NaN if the norm is, as torch's


def _to_send(value: Any, parameter: torch.Tensor) -> tuple[Any, bool]:
    """A piece of state in host memory, and whether it belongs where the parameter is."""
    if not isinstance(value, torch.Tensor):
        return value, False
    return value.cpu(), value.device == parameter.device


def _is_elementwise(value: Any, parameter: torch.Tensor) -> bool:
    return isinstance(value, torch.Tensor) and value.shape == parameter.shape and value.dim() > 0


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value
