"""Cuts a model of recurrent layers into stages that take a sequence in chunks."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from hvdlite.errors import ArgumentError
from hvdlite_torch.checks.plain import hooks_of, is_plain_sequential

State = dict[str, tuple[torch.Tensor, ...]]
"""The states of the recurrent layers of a stage after a chunk, by the names of the layers in the model."""

_RECURRENT = (nn.LSTM, nn.GRU, nn.RNN)
_EACH_STEP = (
    *(nn.Embedding, nn.Linear, nn.Identity, nn.Dropout, nn.AlphaDropout),
    *(nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.SELU, nn.CELU, nn.GELU, nn.SiLU, nn.Mish, nn.Tanh, nn.Sigmoid),
    *(nn.Softplus, nn.Softsign, nn.LogSigmoid, nn.Hardtanh, nn.Hardswish, nn.Hardsigmoid),
)
"""Layers that compute each time step from that time step alone, whatever their arguments are."""


class RecurrentLayers(nn.Module):
    """Consecutive layers of a stack of recurrent layers, with the parameters of the stack, under their names there.

    Args:
        stack: An ``nn.LSTM``, ``nn.GRU`` or ``nn.RNN``.
        first, end: The numbers of the first layer, and of the layer after the last one.
    """

    _layers: nn.RNNBase

    def __init__(self, stack: nn.RNNBase, first: int, end: int) -> None:
        super().__init__()
        width = getattr(stack, "proj_size", 0) or stack.hidden_size
        options: dict[str, Any] = {"proj_size": stack.proj_size} if isinstance(stack, nn.LSTM) else {}
        if isinstance(stack, nn.RNN):
            options["nonlinearity"] = stack.nonlinearity
        make: Any = type(stack)
        layers = make(
            stack.input_size if first == 0 else width,
            stack.hidden_size,
            end - first,
            bias=stack.bias,
            batch_first=stack.batch_first,
            dropout=stack.dropout if end - first > 1 else 0.0,
            device="meta",  # the parameters are those of the stack
            **options,
        )
        for name, _ in list(layers.named_parameters()):
            kind, number = name.rsplit("_l", 1)
            own = f"{kind}_l{first + int(number)}"
            parameter = getattr(stack, own)
            self.register_parameter(own, parameter)
            setattr(layers, name, parameter)
        self.__dict__["_layers"] = layers  # no submodule, for it has other names
        # A stack has dropout after each layer but its last.
        self._dropout = nn.Dropout(stack.dropout if end < stack.num_layers else 0.0)
        self.train(stack.training)

    def train(self, mode: bool = True) -> RecurrentLayers:
        self._layers.train(mode)
        return super().train(mode)

    def forward(self, x: torch.Tensor, state: tuple[torch.Tensor, ...] | None) -> tuple[torch.Tensor, Any]:
        """Return the output for a chunk, and the state after it. A chunk without a state is the first one."""
        is_pair = isinstance(self._layers, nn.LSTM)
        x, state = self._layers(x, state if is_pair or state is None else state[0])
        return self._dropout(x), state if is_pair else (state,)


class Chunks(nn.Module):
    """Some layers of a model, which take a sequence chunk by chunk."""

    def __init__(self, layers: Mapping[str, nn.Module]) -> None:
        super().__init__()
        for name, layer in layers.items():
            self.add_module(name, layer)

    def forward(self, x: torch.Tensor, state: State) -> tuple[torch.Tensor, State]:
        """Return the output for a chunk, and the state after it.

        Args:
            x: The chunk.
            state: The state after the chunk before; empty for the first one.
        """
        after: State = {}
        for name, layer in self._modules.items():
            assert layer is not None
            if isinstance(layer, RecurrentLayers):
                x, after[name] = layer(x, state.get(name))
            else:
                x = layer(x)
        return x, after


class Alone(Chunks):
    """The same, for a whole sequence: it returns the output only."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return super().forward(x, {})[0]


class Unit(NamedTuple):
    """What a stage can begin with: a child of the model, or one layer of a stack.

    Attributes:
        child: The name of the child.
        module: The child.
        layer: The number of the layer, or None.
    """

    child: str
    module: nn.Module
    layer: int | None


def units(model: nn.Module, stepwise: Sequence[type[nn.Module]]) -> dict[str, Unit]:
    """Return the layers with which a stage may begin, by name: "2" is a child of the model, "1.0" a layer of the stack "1" that
    has several.

    Args:
        model: The whole model.
        stepwise: Further types of layers that compute each time step from that time step alone.

    Raises:
        ArgumentError: The model is no ``nn.Sequential`` with recurrent layers, or has a layer that may mix time steps.
    """
    if not is_plain_sequential(model):
        own = ", which does more than call its children one after the other" if isinstance(model, nn.Sequential) else ""
        raise ArgumentError(
            f"a wavefront takes an nn.Sequential, whose children are cut; got a {type(model).__name__}{own}."
        )
    found: dict[str, Unit] = {}
    for name, child in model._modules.items():  # named_children() leaves out a layer that is there a second time
        assert child is not None
        if type(child) in _RECURRENT:
            assert isinstance(child, nn.RNNBase)
            if child.bidirectional:
                raise ArgumentError(
                    f"the layer {name!r} is bidirectional: its second direction begins at the end of the sequence, so its "
                    "chunks cannot follow each other. Use bidirectional=False."
                )
            if hooks := hooks_of(child):
                raise ArgumentError(
                    f"the layer {name!r} has hooks ({', '.join(hooks)}), which would not run, because its layers are called in "
                    "stages and chunks. Remove them, or register them for another layer."
                )
            several = child.num_layers > 1
            for number in range(child.num_layers):
                found[f"{name}.{number}" if several else name] = Unit(name, child, number)
        elif _takes_each_step_alone(child, tuple(stepwise)):
            found[name] = Unit(name, child, None)
        else:
            raise ArgumentError(
                f"the layer {name!r} is a {type(child).__name__}, which may compute a time step from others, so chunks of the "
                "sequence might give another result than the whole one. Known are nn.LSTM, nn.GRU, nn.RNN, nn.Linear, "
                "nn.Embedding, nn.LayerNorm of the last dimension, dropout, and activations. If it computes each time step "
                f"from that time step alone, say so: stepwise=[{type(child).__name__}]."
            )
    return found


def _takes_each_step_alone(layer: nn.Module, stepwise: tuple[type[nn.Module], ...]) -> bool:
    if isinstance(layer, stepwise):
        return True
    if type(layer) is nn.Sequential:
        return all(_takes_each_step_alone(child, stepwise) for child in layer)
    if isinstance(layer, nn.LayerNorm | nn.RMSNorm):
        return len(layer.normalized_shape) == 1
    if isinstance(layer, nn.Softmax | nn.LogSoftmax):
        return layer.dim == -1
    return type(layer) in _EACH_STEP


def time_dimension(model: nn.Module) -> int:
    """Return the dimension of the time steps: 1 if the recurrent layers of a model are ``batch_first``, and else 0.

    Raises:
        ArgumentError: There are no recurrent layers, or they differ.
    """
    layers = {name: child.batch_first for name, child in model.named_children() if isinstance(child, nn.RNNBase)}
    if not layers:
        raise ArgumentError(
            "the model has no nn.LSTM, nn.GRU or nn.RNN, so its time steps do not depend on each other: use hvd.Pipeline."
        )
    if len(set(layers.values())) > 1:
        raise ArgumentError(
            f"batch_first differs between the recurrent layers: {layers}. Expected the same for all of them."
        )
    return int(next(iter(layers.values())))


def layers_of(parts: Sequence[Unit]) -> dict[str, nn.Module]:
    """Return the modules of consecutive layers, by the names of the children; those of one stack are one `RecurrentLayers`."""
    layers: dict[str, nn.Module] = {}
    for child, group in itertools.groupby(parts, lambda unit: unit.child):
        own = list(group)
        if own[0].layer is None:
            layers[child] = own[0].module
        else:
            assert isinstance(own[0].module, nn.RNNBase) and own[-1].layer is not None
            layers[child] = RecurrentLayers(own[0].module, own[0].layer, own[-1].layer + 1)
    return layers
