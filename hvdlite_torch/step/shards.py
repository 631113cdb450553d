"""`ParameterShards`: this rank's shard of the parameters and of the optimizer state, as pieces that the optimizer steps.

During a step the optimizer's groups hold the pieces. During ``state_dict()`` the optimizer has the state of whole parameters,
collected from all ranks.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch

import hvdlite
from hvdlite import ProcessSet
from hvdlite.api import world
from hvdlite.errors import ArgumentError, UnsupportedTensorError
from hvdlite.gradients.layout import Piece
from hvdlite_torch.step import shard_state
from hvdlite_torch.step.shard_state import cut
from hvdlite_torch.step.stepped_groups import SteppedGroups
from hvdlite_torch.tensors.runs import Run
from hvdlite_torch.tensors.sliced import State, local_state, program_state


def refuse_sparse(which: str | Sequence[int]) -> None:
    """Raise an error for a sharded parameter that has a sparse gradient.

    Args:
        which: The parameter in words, or its shape.

    Raises:
        UnsupportedTensorError: Always.
    """
    name = which if isinstance(which, str) else f"a parameter of shape {tuple(which)}"
    raise UnsupportedTensorError(
        f"{name} has sparse gradients, which cannot be sharded: pass "
        "sparse_as_dense=True, use sparse=False in the embedding, or leave out shard=True."
    )


class ParameterShards:
    """This rank's shard of one optimizer's parameters.

    Args:
        optimizer: The optimizer whose groups and state are changed.
        process_set: The ranks that share the parameters.

    Attributes:
        pieces: This rank's pieces, each with the parameter that the optimizer steps: a view of the whole parameter's memory.
        runs: Some of the pieces, in runs. A piece is in one run at most.
        loaded: The state of whole parameters that this rank has loaded, until all ranks are known to have loaded it; or None.
        adopted: Whether all ranks have the state that was dealt out in an earlier world.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, process_set: ProcessSet) -> None:
        self._optimizer = optimizer
        self._process_set = process_set
        self._parameters: Sequence[torch.Tensor] = []
        self._addresses: list[int] = []
        self._groups = SteppedGroups(optimizer)
        self._dealt: tuple[int, int] | None = None
        """This rank's number in the process set, and the size of the set, when shards were dealt out; None before that."""
        self._restarted = True
        """Whether shards have not been dealt out in the present world."""
        self._lost = ""
        """The reason why a part of the state is gone, in words; an empty text if no part is gone."""
        self.adopted = False
        self.pieces: dict[Piece, torch.nn.Parameter] = {}
        self.runs: list[Run] = []
        self.loaded: dict[Any, dict[str, Any]] | None = None

    @property
    def dealt(self) -> bool:
        """Whether this rank has ever been dealt a shard."""
        return self._dealt is not None

    def leave(self) -> None:
        """Note that the world of these shards has ended. Each rank keeps its shard of the state."""
        self._take_apart()
        self._restarted = True

    @torch.no_grad()
    def collect(self, origin: str) -> None:
        """Give the optimizer the state of whole parameters, before shards are dealt out anew. Every rank calls this.

        Shards from an earlier world are used if all ranks that had one are in the present world. Otherwise the optimizer has no
        state, and a step raises an error until the program loads a state.

        Args:
            origin: The origin of this rank's state, in words.
        """
        self._take_apart()
        everybody = self._gather(origin)
        state = self._optimizer.state
        self.adopted = self._restarted and any(shard.dealt is not None for shard in everybody)
        if self.adopted:
            self._lost = self._lost or shard_state.why_lost(everybody)
            if self._dealt is None:  # a new rank's own state is not that of the other ranks
                for parameter in shard_state.all_of(self._optimizer):
                    state.pop(parameter, None)
        whole = self._own() if self._lost else self._joint(everybody, in_host_memory=False)
        self._restarted = False
        self.pieces, self.runs, self._parameters, self._addresses = {}, [], [], []
        state.clear()
        state.update(whole)

    def _gather(self, origin: str) -> list[shard_state.StateShard]:
        return shard_state.gather(
            self._optimizer, self.pieces, self._parameters, self._dealt, origin, self._process_set
        )

    def _own(self) -> State:
        """Return the state of everything except this rank's pieces."""
        pieces = set(self.pieces.values())
        return {key: values for key, values in local_state(self._optimizer.state).items() if key not in pieces}

    def _joint(self, everybody: Sequence[shard_state.StateShard], in_host_memory: bool) -> State:
        """Return the state of whole parameters, from the shards of all ranks."""
        ranks = world("DistributedOptimizer()").ranks(self._process_set)
        return shard_state.merge(self._optimizer, self._own(), everybody, in_host_memory, ranks)

    @torch.no_grad()
    def deal(self, parameters: Sequence[torch.Tensor], pieces: Sequence[Piece]) -> None:
        """Take this rank's shard, and cut the state of whole parameters to it.

        Args:
            parameters: All parameters that are trained, contiguous. From now on they must not be given other memory.
            pieces: This rank's pieces.
        """
        ranks = world("DistributedOptimizer()").ranks(self._process_set)
        self._dealt = ranks.index(hvdlite.rank()), len(ranks)
        self._parameters = list(parameters)
        self._addresses = [parameter.data_ptr() for parameter in parameters]
        self.pieces = {piece: torch.nn.Parameter(cut(parameters[piece.tensor].data, piece)) for piece in pieces}
        self._groups.forget()
        self.cut_state()

    def step_in_runs(self, runs: Sequence[Run]) -> None:
        """Let pieces be stepped in runs. The pieces of a run are of the parameters of one group of the optimizer."""
        self.runs = list(runs)
        self._groups.choose(self._parameters, self.pieces, self.runs)

    def give(self, there: Sequence[bool], buffer: int) -> None:
        """Give the pieces in runs their combined gradients: see `Run.give`."""
        if self.runs and not self._groups.are_as_given:  # parameters have changed groups, maybe
            for run in self.runs:
                run.part_for_good(self._optimizer.state)
            self._groups.forget()
        # All runs must be asked.
        if any([run.give(there, buffer, self._optimizer.state) for run in self.runs]):
            self._groups.forget()

    def check_memory(self) -> None:
        """Raise an error if a parameter was given other memory since it was dealt out.

        Raises:
            ArgumentError: The text has the parameter's shape.
        """
        addresses = [parameter.data_ptr() for parameter in self._parameters]
        if addresses != self._addresses:
            moved = next(p for p, was in zip(self._parameters, self._addresses, strict=True) if p.data_ptr() != was)
            raise ArgumentError(
                f"a parameter of shape {tuple(moved.shape)} was given other memory (by p.data = …, model.to(…) or "
                "the like) after the optimizer was sharded: change models before that."
            )

    def put_in(self) -> None:
        """Let the optimizer's groups hold this rank's pieces, until `put_back`. Do nothing if nothing was dealt out.

        Raises:
            ArgumentError: A parameter that was not dealt out, such as a frozen one, has a gradient, so torch would step it; or
                a part of the state is gone.
        """
        if self._lost:
            raise ArgumentError(self._lost)
        if not self._parameters:
            return
        if not self._groups.are_chosen:
            self._groups.choose(self._parameters, self.pieces, self.runs)
        self._groups.put_in()

    def _take_apart(self) -> None:
        """Let the groups hold whole parameters, and the state be that of single pieces."""
        self.put_back()
        for run in self.runs:
            run.part(self._optimizer.state)
        self._groups.forget()

    def put_back(self) -> None:
        """Let the groups hold whole parameters again, if they hold pieces."""
        self._groups.put_back()

    def drop_gradients(self) -> None:
        """Set the gradients of the pieces to None, so that ``zero_grad()`` can free their memory."""
        for parameter in self._steppable():
            parameter.grad = None

    def gradients(self) -> list[torch.Tensor]:
        """Return the combined gradients of what the optimizer steps: of pieces, and of runs."""
        return [parameter.grad for parameter in self._steppable() if parameter.grad is not None]

    def gradients_of_pieces(self) -> Iterator[tuple[Piece, torch.Tensor]]:
        """Yield the combined gradient of each piece that has one."""
        for run in self.runs:
            yield from run.gradients()
        for piece, parameter in self.pieces.items():
            if parameter.grad is not None:
                yield piece, parameter.grad

    def _steppable(self) -> Iterator[torch.nn.Parameter]:
        yield from self.pieces.values()
        for run in self.runs:
            yield run.parameter

    # The optimizer's state: pieces in this class, whole parameters for the program

    @contextlib.contextmanager
    def whole_state(self) -> Iterator[None]:
        """Return a context manager: in its body the optimizer has the state of whole parameters. Every rank calls this.

        The state is in host memory, because the device may have no room for all of it.

        Raises:
            ArgumentError: Some ranks lack their part of the state. The error is raised on all ranks.
        """
        if self._lost:
            raise ArgumentError(self._lost)
        self._take_apart()
        everybody = self._gather("")
        with self._instead(self._joint(everybody, in_host_memory=True)):
            yield

    @contextlib.contextmanager
    def without_pieces(self) -> Iterator[shard_state.StateShard]:
        """Return a context manager: in its body the optimizer has the state of everything except this rank's pieces.

        Yields:
            The state of this rank's pieces.

        Raises:
            ArgumentError: A part of the state is gone.
        """
        if self._lost:
            raise ArgumentError(self._lost)
        self._take_apart()
        shard = shard_state.own_shard(self._optimizer, self.pieces, self._parameters, self._dealt, "")
        with self._instead(self._own()):
            yield shard

    @contextlib.contextmanager
    def loaded_state(self) -> Iterator[None]:
        """Return a context manager: in its body the optimizer has the state of whole parameters that this rank has loaded."""
        assert self.loaded is not None
        self.put_back()
        with self._instead(self.loaded):
            yield

    @contextlib.contextmanager
    def _instead(self, whole: dict[Any, dict[str, Any]]) -> Iterator[None]:
        state = self._optimizer.state
        shard = dict(state)
        try:
            state.clear()
            state.update(program_state(whole, [p for group in self._optimizer.param_groups for p in group["params"]]))
            yield
        finally:
            state.clear()
            state.update(shard)

    @contextlib.contextmanager
    def loading(self) -> Iterator[None]:
        """Return a context manager: in its body the optimizer loads a state of whole parameters."""
        self._take_apart()
        self._optimizer.state.clear()
        yield
        self._lost = ""
        self.loaded = local_state(self._optimizer.state)
        self.cut_state()

    @torch.no_grad()
    def cut_state(self) -> None:
        """Cut the optimizer's state of whole parameters, and keep the state of this rank's pieces."""
        state = self._optimizer.state
        shard = shard_state.shard_of(local_state(state), self._parameters, self.pieces)
        state.clear()
        state.update(shard)


def squared_norm(gradients: Sequence[torch.Tensor]) -> float:
    """Return the sum of the squares of all elements, in double precision."""
    norms = map(_norm, gradients)
    return sum((norm * norm for norm in norms), 0.0)  # a product overflows to infinity; ** would raise OverflowError


def _norm(gradient: torch.Tensor) -> float:
    wide = torch.complex128 if gradient.is_complex() else torch.float64
    return float(torch.linalg.vector_norm(gradient, dtype=wide))


def clip_factor(squares: float, max_grad_norm: float) -> float:
    """Return the factor that scales gradients to a norm of at most `max_grad_norm`. `squares` is the square of their norm."""
    factor = max_grad_norm / (math.sqrt(squares) + 1e-6)
    return 1.0 if factor > 1.0 else factor  # NaN if the norm is NaN, as torch does
