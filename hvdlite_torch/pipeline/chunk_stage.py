"""`ChunkStage`: the passes of the chunks of a sequence through the stage of one rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist

from hvdlite.adapter.bubble import Bubble
from hvdlite_torch.pipeline.recurrent import Chunks, State

_DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
_MOST_DIMENSIONS = 8

Loss = Callable[[torch.Tensor], torch.Tensor]


class _Pass(NamedTuple):
    """A forward pass of a chunk whose backward pass has not come yet."""

    given: torch.Tensor
    """The input, a leaf of autograd's graph on all stages but the first."""
    before: State
    """The state after the chunk before, leaves of the graph."""
    after: State
    target: torch.Tensor
    """The output, or on the last stage the chunk's share of the loss."""


class ChunkStage:
    """The passes of chunks through one stage, whose neighbours are on other ranks.

    A chunk needs the stage before for its input, and the chunk before for the state of its recurrent layers. Backward it is the
    other way round: the gradient of the output comes from the stage after, that of the state from the chunk after.

    Args:
        layers: The stage.
        group: The group of all stages, in their order.
        time: The dimension of the time steps.
        bubble: Measures the passes.
    """

    def __init__(self, layers: Chunks, group: dist.ProcessGroup, time: int, bubble: Bubble) -> None:
        self._layers, self._group, self._time, self._bubble = layers, group, time, bubble
        self.place, places = dist.get_rank(group), dist.get_world_size(group)
        self.is_first, self.is_last = self.place == 0, self.place == places - 1
        self._passes: list[_Pass] = []
        self._state: State = {}
        self._kind: tuple[list[int], torch.dtype] | None = None
        self._sent: list[dist.Work | None] = []

    def begin(self) -> None:
        """Begin a sequence: there is no state yet."""
        self._passes.clear()
        self._state, self._kind = {}, None

    def forward(self, number: int, x: torch.Tensor, loss: Loss | None) -> torch.Tensor:
        """Make the forward pass of a chunk.

        Args:
            number: The number of the chunk.
            x: The chunk of the sequence: the input of the first stage, and for the others the length.
            loss: Returns the chunk's share of the loss from the output of the last stage. None makes no backward pass.

        Returns:
            The chunk's share of the loss on the last stage, if there is a loss; else the output.
        """
        given = x if self.is_first else self._receive_input(x.shape[self._time])
        trains = loss is not None
        before = {name: _leaves(state, trains) for name, state in self._state.items()}
        if trains and not self.is_first:
            given.requires_grad_()
        with self._bubble.computing("FORWARD", number, self.place, "chunk"):
            target, after = self._layers.forward(given, before)
            if self.is_last and loss is not None:
                target = loss(target)
        if trains:
            self._passes.append(_Pass(given, before, after, target))
        if not self.is_last:
            self._send_output(target.detach(), number)
        self._state = {name: tuple(tensor.detach() for tensor in state) for name, state in after.items()}
        return target.detach()

    def backward(self) -> None:
        """Make the backward passes of all chunks, the last one first. Gradients are added to those of the parameters."""
        of_state: State = {}
        while self._passes:
            number = len(self._passes) - 1
            given, before, after, target = self._passes.pop()
            seeds: list[tuple[torch.Tensor, torch.Tensor | None]] = [(target, None)]
            if not self.is_last:
                gradient = torch.empty_like(target, memory_format=torch.contiguous_format)
                dist.recv(gradient, group=self._group, group_src=self.place + 1)
                seeds = [(target, gradient)]
            for name, gradients in of_state.items():
                seeds += zip(after[name], gradients, strict=True)
            seeds = [(tensor, gradient) for tensor, gradient in seeds if tensor.requires_grad]
            with self._bubble.computing("BACKWARD", number, self.place, "chunk"):
                if seeds:
                    torch.autograd.backward([tensor for tensor, _ in seeds], [gradient for _, gradient in seeds])
            if not self.is_first:
                self._send(_gradient(given), self.place - 1)
            of_state = {name: tuple(map(_gradient, state)) for name, state in before.items()}

    def finish(self) -> None:
        """Wait until the neighbours have received everything."""
        for work in self._sent:
            if work is not None:
                work.wait()
        self._sent.clear()

    def _send(self, tensor: torch.Tensor, place: int) -> None:
        self._sent.append(dist.isend(tensor.contiguous(), group=self._group, group_dst=place))

    def _send_output(self, output: torch.Tensor, number: int) -> None:
        """Send the output of a chunk to the next stage; with the first one its shape and dtype, which all others have."""
        if number == 0:
            shape = [*output.shape] + [0] * (_MOST_DIMENSIONS - output.dim())
            self._send(torch.tensor([_DTYPES.index(output.dtype), output.dim(), *shape]), self.place + 1)
        self._send(output, self.place + 1)

    def _receive_input(self, length: int) -> torch.Tensor:
        if self._kind is None:
            header = torch.empty(2 + _MOST_DIMENSIONS, dtype=torch.int64)
            dist.recv(header, group=self._group, group_src=self.place - 1)
            dtype, dimensions, *shape = header.tolist()
            self._kind = shape[:dimensions], _DTYPES[dtype]
        shape, kind = self._kind
        shape[self._time] = length
        received = torch.empty(shape, dtype=kind)
        dist.recv(received, group=self._group, group_src=self.place - 1)
        return received


def _leaves(state: tuple[torch.Tensor, ...], requires_grad: bool) -> tuple[torch.Tensor, ...]:
    return tuple(tensor.detach().requires_grad_(requires_grad) for tensor in state)


def _gradient(leaf: torch.Tensor) -> torch.Tensor:
    """Return the gradient of a leaf, or zeros if what comes after does not depend on it."""
    return torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
