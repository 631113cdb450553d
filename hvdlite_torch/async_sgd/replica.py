"""`TorchReplica`: the parameters of an optimizer of torch, for a training with a parameter server."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import BinaryIO

import torch
from torch.utils.hooks import RemovableHandle

from hvdlite.async_sgd.compensation import DelayCompensation
from hvdlite.async_sgd.deal import ServerLayout
from hvdlite.async_sgd.rows import Rows
from hvdlite.errors import ArgumentError
from hvdlite.protocols import Array
from hvdlite_torch.async_sgd import settings
from hvdlite_torch.async_sgd.part import TorchPart
from hvdlite_torch.async_sgd.sparse import Taste, rows_of, tensor_of
from hvdlite_torch.async_sgd.views import nbytes_of, view
from hvdlite_torch.tensors.ownership import same_bits


class TorchReplica:
    """A `hvdlite.async_sgd.training.replica.Replica` of torch.

    Args:
        optimizer: The program's optimizer.
        names: Names of some or all parameters, by ``id(parameter)``.

    Attributes:
        trained: The parameters that are trained.
        numbers: For each of them, its number in the optimizer.
        names, sizes, clipping: See `Replica`.
    """

    clipping = "torch.nn.utils.clip_grad_norm_"

    def __init__(self, optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> None:
        self._optimizer = optimizer
        self._all = [p for group in optimizer.param_groups for p in group["params"]]
        self.numbers = [number for number, p in enumerate(self._all) if p.requires_grad]
        self.trained = [self._all[number] for number in self.numbers]
        self._keys: list[str | int] = [names.get(id(self._all[number]), number) for number in self.numbers]
        self.names = [
            repr(names[id(p)]) if id(p) in names else f"parameter {n} of shape {tuple(p.shape)}"
            for n, p in enumerate(self.trained)
        ]
        self.sizes = [nbytes_of(p) for p in self.trained]
        self._taste = Taste(optimizer)

    def gradients(self) -> dict[int, torch.Tensor | Rows]:
        """Return the gradients that there are, by the numbers of their parameters. Of sparse ones, copies of their rows.

        Raises:
            ArgumentError: A parameter has a gradient that is not trained.
            UnsupportedTensorError: A gradient is sparse, or dense, and the optimizer does not take such gradients.
        """
        found = {number: p.grad for number, p in enumerate(self.trained) if p.grad is not None}
        if sum(p.grad is not None for p in self._all) > len(found):
            raise ArgumentError(
                "a parameter has a gradient that did not require one when AsyncDistributedOptimizer was called: no server has "
                "it. Wrap the optimizer when the parameters that are trained are known."
            )
        for number, gradient in found.items():
            self._taste.check(gradient, self.numbers[number], self.names[number])
        return {number: rows_of(given) if given.is_sparse else given for number, given in found.items()}

    def watch(self, ready: Callable[[int, torch.Tensor], None]) -> list[RemovableHandle]:
        """Have torch call a function after a backward pass has added to the gradient of a parameter.

        Args:
            ready: It gets the number of the parameter, and its gradient.

        Returns:
            The hooks, to be removed.
        """

        def hook(number: int, parameter: torch.Tensor) -> None:
            if parameter.grad is not None and parameter.grad.layout is torch.strided:
                ready(number, parameter.grad)

        return [
            p.register_post_accumulate_grad_hook(functools.partial(hook, number))
            for number, p in enumerate(self.trained)
        ]

    def part(self, layout: ServerLayout, compensation: DelayCompensation) -> TorchPart:
        """See `Replica`."""
        return TorchPart(self._optimizer, self.trained, layout, compensation)

    def settings(self) -> bytes:
        """See `Replica`."""
        return settings.pack(self._optimizer.param_groups)

    def is_finite(self, number: int, gradient: torch.Tensor | Rows) -> bool:
        """See `Replica`."""
        if isinstance(gradient, Rows):
            gradient = tensor_of(gradient, self.trained[number]).values()
        # The sum finds almost everything, and is faster than a look at each element; but a sum may overflow.
        return bool(torch.isfinite(gradient.sum())) or bool(torch.isfinite(gradient).all())

    @torch.no_grad()
    def put(self, number: int, gradient: torch.Tensor | Rows, into: Array, add: bool) -> None:
        """See `Replica`."""
        there = view(into, self.trained[number])
        if isinstance(gradient, Rows):
            there.add_(tensor_of(gradient, self.trained[number]))
        elif add:
            there.add_(gradient.to("cpu"))
        else:
            there.copy_(gradient)

    def is_there(self, number: int, gradient: torch.Tensor, there: Array) -> bool:
        """See `Replica`."""
        value = gradient.detach().to("cpu").resolve_conj().resolve_neg().contiguous()
        known = view(there, self.trained[number])
        return value.dtype == known.dtype and same_bits(value, known)

    @torch.no_grad()
    def read(self, number: int, into: Array) -> None:
        """See `Replica`."""
        view(into, self.trained[number]).copy_(self.trained[number])

    def save(self, file: BinaryIO) -> None:
        """See `Replica`. The file is a dictionary for ``torch.load``; a parameter without a name is there by its number."""
        torch.save({key: p.detach().to("cpu") for key, p in zip(self._keys, self.trained, strict=True)}, file)

    @torch.no_grad()
    def take(self, number: int, value: Array) -> None:
        """See `Replica`."""
        self.trained[number].copy_(view(value, self.trained[number]))
