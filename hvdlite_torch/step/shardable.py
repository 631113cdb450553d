"""`check_shardable` checks that an optimizer steps each parameter by itself, or even each element, so that it can be sharded.

Nobody can see from outside which gradients the step of an optimizer reads. torch's own optimizers are known. For any other
optimizer, the user says that it steps each parameter by itself (``shard="parameters"``). The optimizer is then tried out on
small parameters, because the user may be wrong. An optimizer that reads all gradients, such as for a norm over all of them,
would see this rank's shard only.
"""

from __future__ import annotations

import torch

from hvdlite.errors import ArgumentError, ranks_text
from hvdlite_torch.checks.trial import ELEMENTWISE, PARAMETERWISE, differs_alone, known_algorithm
from hvdlite_torch.step.options import OptimizerOptions
from hvdlite_torch.step.shards import refuse_sparse
from hvdlite_torch.tensors.sliced import is_sliced
from hvdlite_torch.tensors.split import all_stages, optimizer_parameters

UNSHARDABLE = (torch.optim.LBFGS, torch.optim.SparseAdam)


def check_shardable(optimizer: torch.optim.Optimizer, options: OptimizerOptions) -> bool:
    """Raise an error if an optimizer cannot be sharded.

    Args:
        optimizer: The optimizer, which is not distributed yet.
        options: The arguments. `OptimizerOptions.shard` is not False.

    Returns:
        Whether parameters must be dealt out whole; otherwise they may be cut in two.

    Raises:
        ArgumentError: The optimizer cannot be sharded, or is not known to be one that can, or other arguments do not fit.
        UnsupportedTensorError: A stage of the model will have sparse gradients.
    """
    name, shard = type(optimizer).__name__, options.shard
    if isinstance(optimizer, UNSHARDABLE):
        raise ArgumentError(
            f"{name} cannot be sharded: its step needs all gradients at once. Leave out shard={shard!r}."
        )
    if options.codec is not None:
        raise ArgumentError(f"compression and shard={shard!r} cannot be used together yet: leave out one of them.")
    for stages in all_stages(optimizer_parameters(optimizer)):
        if stages.sparse and not options.sparse_as_dense:  # later, only the ranks of one stage would raise
            refuse_sparse(f"the parameter {stages.sparse[0]!r} of a {stages.kind}")
    known = known_algorithm(type(optimizer))
    if known in ELEMENTWISE and shard is True:
        return False
    if known in PARAMETERWISE or known in ELEMENTWISE:
        return True
    if shard is True:
        raise ArgumentError(
            f"{name} is not known to step each parameter by itself, which sharding needs: a rank's optimizer sees its share of "
            "the parameters and gradients only. If it looks at several parameters together (a norm over all gradients, as in "
            'Prodigy or D-Adaptation), leave out shard=True. If it does not, say so: shard="parameters".'
        )
    difference = differs_alone(optimizer)
    if difference:
        raise ArgumentError(
            f'shard="parameters": {name} does not step each parameter by itself. Tried out on small parameters, {difference} '
            "if the others are not there. Leave out shard."
        )
    return True


def check_independent(optimizer: torch.optim.Optimizer) -> None:
    """Raise an error if an optimizer looks across parameters, of a model of which each rank has some, or some slices.

    All ranks of the model call this, with optimizers of one class.

    Args:
        optimizer: The optimizer of this rank's parameters.

    Raises:
        ArgumentError: It needs all gradients at once, or does something else if it has one parameter only, or nobody can say,
            because it cannot be tried out. Raised on all ranks.
    """
    parameters = optimizer_parameters(optimizer)
    stages = all_stages(parameters)
    if not stages and not any(map(is_sliced, parameters)):
        return
    cls = type(optimizer)
    if known_algorithm(cls) is not None or isinstance(optimizer, torch.optim.SparseAdam):
        return
    found: str | None = "its step needs all gradients at once"
    if not isinstance(optimizer, torch.optim.LBFGS):
        difference = differs_alone(optimizer)
        found = f"tried out on small parameters, {difference} if the others are not there" if difference else difference
        if difference is None and stages:  # torch computes with slices as with whole parameters
            found = "it cannot be tried out, so nobody knows whether its step looks at several parameters"
    has = [f"one stage of a {each.kind} on {ranks_text(list(each.process_set.members))}" for each in stages]
    for each in stages:
        told = each.gather(found, "whether the optimizer steps each parameter by itself,")
        found = found or next(filter(None, told), None)
    if found:
        raise ArgumentError(
            f"{cls.__name__} does not step each parameter by itself ({found}), and this rank's parameters are those of "
            f"{has[0] if has else 'its slices'}. Use an optimizer of torch that does, such as Adam or Muon; or train with "
            "data parallelism, where each rank has all parameters."
        )
