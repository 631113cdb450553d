"""`AsyncDistributedOptimizer`: training with a parameter server, in one line."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterable
from typing import Any

import torch

import hvdlite
from hvdlite import ProcessSet
from hvdlite.adapter.agreement import together
from hvdlite.adapter.arguments import size_of
from hvdlite.api import world
from hvdlite.async_sgd.compensation import DelayCompensation
from hvdlite.async_sgd.training.options import AsyncOptions, Servers, make_options
from hvdlite.errors import ArgumentError
from hvdlite_torch.async_sgd.checks import check_compensation, check_optimizer, check_plain_sgd
from hvdlite_torch.async_sgd.hogwild import HogwildTraining
from hvdlite_torch.async_sgd.training import TorchTraining
from hvdlite_torch.async_sgd.typed import typed
from hvdlite_torch.async_sgd.wrapped import AsyncDistributed
from hvdlite_torch.step.amp import teach_grad_scaler
from hvdlite_torch.step.step_guard import hooked
from hvdlite_torch.step.wrapped import Opt, add_to_class
from hvdlite_torch.training.state import broadcast_optimizer_state, broadcast_parameters


@typed
def AsyncDistributedOptimizer(
    optimizer: Opt,
    named_parameters: torch.nn.Module | Iterable[tuple[str, torch.nn.Parameter]] | None = None,
    *,
    mode: str = "async",
    staleness: int | None = None,
    servers: Servers | None = None,
    push_every: int = 1,
    delay_compensation: DelayCompensation | None = None,
    overlap: bool | None = None,
    hogwild: bool = False,
    on_worker_loss: str = "end",
    checkpoint: str | os.PathLike[str] | None = None,
    on_nan: str = "raise",
    overlap_pull: bool = False,
    process_set: ProcessSet = hvdlite.global_process_set,
) -> Opt:
    """Let ranks train at their own pace: `step` pushes gradients to servers, and pulls parameters. Every rank calls this.

    Servers hold the parameters in host memory, each a part of them, and step them with an optimizer of the same class. In the
    beginning all ranks get rank 0's parameters, and its optimizer's state and settings. A push says the settings of
    the pushing rank's groups (learning rates), so schedules work. A parameter without a gradient keeps its value in that step.
    `AsyncDistributed` has the methods that the optimizer gets; call `finish` at the end.

    ``hvdlite docs asynchronous`` says when to use which mode:

    - "sync": the server waits for all ranks that still train, and makes one step with the mean of their gradients, weighted by
      `set_batch_weight`. The result is that of `DistributedOptimizer`.
    - "ssp": the server makes one step with each rank's gradients, as they come. No rank gets more than `staleness` steps ahead
      of the slowest that still trains (Ho et al., NIPS 2013).
    - "async": the server makes one step with each rank's gradients, as they come. Nobody waits for others (Dean et al., NIPS
      2012).

    In "ssp" and "async" nothing is scaled: n ranks make n steps where "sync" makes one, each with the gradient of one rank.

    Of a sparse gradient (``nn.Embedding(sparse=True)``) the rows are pushed, and the server's optimizer gets a sparse gradient.

    Args:
        optimizer: An optimizer of torch that steps each parameter by itself. It is changed and returned.
        named_parameters: ``model.named_parameters()``, or the model itself: the names are for error texts, and for
            `checkpoint`.
        mode: "sync", "ssp" or "async".
        staleness: For "ssp": how many steps a rank may be ahead of the slowest, 0 or more. A step is a push.
        servers: "sharded": every rank serves a part, in a thread beside its training. A number n: the last n ranks only
            serve; there, ``optimizer.is_server`` is True, and the program calls `serve_parameters` instead of its loop. None:
            the number of ``hvdliterun --servers n``, and "sharded" if the job was started without.
        push_every: The gradients of so many steps are added up before they are pushed; with mode="sync" their weights too.
        delay_compensation: For "ssp" and "async", what servers do about gradients that are old when they arrive: None,
            `StalenessRate` or `DCASGD`.
        overlap: Whether gradients travel to the servers while the backward pass goes on (see `hvdlite.async_sgd.early`). None
            means: where each rank has a core to spare, unless ``HVDLITE_OVERLAP`` says "on" or "off"; never with `push_every`.
        hogwild: The ranks of one host share the memory of the parameters, and add to them without locks: for plain SGD with
            mode="async" (Niu et al., NIPS 2011). hvdlite docs asynchronous says what that gives up.
        on_worker_loss: "end": a rank that fails ends the job. "go on": the others go on without a rank that trains and fails
            (not: serves). This needs servers=n, hvdliterun with Open MPI, and all ranks on one host.
        checkpoint: A file. If the job fails, the lowest rank that trains and lives saves there the parameters that it has
            pulled last, as a dictionary by their names, or numbers if `named_parameters` is not given:
            ``torch.load(checkpoint)``. This needs hvdliterun.
        on_nan: "raise": a step with a gradient that has NaN or infinite elements raises ArgumentError, and nothing
            of it is pushed. "pass on": it is pushed like any other, and each server makes the step with its part.
        overlap_pull: `step` returns before the new values are there. They come in the order of the parameters, and each layer
            waits for its own before its forward pass. `named_parameters` is the model. What reads parameters in another way
            calls `wait` before: ``hvdlite docs asynchronous`` has the details.
        process_set: The ranks that take part; all by default.

    Returns:
        `optimizer`, still an instance of its class, with the methods of `AsyncDistributed`.

    Raises:
        DistributedAlreadyError: The optimizer is distributed already.
        ArgumentError: An argument is wrong, or the optimizer needs all gradients at once (LBFGS), or has nothing to train.
        UnsupportedTensorError: A parameter is a DTensor, or is complex and `delay_compensation` is `DCASGD`.
        MismatchError: The ranks have different parameters or arguments. All ranks raise it.

    Examples:
        >>> def trained():
        ...     weight = torch.nn.Parameter(torch.zeros(1))
        ...     optimizer = hvd.AsyncDistributedOptimizer(torch.optim.SGD([weight], lr=1.0), mode="async")
        ...     for step in range(3):
        ...         optimizer.zero_grad()
        ...         weight.sum().backward()  # the gradient is 1
        ...         optimizer.step()
        ...     optimizer.finish()
        ...     return weight.item()
        >>> on_ranks(2, trained)  # the server has made the steps of both ranks
        [-6.0, -6.0]
    """
    check_optimizer(optimizer)
    teach_grad_scaler()
    options = make_options(
        *(mode, staleness, servers, push_every, process_set, size_of(process_set)),
        *(delay_compensation, overlap, hogwild, on_worker_loss, checkpoint, on_nan),
        overlap_pull=overlap_pull,
    )
    check_compensation(optimizer, delay_compensation)
    if hogwild:
        check_plain_sgd(optimizer)
    model = named_parameters if isinstance(named_parameters, torch.nn.Module) else None
    if overlap_pull and model is None:
        raise ArgumentError(
            "overlap_pull=True needs the model, whose layers wait for their values: write "
            "hvd.AsyncDistributedOptimizer(optimizer, model, overlap_pull=True)."
        )
    if isinstance(named_parameters, torch.nn.Module):
        named_parameters = named_parameters.named_parameters()
    names = {}
    for item in named_parameters or ():
        if not isinstance(item, tuple) or len(item) != 2:
            raise ArgumentError(
                "named_parameters: expected pairs of name and parameter, as model.named_parameters() gives them."
            )
        names[id(item[1])] = item[0]
    _agree(optimizer, names, options)
    step = vars(optimizer).pop("step", None)  # a scheduler has put it there, and it calls the `step` of the plain class
    # The servers' optimizers are of the plain class.
    training = (
        HogwildTraining(optimizer, names, options) if hogwild else TorchTraining(optimizer, names, options, model)
    )
    add_to_class(optimizer, AsyncDistributed, step=_step_of(type(optimizer)))
    optimizer._hvdlite_training = training  # type: ignore[attr-defined]
    if step is not None:
        _let_scheduler_see(optimizer)
    return optimizer


def _agree(optimizer: torch.optim.Optimizer, names: dict[int, str], options: AsyncOptions) -> None:
    """Check that all ranks call this alike, and give them the first rank's parameters, state and settings."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    lines = [
        f"optimizer={type(optimizer).__name__}",
        *options.lines(),
    ]
    for number, p in enumerate(parameters):
        frozen = "" if p.requires_grad else ", which requires no gradient"
        name = repr(names[id(p)]) if id(p) in names else ""
        lines.append(f"parameter {number} {name} is {p.dtype} of shape {tuple(p.shape)}{frozen}")
    lines.append(f"parameters: {len(parameters)}")
    process_set = options.process_set
    ranks = world().ranks(process_set)
    together(process_set).check_same(lines, "what AsyncDistributedOptimizer is given")
    if len(ranks) > 1:
        broadcast_parameters(parameters, ranks[0], process_set=process_set)
        broadcast_optimizer_state(optimizer, ranks[0], process_set=process_set)


def _step_of(plain: type[torch.optim.Optimizer]) -> Callable[..., Any]:
    """Return the `step` of the new class, with torch's hooks around it."""

    @functools.wraps(plain.step)
    def step(self: Any, closure: Callable[[], Any] | None = None) -> Any:
        return self._hvdlite_training.step(closure)

    if hasattr(step, "hooked"):
        del step.hooked
    return hooked(torch.optim.Optimizer.profile_hook_step(step))


def _let_scheduler_see(optimizer: Any) -> None:
    """Let a schedule that was made before see the steps, or it would warn that it comes before them."""

    def step(*args: Any, **kwargs: Any) -> Any:
        optimizer._opt_called = True
        return type(optimizer).step(optimizer, *args, **kwargs)

    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    optimizer.step = step
