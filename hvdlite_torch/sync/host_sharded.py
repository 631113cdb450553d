"""`HostShards`: ``shard=True`` in host memory. Each rank steps its shard of the parameters.

The parameters of the ranks of a host lie in one shared memory, so the other ranks see the new values without a copy. A step
reduces a gradient only where it is needed, and on one host nothing is gathered afterwards::

    backward on every rank ─▶ meet ─▶ rank r sums shard r of all gradients, steps shard r ─▶ meet ─▶ forward

The optimizer's own code makes the step: during a step its groups hold this rank's pieces of the parameters. If the optimizer
steps each element by itself (Adam, SGD, …), the shards are equal and a parameter may be cut in two. For all other optimizers,
whole parameters are dealt out. This is the idea of ZeRO (Rajbhandari et al., arXiv:1910.02054), stages 1 and 2, without its
communication where ranks share memory.

A sharded optimizer differs from one that is not sharded. All ranks start with the parameters of the first rank. The parameters
of one host are the same memory, so an in-place change that each rank makes is applied several times. After a step ``p.grad``
means nothing. Every rank calls ``state_dict()`` and ``load_state_dict()``.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

import hvdlite
from hvdlite.errors import ArgumentError
from hvdlite.gradients.layout import Piece
from hvdlite.gradients.sharded_reducer import ShardedReducer, Stretch
from hvdlite.protocols import Plan, TensorInfo
from hvdlite_torch.step.context import OptimizerContext
from hvdlite_torch.step.own_parameters import versions_of
from hvdlite_torch.step.shard_state import cut
from hvdlite_torch.step.sharding import Sharding
from hvdlite_torch.step.shards import clip_factor, squared_norm
from hvdlite_torch.step.stepped_groups import groups_of
from hvdlite_torch.sync.host_gradients import HostGradients
from hvdlite_torch.sync.slot import GradientPlace, Slot, as_tensor
from hvdlite_torch.tensors.gradient import gradient_dtype
from hvdlite_torch.tensors.runs import Member, Run
from hvdlite_torch.tensors.split import joint_squares


class HostShards:
    """The `CombinedGradients` of a sharded optimizer in host memory: this rank's shard.

    Args:
        context: The optimizer.
        sharding: Deals the parameters out.

    Raises:
        ArgumentError: ``overlap=True`` was asked for.
    """

    def __init__(self, context: OptimizerContext, sharding: Sharding) -> None:
        if context.options.overlap:
            raise ArgumentError(
                "overlap=True has no meaning with shard=True: a rank's share is summed by its own step."
            )
        self._context = context
        self._sharding = sharding
        self._shards = sharding.shards
        self._reducer: ShardedReducer | None = None
        self._parameters: Sequence[torch.Tensor] = []
        self._versions: list[int] | None = None
        """The version counters of the parameters after the last step; None if they may differ between ranks."""
        self._gradients: HostGradients | None = None
        self._homes: list[tuple[Piece, torch.nn.Parameter, Slot, list[torch.Tensor]]] = []
        """For each piece that is in no run: the parameter that is stepped, the slot of the whole one, and the gradient's memory
        in each buffer."""

    @property
    def _here(self) -> ShardedReducer:
        assert self._reducer is not None
        return self._reducer

    @torch.no_grad()
    def make_reducer(
        self, parameters: Sequence[torch.Tensor], infos: Sequence[TensorInfo], plan: Plan
    ) -> ShardedReducer:
        """Deal the parameters out, in memory that the ranks of a host share. Every rank calls this.

        Args:
            parameters: All parameters that are trained.
            infos: Dtype and shape of the gradient of each parameter.
            plan: How gradients are exchanged.

        Raises:
            ArgumentError: The gradients of a parameter have another dtype than the parameter.
        """
        for parameter in parameters:
            if gradient_dtype(parameter) is not parameter.dtype:
                raise ArgumentError(
                    f"a parameter of {parameter.dtype} with grad_dtype={gradient_dtype(parameter)} cannot be sharded: leave "
                    "out shard=True, or grad_dtype."
                )
        context = self._context
        self._sharding.collect()
        whole, name = self._sharding.whole, context.name
        reducer = context.group.reducers.make_sharded(infos, context.options.op, plan, whole, name)
        hvdlite.broadcast(parameters, 0, inplace=True, process_set=context.process_set)
        shared = [as_tensor(reducer.parameters_of(n), parameter) for n, parameter in enumerate(parameters)]
        for parameter, memory in zip(parameters, shared, strict=True):
            memory.copy_(parameter)  # every rank of the host writes the same values
        reducer.meet()
        for parameter, memory in zip(parameters, shared, strict=True):
            parameter.data = memory
        self._reducer, self._parameters = reducer, parameters
        self._shards.deal(parameters, reducer.pieces)
        if not self._sharding.whole:  # else the optimizer may look at a parameter as a whole
            self._shards.step_in_runs(list(map(self._run_of, reducer.stretches(self._kinds(parameters).get))))
        context.lease.share(parameters)
        self._versions = versions_of(parameters)
        return reducer

    def follow(self, gradients: HostGradients) -> None:
        """Use `gradients`, which lie in the memory that `make_reducer` has made."""
        self._gradients = gradients
        in_runs = {piece for run in self._shards.runs for piece in run.pieces}
        self._homes = [
            (piece, parameter, gradients.slots[piece.tensor], [self._piece_in(buffer, piece) for buffer in (0, 1)])
            for piece, parameter in self._shards.pieces.items()
            if piece not in in_runs
        ]

    def _kinds(self, parameters: Sequence[torch.Tensor]) -> dict[int, int]:
        """Return by the parameter's number which group it is in; without parameters of no dimension.

        The state of such a parameter cannot be told from a number, such as the count of steps.
        """
        found = groups_of(self._context.optimizer, parameters)
        return {number: group for number, group in found.items() if parameters[number].dim() > 0}

    def _run_of(self, stretch: Stretch) -> Run:
        pieces = self._shards.pieces
        members = [
            Member(piece, pieces[piece], start) for piece, start in zip(stretch.pieces, stretch.starts, strict=True)
        ]
        dtype = members[0].parameter.dtype
        values, *gradients = (
            torch.from_numpy(memory).view(dtype) for memory in (stretch.parameters, *stretch.gradients)
        )
        return Run(members, values, gradients)

    def _piece_in(self, buffer: int, piece: Piece) -> torch.Tensor:
        memory = self._here.memory_of(piece.tensor, buffer)
        return cut(as_tensor(memory, self._parameters[piece.tensor]), piece)

    def check_memory(self) -> None:
        """Raise ArgumentError if a parameter was given other memory since it was dealt out."""
        self._shards.check_memory()

    def changed(self) -> bool:
        """Return whether the program has changed parameters in place since the last step. Each rank makes such a change."""
        return self._versions is not None and self._versions != versions_of(self._parameters)

    @property
    def total_weight(self) -> float:
        """Return the sum of the weights of all ranks in the last exchange."""
        return self._here.divisor

    def gradients(self) -> list[torch.Tensor]:
        """Return the combined gradients of this rank's pieces."""
        return self._shards.gradients()

    def clip(self, max_norm: float) -> None:
        """Scale the gradients to a norm of at most `max_norm` over the parameters of all ranks. Every rank calls this."""
        of: dict[int, list[torch.Tensor]] = {}
        for piece, combined in self._shards.gradients_of_pieces():
            of.setdefault(piece.tensor, []).append(combined)

        def squares_of(numbers: Sequence[int]) -> float:
            own = squared_norm([gradient for number in numbers for gradient in of.get(number, ())])
            return self._here.sum_over_ranks(own)

        factor = clip_factor(joint_squares(self._context.given(), squares_of), max_norm)
        for gradient in self._shards.gradients():
            gradient.mul_(factor)

    def give(self, there: Sequence[bool]) -> None:
        """Give each piece its combined gradient, or None if `there` says that no rank has a gradient of the parameter."""
        for piece, parameter, slot, homes in self._homes:
            whole = self._parameters[piece.tensor].grad if slot.where is GradientPlace.IN_PLACE else None
            # A new tensor object each time: an optimizer's step may give the object other memory (``p.grad.data = …``).
            combined = homes[slot.pool.number].data if whole is None else cut(whole, piece)
            parameter.grad = combined if there[piece.tensor] else None
        self._shards.give(there, self._here.buffer)
        assert self._gradients is not None
        self._gradients.forget()

    def publish(self) -> None:
        """Let all ranks have the parameters, after each rank has stepped its pieces. Every rank calls this."""
        self._here.publish()
        self._versions = versions_of(self._parameters)

    def have_same_state(self) -> None:
        """Forget the versions: all ranks have been given the same parameters, which may have changed them in place."""
        self._versions = None

    def leave(self) -> None:
        """Drop what belongs to the world that has ended."""
        self._homes = []
        self._reducer = self._gradients = None
        self._versions = None
