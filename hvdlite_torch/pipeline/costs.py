"""Measures the layers of a model, and finds the cuts into stages that balance time, and then memory."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import nn

from hvdlite.errors import ArgumentError
from hvdlite_torch.checks.plain import is_plain_sequential

_RUNS = 4
"""How often the model runs for the measurement. The first run is not counted, and of the others the shortest time."""
_NEARLY = 1.03
"""Cuts whose longest stage is longer than the shortest possible by this factor are as good, and memory decides."""


class Cost(NamedTuple):
    """What one layer costs.

    Attributes:
        seconds: The time of a forward pass; that of a backward pass is taken to be proportional.
        nbytes: Parameters with gradients and two values of an optimizer, and the outputs of a micro-batch.
    """

    seconds: float
    nbytes: float


def measure(
    model: nn.Module,
    layers: Mapping[str, nn.Module],
    example: tuple[Any, ...],
    keywords: Mapping[str, Any] | None = None,
) -> dict[str, Cost]:
    """Run a model, and return the cost of each of its layers in the order in which they run.

    Args:
        model: The model, which is called as ``model(*example, **keywords)`` without gradients.
        layers: The layers by name.
        example, keywords: A micro-batch.

    Raises:
        ArgumentError: A layer does not run, or runs several times.
    """
    seconds: dict[str, list[float]] = {}
    outputs: dict[str, float] = {}
    began: dict[str, float] = {}

    def before(name: str, *_: object) -> None:
        began[name] = time.perf_counter()

    def after(name: str, layer: nn.Module, given: object, output: object) -> None:
        seconds.setdefault(name, []).append(time.perf_counter() - began[name])
        outputs[name] = _nbytes(output)

    def one_by_one() -> None:  # a Sequential may have a layer twice, such as an activation
        given = example
        for name, layer in layers.items():
            before(name)
            output = layer(*given)
            after(name, layer, given, output)
            given = (output,)

    in_sequence = is_plain_sequential(model)
    watched = {} if in_sequence else layers
    hooks = [layer.register_forward_pre_hook(partial(before, name)) for name, layer in watched.items()]
    hooks += [layer.register_forward_hook(partial(after, name)) for name, layer in watched.items()]
    states = {name: buffer.clone() for name, buffer in model.named_buffers()}  # a run changes the means of BatchNorm
    try:
        with torch.no_grad():
            for _ in range(_RUNS):
                one_by_one() if in_sequence else model(*example, **(keywords or {}))
    finally:
        for hook in hooks:
            hook.remove()
        for name, buffer in model.named_buffers():
            buffer.copy_(states[name])
    odd = {name: len(seconds.get(name, ())) / _RUNS for name in layers if len(seconds.get(name, ())) != _RUNS}
    if odd:
        name, runs = next(iter(odd.items()))
        raise ArgumentError(
            f"the model cannot be split automatically: its layer {name!r} runs {runs:g} times in a forward pass; expected each "
            "layer once. Give `cuts`, the names of the layers with which the stages but the first begin."
        )
    return {
        name: Cost(min(taken[1:]), outputs[name] + 4 * sum(map(_nbytes, layers[name].parameters())))
        for name, taken in seconds.items()
    }


def _nbytes(value: object) -> float:
    if isinstance(value, torch.Tensor):
        return value.numel() * value.element_size()
    return sum(map(_nbytes, value)) if isinstance(value, tuple | list) else 0.0


def balance(costs: Sequence[Cost], stages: int, may_begin: Sequence[bool]) -> list[int]:
    """Return the numbers of the layers with which the stages but the first begin.

    The longest stage is as short as possible; among cuts that are nearly as good, the largest memory is the smallest.
    (Linear partition by dynamic programming: Skiena, The Algorithm Design Manual, section 10.7.)

    Args:
        costs: The cost of each layer.
        stages: The number of stages, at most that of the layers.
        may_begin: For each layer, whether a stage may begin with it so that each stage can have parameters.
    """
    shortest = _partition([cost.seconds for cost in costs], stages, may_begin)
    limit = _NEARLY * _largest([cost.seconds for cost in costs], shortest)
    return _partition([cost.nbytes for cost in costs], stages, may_begin, [cost.seconds for cost in costs], limit)


def _largest(values: Sequence[float], cuts: Sequence[int]) -> float:
    ends = [0, *cuts, len(values)]
    return max(sum(values[begin:end]) for begin, end in pairwise(ends))


def _partition(
    values: Sequence[float],
    stages: int,
    may_begin: Sequence[bool],
    limited: Sequence[float] | None = None,
    limit: float = float("inf"),
) -> list[int]:
    """Return the cuts with the smallest largest sum of `values`, of those whose sums of `limited` are within the limit."""
    n = len(values)
    # best[k][end]: the largest sum of the best cut of layers 0 … end - 1 into k stages, and the beginning of the last of them
    best: list[list[tuple[float, int]]] = [[(0.0, 0)] + [(float("inf"), 0)] * n]
    for k in range(1, stages + 1):
        row: list[tuple[float, int]] = [(float("inf"), 0)] * (n + 1)
        for end in range(k, n + 1):
            for begin in range(k - 1, end):
                if (begin and not may_begin[begin]) or (limited is not None and sum(limited[begin:end]) > limit):
                    continue
                row[end] = min(row[end], (max(best[k - 1][begin][0], sum(values[begin:end])), begin))
        best.append(row)
    cuts, end = [], n
    for k in range(stages, 0, -1):
        end = best[k][end][1]
        cuts.append(end)
    return cuts[-2::-1]
