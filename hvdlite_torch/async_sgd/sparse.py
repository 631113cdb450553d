"""Sparse gradients of torch: as rows, and which optimizers take them."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

import hvdlite
from hvdlite.async_sgd.rows import Rows
from hvdlite.errors import UnsupportedTensorError
from hvdlite_torch.async_sgd import settings
from hvdlite_torch.checks.trial import copy_with

_STEPS = 2  # momentum adds up gradients in the second one


def rows_of(gradient: torch.Tensor) -> Rows:
    """Return a sparse gradient as rows, in memory of their own, each row once."""
    entries = gradient.detach().to("cpu").coalesce()
    values = entries.values().contiguous().clone()
    flat: Any = values.view(-1).view(torch.uint8).numpy() if values.numel() else np.empty(0, np.uint8)
    return Rows(entries.indices()[0].numpy().copy(), flat)


def tensor_of(rows: Rows, like: torch.Tensor) -> torch.Tensor:
    """Return rows as a sparse tensor on the host, coalesced, with the dtype and shape of a parameter."""
    indices = torch.from_numpy(rows.indices)
    values = torch.empty(len(indices), *like.shape[1:], dtype=like.dtype)
    if values.numel():  # NumPy's empty arrays cannot be viewed as another dtype
        values.view(-1).view(torch.uint8).copy_(torch.from_numpy(rows.values))
    return torch.sparse_coo_tensor(indices[None], values, like.shape, check_invariants=False).coalesce()


class Taste:
    """Which gradients an optimizer takes. Sparse ones are tried out, on small parameters.

    Args:
        optimizer: The program's optimizer, which is not distributed yet. It is left alone.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer, self._name = optimizer, type(optimizer).__name__
        self._takes_dense = not isinstance(optimizer, torch.optim.SparseAdam)
        self._tried: dict[tuple[int, int], tuple[bytes, str]] = {}
        groups = optimizer.param_groups
        self._group_of = [group for group, its in enumerate(groups) for _ in its["params"]]
        self._plain = copy_with(optimizer, {id(p): None for group in groups for p in group["params"]})

    def check(self, gradient: torch.Tensor, number: int, name: str) -> None:
        """Raise an error unless the optimizer takes the gradient of a parameter.

        Args:
            gradient: The gradient.
            number: The number of the parameter in the optimizer.
            name: Its name.

        Raises:
            UnsupportedTensorError: It does not.
        """
        if gradient.layout is torch.strided and self._takes_dense:
            return
        what = f"rank {hvdlite.rank()}: the gradient of {name} has the layout {gradient.layout}"
        if gradient.layout is torch.strided:
            raise UnsupportedTensorError(
                f"{what}, and {self._name} takes sparse gradients only. Nothing was pushed. Make the layer with sparse=True, "
                "or give this parameter to another optimizer."
            )
        if not gradient.is_sparse or gradient.sparse_dim() != 1:
            raise UnsupportedTensorError(
                f"{what} and is sparse in another way than by rows. Nothing was pushed. Make the layer with sparse=False."
            )
        refusal = self._refusal(self._group_of[number], gradient)
        if refusal:
            raise UnsupportedTensorError(
                f"{what}, which {self._name} does not take with these settings. Nothing was pushed. Make the layer with "
                f"sparse=False, or use torch.optim.SGD, Adagrad or SparseAdam. Tried out on a small parameter: {refusal}"
            )

    def _refusal(self, group: int, gradient: torch.Tensor) -> str:
        """Return the error of the optimizer; an empty text if there is none. It is tried out again if settings change."""
        said = settings.pack([{**its, "lr": 0} for its in self._optimizer.param_groups])
        before, error = self._tried.get((group, gradient.dim()), (b"", ""))
        if before != said:
            error = self._try(group, gradient)
            self._tried[group, gradient.dim()] = said, error
        return error

    def _try(self, group: int, gradient: torch.Tensor) -> str:
        tried = copy_with(self._plain, {})
        settings.unpack(settings.pack(self._optimizer.param_groups), tried.param_groups)
        small = torch.nn.Parameter(torch.ones([3] + [2] * gradient.dense_dim(), dtype=gradient.dtype))
        tried.param_groups[group]["params"].append(small)
        indices, values = torch.tensor([[0, 2]]), torch.ones_like(small)[:2].detach()
        try:
            for _ in range(_STEPS):
                small.grad = torch.sparse_coo_tensor(indices, values, small.shape, check_invariants=True)
                tried.step()
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return ""
