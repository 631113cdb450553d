"""The one-line wrap: an optimizer that averages gradients over the ranks before it steps.

The optimizer stays the object that it was. A step hook exchanges the gradients first; where `step` gets a closure, the
closure is replaced by one that exchanges after each evaluation::

    backward ─▶ p.grad ─▶ shared memory ─▶ sum over the ranks ─▶ p.grad = view of that memory ─▶ the optimizer's own step
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

import hvdlite
from hvdlite import ProcessSet, ReduceOp
from hvdlite.api import world
from hvdlite.errors import ArgumentError, DistributedAlreadyError
from hvdlite.gradients.aggregator import Aggregator
from hvdlite.gradients.sync import GradientSync, StepsWith
from hvdlite.tensors.compression import Compression, Compressor
from hvdlite_torch.step.amp import teach_grad_scaler
from hvdlite_torch.step.codec import Codec
from hvdlite_torch.step.context import OptimizerContext
from hvdlite_torch.step.driver import StepDriver
from hvdlite_torch.step.options import Options, Shard
from hvdlite_torch.step.sharding import Sharding
from hvdlite_torch.step.step_guard import guarded
from hvdlite_torch.step.typed import typed
from hvdlite_torch.step.wrapped import Aggregating, Distributed, Opt, Sharded, add_to_class
from hvdlite_torch.sync.adasum import AdasumSync
from hvdlite_torch.sync.catch_up import StandIn
from hvdlite_torch.sync.device import DeviceSync
from hvdlite_torch.sync.host import HostSync
from hvdlite_torch.tensors.device import device_kind
from hvdlite_torch.training.state import broadcast_optimizer_state


@typed
def DistributedOptimizer(
    optimizer: Opt,
    named_parameters: torch.nn.Module | Iterable[tuple[str, torch.nn.Parameter]] | None = None,
    compression: Compressor = Compression.none,
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
) -> Opt:
    """Make `optimizer` step with the gradients of all ranks. Every rank calls this, at the same point.

    Call `backward` as often as you like before `step`. A parameter that has a gradient on some ranks counts as zero on the
    others; one that has none anywhere keeps ``grad=None``, so that weight decay leaves it alone. After `step`, ``p.grad``
    holds the combined gradient. A closure passed to `step` is exchanged after each evaluation, its loss too. torch's fused
    step is used where the choice is left to torch. What else the optimizer can do from now on is in `Distributed`.

    Args:
        optimizer: Any torch optimizer; it is changed and returned.
        named_parameters: ``model.named_parameters()``, or the model itself; checked if given: names unique, every parameter of
            `optimizer` there, in the same order on all ranks.
        compression: `Compression.none`, `Compression.fp16`, `Compression.bf16`, or a `Compressor` of yours whose results may
            be averaged.
        backward_passes_per_step: How often `backward` is called before `step`, at most: more is an error. 1 allows any number.
            Gradients add up over the passes, so divide the loss.
        op: Average, Sum, or Adasum (see `hvdlite_torch.sync.adasum`).
        gradient_predivide_factor: With compression and Average: gradients are divided by it before they are compressed, and
            multiplied by it in the end, so that sums fit into the smaller dtype. Without compression it makes no difference.
        num_groups: As an int for `groups`.
        groups: Horovod's, checked and otherwise without effect: all gradients travel together anyway.
        sparse_as_dense: Exchange sparse gradients as dense ones; if not, their rows alone travel.
        process_set: The ranks that take part; all by default.
        shard: Let each rank step its share of the parameters only, and hold only that share of the optimizer's state: less
            time, less memory, the same result. See `hvdlite_torch.sync.host_sharded` for what differs. True for an optimizer
            of torch; "parameters" for any other that steps each parameter by itself, as if there were no others.
        overlap: Exchange gradients while the backward pass goes on (see `hvdlite.gradients.overlap`). By default where each
            rank has a core to spare, unless ``HVDLITE_OVERLAP`` says "on" or "off". Of parameters on a GPU: by default always,
            if nothing changes them between the last backward pass and `step`; see docs/gpu.md.
        max_grad_norm: Clip the combined gradients so that their norm over all parameters is at most this.
        aggregator: Combines gradients in a way of yours: `hvdlite_torch.Aggregator` has the one method that it needs. If it has
            ``state_dict()``, its state is in that of the optimizer. For parameters in host memory.

    Returns:
        `optimizer`, still an instance of its class, with its state.

    Raises:
        ArgumentError: It is wrapped already, or has no parameters, or the arguments do not fit.
        MismatchError: The ranks have different parameters. Raised on all of them.
    """
    _check_optimizer(optimizer)
    if isinstance(named_parameters, torch.nn.Module):
        named_parameters = named_parameters.named_parameters()
    named = list(named_parameters or ())
    if named_parameters is not None:
        _check_names(optimizer, named)
    _check_groups(optimizer, groups if groups is not None else num_groups)
    if gradient_predivide_factor != 1.0 and op is not hvdlite.Average:
        raise ArgumentError(f"gradient_predivide_factor={gradient_predivide_factor} needs op=Average; got {op!r}.")
    if not gradient_predivide_factor > 0:
        raise ArgumentError(f"gradient_predivide_factor={gradient_predivide_factor}: expected a number above 0.")
    if max_grad_norm is not None and not max_grad_norm > 0:
        raise ArgumentError(f"max_grad_norm={max_grad_norm}: expected a number above 0, or None.")
    if shard not in (True, False, "parameters"):
        raise ArgumentError(f'shard={shard!r}: expected True, False or "parameters".')
    codec = None if compression is Compression.none else Codec(compression, gradient_predivide_factor)
    names = {id(parameter): name for name, parameter in named}
    options = Options(
        *(
            op,
            process_set,
            overlap,
            codec,
            sparse_as_dense,
            backward_passes_per_step,
            max_grad_norm,
            shard,
            aggregator,
            names,
        )
    )
    if shard and op is hvdlite.Adasum:
        raise ArgumentError("shard=True and op=Adasum do not go together: every rank makes a whole step of its own.")
    driver = StepDriver(optimizer, options, _make_sync)
    plain = type(optimizer)
    kind = Sharded if shard else Distributed if aggregator is None else Aggregating
    add_to_class(optimizer, kind, step=guarded(plain.step))
    if not hasattr(optimizer, "_optimizer_step_pre_hooks"):
        # One that never called torch's constructor, as Lookahead of many programs: torch completes those that it unpickles.
        vars(optimizer).setdefault("defaults", {})
        torch.optim.Optimizer.__setstate__(optimizer, {})
    optimizer._hvdlite_driver = driver  # type: ignore[attr-defined]
    optimizer._hvdlite_plain = plain  # type: ignore[attr-defined]
    optimizer._hvdlite_aggregator = aggregator  # type: ignore[attr-defined]
    driver.attach()
    world().group(process_set).add(StandIn(driver, not shard, broadcast_optimizer_state))
    teach_grad_scaler()
    return optimizer


def _make_sync(context: OptimizerContext, sharding: Sharding | None) -> GradientSync:
    """What combines gradients where the parameters lie; or what combines steps."""
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
    if isinstance(given, Distributed):
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
