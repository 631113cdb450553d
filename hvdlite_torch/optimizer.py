"""The one-line wrap: an optimizer that averages gradients over the ranks before it steps.

The optimizer stays the object that it was. A step hook exchanges the gradients first; where `step` gets a closure, the
closure is replaced by one that exchanges after each evaluation::

    backward ─▶ p.grad ─▶ shared memory ─▶ sum over the ranks ─▶ p.grad = view of that memory ─▶ the optimizer's own step
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeVar

import torch

import hvdlite
from hvdlite import ProcessSet, ReduceOp
from hvdlite.errors import ArgumentError
from hvdlite_torch.exchange import GradientExchange
from hvdlite_torch.sharded import ShardedExchange

Opt = TypeVar("Opt", bound=torch.optim.Optimizer)


def DistributedOptimizer(
    optimizer: Opt,
    named_parameters: Iterable[tuple[str, torch.nn.Parameter]] | None = None,
    *,
    op: ReduceOp = hvdlite.Average,
    process_set: ProcessSet | None = None,
    shard: bool = False,
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
        shard: Let each rank step its share of the parameters only, and hold only that share of the optimizer's state: less
            time, less memory, the same result. See `hvdlite_torch.sharded` for what differs.

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
    plain = type(optimizer)
    exchange = (ShardedExchange if shard else GradientExchange)(optimizer, op, process_set)
    mixin = Sharded if shard else Distributed
    # Same name, so that whoever prints or saves the class sees what the user wrote.
    optimizer.__class__ = type(
        plain.__name__, (mixin, plain), {"__module__": plain.__module__, "__doc__": plain.__doc__}
    )
    optimizer._hvdlite_exchange = exchange  # type: ignore[attr-defined]
    exchange.attach()
    return optimizer


class Distributed:
    """What `DistributedOptimizer` adds to an optimizer's class."""

    _hvdlite_exchange: GradientExchange

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


class Sharded(Distributed):
    """What `DistributedOptimizer` with ``shard=True`` adds to an optimizer's class."""

    _hvdlite_exchange: ShardedExchange

    def state_dict(self) -> dict[str, Any]:
        """The whole state, as an optimizer that is not sharded has it. Every rank calls this."""
        with self._hvdlite_exchange.whole_state():
            return super().state_dict()  # type: ignore[misc, no-any-return]

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a whole state, from any number of ranks. Every rank calls this, with the same."""
        self._hvdlite_exchange.forget_state()
        super().load_state_dict(state_dict)  # type: ignore[misc]
        self._hvdlite_exchange.take_share_of_state()

    def __reduce__(self) -> tuple[Any, ...]:
        raise ArgumentError(
            "a sharded optimizer cannot be copied or pickled: each rank has its share. Use state_dict()."
        )


def _blank(cls: type[Opt]) -> Opt:
    return cls.__new__(cls)


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
