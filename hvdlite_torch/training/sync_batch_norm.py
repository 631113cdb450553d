"""Batch normalisation with the statistics of the global batch: the batches of all ranks as one."""

from __future__ import annotations

import functools
from typing import Any, TypeVar

import torch
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.utils import parametrize
from torch.overrides import TorchFunctionMode

from hvdlite import ProcessSet
from hvdlite.api import world
from hvdlite.errors import ArgumentError
from hvdlite_torch.training.global_batch_norm import global_batch_norm

M = TypeVar("M", bound=torch.nn.Module)

_OF_TORCH = (_BatchNorm, torch.nn.BatchNorm1d, torch.nn.BatchNorm2d, torch.nn.BatchNorm3d, torch.nn.SyncBatchNorm)


class SyncBatchNorm(_BatchNorm):
    """`torch.nn.BatchNorm1d`, `2d` or `3d` over the global batch of all ranks.

    In training, the mean and the variance are those of the samples of all ranks. Batches may differ in size. They may be empty
    on some ranks, but these ranks must run forward and backward too. In evaluation mode, and in a job of one rank, the layer
    computes what torch's layer does. Gradients of gradients (penalties of gradients) are those of the joined batch too. The
    gradients of `weight` and `bias` are those of this rank's samples;
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
        if not self._is_global():
            return super().forward(input)
        self._check_input_dim(input)
        normalized: torch.Tensor = self._normalize_globally(input)
        return normalized

    def _is_global(self) -> bool:
        of_batch = self.training or (self.running_mean is None and self.running_var is None)
        return of_batch and world("SyncBatchNorm()").engine(self.process_set).size > 1

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # the compiler cannot trace an exchange
    def _normalize_globally(self, input: torch.Tensor) -> torch.Tensor:
        tracked: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None)
        momentum = self.momentum
        if self.training and self.track_running_stats and self.num_batches_tracked is not None:
            tracked = self.running_mean, self.running_var
            self.num_batches_tracked.add_(1)
            momentum = 1 / int(self.num_batches_tracked) if momentum is None else momentum
        return global_batch_norm(input, *tracked, self.weight, self.bias, momentum or 0.0, self.eps, self.process_set)

    @classmethod
    def convert_sync_batchnorm(cls, module: M, process_set: ProcessSet | None = None) -> M:
        """Let each batch norm layer of a model, in place, normalise over all ranks.

        Each layer stays the same object, with its parameters, hooks and attributes, and becomes a `SyncBatchNorm`. An optimizer
        that was made before remains valid. A layer of a subclass with a forward pass of its own, such as timm's
        ``BatchNormAct2d``, goes on to use that; its ``F.batch_norm`` takes the statistics of all ranks.

        Args:
            module: The model, or one layer.
            process_set: The ranks that take part; None means all ranks.

        Returns:
            `module`.

        Raises:
            ArgumentError: A lazy batch norm has not seen an input yet; or a layer has been changed so that its statistics
                cannot be those of all ranks. In training: a subclass normalises without calling ``F.batch_norm`` once.
        """
        for name, layer in module.named_modules():
            if isinstance(layer, _BatchNorm) and not isinstance(layer, SyncBatchNorm):
                _check_convertible(name, layer)
                layer.__class__ = _synchronized(layer, cls)
                layer.process_set = process_set  # type: ignore[assignment]  # its class has this attribute now
        return module


class _OneBatchNorm(TorchFunctionMode):
    """While a layer's own forward pass runs, its call of ``F.batch_norm`` normalises over all ranks."""

    def __init__(self, layer: SyncBatchNorm) -> None:
        super().__init__()
        self._layer, self.calls = layer, 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not F.batch_norm:
            return func(*args, **(kwargs or {}))
        return self._batch_norm(*args, **(kwargs or {}))

    def _batch_norm(
        self,
        input: torch.Tensor,
        running_mean: torch.Tensor | None,
        running_var: torch.Tensor | None,
        weight: torch.Tensor | None = None,
        bias: torch.Tensor | None = None,
        training: bool = False,
        momentum: float = 0.1,
        eps: float = 1e-5,
    ) -> torch.Tensor:
        layer = self._layer
        if running_mean is not None and running_mean is not layer.running_mean:  # of another layer inside of this one
            return F.batch_norm(input, running_mean, running_var, weight, bias, training, momentum, eps)
        self.calls += 1
        if not training:
            return F.batch_norm(input, running_mean, running_var, weight, bias, training, momentum, eps)
        SyncBatchNorm._check_input_dim(layer, input)
        return global_batch_norm(input, running_mean, running_var, weight, bias, momentum, eps, layer.process_set)


class _WithOwnForward(SyncBatchNorm):
    """What the class of a converted layer has among its bases, if the layer's class is not torch's own."""

    _plain: type[_BatchNorm]

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """What ``super().forward`` of the layer's class is: torch's forward pass, which calls ``F.batch_norm``."""
        return _BatchNorm.forward(self, input)

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # the compiler cannot trace an exchange
    def _forward_globally(self, *args: Any, **kwargs: Any) -> Any:
        with _OneBatchNorm(self) as mode:
            result = self._plain.forward(self, *args, **kwargs)
        if mode.calls != 1:
            raise ArgumentError(
                f"convert_sync_batchnorm: {self._plain.__name__}.forward called F.batch_norm with its own running statistics "
                f"{mode.calls} times, expected once: so what it normalises by would not be the statistics of all ranks. "
                "Convert the other layers of the model only, or write its forward pass with super().forward()."
            )
        return result


def _check_convertible(name: str, layer: _BatchNorm) -> None:
    found = ""
    if isinstance(layer, LazyModuleMixin) and layer.has_uninitialized_params():
        raise ArgumentError(
            f"convert_sync_batchnorm: {layer} does not know its num_features yet; pass a batch through the model first."
        )
    if "forward" in layer.__dict__:
        found = "has a forward pass that was put on the object (by accelerate, for example): convert the model before"
    elif isinstance(layer, torch.nn.SyncBatchNorm) and type(layer) is not torch.nn.SyncBatchNorm:
        found = "is made for torch.distributed, by torch.nn.SyncBatchNorm: convert the model that has the plain layer"
    if found:
        raise ArgumentError(f"convert_sync_batchnorm: the layer {name!r}, a {type(layer).__name__}, {found}.")


def _synchronized(layer: _BatchNorm, cls: type[SyncBatchNorm]) -> type[SyncBatchNorm]:
    """Return the class that a layer has after its conversion to `cls`."""
    plain: Any = type(layer)
    if not parametrize.is_parametrized(layer):
        return cls if plain in _OF_TORCH else _extended(plain)
    # torch made the class of this object, with properties for what is parametrized, as a subclass of what it was before.
    before = plain.__bases__[0]
    base = cls if before in _OF_TORCH else _extended(before)
    return type(plain.__name__, (base,), dict(plain.__dict__))


@functools.cache
def _extended(plain: Any) -> type[SyncBatchNorm]:
    """Return a subclass of a class that is not torch's own, whose forward pass normalises over all ranks."""

    @functools.wraps(plain.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not self._is_global():
            return plain.forward(self, *args, **kwargs)
        return self._forward_globally(*args, **kwargs)

    def reduced(self: Any, protocol: Any) -> Any:  # by the class of the program, because a file cannot name this one
        _, _, *state = super(made, self).__reduce_ex__(protocol)
        return _new, (plain,), *state

    body: dict[str, Any] = {
        "_plain": plain,
        "forward": forward,
        "__reduce_ex__": reduced,
        "__module__": plain.__module__,
    }
    made: Any = type(plain.__name__, (plain, _WithOwnForward), body)
    return made  # type: ignore[no-any-return]


def _new(plain: Any) -> SyncBatchNorm:
    """Return an empty object of the class that layers of the class `plain` are converted to."""
    made = _extended(plain)
    return made.__new__(made)
