"""The models that are trained, each with its optimizer and its data."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

MakeOptimizer = Callable[[nn.Module], torch.optim.Optimizer]


@dataclass(frozen=True)
class Workload:
    """Something to train by cross-entropy.

    Attributes:
        model: Makes it, by the default random generator.
        optimizer: Makes the plain torch optimizer of a model.
        batch: ``batch(generator)`` is one rank's inputs and labels.
    """

    model: Callable[[], nn.Module]
    optimizer: MakeOptimizer
    batch: Callable[[torch.Generator], tuple[torch.Tensor, torch.Tensor]]


def workloads(tiny: bool) -> dict[str, Workload]:
    """By name, as in `plan.WORKLOADS`. 10 million parameters each, or so few that a step takes a moment."""
    images, tokens = _images(64), _tokens(4, *((16, 64) if tiny else (32, 4096)))
    mlp = _mlp((784, 16, 10) if tiny else (784, 2048, 2048, 2048, 10))
    gpt = _gpt(GptSize(64, 16, 32, 2, 2) if tiny else GptSize(4096, 32, 320, 5, 6))
    return {
        "MLP, SGD momentum": Workload(mlp, lambda m: torch.optim.SGD(m.parameters(), 0.01, momentum=0.9), images),
        "MLP, Adam": Workload(mlp, lambda m: torch.optim.Adam(m.parameters(), 1e-4), images),
        "GPT, AdamW": Workload(gpt, lambda m: torch.optim.AdamW(m.parameters(), 1e-4), tokens),
    }


def _images(size: int) -> Callable[[torch.Generator], tuple[torch.Tensor, torch.Tensor]]:
    return lambda g: (torch.randn(size, 784, generator=g), torch.randint(10, (size,), generator=g))


def _tokens(size: int, context: int, words: int) -> Callable[[torch.Generator], tuple[torch.Tensor, torch.Tensor]]:
    def batch(generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        text = torch.randint(words, (size, context + 1), generator=generator)
        return text[:, :-1], text[:, 1:].flatten()

    return batch


def _mlp(widths: tuple[int, ...]) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        layers: list[nn.Module] = []
        for inputs, outputs in itertools.pairwise(widths):
            layers += [nn.Linear(inputs, outputs), nn.ReLU()]
        return nn.Sequential(*layers[:-1])

    return make


@dataclass(frozen=True)
class GptSize:
    words: int
    context: int
    width: int
    heads: int
    layers: int


def _gpt(size: GptSize) -> Callable[[], nn.Module]:
    return lambda: Gpt(size)


class Gpt(nn.Module):
    """A decoder-only transformer: tokens (batch, context) to logits (batch · context, words)."""

    def __init__(self, size: GptSize) -> None:
        super().__init__()
        self.token = nn.Embedding(size.words, size.width)
        self.position = nn.Parameter(torch.randn(size.context, size.width) * 0.02)
        self.blocks = nn.Sequential(*(_Block(size.width, size.heads) for _ in range(size.layers)))
        self.norm = nn.LayerNorm(size.width)
        self.head = nn.Linear(size.width, size.words, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.blocks(self.token(tokens) + self.position)
        logits: torch.Tensor = self.head(self.norm(x))
        return logits.flatten(0, 1)


class _Block(nn.Module):
    """Causal self-attention and a feed-forward layer, each on the normalised input and added to it."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_attention, self.norm_forward = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query_key_value, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.forward_layers = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in self.query_key_value(self.norm_attention(x)).chunk(3, dim=-1)
        )
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).flatten(2))
        result: torch.Tensor = x + self.forward_layers(self.norm_forward(x))
        return result


def parameters_of(model: nn.Module) -> int:
    """The number of trained values."""
    return sum(parameter.numel() for parameter in model.parameters())


def train(module: nn.Module, batch: Any) -> None:
    """Forward and backward: leaves gradients."""
    inputs, labels = batch
    F.cross_entropy(module(inputs), labels).backward()  # type: ignore[no-untyped-call]
