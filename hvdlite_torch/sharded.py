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
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch

import hvdlite
from hvdlite.errors import ArgumentError
from hvdlite.layout import Piece
from hvdlite.protocols import Array
from hvdlite.reducer import ShardedReducer
from hvdlite_torch.exchange import GradientExchange, as_tensor, replace_closure
from hvdlite_torch.tensor import ADAPTER

ELEMENTWISE = frozenset(
    getattr(torch.optim, name)
    for name in (
        *("ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD"),
    )
)
"""Optimizers that treat each element by itself."""

FUSED = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad)
"""Optimizers of which torch has an implementation that goes through memory once (on CPUs too)."""

UNSHARDABLE = (torch.optim.LBFGS, torch.optim.SparseAdam)


SPARE_BYTES = 2**14
"""Smaller gradients are copied whole: that is sooner done than to find out which part to leave where it is."""


class ShardedExchange(GradientExchange):
    """Exchanges gradients, and puts this rank's pieces into the optimizer's groups while it steps.

    Args:
        optimizer, op, process_set: As for `GradientExchange`.
    """

    _reducer: ShardedReducer

    def __init__(self, optimizer: torch.optim.Optimizer, *args: Any) -> None:
        if isinstance(optimizer, UNSHARDABLE):
            raise ArgumentError(
                f"{type(optimizer).__name__} cannot be sharded: its step needs all gradients at once. Leave out shard=True."
            )
        self._elementwise = type(optimizer) in ELEMENTWISE
        self._pieces: dict[Piece, torch.nn.Parameter] = {}
        self._groups: list[dict[str, Any]] | None = None
        self._numbers: dict[int, int] = {}
        """Parameter -> its piece here, of those whose gradients are not copied whole."""
        self._gradients: list[torch.Tensor] = []
        """Of each piece: where this rank's gradient is, and then the combined one."""
        self._in_memory: list[tuple[torch.Tensor, Array]] = []
        """The same in the reducer's memory, for gradients that did not come from a backward pass."""
        self._shown: dict[int, tuple[torch.Tensor, int]] = {}
        """Gradients that stay where backward left them, and their versions when the others' part was copied."""
        super().__init__(optimizer, *args)

    def attach(self) -> None:
        super().attach()
        handle = self._optimizer.register_step_post_hook(self._after_step)
        self._optimizer._optimizer_step_post_hooks.move_to_end(handle.id, last=False)  # type: ignore[attr-defined]

    @torch.no_grad()
    def _make_reducer(self, parameters: list[torch.Tensor]) -> None:
        infos = [ADAPTER.info(parameter) for parameter in parameters]
        if self._parameters:  # other parameters than before: their shares are dealt out anew
            state = self._gather_state()
            self._pieces = {}
            self._optimizer.state.clear()
            self._optimizer.state.update(state)
        self._reducer = self._world.sharded_reducer(infos, self._op, self._process_set, whole=not self._elementwise)
        hvdlite.broadcast(parameters, 0, inplace=True, process_set=self._process_set)
        shared = [as_tensor(self._reducer.parameters_of(n), parameter) for n, parameter in enumerate(parameters)]
        for parameter, memory in zip(parameters, shared, strict=True):
            memory.copy_(parameter)  # the same values, from every rank of the host
        self._reducer.meet()
        self._addresses = []
        for parameter, memory in zip(parameters, shared, strict=True):
            parameter.data = memory
            self._addresses.append(memory.data_ptr())
        self._parameters = parameters
        self._numbers, self._shown, self._gradients = {}, {}, []
        for number, piece in enumerate(self._reducer.pieces):
            parameter = parameters[piece.tensor]
            memory = as_tensor(self._reducer.memory_of(piece.tensor), parameter)
            self._pieces[piece] = torch.nn.Parameter(_cut(parameter.data, piece))
            self._gradients.append(_cut(memory, piece))
            if self._reducer.one_host and memory.nbytes >= SPARE_BYTES:
                self._numbers[piece.tensor] = number
        self._in_memory = list(zip(self._gradients, self._reducer.own, strict=True))
        self.take_share_of_state()

    # This rank's piece of a gradient is read by nobody else, so on one host it is reduced where backward left it

    def _hook(self, index: int) -> Callable[[torch.Tensor], None]:
        if index not in self._numbers:
            return super()._hook(index)
        return functools.partial(self._show_others, index)

    def _show_others(self, index: int, parameter: torch.Tensor) -> None:
        """Copy what other ranks answer for of a gradient."""
        self._synchronized = False
        gradient = parameter.grad
        self._shown.pop(index, None)
        if gradient is None or not gradient.is_contiguous() or gradient.requires_grad:
            return  # left for the step
        memory = self._memory[index]
        if gradient.shape == memory.shape:
            piece = self._reducer.pieces[self._numbers[index]]
            flat, shown = gradient.view(-1), memory.view(-1)
            if piece.start > 0:
                shown[: piece.start].copy_(flat[: piece.start])
            if piece.stop < flat.numel():
                shown[piece.stop :].copy_(flat[piece.stop :])
            self._shown[index] = gradient, gradient._version

    def _collect(self, index: int, gradient: torch.Tensor) -> bool:
        number = self._numbers.get(index)
        if number is None:
            return super()._collect(index, gradient)
        shown, version = self._shown.get(index, (None, 0))
        if shown is gradient and version != gradient._version:  # clipped since, for example
            self._show_others(index, self._parameters[index])
            shown, _ = self._shown.get(index, (None, 0))
        if shown is gradient:
            own = _cut(gradient, self._reducer.pieces[number])
            self._gradients[number], self._reducer.own[number] = own, ADAPTER.to_array(own, wide=False).reshape(-1)
            return True
        self._gradients[number], self._reducer.own[number] = self._in_memory[number]
        return super()._collect(index, gradient)

    def synchronize(self) -> None:
        raise ArgumentError(
            "synchronize() has no meaning with shard=True: no rank ever has all combined gradients. To clip them, leave out "
            "shard=True."
        )

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        self._put_back()  # a step that failed may have left the pieces there
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if closure is None:
            self._exchange()
        else:
            # Evaluated first, for it uses the whole parameters, and maybe zero_grad().
            with torch.enable_grad():
                loss = self._together(closure)()
            args, kwargs = replace_closure(args, kwargs, lambda: loss)
        self._put_in()
        return args, kwargs

    def _put_in(self) -> None:
        """Let the optimizer's groups hold this rank's pieces, until `_put_back`."""
        optimizer = self._optimizer
        self._groups = [{name: group.get(name) for name in ("params", "fused")} for group in optimizer.param_groups]
        numbers = {id(parameter): number for number, parameter in enumerate(self._parameters)}
        for group in optimizer.param_groups:
            mine = {numbers[id(parameter)] for parameter in group["params"] if id(parameter) in numbers}
            group["params"] = [parameter for piece, parameter in self._pieces.items() if piece.tensor in mine]
            # Where the choice is left to torch: pieces are plain flat memory, for which this one is the fastest.
            chosen = group.get("fused") is not None or group.get("foreach") is not None or group.get("differentiable")
            if isinstance(optimizer, FUSED) and not chosen:
                group["fused"] = all(parameter.is_floating_point() for parameter in group["params"])

    def _after_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self._put_back()
        self._shown.clear()  # what zero_grad() frees is to be free
        for number in self._numbers.values():
            self._gradients[number], self._reducer.own[number] = self._in_memory[number]
        for parameter in self._pieces.values():
            parameter.grad = None
        self._reducer.publish()

    def _put_back(self) -> None:
        if self._groups is not None:
            for group, values in zip(self._optimizer.param_groups, self._groups, strict=True):
                group.update({name: value for name, value in values.items() if name in group})
            self._groups = None

    def _check_parameters(self) -> None:
        for parameter, address in zip(self._parameters, self._addresses, strict=True):
            if parameter.data_ptr() != address:
                raise ArgumentError(
                    f"a parameter of shape {tuple(parameter.shape)} was given other memory (by p.data = …, model.to(…) or "
                    "the like) after the optimizer was sharded: change models before that."
                )

    def _deliver(self, anywhere: list[bool]) -> None:
        for (piece, parameter), gradient in zip(self._pieces.items(), self._gradients, strict=True):
            parameter.grad = gradient if anywhere[piece.tensor] else None

    # The optimizer's state: of pieces here, of whole parameters for everybody else

    @contextlib.contextmanager
    def whole_state(self) -> Iterator[None]:
        """Let the optimizer have the state of whole parameters, for the body of a with statement."""
        self._put_back()
        optimizer = self._optimizer
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
        self._optimizer.state.clear()

    @torch.no_grad()
    def take_share_of_state(self) -> None:
        """Cut the state of whole parameters, and keep what belongs to this rank's pieces."""
        optimizer = self._optimizer
        whole = dict(optimizer.state)
        dealt_out = set(self._parameters)
        kept: dict[Any, Any] = {key: state for key, state in whole.items() if key not in dealt_out}
        for piece, parameter in self._pieces.items():
            of = self._parameters[piece.tensor]
            if of in whole:
                kept[parameter] = {
                    name: _cut(value, piece).clone() if _is_elementwise(value, of) else _copy(value)
                    for name, value in whole[of].items()
                }
        optimizer.state.clear()
        optimizer.state.update(kept)

    def _gather_state(self) -> dict[torch.Tensor, dict[str, Any]]:
        """The state of whole parameters, from all ranks. Collective."""
        state = self._optimizer.state
        mine = [
            (piece, {name: value for name, value in state[parameter].items()})
            for piece, parameter in self._pieces.items()
            if parameter in state
        ]
        pieces = set(self._pieces.values())
        whole: dict[Any, dict[str, Any]] = {key: values for key, values in state.items() if key not in pieces}
        everybody = hvdlite.allgather_object(mine, name="optimizer.state_dict()", process_set=self._process_set)
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


def _is_elementwise(value: Any, parameter: torch.Tensor) -> bool:
    return isinstance(value, torch.Tensor) and value.shape == parameter.shape and value.dim() > 0


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value
