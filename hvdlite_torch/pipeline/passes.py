"""`StagePasses`: the forward and backward passes of micro-batches, or of chunks of a sequence, through one stage."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from hvdlite.adapter.pipeline.bubble import Bubble
from hvdlite_torch.pipeline.batch import MicroBatches
from hvdlite_torch.pipeline.losses import Losses, Target
from hvdlite_torch.pipeline.recurrent import State
from hvdlite_torch.pipeline.values import Inlet, gradient_targets

Call = Callable[[Any, tuple[Any, ...], Mapping[str, Any], State], tuple[Any, State]]
"""``call(come, inputs, keywords, state)`` returns the output of a stage, and its state after this part of the batch.

`come` is the output of the stage before, None for the first stage; `inputs` and `keywords` are those of the whole model."""


def call_of(module: nn.Module, is_first: bool, spread: bool) -> Call:
    """Return a function that calls a stage, which has no state between parts.

    Args:
        module: The stage. The first one is called as the model is, and the others with what comes from the stage before.
        is_first: Whether it is the first one.
        spread: Whether that is a tuple of arguments.
    """

    def call(come: Any, inputs: tuple[Any, ...], keywords: Mapping[str, Any], state: State) -> tuple[Any, State]:
        if is_first:
            return module(*inputs, **keywords), state
        return module(*come) if spread else module(come), state

    return call


@contextlib.contextmanager
def without_autocast() -> Iterator[None]:
    """Return a context manager: in its body nothing is cast, as after a forward pass within autocast in one process."""
    with contextlib.ExitStack() as stack:
        for kind in ("cpu", "cuda"):
            if torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        yield


class _Pass(NamedTuple):
    """A forward pass whose backward pass has not come yet."""

    inlet: Inlet
    before: dict[str, Inlet]
    """The state after the part before."""
    after: State
    outputs: list[torch.Tensor]
    """What the next stage sends gradients for."""
    losses: list[Target]


class StagePasses:
    """The passes of one stage. See `hvdlite.adapter.pipeline.relay.Stage`.

    Args:
        call: Calls the stage.
        number, count: The number of the stage, and how many there are.
        bubble: Measures the passes.
        kind: What the parts of a batch are called.
    """

    def __init__(self, call: Call, number: int, count: int, bubble: Bubble, kind: str = "micro-batch") -> None:
        self._call, self._number, self._bubble, self._kind = call, number, bubble, kind
        self._is_last = number == count - 1
        self._passes: dict[int, _Pass] = {}
        self._state: State = {}
        self._of_state: dict[str, list[torch.Tensor | None]] = {}
        self.outputs: list[Any] = []

    def begin(self, batch: MicroBatches | None, losses: Losses | None) -> None:
        """Begin a step.

        Args:
            batch: The batch; None ends the last step, and frees what it has left.
            losses: The losses, which are None if there are no backward passes.
        """
        self._batch, self._losses = batch, losses
        self._passes.clear()
        self._state, self._of_state, self.outputs = {}, {}, []

    def forward(self, part: int, values: Any) -> Any:
        assert self._batch is not None
        trains = self._losses is not None
        inputs, keywords, target = self._batch[part]
        inlet = Inlet(values, trains)
        before = {name: Inlet(state, trains) for name, state in self._state.items()}
        losses: list[Target] = []
        with (
            self._bubble.computing("FORWARD", part, self._number, self._kind, trains),
            torch.set_grad_enabled(trains),
        ):
            output, after = self._call(
                inlet.values,
                inputs,
                keywords,
                {name: each.values for name, each in before.items()},
            )
            if self._is_last and self._losses is not None:
                losses = self._losses(part, output, target, self._batch.rows_of[part])
        if trains:
            outputs = [] if self._is_last else gradient_targets(output)
            self._passes[part] = _Pass(inlet, before, after, outputs, losses)
        elif self._is_last:
            self.outputs.append(output)
        self._state = {
            name: tuple(each.detach().requires_grad_(each.requires_grad) for each in state)
            for name, state in after.items()
        }
        return output

    def backward(self, part: int, values: Any) -> Any:
        inlet, before, after, outputs, losses = self._passes.pop(part)
        pairs: list[tuple[torch.Tensor, torch.Tensor | None]] = [(each, gradient()) for each, gradient in losses]
        pairs += zip(outputs, values or (), strict=True)
        for name, gradients in self._of_state.items():
            wanted = gradient_targets(after[name])
            pairs += zip(wanted, gradients, strict=True)
        pairs = [(tensor, gradient) for tensor, gradient in pairs if gradient is not None]
        with self._bubble.computing("BACKWARD", part, self._number, self._kind), without_autocast():
            if pairs:
                torch.autograd.backward([tensor for tensor, _ in pairs], [gradient for _, gradient in pairs])
        self._of_state = {name: each.gradients for name, each in before.items()}
        return inlet.gradients
