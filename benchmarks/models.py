"""The models that the benchmarks train, each with its optimizer and its data."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

MakeOptimizer = Callable[[nn.Module], torch.optim.Optimizer]


@dataclass(frozen=True)
class Workload:
    """A model to train by cross-entropy.

    Attributes:
        model: Makes the model. The weights come from torch's default random generator.
        optimizer: Makes the plain torch optimizer of a model.
        batch: ``batch(generator)`` returns one rank's inputs and labels.
    """

    model: Callable[[], nn.Module]
    optimizer: MakeOptimizer
    batch: Callable[[torch.Generator], tuple[torch.Tensor, torch.Tensor]]


def workloads(tiny: bool) -> dict[str, Workload]:
    """Return the workloads by the names that `plan.WORKLOADS` shows. If `tiny`, they have few parameters."""
    mlp = _mlp((784, 16, 10) if tiny else (784, 2048, 2048, 2048, 10))
    wide = _mlp((1024, 16, 100) if tiny else (1024, 4096, 4096, 100))
    gpt = GptSize(64, 16, 32, 2, 2) if tiny else GptSize(4096, 32, 320, 5, 6)
    bert = GptSize(64, 16, 32, 2, 2) if tiny else GptSize(30522, 512, 768, 12, 12)
    words, lstm = (64, 16) if tiny else (5000, 512)

    def sgd(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)

    def adam(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.Adam(model.parameters(), 1e-4)

    def adamw(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), 1e-4)

    return {
        "MLP, SGD momentum": Workload(mlp, sgd, _images(64, (784,), 10)),
        "MLP, Adam": Workload(mlp, adam, _images(64, (784,), 10)),
        "GPT, AdamW": Workload(lambda: Gpt(gpt), adamw, _tokens(4, gpt.context, gpt.words)),
        "wide MLP, AdamW": Workload(wide, adamw, _images(32, (1024,), 100)),
        "ResNet-18, SGD momentum": Workload(lambda: SmallResNet(8 if tiny else 64), sgd, _images(4, (3, 32, 32), 10)),
        "LSTM, Adam": Workload(lambda: Lstm(words, lstm), adam, _tokens(4, 32, words)),
        "300 small layers, Adam": Workload(lambda: Chain(20 if tiny else 300, 64), adam, _images(32, (64,), 10)),
        "BERT size, AdamW": Workload(
            lambda: Gpt(bert, causal=False, tied=True), adamw, _tokens(2, 32 // (1 + tiny), bert.words)
        ),
    }


def _images(
    size: int, shape: tuple[int, ...], classes: int
) -> Callable[[torch.Generator], tuple[torch.Tensor, torch.Tensor]]:
    return lambda g: (torch.randn(size, *shape, generator=g), torch.randint(classes, (size,), generator=g))


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


class Gpt(nn.Module):
    """A transformer, from tokens (batch, at most `context`) to logits (batch · length, words).

    Args:
        size: The size.
        causal: Whether a token sees only those before it, as in GPT; if not, it sees all, as in BERT.
        tied: Whether the last layer has the weights of the embedding.
    """

    def __init__(self, size: GptSize, causal: bool = True, tied: bool = False) -> None:
        super().__init__()
        self.token = nn.Embedding(size.words, size.width)
        self.position = nn.Parameter(torch.randn(size.context, size.width) * 0.02)
        self.blocks = nn.Sequential(*(_Block(size.width, size.heads, causal) for _ in range(size.layers)))
        self.norm = nn.LayerNorm(size.width)
        self.head = nn.Linear(size.width, size.words, bias=False)
        if tied:
            nn.init.normal_(self.token.weight, std=0.02)
            self.head.weight = self.token.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.blocks(self.token(tokens) + self.position[: tokens.shape[1]])
        logits: torch.Tensor = self.head(self.norm(x))
        return logits.flatten(0, 1)


class _Block(nn.Module):
    """Self-attention and a feed-forward layer, each on the normalised input and added to it."""

    def __init__(self, width: int, heads: int, causal: bool) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.norm_attention, self.norm_forward = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query_key_value, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.forward_layers = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in self.query_key_value(self.norm_attention(x)).chunk(3, dim=-1)
        )
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        x = x + self.out(seen.transpose(1, 2).flatten(2))
        result: torch.Tensor = x + self.forward_layers(self.norm_forward(x))
        return result


class Lstm(nn.Module):
    """A language model of two LSTM layers, from tokens (batch, length) to logits (batch · length, words)."""

    def __init__(self, words: int, width: int) -> None:
        super().__init__()
        self.token = nn.Embedding(words, width)
        self.layers = nn.LSTM(width, width, num_layers=2, batch_first=True)
        self.head = nn.Linear(width, words)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.layers(self.token(tokens))[0])
        return logits.flatten(0, 1)


class Chain(nn.Module):
    """Many small linear layers, each added to its input, from vectors (batch, width) to logits (batch, 10)."""

    def __init__(self, depth: int, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth - 1))
        self.head = nn.Linear(width, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + 0.1 * torch.tanh(layer(x))
        logits: torch.Tensor = self.head(x)
        return logits


class ResNet(nn.Module):
    """ResNet-50 as in torchvision, from images (batch, 3, height, width) to logits (batch, 1000).

    Args:
        depths: The number of blocks of each width.
        width: The number of channels of the first blocks.
    """

    def __init__(self, depths: Sequence[int] = (3, 4, 6, 3), width: int = 64) -> None:
        super().__init__()
        self.stem = nn.Sequential(*_convolution(3, width, 7, 2), nn.ReLU(True), nn.MaxPool2d(3, 2, 1))
        blocks: list[nn.Module] = []
        channels = width
        for level, depth in enumerate(depths):
            for number in range(depth):
                blocks.append(_Bottleneck(channels, width << level, 2 if level and not number else 1))
                channels = 4 * width << level
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 1000))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.blocks(self.stem(images)))
        return logits


class _Bottleneck(nn.Module):
    """Three convolutions, whose output is added to their input."""

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        narrow = [
            *_convolution(channels, width, 1),
            nn.ReLU(True),
            *_convolution(width, width, 3, stride),
            nn.ReLU(True),
        ]
        self.layers = nn.Sequential(*narrow, *_convolution(width, 4 * width, 1))
        same = channels == 4 * width and stride == 1
        self.shortcut = nn.Sequential(*(() if same else _convolution(channels, 4 * width, 1, stride)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(self.layers(x) + self.shortcut(x))


class SmallResNet(nn.Module):
    """ResNet-18 for small images, (batch, 3, height, width) to logits (batch, 10): it begins with 3×3, and without pooling.

    See He, Zhang, Ren & Sun, "Deep residual learning for image recognition", 2015, table 1.

    Args:
        width: The number of channels of the first blocks.
    """

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        layers: list[nn.Module] = [*_convolution(3, width, 3), nn.ReLU(True)]
        channels = width
        for level in range(4):
            for stride in (2 if level else 1, 1):
                layers.append(_BasicBlock(channels, width << level, stride))
                channels = width << level
        self.layers = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 10))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.layers(images)
        return logits


class _BasicBlock(nn.Module):
    """Two 3×3 convolutions, whose output is added to their input."""

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        first = [*_convolution(channels, width, 3, stride), nn.ReLU(True)]
        self.layers = nn.Sequential(*first, *_convolution(width, width, 3))
        same = channels == width and stride == 1
        self.shortcut = nn.Sequential(*(() if same else _convolution(channels, width, 1, stride)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(self.layers(x) + self.shortcut(x))


def _convolution(channels: int, filters: int, size: int, stride: int = 1) -> tuple[nn.Module, nn.Module]:
    return nn.Conv2d(channels, filters, size, stride, size // 2, bias=False), nn.BatchNorm2d(filters)


def parameters_of(model: nn.Module) -> int:
    """Return the number of trained values."""
    return sum(parameter.numel() for parameter in model.parameters())


def train(module: nn.Module, batch: Any) -> None:
    """Run the forward and the backward pass. The gradients are in ``grad`` afterwards."""
    inputs, labels = batch
    F.cross_entropy(module(inputs), labels).backward()
