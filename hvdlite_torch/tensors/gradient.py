"""The dtype and shape of a parameter's gradients, and sparse gradients made dense."""

from __future__ import annotations

import torch

from hvdlite.errors import ArgumentError, UnsupportedTensorError
from hvdlite.protocols import TensorInfo
from hvdlite_torch.tensors.adapter import ADAPTER
from hvdlite_torch.tensors.device import DTYPES


def gradient_dtype(parameter: torch.Tensor) -> torch.dtype:
    """Return the dtype of a parameter's gradients; since torch 2.9 it may differ from the parameter's (``grad_dtype``)."""
    return getattr(parameter, "grad_dtype", None) or parameter.dtype


def gradient_info(parameter: torch.Tensor) -> TensorInfo:
    """Return the dtype and shape of a parameter's gradients.

    Raises:
        UnsupportedTensorError: The ranks cannot exchange such gradients.
    """
    info, dtype = ADAPTER.info(parameter), gradient_dtype(parameter)
    return info if parameter.dtype is dtype else info._replace(dtype=DTYPES[dtype])


def as_dense(
    gradient: torch.Tensor, shape: torch.Size, dtype: torch.dtype, sparse_as_dense: bool
) -> torch.Tensor | None:
    """Return a gradient as a dense tensor; None if it is sparse and stays sparse.

    Args:
        gradient: The gradient that the backward pass made.
        shape, dtype: The shape and the dtype of the gradients when the optimizer was made distributed.
        sparse_as_dense: Whether sparse gradients are made dense.

    Raises:
        UnsupportedTensorError: The gradient has a layout that cannot be exchanged.
        ArgumentError: The gradient has another shape or dtype, because the program has changed the parameter.
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
