"""`global_batch_norm`: torch's ``F.batch_norm`` over the batches of all ranks. It can be differentiated any number of times."""

from __future__ import annotations

from typing import Any

import torch

import hvdlite
from hvdlite import ProcessSet
from hvdlite.errors import ArgumentError
from hvdlite.tensors.numpy_adapter import HALF_DTYPES
from hvdlite_torch.ops.allreduce import allreduce

_HALVES = tuple(getattr(torch, name) for name in HALF_DTYPES)


def global_batch_norm(
    input: torch.Tensor,
    running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    momentum: float,
    eps: float,
    process_set: ProcessSet | None,
) -> torch.Tensor:
    """Normalise by the statistics of the batches of all ranks, and move the running statistics. All ranks call this.

    Args:
        input: This rank's batch, of shape (N, C, ...).
        running_mean: The running mean of shape (C,), which changes; or None.
        running_var: The running variance of shape (C,), which changes; or None.
        weight: The factor of each channel, or None.
        bias: What is added to each channel, or None.
        momentum: The weight of this batch in the running statistics.
        eps: A small number that is added to the variance.
        process_set: The ranks that take part; None means all ranks.

    Raises:
        ArgumentError: All ranks together have fewer than two values per channel.
    """
    count, mean, variance = _global_statistics(input.detach(), process_set)
    if count < 2:
        raise ArgumentError(
            f"SyncBatchNorm: expected more than one value per channel to train with; all ranks together have {count}."
        )
    with torch.no_grad():
        unbiased = variance * (count / (count - 1))
        for running, now in ((running_mean, mean), (running_var, unbiased)):
            if running is not None:  # float16 and bfloat16 statistics are rounded once, as in torch
                running.copy_(running.to(now.dtype) * (1 - momentum) + now * momentum)
    output: torch.Tensor = _Normalize.apply(  # type: ignore[no-untyped-call]
        input, weight, bias, mean, variance, count, eps, process_set
    )
    return output


def _over_samples(input: torch.Tensor) -> list[int]:
    """Return all dimensions except the channels' dimension."""
    return [dim for dim in range(input.dim()) if dim != 1]


def _widened(input: torch.Tensor) -> torch.Tensor:
    return input.float() if input.dtype in _HALVES else input


def _total(values: torch.Tensor, process_set: ProcessSet | None) -> torch.Tensor:
    """Return the sum over the ranks, in float64. Its gradient is the sum of the ranks' gradients."""
    return allreduce(values.double(), op=hvdlite.Sum, process_set=process_set or hvdlite.global_process_set)


def _global_statistics(input: torch.Tensor, process_set: ProcessSet | None) -> tuple[int, torch.Tensor, torch.Tensor]:
    """Return the count, the mean and the biased variance of each channel, over the batches of all ranks.

    A rank has a count n, a mean m and a variance v. The ranks first compute the joint mean, and then sum
    ``nv + n(m - mean)²``. Sums of the values and of their squares would lose digits if the mean is far larger than the
    deviations; these sums do not.

    Source: Chan, Golub & LeVeque, "Updating formulae and a pairwise algorithm for computing sample variances", 1979.
    """
    count = input.numel() // max(1, input.shape[1])
    wide = _widened(input)
    if count:
        variance, mean = torch.var_mean(wide, _over_samples(input), correction=0)
    else:
        variance = mean = wide.new_zeros(input.shape[1])
    own_variance, own_mean = variance.double(), mean.double()
    sums = _total(torch.cat([own_mean * count, own_mean.new_tensor([count])]), process_set)
    total = int(sums[-1])
    joint_mean = sums[:-1] / max(1, total)
    squares = _total((own_variance + (own_mean - joint_mean).square()) * count, process_set)
    return total, joint_mean.to(wide.dtype), (squares / max(1, total)).to(wide.dtype)


class _Normalize(torch.autograd.Function):
    """The function ``(x - mean) / sqrt(variance + eps) * weight + bias``, whose mean and variance depend on all ranks' x.

    Source of the gradient: Ioffe & Szegedy, "Batch normalization", ICML 2015, section 3.
    """

    @staticmethod
    def forward(
        ctx: Any,
        input: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        mean: torch.Tensor,
        variance: torch.Tensor,
        count: int,
        eps: float,
        process_set: ProcessSet | None,
    ) -> torch.Tensor:
        ctx.save_for_backward(input, weight, mean, (variance + eps).rsqrt())
        ctx.count, ctx.eps, ctx.process_set = count, eps, process_set
        ctx.bias_dtype = None if bias is None else bias.dtype
        wide_weight, wide_bias = (None if each is None else each.to(mean.dtype) for each in (weight, bias))
        return torch.nn.functional.batch_norm(input, mean, variance, wide_weight, wide_bias, False, 0.0, eps)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        input, weight, mean, scale = ctx.saved_tensors
        samples = _over_samples(input)
        shape = [-1 if dim == 1 else 1 for dim in range(input.dim())]  # one number per channel, against the input
        wide, upstream = _widened(input), _widened(gradient)
        again = torch.is_grad_enabled()  # the program asks for gradients of gradients (create_graph=True)
        if again and ctx.needs_input_grad[0]:  # as functions of the input, which they were not when they were computed
            mean = (_total(wide.sum(samples), ctx.process_set) / ctx.count).to(mean.dtype)
            squares = _total((wide - mean.reshape(shape)).square().sum(samples), ctx.process_set)
            scale = (squares / ctx.count + ctx.eps).rsqrt().to(scale.dtype)
        centred = wide - mean.reshape(shape)
        along_one, along_centred = upstream.sum(samples), (upstream * centred).sum(samples)

        of_input = of_weight = of_bias = None
        if ctx.needs_input_grad[0]:
            # All ranks take this branch alike, because it depends on the model whether an input needs a gradient.
            sums = _total(torch.cat([along_one, along_centred]), ctx.process_set)
            mean_one, mean_centred = (sums / ctx.count).to(mean.dtype).chunk(2)
            factor = (scale if weight is None else scale * weight.to(scale.dtype)).reshape(shape)
            slope = (scale.square() * mean_centred).reshape(shape)
            of_input = upstream - mean_one.reshape(shape)
            if again:
                of_input = (of_input - centred * slope) * factor
            else:
                of_input.sub_(centred.mul_(slope)).mul_(factor)
            of_input = of_input.to(input.dtype)
        if ctx.needs_input_grad[1]:
            of_weight = (along_centred * scale).to(weight.dtype)
        if ctx.needs_input_grad[2]:
            of_bias = along_one.to(ctx.bias_dtype)
        return of_input, of_weight, of_bias, None, None, None, None, None
