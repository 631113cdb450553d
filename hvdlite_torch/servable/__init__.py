"""A torch module for ``hvdlite serve``. `shared_weights`: the weights that all replicas have in memory once."""

from __future__ import annotations

import inspect
import pickle
from collections.abc import Callable, Mapping, Sequence
from os import PathLike
from typing import Any

import numpy as np
import torch

from hvdlite.errors import ArgumentError
from hvdlite.protocols import Array
from hvdlite.serving.servable import Inputs, Servable, by_input
from hvdlite_torch.servable.shared_weights import share

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
    inputs: Inputs | None = None,
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
        inputs: If an input has several tensors: the names of the arguments of `forward`, each with the dtype and the shape of
            one input. The tensors have these dtypes, which may be torch's. Then `pad` gets a list of dictionaries.

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
    dtypes: dict[str, torch.dtype] = {}
    if inputs is not None:
        inputs, dtypes = _named(model, inputs, pad is not None)
    if dtype is None and example is None and inputs is None:
        dtype = _dtype_of_inputs(model)
    if shape is None and example is None and inputs is None and pad is None:
        shape = _shape_of_inputs(model)
    about: dict[str, Any] = {"dtype": _of_numpy(dtype), "shape": shape, "example": example, "inputs": inputs}
    return Servable(_Predict(model, {} if pad else dtypes), pad=pad, allow_nan=allow_nan, **about)


class _Predict:
    """Calls a module on a batch.

    Args:
        model: The module.
        dtypes: What its arguments get, by their names. Other floating-point inputs get the dtype of its parameters.
    """

    def __init__(self, model: torch.nn.Module, dtypes: Mapping[str, torch.dtype]) -> None:
        self._model, self._dtypes = model, dtypes
        first = next(iter(model.parameters()), None)
        self._device = torch.device("cpu") if first is None else first.device
        self._dtype = first.dtype if first is not None and first.is_floating_point() else None

    def share(self, descriptor: int) -> None:
        """Share the weights with other replicas (`hvdlite.serving.servable.Servable.share`)."""
        share(self._model, descriptor)

    @torch.inference_mode()
    def __call__(self, batch: Any) -> Any:
        if isinstance(batch, tuple):
            outputs = self._model(*map(self._tensor, batch))
        elif isinstance(batch, Mapping):
            outputs = self._model(
                **{name: self._tensor(value, self._dtypes.get(name)) for name, value in batch.items()}
            )
        else:
            outputs = self._model(self._tensor(batch))
        return by_input(outputs, _to_numpy)

    def _tensor(self, value: Any, dtype: torch.dtype | None = None) -> Any:
        if isinstance(value, list):
            raise ArgumentError(
                "the inputs of a batch are no arrays of one shape: give hvd.servable a dtype=, or pad=."
            )
        if isinstance(value, np.ndarray):
            value = torch.from_numpy(value)
        if not isinstance(value, torch.Tensor):
            return value
        return value.to(self._device, dtype or (self._dtype if value.is_floating_point() else None))


def _of_numpy(dtype: Any) -> Any:
    """Return a dtype as NumPy names it."""
    return str(_NO_NUMPY.get(dtype, dtype)).removeprefix("torch.") if isinstance(dtype, torch.dtype) else dtype


def _named(model: torch.nn.Module, inputs: Inputs, is_padded: bool) -> tuple[Inputs, dict[str, torch.dtype]]:
    """Return named inputs with dtypes of NumPy, and the dtypes that the tensors get.

    Raises:
        ArgumentError: They are none, or the module does not take arguments of their names.
    """
    if not isinstance(inputs, Mapping):
        return inputs, {}  # Servable says what is wrong with it
    pairs = {name: each for name, each in inputs.items() if isinstance(each, tuple | list) and len(each) == 2}
    plain = {**inputs, **{name: (_of_numpy(dtype), shape) for name, (dtype, shape) in pairs.items()}}
    found = Servable(model, inputs=plain).spec.inputs
    if not is_padded:
        try:
            inspect.signature(model.forward).bind(**inputs)
        except TypeError as error:
            names = ", ".join(map(repr, inputs))
            raise ArgumentError(
                f"servable: inputs= has {names}, which forward of {type(model).__name__} does not take: {error}."
            ) from None
    dtypes = {name: getattr(torch, spec.dtype) for name, spec in found if spec.dtype}
    return plain, dtypes | {name: dtype for name, (dtype, _) in pairs.items() if isinstance(dtype, torch.dtype)}


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
