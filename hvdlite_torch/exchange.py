"""The gradients of one optimizer, on one rank: from the parameters to the reducer's memory and back."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

import hvdlite
from hvdlite import ProcessSet, ReduceOp
from hvdlite.api import world
from hvdlite.errors import ArgumentError, UnsupportedTensorError
from hvdlite.protocols import Array
from hvdlite.reducer import Reducer
from hvdlite_torch.allocator import keep_freed_memory
from hvdlite_torch.tensor import ADAPTER

Closure = Callable[[], Any]


class GradientExchange:
    """Exchanges the gradients of an optimizer's parameters before it steps.

    A gradient is copied into the reducer's memory as soon as a backward pass has it, while it is in the cache, and
    ``p.grad`` becomes a view of that memory. What backward passes add later is added there.

    Args:
        optimizer: Its step hooks are made by `attach`.
        op: Average or Sum.
        process_set: The ranks that take part; all if None.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, op: ReduceOp, process_set: ProcessSet | None) -> None:
        self._world = world("DistributedOptimizer()")
        self._optimizer = optimizer
        self._op = op
        self._process_set = process_set
        self._weight = 1.0
        self._synchronized = False
        self._parameters: list[torch.Tensor] = []
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []
        self._reducer: Reducer
        keep_freed_memory()
        self._prepare(self._trainable())

    def attach(self) -> None:
        """Have the optimizer call this at each step."""
        handle = self._optimizer.register_step_pre_hook(self._before_step)
        # Other hooks (clipping, logging) are to see the combined gradients, those registered before too.
        self._optimizer._optimizer_step_pre_hooks.move_to_end(handle.id, last=False)  # type: ignore[attr-defined]

    def _trainable(self) -> list[torch.Tensor]:
        return [p for group in self._optimizer.param_groups for p in group["params"] if p.requires_grad]

    def _prepare(self, parameters: list[torch.Tensor]) -> None:
        if not parameters:
            raise ArgumentError("this optimizer has no parameters that require a gradient.")
        outdated = getattr(self, "_reducer", None)
        self._make_reducer(parameters)
        if outdated is not None:
            self._world.release(outdated)
        self._parameters = parameters
        self._memory = [
            as_tensor(self._reducer.memory_of(index), parameter) for index, parameter in enumerate(parameters)
        ]
        for hook in self._hooks:
            hook.remove()
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(self._hook(index))  # type: ignore[no-untyped-call]
            for index, parameter in enumerate(parameters)
        ]

    def _hook(self, index: int) -> Callable[[torch.Tensor], None]:
        """What is called when a backward pass has added to the gradient of a parameter."""
        memory = self._memory[index]
        return functools.partial(self._take, memory, memory.data_ptr())

    def _make_reducer(self, parameters: list[torch.Tensor]) -> None:
        infos = [ADAPTER.info(parameter) for parameter in parameters]
        self._reducer = self._world.reducer(infos, self._op, self._process_set)

    def set_weight(self, weight: float) -> None:
        if self._op is not hvdlite.Average:
            raise ArgumentError(f"a batch weight has no meaning for op={self._op!r}: it is for averages.")
        if not weight >= 0:
            raise ArgumentError(f"set_batch_weight({weight!r}): expected the number of this rank's samples, 0 or more.")
        self._weight = float(weight)

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        """The step hook. `args` begin with the optimizer; returns those to call `step` with instead."""
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if closure is not None:
            return replace_closure(args, kwargs, self._together(closure))
        if not self._synchronized:
            self.synchronize()
        self._synchronized = False
        return None

    def _together(self, closure: Closure) -> Closure:
        """A closure that all ranks evaluate together, to equal gradients and an equal loss."""

        weight, self._weight = self._weight, 1.0  # of the batch, however often it is evaluated

        def evaluate() -> Any:
            loss = closure()
            self._weight = weight
            self._exchange()
            value = torch.as_tensor(loss, dtype=torch.float64).detach()
            share, total = hvdlite.allreduce(
                [value * weight, torch.tensor(weight, dtype=torch.float64)], hvdlite.Sum, process_set=self._process_set
            )
            joined = share / total if self._op is hvdlite.Average else share
            return joined.to(loss) if isinstance(loss, torch.Tensor) else float(joined)

        return evaluate

    def synchronize(self) -> None:
        """Exchange the gradients: afterwards every rank's ``p.grad`` is the combined one, or None if no rank has one."""
        self._exchange()

    @torch.no_grad()
    def _exchange(self) -> None:
        parameters = self._trainable()
        if len(parameters) != len(self._parameters) or any(
            a is not b for a, b in zip(parameters, self._parameters, strict=True)
        ):
            # A group was added, or a parameter frozen or thawed: on every rank, or they disagree.
            self._prepare(parameters)
        self._check_parameters()
        used = [
            parameter.grad is not None and self._collect(index, parameter.grad)
            for index, parameter in enumerate(self._parameters)
        ]
        weight, self._weight = self._weight, 1.0
        self._deliver(self._reducer.exchange(used, weight))
        self._synchronized = True

    def _check_parameters(self) -> None:
        """Raise if a parameter is not what it was."""

    def _deliver(self, anywhere: list[bool]) -> None:
        for parameter, memory, there in zip(self._parameters, self._memory, anywhere, strict=True):
            if there:
                parameter.grad = memory

    def _take(self, memory: torch.Tensor, address: int, parameter: torch.Tensor) -> None:
        """The hook of a parameter: a backward pass has added to its gradient."""
        # A step that was left out after synchronize(), as GradScaler does, must not spare the next one its exchange.
        self._synchronized = False
        gradient = parameter.grad
        # One that is part of a graph, or that cannot be exchanged, is left for the step.
        if (
            gradient is not None
            and gradient.data_ptr() != address
            and gradient.layout is torch.strided
            and gradient.shape == memory.shape
            and not gradient.requires_grad
        ):
            memory.copy_(gradient)
            parameter.grad = memory

    def _collect(self, index: int, gradient: torch.Tensor) -> bool:
        """Put this rank's gradient of a parameter where it is reduced, if it is not there already."""
        memory = self._memory[index]
        if gradient.layout is not torch.strided:
            raise UnsupportedTensorError(
                f"expected dense gradients; got layout {gradient.layout} for a parameter of shape {tuple(memory.shape)}. "
                "Use sparse=False in the embedding."
            )
        if gradient.shape != memory.shape or gradient.dtype is not memory.dtype:
            raise ArgumentError(
                f"a parameter of {memory.dtype} and shape {tuple(memory.shape)} has become one of {gradient.dtype} and shape "
                f"{tuple(gradient.shape)} since the optimizer was made distributed: change models before that."
            )
        if gradient.data_ptr() != memory.data_ptr():
            memory.copy_(gradient)
        return True


def as_tensor(memory: Array, like: torch.Tensor) -> torch.Tensor:
    """Flat memory of the reducer as a tensor of the dtype and shape of `like`."""
    return torch.from_numpy(memory).view(like.dtype).view(like.shape)


def replace_closure(args: Any, kwargs: Any, closure: Closure) -> tuple[Any, Any]:
    """The arguments of a step, the first of them the optimizer, with another closure."""
    return ((args[0], closure, *args[2:]), kwargs) if len(args) > 1 else (args, {**kwargs, "closure": closure})
