"""Batch normalisation with the statistics of the global batch: the batches of all ranks as one."""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from torch.autograd.function import once_differentiable
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.lazy import LazyModuleMixin

import hvdlite
from hvdlite import ProcessSet
from hvdlite.api import world
from hvdlite.errors import ArgumentError
from hvdlite.tensors.numpy_adapter import HALF_DTYPES

M = TypeVar("M", bound=torch.nn.Module)

_HALVES = tuple(getattr(torch, name) for name in HALF_DTYPES)


class SyncBatchNorm(_BatchNorm):
    """`torch.nn.BatchNorm1d`, `2d` or `3d` over the global batch of all ranks.

    In training, the mean and the variance are those of the samples of all ranks. Batches may differ in size. They may be empty
    on some ranks, but these ranks must run forward and backward too. In evaluation mode, and in a job of one rank, the layer
    computes what torch's layer does. The gradients of `weight` and `bias` are those of this rank's samples;
    `DistributedOptimizer` combines them with the other ranks' gradients. The forward pass communicates twice and the backward
    pass once, so all ranks must call the layers in the same order.

    With this layer each rank's loss depends on all ranks' samples, and gradients flow between the ranks, so all losses must
    have the same scale. If the batches are uneven, a rank must not take the mean of its own samples' losses and correct that by
    ``set_batch_weight``. It must divide the sum of the losses by the mean batch size of the ranks, which is
    ``hvd.allreduce(torch.tensor(float(n)))``.

    Input and output have shape ``(N, C, *)`` and dtype float64, float32, bfloat16 or float16. bfloat16 and float16 are
    normalised with float32 statistics. The ranks exchange the statistics as float64.

    Args:
        num_features: The number of channels C.
        eps: A small number that is added to the variance.
        momentum: The weight of the newest batch in the running statistics; None means the plain average of all batches.
        affine: Whether the layer has the parameters `weight` and `bias`.
        track_running_stats: Whether the layer keeps running statistics for evaluation.
        process_set: The ranks that take part; None means all ranks.
        device: The device of the parameters and buffers.
        dtype: The dtype of the parameters and buffers.

    Raises:
        ArgumentError: The input has another shape, or all ranks together have fewer than two values per channel.
        NotInitializedError: The layer is called in training before `init`.

    Examples:
        >>> def normalized():
        ...     layer = hvd.SyncBatchNorm(1, affine=False)
        ...     return round(layer(torch.tensor([[1.0 + 2 * hvd.rank()]])).item(), 2)
        >>> on_ranks(2, normalized)  # of 1 and 3, whose mean is 2 and whose variance is 1
        [-1.0, 1.0]
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-05,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        *,
        process_set: ProcessSet | None = None,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats, device=device, dtype=dtype)
        self.process_set = process_set

    def _check_input_dim(self, input: torch.Tensor) -> None:
        if input.dim() < 2 or input.shape[1] != self.num_features:
            raise ArgumentError(
                f"SyncBatchNorm: expected an input of shape (N, {self.num_features}, ...); got {tuple(input.shape)}."
            )

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Normalise `input`. In training, every rank calls this method; see the class."""
        of_batch = self.training or (self.running_mean is None and self.running_var is None)
        if not of_batch or world("SyncBatchNorm()").engine(self.process_set).size == 1:
            return super().forward(input)
        self._check_input_dim(input)
        normalized: torch.Tensor = self._normalize_globally(input)
        return normalized

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # the compiler cannot trace an exchange
    def _normalize_globally(self, input: torch.Tensor) -> torch.Tensor:
        count, mean, variance = _global_statistics(input.detach(), self.process_set)
        if count < 2:
            raise ArgumentError(
                f"SyncBatchNorm: expected more than one value per channel to train with; all ranks together have {count}."
            )
        if self.training and self.track_running_stats:
            self._track(count, mean, variance)
        output: torch.Tensor = _Normalize.apply(  # type: ignore[no-untyped-call]
            input, self.weight, self.bias, mean, variance, count, self.eps, self.process_set
        )
        return output

    @torch.no_grad()
    def _track(self, count: int, mean: torch.Tensor, variance: torch.Tensor) -> None:
        if self.running_mean is None or self.running_var is None or self.num_batches_tracked is None:
            return
        self.num_batches_tracked.add_(1)
        share = 1 / int(self.num_batches_tracked) if self.momentum is None else self.momentum
        unbiased = variance * (count / (count - 1))
        for running, now in ((self.running_mean, mean), (self.running_var, unbiased)):
            # float16 and bfloat16 statistics are rounded once, as in torch.
            running.copy_(running.to(now.dtype) * (1 - share) + now * share)

    @classmethod
    def convert_sync_batchnorm(cls, module: M, process_set: ProcessSet | None = None) -> M | SyncBatchNorm:
        """Replace each batch norm layer of a model by a `SyncBatchNorm`.

        Parameters and buffers stay the same tensors, so an optimizer that was made before remains valid.

        Args:
            module: The model, which is changed in place.
            process_set: The ranks that take part; None means all ranks.

        Returns:
            `module`; if it is a batch norm layer itself, the layer that replaces it.

        Raises:
            ArgumentError: A lazy batch norm has not seen an input yet.
        """
        converted: M | SyncBatchNorm = cls._convert(module, process_set, {})
        return converted

    @classmethod
    def _convert(cls, module: Any, process_set: ProcessSet | None, done: dict[torch.nn.Module, Any]) -> Any:
        if module in done:  # a layer that the model uses twice stays one layer
            return done[module]
        converted = module
        if isinstance(module, _BatchNorm) and not isinstance(module, SyncBatchNorm):
            converted = cls._like(module, process_set)
        done[module] = converted
        for name, child in module._modules.items():
            if child is not None:
                converted.add_module(name, cls._convert(child, process_set, done))
        return converted

    @classmethod
    def _like(cls, layer: _BatchNorm, process_set: ProcessSet | None) -> SyncBatchNorm:
        if isinstance(layer, LazyModuleMixin) and layer.has_uninitialized_params():
            raise ArgumentError(
                f"convert_sync_batchnorm: {layer} does not know its num_features yet; pass a batch through the model first."
            )
        made = cls(
            layer.num_features,
            layer.eps,
            layer.momentum,
            layer.affine,
            layer.track_running_stats,
            process_set=process_set,
        )
        made.weight, made.bias = layer.weight, layer.bias
        made.running_mean, made.running_var = layer.running_mean, layer.running_var
        made.num_batches_tracked = layer.num_batches_tracked
        made.training = layer.training
        return made


def _over_samples(input: torch.Tensor) -> list[int]:
    """Return all dimensions except the channels' dimension."""
    return [dim for dim in range(input.dim()) if dim != 1]


def _widened(input: torch.Tensor) -> torch.Tensor:
    return input.float() if input.dtype in _HALVES else input


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
    sums = hvdlite.allreduce(
        torch.cat([own_mean * count, own_mean.new_tensor([count])]), hvdlite.Sum, process_set=process_set
    )
    total = int(sums[-1])
    joint_mean = sums[:-1] / max(1, total)
    squares = hvdlite.allreduce(
        (own_variance + (own_mean - joint_mean).square()) * count, hvdlite.Sum, process_set=process_set
    )
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
        ctx.count, ctx.process_set = count, process_set
        wide_weight, wide_bias = (None if each is None else each.to(mean.dtype) for each in (weight, bias))
        return torch.nn.functional.batch_norm(input, mean, variance, wide_weight, wide_bias, False, 0.0, eps)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        input, weight, mean, scale = ctx.saved_tensors
        samples = _over_samples(input)
        shape = [-1 if dim == 1 else 1 for dim in range(input.dim())]  # one number per channel, against the input
        centred = _widened(input) - mean.reshape(shape)
        upstream = _widened(gradient)
        along_one, along_centred = upstream.sum(samples), (upstream * centred).sum(samples)

        of_input = of_weight = of_bias = None
        if ctx.needs_input_grad[0]:
            # All ranks take this branch alike, because it depends on the model whether an input needs a gradient.
            both = torch.cat([along_one, along_centred]).double()
            sums = hvdlite.allreduce(both, hvdlite.Sum, process_set=ctx.process_set)
            mean_one, mean_centred = (sums / ctx.count).to(mean.dtype).chunk(2)
            factor = scale if weight is None else scale * weight.to(scale.dtype)
            centred *= (scale.square() * mean_centred).reshape(shape)
            of_input = (upstream - mean_one.reshape(shape)).sub_(centred).mul_(factor.reshape(shape)).to(input.dtype)
        if ctx.needs_input_grad[1]:
            of_weight = (along_centred * scale).to(weight.dtype)
        if ctx.needs_input_grad[2]:
            of_bias = along_one.to(weight.dtype)
        return of_input, of_weight, of_bias, None, None, None, None, None
