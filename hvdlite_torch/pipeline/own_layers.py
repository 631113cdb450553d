"""`OwnLayers`: what a program does with the layers that one rank keeps of a model."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import nn

import hvdlite
from hvdlite.adapter.bubble import Bubble
from hvdlite.process_set import ProcessSet
from hvdlite_torch.slicing.state import full_state_dict

if TYPE_CHECKING:
    from typing_extensions import Self  # Python 3.10 has none


class OwnLayers:
    """The layers of one rank, of a model whose layers are on different ranks.

    Args:
        modules: The stages of this rank. Their parameters have the names that they have in the model.
        process_set: The ranks that have the model together.
    """

    def __init__(self, modules: Sequence[nn.Module], process_set: ProcessSet) -> None:
        self._modules, self.process_set = modules, process_set
        self._bubble = Bubble()

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Return the parameters of this rank's stages, under the names that they have in the model."""
        return itertools.chain(*(module.named_parameters() for module in self._modules))

    def parameters(self) -> Iterator[nn.Parameter]:
        """Return the parameters of this rank's stages."""
        return (parameter for _, parameter in self.named_parameters())

    def state_dict(self) -> dict[str, Any]:
        """Return the state of this rank's stages, under the names of the model."""
        return {name: value for module in self._modules for name, value in module.state_dict().items()}

    def full_state_dict(self) -> dict[str, Any]:
        """Return the state of all stages, on every rank of the pipeline: what the whole model's `load_state_dict` takes.

        If layers are sliced, the ranks with the other slices call this too.
        """
        own = {name: value for module in self._modules for name, value in full_state_dict(module).items()}
        parts = hvdlite.allgather_object(own, process_set=self.process_set)
        return {name: value for part in parts for name, value in part.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load this rank's part of the state of the whole model, or its own part."""
        for module in self._modules:
            module.load_state_dict({name: state[name] for name in module.state_dict()})

    def train(self, mode: bool = True) -> Self:
        """Set the mode of this rank's layers, as ``nn.Module.train`` does."""
        for module in self._modules:
            module.train(mode)
        return self

    def eval(self) -> Self:
        """Set the mode of this rank's layers, as ``nn.Module.eval`` does."""
        return self.train(False)
