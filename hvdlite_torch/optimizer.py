"""The one-line wrap: an optimizer that averages gradients over the ranks before it steps.

The optimizer stays the object that it was. A step hook exchanges the gradients first; where `step` gets a closure, the
closure is replaced by one that exchanges after each evaluation::

    backward ─▶ p.grad ─▶ bucket memory ─▶ sum over the ranks ─▶ p.grad = view of bucket memory ─▶ the optimizer's own step
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch

import hvdlite
from hvdlite import ProcessSet, ReduceOp
from hvdlite.api import world
from hvdlite.errors import ArgumentError, UnsupportedTensorError
from hvdlite_torch.tensor import ADAPTER

Opt = TypeVar("Opt", bound=torch.optim.Optimizer)


def DistributedOptimizer(
    optimizer: Opt,
    named_parameters: Iterable[tuple[str, torch.nn.Parameter]] | None = None,
    *,
    op: ReduceOp = hvdlite.Average,
    process_set: ProcessSet | None = None,
) -> Opt:
    """Make `optimizer` step with the gradients of all ranks. Every rank calls this, at the same point.

    Call `backward` as often as you like before `step`. A parameter that has a gradient on some ranks counts as zero on the
    others; one that has none anywhere keeps ``grad=None``, so that weight decay leaves it alone. After `step`, ``p.grad``
    holds the combined gradient. A closure passed to `step` is exchanged after each evaluation, its loss too.

    It has two more methods from now on. ``set_batch_weight(m)``, before a step, says that this rank's gradients are the mean
    of m samples, so that ranks with different numbers of samples (0 too, without a backward pass) get the gradient of the
    joined batch. ``synchronize()`` exchanges now and not in the next `step`, for whoever wants to see or clip the gradients
    in between.

    Args:
        optimizer: Any torch optimizer; it is changed and returned.
        named_parameters: ``model.named_parameters()``, checked if given: names unique, every parameter of `optimizer` there.
        op: Average or Sum.
        process_set: The ranks that take part; all by default.

    Returns:
        `optimizer`, still an instance of its class, with its state.

    Raises:
        ArgumentError: It is wrapped already, or has no parameters, or `named_parameters` does not fit.
        MismatchError: The ranks have different parameters. Raised on all of them.
    """
    if isinstance(optimizer, Distributed):
        raise ArgumentError("this optimizer is distributed already: wrap it once.")
    if named_parameters is not None:
        _check_names(optimizer, list(named_parameters))
    exchange = _GradientExchange(optimizer, op, process_set)
    plain = type(optimizer)
    # Same name, so that whoever prints or saves the class sees what the user wrote.
    optimizer.__class__ = type(
        plain.__name__, (Distributed, plain), {"__module__": plain.__module__, "__doc__": plain.__doc__}
    )
    optimizer._hvdlite_exchange = exchange  # type: ignore[attr-defined]
    handle = optimizer.register_step_pre_hook(exchange.before_step)
    # Other hooks (clipping, logging) are to see the combined gradients, those registered before too.
    optimizer._optimizer_step_pre_hooks.move_to_end(handle.id, last=False)  # type: ignore[attr-defined]
    return optimizer


class Distributed:
    """What `DistributedOptimizer` adds to an optimizer's class."""

    _hvdlite_exchange: _GradientExchange

    def set_batch_weight(self, weight: float) -> None:
        """Say how many samples this rank's gradients are the mean of, for the next step only; 1 unless said.

        Raises:
            ArgumentError: A negative weight, or the gradients are summed and not averaged.
        """
        self._hvdlite_exchange.set_weight(weight)

    def synchronize(self) -> None:
        """Exchange the gradients now; the next `step` will not."""
        self._hvdlite_exchange.synchronize()

    def __reduce__(self) -> tuple[Any, ...]:
        # Pickled and copied as the plain optimizer: the exchange belongs to this process.
        return _blank, (type(self).__mro__[2],), self.__getstate__()  # type: ignore[attr-defined]


def _blank(cls: type[Opt]) -> Opt:
    return cls.__new__(cls)


class _GradientExchange:
    """The gradients of one optimizer, on one rank."""

    def __init__(self, optimizer: torch.optim.Optimizer, op: ReduceOp, process_set: ProcessSet | None) -> None:
        self._world = world("DistributedOptimizer()")
        self._optimizer = optimizer
        self._op = op
        self._process_set = process_set
        self._weight = 1.0
        self._synchronized = False
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []
        self._prepare(self._trainable())

    def _trainable(self) -> list[torch.Tensor]:
        return [p for group in self._optimizer.param_groups for p in group["params"] if p.requires_grad]

    def _prepare(self, parameters: list[torch.Tensor]) -> None:
        if not parameters:
            raise ArgumentError("this optimizer has no parameters that require a gradient.")
        self._parameters = parameters
        infos = [ADAPTER.info(parameter) for parameter in parameters]
        self._reducer = self._world.reducer(infos, self._op, self._process_set)
        self._memory = [
            torch.from_numpy(self._reducer.memory_of(index)).view(parameter.shape)
            for index, parameter in enumerate(parameters)
        ]
        for hook in self._hooks:
            hook.remove()
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(self._on_gradient)  # type: ignore[no-untyped-call]
            for parameter in parameters
        ]

    def _on_gradient(self, _: torch.Tensor) -> None:
        # A step that was left out after synchronize(), as GradScaler does, must not spare the next one its exchange.
        self._synchronized = False

    def set_weight(self, weight: float) -> None:
        if self._op is not hvdlite.Average:
            raise ArgumentError(f"a batch weight has no meaning for op={self._op!r}: it is for averages.")
        if not weight >= 0:
            raise ArgumentError(f"set_batch_weight({weight!r}): expected the number of this rank's samples, 0 or more.")
        self._weight = float(weight)

    def before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        """The step hook. `args` begin with the optimizer; returns those to call `step` with instead."""
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if closure is not None:
            together = self._together(closure)
            return (
                ((args[0], together, *args[2:]), kwargs) if len(args) > 1 else (args, {**kwargs, "closure": together})
            )
        if not self._synchronized:
            self.synchronize()
        self._synchronized = False
        return None

    def _together(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """A closure that all ranks evaluate together, to equal gradients and an equal loss."""

        weight, self._weight = self._weight, 1.0  # of the batch, however often it is evaluated

        def evaluate() -> Any:
            loss = closure()
            self._weight = weight
            self.synchronize()
            value = torch.as_tensor(loss, dtype=torch.float64).detach()
            share, total = hvdlite.allreduce(
                [value * weight, torch.tensor(weight, dtype=torch.float64)], hvdlite.Sum, process_set=self._process_set
            )
            joined = share / total if self._op is hvdlite.Average else share
            return joined.to(loss) if isinstance(loss, torch.Tensor) else float(joined)

        return evaluate

    @torch.no_grad()
    def synchronize(self) -> None:
        """Exchange the gradients: afterwards every rank's ``p.grad`` is the combined one, or None if no rank has one."""
        parameters = self._trainable()
        if len(parameters) != len(self._parameters) or any(
            a is not b for a, b in zip(parameters, self._parameters, strict=True)
        ):
            self._prepare(
                parameters
            )  # a group was added, or a parameter frozen or thawed: on every rank, or they disagree
        used = [
            self._collect(parameter, memory) for parameter, memory in zip(self._parameters, self._memory, strict=True)
        ]
        weight, self._weight = self._weight, 1.0
        anywhere = self._reducer.exchange(used, weight)
        for parameter, memory, there in zip(self._parameters, self._memory, anywhere, strict=True):
            if there:
                parameter.grad = memory if memory.dtype == parameter.dtype else memory.to(parameter.dtype)
        self._synchronized = True

    @staticmethod
    def _collect(parameter: torch.Tensor, memory: torch.Tensor) -> bool:
        """Put this rank's gradient where it is reduced, if there is one and it is not there already."""
        gradient = parameter.grad
        if gradient is None:
            return False
        if gradient.layout is not torch.strided:
            raise UnsupportedTensorError(
                f"expected dense gradients; got layout {gradient.layout} for a parameter of shape {tuple(parameter.shape)}. "
                "Use sparse=False in the embedding."
            )
        if gradient.data_ptr() != memory.data_ptr() or gradient.dtype != memory.dtype:
            memory.copy_(gradient)
        return True


def _check_names(optimizer: torch.optim.Optimizer, named: list[tuple[str, torch.nn.Parameter]]) -> None:
    if any(not isinstance(item, tuple) or len(item) != 2 for item in named):
        raise ArgumentError(
            "named_parameters: expected pairs of name and parameter, as model.named_parameters() gives them."
        )
    names = [name for name, _ in named]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ArgumentError(f"named_parameters: these names occur more than once: {', '.join(twice)}.")
    known = {id(parameter) for _, parameter in named}
    unnamed = sum(id(p) not in known for group in optimizer.param_groups for p in group["params"])
    if unnamed:
        raise ArgumentError(
            f"named_parameters: {unnamed} parameters of the optimizer are not among the {len(names)} given. "
            "Pass those of the whole model, or leave the argument out."
        )
