"""What the gradients of a parameter are like."""

from __future__ import annotations

import torch

from hvdlite.errors import ArgumentError, UnsupportedTensorError
from hvdlite.protocols import TensorInfo
from hvdlite_torch.tensors.adapter import ADAPTER
from hvdlite_torch.tensors.device import DTYPES


def gradient_dtype(parameter: torch.Tensor) -> torch.dtype:
    """The dtype of a parameter's gradients, which may be another one since torch 2.9 (``grad_dtype``)."""
    return getattr(parameter, "grad_dtype", None) or parameter.dtype


def gradient_info(parameter: torch.Tensor) -> TensorInfo:
    """The dtype and shape of a parameter's gradients.

    Raises:
        UnsupportedTensorError: They cannot be exchanged.
    """
    info, dtype = ADAPTER.info(parameter), gradient_dtype(parameter)
    return info if parameter.dtype is dtype else info._replace(dtype=DTYPES[dtype])


def as_dense(
    gradient: torch.Tensor, shape: torch.Size, dtype: torch.dtype, sparse_as_dense: bool
) -> torch.Tensor | None:
    """A gradient as a dense one; None if it is sparse and is to stay so.

    Args:
        gradient: As backward left it.
        shape, dtype: Of the parameter, when the optimizer was made distributed.
        sparse_as_dense: What is sparse is not to stay so.

    Raises:
        UnsupportedTensorError: It cannot be exchanged at all.
        ArgumentError: It is not like the parameter once was.
    """
    if gradient.layout is not torch.strided:
        if gradient.layout is not torch.sparse_coo:
            raise UnsupportedTensorError(
                f"a gradient of layout {gradient.layout} for a parameter of shape {tuple(shape)}: expected a dense "
                "one, or one of layout torch.sparse_coo."
            )
        if not sparse_as_dense:
            return None
        gradient = gradient.to_dense()
    if gradient.shape != shape or gradient.dtype is not dtype:
        raise ArgumentError(
            f"a parameter of {dtype} and shape {tuple(shape)} has become one of {gradient.dtype} and shape "
            f"{tuple(gradient.shape)} since the optimizer was made distributed: change models before that."
        )
    return gradient
