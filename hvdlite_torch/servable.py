"""A torch module for ``hvdlite serve``."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping, Sequence
from os import PathLike
from typing import Any

import numpy as np
import torch

from hvdlite.errors import ArgumentError
from hvdlite.protocols import Array
from hvdlite.serving.servable import Servable, by_input

_NO_NUMPY = {torch.bfloat16: torch.float32}
"""The dtypes that NumPy does not have, and what they become there."""
_WRAPPERS = "module.", "_orig_mod."
"""What DistributedDataParallel and torch.compile put before the names of weights."""


def servable(
    model: torch.nn.Module,
    example: Any = None,
    *,
    weights: str | PathLike[str] | None = None,
    dtype: Any = None,
    shape: Sequence[int | None] | None = None,
    pad: Callable[[list[Array]], Any] | None = None,
    device: Any = None,
    allow_nan: bool = False,
) -> Servable:
    """Make a module ready for ``hvdlite serve``: it runs in `eval` mode, within `torch.inference_mode`.

    Args:
        model: Takes a batch as a tensor, and returns a tensor whose first axis is the batch, or a tuple, list or dictionary of
            such tensors: then the output of one input has one row of each.
        example: One input, without the batch: a tensor or an array. Replicas warm up with it.
        weights: A file that `torch.save` has written: the module's `state_dict`, or a dictionary that has it under "model" or
            "state_dict". The names may begin with "module." or "_orig_mod.", as DistributedDataParallel and torch.compile write
            them. It is loaded with ``weights_only=True``.
        dtype: The dtype of inputs, as NumPy or torch name it. If neither this nor `example` is given, it is that of the
            module's first parameter, if that is a floating-point number; int64 if the parameter is an embedding's.
        shape: The shape of one input, without the batch; None stands for any length there. If neither this nor `example` nor
            `pad` is given, it is what the first layer takes, if that is linear or a convolution, and `model` is this layer or a
            `torch.nn.Sequential`, of which one knows which layer is the first.
        pad: If it is given, batches mix inputs of different shapes: `pad` gets a list of arrays, and returns a tensor or an
            array for the model, a tuple of its arguments, or a dictionary of its keyword arguments.
        device: Where the model computes; if it is not given, the model stays where it is.
        allow_nan: Whether NaN and infinities in inputs are allowed.

    Returns:
        What a module gives a name for ``hvdlite serve module:name``.

    Raises:
        ArgumentError: `model` is no module, the file has other weights, or an argument is not of its type.
        OSError: The file cannot be read.

    Examples:
        >>> doubles = torch.nn.Linear(1, 1, bias=False)
        >>> weight = torch.nn.init.constant_(doubles.weight, 2.0)
        >>> served = hvd.servable(doubles)
        >>> print(served.spec)
        an array of float32, shape (1,)
        >>> served(np.array([[1.0], [3.0]], np.float32)).tolist()
        [[2.0], [6.0]]
    """
    if not isinstance(model, torch.nn.Module):
        raise ArgumentError(f"servable({model!r}): expected a torch.nn.Module. For a function, use hvdlite.servable.")
    if weights is not None:
        _load(model, weights)
    if device is not None:
        model.to(device)
    model.eval()
    if isinstance(example, torch.Tensor):
        example = _to_numpy(example)
    if dtype is None and example is None:
        dtype = _dtype_of_inputs(model)
    if shape is None and example is None and pad is None:
        shape = _shape_of_inputs(model)
    if isinstance(dtype, torch.dtype):
        dtype = str(_NO_NUMPY.get(dtype, dtype)).removeprefix("torch.")
    return Servable(_Predict(model), dtype=dtype, shape=shape, pad=pad, example=example, allow_nan=allow_nan)


class _Predict:
    """Calls a module on a batch. Floating-point inputs get the dtype of its parameters."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        first = next(iter(model.parameters()), None)
        self._device = torch.device("cpu") if first is None else first.device
        self._dtype = first.dtype if first is not None and first.is_floating_point() else None

    @torch.inference_mode()
    def __call__(self, batch: Any) -> Any:
        if isinstance(batch, tuple):
            outputs = self._model(*map(self._tensor, batch))
        elif isinstance(batch, Mapping):
            outputs = self._model(**{name: self._tensor(value) for name, value in batch.items()})
        else:
            outputs = self._model(self._tensor(batch))
        return by_input(outputs, _to_numpy)

    def _tensor(self, value: Any) -> Any:
        if isinstance(value, list):
            raise ArgumentError(
                "the inputs of a batch are no arrays of one shape: give hvd.servable a dtype=, or pad=."
            )
        if isinstance(value, np.ndarray):
            value = torch.from_numpy(value)
        if not isinstance(value, torch.Tensor):
            return value
        return value.to(self._device, self._dtype if value.is_floating_point() else None)


def _to_numpy(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    value = value.detach().cpu()
    return value.to(_NO_NUMPY.get(value.dtype, value.dtype)).numpy()


def _dtype_of_inputs(model: torch.nn.Module) -> torch.dtype | None:
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            if isinstance(module, torch.nn.Embedding | torch.nn.EmbeddingBag):
                return torch.int64
            return parameter.dtype if parameter.is_floating_point() else None
    return None


def _shape_of_inputs(model: torch.nn.Module) -> tuple[int | None, ...] | None:
    """Return the shape that the first layer takes, without the batch, if it is known which layer that is, and what it takes."""
    while isinstance(model, torch.nn.Sequential) and len(model):
        model = model[0]
    if isinstance(model, torch.nn.Linear):
        return (model.in_features,)
    if isinstance(model, torch.nn.Conv1d | torch.nn.Conv2d | torch.nn.Conv3d):
        return (model.in_channels, *[None] * len(model.kernel_size))
    return None


def _load(model: torch.nn.Module, path: str | PathLike[str]) -> None:
    """Load a file of weights."""
    try:
        saved = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise ArgumentError(
            f"weights={str(path)!r}: the file has more than tensors, such as a whole module, and is not loaded, for it could "
            f"run any program: save model.state_dict() in place of it. torch says: {error}"
        ) from None
    state = _state(saved, path)
    if not model.state_dict().keys() & state.keys():
        for prefix in _WRAPPERS:
            torch.nn.modules.utils.consume_prefix_in_state_dict_if_present(state, prefix)
    try:
        model.load_state_dict(state)
    except RuntimeError as error:  # other names or shapes
        raise ArgumentError(f"weights={str(path)!r}: {error}") from None


def _state(saved: Any, path: str | PathLike[str]) -> dict[str, Any]:
    """Return the state_dict of a module in what a file has."""
    for name in ("model", "state_dict"):
        if isinstance(saved, Mapping) and isinstance(saved.get(name), Mapping):
            saved = saved[name]
    if isinstance(saved, dict) and all(isinstance(value, torch.Tensor) for value in saved.values()):
        return saved
    found = f"a {type(saved).__name__}" + (f" with {list(saved)[:5]}" if isinstance(saved, Mapping) else "")
    raise ArgumentError(
        f"weights={str(path)!r}: the file has {found}: expected model.state_dict(), or a dictionary that has it under "
        '"model" or "state_dict".'
    )
