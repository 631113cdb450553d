"""`OwnLayers`: what a program does with the layers that one rank keeps of a model."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

import hvdlite
from hvdlite.adapter.pipeline.bubble import Bubble
from hvdlite.errors import ArgumentError
from hvdlite.ranks.process_set import ProcessSet
from hvdlite_torch.pipeline.tied import Tied
from hvdlite_torch.step.amp import teach_grad_scaler
from hvdlite_torch.step.shardable import check_independent
from hvdlite_torch.step.wrapped import Distributed
from hvdlite_torch.tensors import split_norm
from hvdlite_torch.tensors.sliced import full_state_dict, load_full_state_dict
from hvdlite_torch.tensors.split import Stages
from hvdlite_torch.training.whole_state import load_whole_state, whole_state

if TYPE_CHECKING:
    from typing_extensions import Self  # Python 3.10 has none


class OwnLayers:
    """The layers of one rank, of a model whose layers are on different ranks.

    Args:
        modules: The stages of this rank. Their parameters have the names that they have in the model.
        process_set: The ranks that have the model together.
        model: The whole model.
        tied: The parameters that several ranks have.
    """

    def __init__(self, modules: Sequence[nn.Module], process_set: ProcessSet, model: nn.Module, tied: Tied) -> None:
        self._modules, self.process_set, self._tied = modules, process_set, tied
        self._bubble = Bubble()
        first = {id(parameter): name for name, parameter in model.named_parameters()}
        self._first = {name: first[id(p)] for name, p in model.named_parameters(remove_duplicate=False)}
        own = dict(self.named_parameters())
        sparse = [first[id(layer.weight)] for layer in model.modules() if getattr(layer, "sparse", False) is True]
        self._split = Stages(type(self).__name__, process_set, own, first.values(), sparse, tied.copies)
        split_norm.teach()
        teach_grad_scaler()
        self._may_step: weakref.WeakSet[Any] = weakref.WeakSet()

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Return the parameters of this rank's stages, under the names that they have in the model.

        A tied parameter has its first name, on all ranks that have it.
        """
        named = (pair for module in self._modules for pair in module.named_parameters())
        return iter({self._first[name]: parameter for name, parameter in named}.items())

    def parameters(self) -> Iterator[nn.Parameter]:
        """Return the parameters of this rank's stages."""
        return (parameter for _, parameter in self.named_parameters())

    def state_dict(self) -> dict[str, Any]:
        """Return the state of this rank's stages, under the names of the model.

        A file of it has this rank's stages only: see `full_state_dict`, and ``hvd.checkpoint.save``.
        """
        return {name: value for module in self._modules for name, value in module.state_dict().items()}

    def full_state_dict(self) -> dict[str, Any]:
        """Return the state of all stages, on every rank of the pipeline: what the whole model's `load_state_dict` takes.

        If layers are sliced, the ranks with the other slices call this too.
        """
        own = {name: value for module in self._modules for name, value in full_state_dict(module).items()}
        parts = hvdlite.allgather_object(own, process_set=self.process_set)
        return {name: value for part in parts for name, value in part.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load this rank's part of the state of the whole model, or its own part.

        Raises:
            ArgumentError: `state` lacks a tensor of this rank's stages, or has another shape of it.
        """
        for module in self._modules:
            load_full_state_dict(module, state)

    def full_optimizer_state_dict(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Return the state of the optimizers of all stages, on every rank, as one process with the whole model has it.

        All ranks call this: of the pipeline, and of the axes of slices and of data parallelism.

        Args:
            optimizer: The optimizer of this rank's parameters, plain or distributed.

        Raises:
            ArgumentError: The state cannot be put together. The text says why.
        """
        return whole_state(optimizer)

    def load_optimizer_state_dict(self, optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
        """Load this rank's part of what `full_optimizer_state_dict` has returned, with any cuts, or of one process's state.

        All ranks call this.

        Args:
            optimizer: The optimizer of this rank's parameters, plain or distributed.
            state: The state of the optimizer of the whole model.

        Raises:
            ArgumentError: It is the state of other parameters.
        """
        load_whole_state(optimizer, state)

    def _check_optimizer(self, optimizer: Any) -> None:
        """Check that an optimizer may step the parameters of a stage. All ranks of the model call this, with the same kind.

        Raises:
            ArgumentError: It is no optimizer of torch, or looks across the parameters, of which it has those of a stage only.
                Raised on all ranks.
        """
        if optimizer is None or optimizer in self._may_step:
            return
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise ArgumentError(
                f"{self._split.kind}.step takes an optimizer of torch, plain or distributed; got a {type(optimizer).__name__}. "
                "What wraps an optimizer may look at all parameters, and here are those of one stage: pass the optimizer "
                "inside, or call step(x, y) alone and then your own step."
            )
        if not isinstance(optimizer, Distributed):  # which was checked when it was made
            check_independent(optimizer)
        self._may_step.add(optimizer)

    def train(self, mode: bool = True) -> Self:
        """Set the mode of this rank's layers, as ``nn.Module.train`` does."""
        for module in self._modules:
            module.train(mode)
        return self

    def eval(self) -> Self:
        """Set the mode of this rank's layers, as ``nn.Module.eval`` does."""
        return self.train(False)
