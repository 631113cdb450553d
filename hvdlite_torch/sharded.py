"""The sharded step: each rank steps its share of the parameters, and the others see the new values in the same memory.

The parameters of the ranks of a host lie in one memory. A step reduces a gradient only where it is needed, and nothing is
gathered afterwards on one host::

    backward on every rank ─▶ meet ─▶ rank r sums part r of all gradients, steps part r of the parameters ─▶ meet ─▶ forward

The optimizer's own code does the stepping: for the time of a step its groups hold this rank's pieces of the parameters.
Where each element is stepped by itself (Adam, SGD, …) the parts are equal and a parameter may be cut in two; for all other
optimizers whole parameters are dealt out. This is the idea of ZeRO (Rajbhandari et al., arXiv:1910.02054), stages 1 and 2,
without its communication where ranks share memory.

What differs from an optimizer that is not sharded: all ranks start with the parameters of the first rank, and those of one
host are the same memory, so a change in place that each rank makes for itself is made several times. After a step ``p.grad``
means nothing. ``state_dict()`` and ``load_state_dict()`` are called by every rank.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator
from typing import Any

import torch

import hvdlite
from hvdlite.errors import ArgumentError, UnsupportedTensorError
from hvdlite.layout import Piece
from hvdlite.protocols import Plan
from hvdlite.sharded_reducer import ShardedReducer
from hvdlite_torch.closures import closure_of, replace_closure
from hvdlite_torch.exchange import GradientExchange
from hvdlite_torch.options import Options
from hvdlite_torch.slot import Slot, as_tensor
from hvdlite_torch.tensor import ADAPTER

ELEMENTWISE = frozenset(
    getattr(torch.optim, name)
    for name in (
        *("ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD"),
    )
)
"""Optimizers that treat each element by itself."""

UNSHARDABLE = (torch.optim.LBFGS, torch.optim.SparseAdam)


class ShardedExchange(GradientExchange):
    """Exchanges gradients, and puts this rank's pieces into the optimizer's groups while it steps.

    Args:
        optimizer, options: As for `GradientExchange`.
    """

    _adapts = False
    _reducer: ShardedReducer

    def __init__(self, optimizer: torch.optim.Optimizer, options: Options) -> None:
        if isinstance(optimizer, UNSHARDABLE):
            raise ArgumentError(
                f"{type(optimizer).__name__} cannot be sharded: its step needs all gradients at once. Leave out shard=True."
            )
        if options.overlap:
            raise ArgumentError(
                "overlap=True has no meaning with shard=True: a rank's share is summed by its own step."
            )
        if options.codec is not None:
            raise ArgumentError("compression and shard=True cannot be used together yet: leave out one of them.")
        self._elementwise = type(optimizer) in ELEMENTWISE
        self._pieces: dict[Piece, torch.nn.Parameter] = {}
        self._whole_groups: list[list[torch.Tensor]] | None = None
        self._standing_in: list[bool] | None = None
        super().__init__(optimizer, options)

    @torch.no_grad()
    def _make_reducer(self, parameters: list[torch.Tensor], plan: Plan) -> ShardedReducer:
        infos = [ADAPTER.info(parameter) for parameter in parameters]
        if self._parameters:  # other parameters than before: their shares are dealt out anew
            state = self._gather_state()
            self._pieces = {}
            self.optimizer.state.clear()
            self.optimizer.state.update(state)
        reducer = self._world.sharded_reducer(
            infos, self._options.op, self.process_set, plan, whole=not self._elementwise
        )
        hvdlite.broadcast(parameters, 0, inplace=True, process_set=self.process_set)
        shared = [as_tensor(reducer.parameters_of(n), parameter) for n, parameter in enumerate(parameters)]
        for parameter, memory in zip(parameters, shared, strict=True):
            memory.copy_(parameter)  # the same values, from every rank of the host
        reducer.meet()
        self._addresses = []
        for parameter, memory in zip(parameters, shared, strict=True):
            parameter.data = memory
            self._addresses.append(memory.data_ptr())
        self._parameters = parameters
        for piece in reducer.pieces:
            self._pieces[piece] = torch.nn.Parameter(_cut(parameters[piece.tensor].data, piece))
        self.take_share_of_state()
        return reducer

    def synchronize(self) -> None:
        raise ArgumentError(
            "synchronize() has no meaning with shard=True: no rank ever has all combined gradients. To clip them, pass "
            "max_grad_norm to DistributedOptimizer."
        )

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        self._put_back()  # a step that failed may have left the pieces there
        self._fused.back()
        if self._standing_in is not None:
            self._deliver(self._standing_in)
            self._clip()
            self._standing_in = None
            self._put_in()
            self._fused.switch()
            return None
        closure = closure_of(args, kwargs)
        if closure is None:
            self._exchange()
            self._clip()
        else:
            # Evaluated first, for it uses the whole parameters, and maybe zero_grad().
            with torch.enable_grad():
                loss = self._together(closure)()
            args, kwargs = replace_closure(args, kwargs, lambda: loss)
        self._put_in()
        self._fused.switch()
        return args, kwargs

    def _put_in(self) -> None:
        """Let the optimizer's groups hold this rank's pieces, until `_put_back`."""
        groups = self.optimizer.param_groups
        self._whole_groups = [group["params"] for group in groups]
        numbers = {id(parameter): number for number, parameter in enumerate(self._parameters)}
        for group in groups:
            mine = {numbers[id(parameter)] for parameter in group["params"] if id(parameter) in numbers}
            group["params"] = [parameter for piece, parameter in self._pieces.items() if piece.tensor in mine]

    def _after_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        super()._after_step(optimizer, args, kwargs)
        self._put_back()
        for parameter in self._pieces.values():
            parameter.grad = None  # what zero_grad() frees is to be free
        self._reducer.publish()

    def _put_back(self) -> None:
        if self._whole_groups is not None:
            for group, parameters in zip(self.optimizer.param_groups, self._whole_groups, strict=True):
                group["params"] = parameters
            self._whole_groups = None

    def before_unscale(self) -> None:
        """Nothing: no rank ever has all combined gradients."""

    def after_unscale(self, infinities: Iterable[torch.Tensor]) -> None:
        for slot in self._large:
            slot.gradient = None  # which has changed, though torch does not count that as a new version
        for found in infinities:
            hvdlite.allreduce(found, hvdlite.Max, inplace=True, process_set=self.process_set)

    @torch.no_grad()
    def stand_in(self) -> None:
        """As it says there; and step this rank's share, which nobody else does."""
        while (anywhere := self._stand_in_once()) is not None:
            if any(anywhere) or (anywhere and self._reducer.divisor <= 0):  # else the others make no step
                self._standing_in = anywhere
                self.optimizer.step()

    def _clip(self) -> None:
        if self._options.max_grad_norm is None:
            return
        gradients = [parameter.grad for parameter in self._pieces.values() if parameter.grad is not None]
        squares = sum((_norm(gradient) ** 2 for gradient in gradients), 0.0)
        norm = math.sqrt(self._reducer.sum_over_ranks(squares))
        factor = min(1.0, self._options.max_grad_norm / (norm + 1e-6))
        for gradient in gradients:
            gradient.mul_(factor)

    def _check_sparse(self, slot: Slot) -> None:
        raise UnsupportedTensorError(
            f"a parameter of shape {tuple(slot.shape)} has sparse gradients, which cannot be sharded: pass "
            "sparse_as_dense=True, use sparse=False in the embedding, or leave out shard=True."
        )

    def _check_parameters(self) -> None:
        for parameter, address in zip(self._parameters, self._addresses, strict=True):
            if parameter.data_ptr() != address:
                raise ArgumentError(
                    f"a parameter of shape {tuple(parameter.shape)} was given other memory (by p.data = …, model.to(…) or "
                    "the like) after the optimizer was sharded: change models before that."
                )

    def _deliver(self, anywhere: list[bool]) -> None:
        for piece, parameter in self._pieces.items():
            slot = self._slots[piece.tensor]
            gradient = slot.memory if slot.gradient is None else slot.gradient
            parameter.grad = _cut(gradient, piece) if anywhere[piece.tensor] else None
        for slot in self._large:
            slot.gradient = None

    # The optimizer's state: of pieces here, of whole parameters for everybody else

    @contextlib.contextmanager
    def whole_state(self) -> Iterator[None]:
        """Let the optimizer have the state of whole parameters, for the body of a with statement."""
        self._put_back()
        optimizer = self.optimizer
        share = dict(optimizer.state)
        whole = self._gather_state()
        try:
            optimizer.state.clear()
            optimizer.state.update(whole)
            yield
        finally:
            optimizer.state.clear()
            optimizer.state.update(share)

    def forget_state(self) -> None:
        """Drop the state of this rank's pieces."""
        self._put_back()
        self.optimizer.state.clear()

    @torch.no_grad()
    def take_share_of_state(self) -> None:
        """Cut the state of whole parameters, and keep what belongs to this rank's pieces."""
        optimizer = self.optimizer
        whole = dict(optimizer.state)
        dealt_out = set(self._parameters)
        kept: dict[Any, Any] = {key: state for key, state in whole.items() if key not in dealt_out}
        for piece, parameter in self._pieces.items():
            of = self._parameters[piece.tensor]
            if of in whole:
                kept[parameter] = {
                    name: _cut(value.contiguous(), piece).clone() if _is_elementwise(value, of) else _copy(value)
                    for name, value in whole[of].items()
                }
        optimizer.state.clear()
        optimizer.state.update(kept)

    def _gather_state(self) -> dict[torch.Tensor, dict[str, Any]]:
        """The state of whole parameters, from all ranks. Collective."""
        state = self.optimizer.state
        mine = [
            (piece, {name: value for name, value in state[parameter].items()})
            for piece, parameter in self._pieces.items()
            if parameter in state
        ]
        pieces = set(self._pieces.values())
        whole: dict[Any, dict[str, Any]] = {key: values for key, values in state.items() if key not in pieces}
        everybody = hvdlite.allgather_object(mine, name="optimizer.state_dict()", process_set=self.process_set)
        for piece, values in (item for share in everybody for item in share):
            parameter = self._parameters[piece.tensor]
            target = whole.setdefault(parameter, {})
            shape = _cut(parameter.data, piece).shape
            for name, value in values.items():
                if isinstance(value, torch.Tensor) and value.shape == shape and shape:
                    if name not in target:
                        target[name] = torch.empty(parameter.shape, dtype=value.dtype)
                    _cut(target[name], piece).copy_(value)
                else:
                    target[name] = value
        return whole


def _cut(tensor: torch.Tensor, piece: Piece) -> torch.Tensor:
    """The piece of a parameter, or of something of its shape: a view. In its shape, if it is the whole."""
    if piece.stop - piece.start == tensor.numel():
        return tensor
    return tensor.view(-1)[piece.start : piece.stop]


def _norm(gradient: torch.Tensor) -> float:
    wide = torch.complex128 if gradient.is_complex() else torch.float64
    return float(torch.linalg.vector_norm(gradient, dtype=wide))


def _is_elementwise(value: Any, parameter: torch.Tensor) -> bool:
    return isinstance(value, torch.Tensor) and value.shape == parameter.shape and value.dim() > 0


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value
