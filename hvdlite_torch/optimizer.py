"""`DistributedOptimizer`: an optimizer that combines the gradients of all ranks before it steps.

The optimizer stays the same object. A step hook combines the gradients first. If `step` gets a closure, the closure is replaced
by one that combines after each evaluation::

    backward ─▶ p.grad ─▶ shared memory ─▶ sum over the ranks ─▶ p.grad = view of that memory ─▶ the optimizer's own step
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

import hvdlite
from hvdlite import ProcessSet, ReduceOp
from hvdlite.adapter.few_bytes.local_steps import LocalSGD
from hvdlite.adapter.options import combined_by
from hvdlite.api import world
from hvdlite.errors import ArgumentError, DistributedAlreadyError, UnsupportedTensorError
from hvdlite.gradients.aggregator import Aggregator
from hvdlite.tensors.compression import Compression, Compressor
from hvdlite_torch.step.amp import teach_grad_scaler
from hvdlite_torch.step.context import OptimizerContext
from hvdlite_torch.step.driver import StepDriver
from hvdlite_torch.step.gradient_sync import GradientSync
from hvdlite_torch.step.options import OptimizerOptions, Shard, StepsWith
from hvdlite_torch.step.shardable import check_independent, check_shardable
from hvdlite_torch.step.sharding import Sharding
from hvdlite_torch.step.step_guard import guarded
from hvdlite_torch.step.typed import typed
from hvdlite_torch.step.wrapped import Aggregating, Distributed, Local, Opt, Sharded, add_to_class
from hvdlite_torch.sync.adasum import AdasumSync
from hvdlite_torch.sync.catch_up import OptimizerMember
from hvdlite_torch.sync.device import DeviceSync
from hvdlite_torch.sync.host import HostSync
from hvdlite_torch.sync.local_steps import LocalSync
from hvdlite_torch.sync.measured import measure
from hvdlite_torch.tensors import split_norm
from hvdlite_torch.tensors.device import device_kind
from hvdlite_torch.tensors.sliced import is_sliced, local_of
from hvdlite_torch.training.state import share_state
from hvdlite_torch.training.whole_state import name_in_state


@typed
def DistributedOptimizer(
    optimizer: Opt,
    named_parameters: torch.nn.Module | Iterable[tuple[str, torch.nn.Parameter]] | None = None,
    compression: Compressor | Aggregator = Compression.none,
    backward_passes_per_step: int = 1,
    op: ReduceOp = hvdlite.Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: int | Sequence[Sequence[torch.Tensor]] | None = None,
    sparse_as_dense: bool = False,
    process_set: ProcessSet = hvdlite.global_process_set,
    *,
    shard: Shard = False,
    overlap: bool | None = None,
    max_grad_norm: float | None = None,
    aggregator: Aggregator | None = None,
    local_steps: LocalSGD | None = None,
) -> Opt:
    """Make `optimizer` step with the gradients of all ranks. Every rank calls this, at the same point.

    A program may call `backward` any number of times before `step`. A parameter that has a gradient on some ranks counts as
    zero on the others. One that has a gradient on no rank keeps ``grad=None``, so that weight decay leaves it alone. After
    `step`, ``p.grad`` holds the combined gradient. A closure passed to `step` is replaced by one that combines gradients and
    loss after each evaluation. torch's fused step is used where the program leaves the choice to torch. `Distributed` has the
    methods that the optimizer gets.

    Args:
        optimizer: An optimizer of torch. It is changed and returned.
        named_parameters: ``model.named_parameters()``, or the model itself. If given, it is checked: names are unique, every
            parameter of `optimizer` is there, and the order is the same on all ranks.
        compression: `Compression.none`, `Compression.fp16`, `Compression.bf16`, or a `Compressor` of yours whose results can
            be averaged; or ``Compression.powersgd(rank=4)`` or ``Compression.topk(0.01)``, which send few bytes and are
            aggregators (see `aggregator`).
        backward_passes_per_step: The largest number of calls of `backward` before `step`; more raise an error. 1 allows any
            number. Gradients add up over the passes, so divide the loss.
        op: Average, Sum, or Adasum (see `hvdlite_torch.sync.adasum`).
        gradient_predivide_factor: With compression and Average, gradients are divided by this before they are compressed, and
            multiplied by it in the end, so that sums fit into the smaller dtype. Without compression it changes nothing.
        num_groups: The same as an int for `groups`.
        groups: An argument of Horovod's. It is checked and has no effect: all gradients travel together anyway.
        sparse_as_dense: Whether sparse gradients travel as dense ones; if False, only their rows travel.
        process_set: The ranks that take part; all by default.
        shard: Whether each rank steps its shard of the parameters only, and holds only that shard of the optimizer's state:
            less time, less memory, the same result. `hvdlite_torch.sync.host_sharded` says what differs. Use True for an
            optimizer of torch, and "parameters" for any other that steps each parameter independently of the others.
        overlap: Whether gradients travel while the backward pass goes on (see `hvdlite.gradients.overlap`). None means: where
            each rank has a core to spare, unless ``HVDLITE_OVERLAP`` says "on" or "off". For parameters on a GPU, None means:
            always, if nothing changes gradients between the last backward pass and `step`; see ``hvdlite docs gpu``.
        max_grad_norm: The combined gradients are clipped to at most this norm over all parameters; None does not clip.
        aggregator: Combines gradients in your way: `hvdlite_torch.Aggregator` has the one method that it needs. If it has
            ``state_dict()``, its state is a part of the optimizer's. The parameters must be in host memory.
        local_steps: `LocalSGD` or `DiLoCo`: each rank steps with its own gradients, and every few steps the ranks bring their
            parameters together. Before a program evaluates or saves, ``optimizer.average_parameters()`` does that at once.

    Returns:
        `optimizer`, still an instance of its class, with its state.

    Raises:
        UnsupportedTensorError: A parameter is a DTensor, and the other arguments need whole parameters.
        ArgumentError: The optimizer is wrapped already, or has no parameters, or the arguments do not fit together.
        MismatchError: The ranks have different parameters. The error is raised on all ranks.

    Examples:
        >>> def step():
        ...     weight = torch.nn.Parameter(torch.zeros(1))
        ...     optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0))
        ...     (weight * hvd.rank()).sum().backward()  # the gradient is 0 on rank 0, and 1 on rank 1
        ...     optimizer.step()
        ...     return weight.item()
        >>> on_ranks(2, step)
        [-0.5, -0.5]
    """
    _check_optimizer(optimizer)
    if isinstance(named_parameters, torch.nn.Module):
        named_parameters = named_parameters.named_parameters()
    named = list(named_parameters or ())
    if named_parameters is not None:
        _check_names(optimizer, named)
    _check_groups(optimizer, groups if groups is not None else num_groups)
    compression, aggregator = combined_by(compression, aggregator)
    options = OptimizerOptions(
        op,
        process_set,
        compression,
        sparse_as_dense,
        gradient_predivide_factor,
        overlap=overlap,
        passes=backward_passes_per_step,
        max_grad_norm=max_grad_norm,
        shard=shard,
        aggregator=aggregator,
        local_steps=local_steps,
        names={id(local_of(parameter)): name for name, parameter in named},
    )
    _check_sliced(optimizer, options)
    check_independent(optimizer)
    driver = StepDriver(optimizer, options, _make_sync)
    plain = type(optimizer)
    kind = Sharded if shard else Local if local_steps else Distributed if aggregator is None else Aggregating
    add_to_class(optimizer, kind, step=guarded(plain.step))
    if not hasattr(optimizer, "_optimizer_step_pre_hooks"):
        # Some optimizers (versions of Lookahead) never call torch's constructor. torch completes them like unpickled ones.
        vars(optimizer).setdefault("defaults", {})
        torch.optim.Optimizer.__setstate__(optimizer, {})
    optimizer._hvdlite_driver = driver  # type: ignore[attr-defined]
    optimizer._hvdlite_plain = plain  # type: ignore[attr-defined]
    optimizer._hvdlite_names = options.names  # type: ignore[attr-defined]
    optimizer._hvdlite_aggregator = aggregator  # type: ignore[attr-defined]
    name_in_state(optimizer)
    driver.attach()
    world().group(process_set).add(OptimizerMember(driver, not shard, share_state))
    teach_grad_scaler()
    return optimizer


def _make_sync(context: OptimizerContext, sharding: Sharding | None) -> GradientSync:
    """Return the object that combines gradients where the parameters lie, or that combines steps (Adasum).

    Raises:
        ArgumentError: ``aggregator=`` is given, and the parameters are on a GPU; or ``hvdlite advise`` cannot measure this.
    """
    sync = _choose_sync(context, sharding)
    if context.config.advise:
        measure(sync, context)
    return sync


def _choose_sync(context: OptimizerContext, sharding: Sharding | None) -> GradientSync:
    if context.options.local_steps is not None:
        return LocalSync(context, context.options.local_steps)
    if context.options.steps_with is StepsWith.OWN:
        return AdasumSync(context)
    on_device = any([device_kind(parameter) is not None for parameter in context.trained()])
    if on_device and context.options.aggregator is not None:
        raise ArgumentError(
            "aggregator= combines gradients in host memory, and the parameters are on a GPU: train on the CPU, or use "
            "compression=hvd.Compression.fp16 or bf16."
        )
    return (DeviceSync if on_device else HostSync)(context, sharding)


def _check_optimizer(given: object) -> None:
    if isinstance(given, Distributed) or hasattr(given, "_hvdlite_training"):
        raise DistributedAlreadyError("this optimizer is distributed already: wrap it once.")
    if isinstance(given, torch.optim.Optimizer):
        return
    what = given.__name__ if isinstance(given, type) else f"a {type(given).__name__}"
    advice = "hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))"
    if isinstance(given, type) and issubclass(given, torch.optim.Optimizer):
        advice = f"hvd.DistributedOptimizer({given.__name__}(model.parameters(), …))"
    if isinstance(given, torch.optim.lr_scheduler.LRScheduler):
        advice = "optimizer = hvd.DistributedOptimizer(optimizer), and then make the schedule with it"
    raise ArgumentError(f"DistributedOptimizer wraps an optimizer of torch; got {what}. Write {advice}.")


def _check_sliced(optimizer: torch.optim.Optimizer, options: OptimizerOptions) -> None:
    """Raise UnsupportedTensorError if a parameter is a DTensor, and the arguments need whole parameters."""
    sliced = [p for group in optimizer.param_groups for p in group["params"] if is_sliced(p)]
    if not sliced:
        return
    split_norm.teach()
    what = f"a parameter of shape {tuple(sliced[0].shape)} is a DTensor, of which this rank has a slice"
    apart = {
        "op=Adasum": options.op is hvdlite.Adasum,
        "aggregator=": options.aggregator,
        "local_steps=": options.local_steps,
    }
    for how in (name for name, given in apart.items() if given):
        raise UnsupportedTensorError(f"{what}: {how} needs whole parameters. Use Average or Sum.")
    if device_kind(local_of(sliced[0])) is not None:
        raise UnsupportedTensorError(
            f"{what}, on a GPU, which nobody has tried with DistributedOptimizer. Let FSDP have the data-parallel axis: "
            'fully_shard(model, mesh=grid.to_torch("cuda")["dp"]), with the plain optimizer.'
        )
    if options.shard and check_shardable(optimizer, options):
        raise UnsupportedTensorError(
            f"{what}, and {type(optimizer).__name__} steps whole parameters: leave out shard={options.shard!r}."
        )


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


def _check_groups(optimizer: torch.optim.Optimizer, groups: int | Sequence[Sequence[torch.Tensor]]) -> None:
    if isinstance(groups, int):
        if groups < 0:
            raise ArgumentError(f"groups={groups}: expected a number of groups, or lists of parameters.")
        return
    known = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    grouped = [id(parameter) for group in groups for parameter in group]
    if len(set(grouped)) < len(grouped):
        raise ArgumentError("groups: a parameter is in more than one group, or twice in one.")
    if not known.issuperset(grouped):
        raise ArgumentError("groups: a tensor is none of the optimizer's parameters.")
