"""Finds the layers of a model that can be sliced over ranks, without running it.

Only layers whose forward pass is known are sliced: classes of torch itself, and layers in an `nn.Sequential`. A layer that is
used in two places, or shares a weight with another one, is left alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrize

from hvdlite_torch.slicing import attention, convolution
from hvdlite_torch.slicing.whole import altered, watched

POINTWISE = frozenset(
    getattr(nn, name)
    for name in (
        *("CELU", "Dropout", "ELU", "GELU", "Hardsigmoid", "Hardswish", "Hardtanh", "Identity", "LeakyReLU", "Mish"),
        *("ReLU", "ReLU6", "SELU", "SiLU", "Sigmoid", "Softplus", "Softsign", "Tanh"),
    )
)
"""Layers that work on each element by itself, so that they can stand between columns and rows."""

FUNCTIONS = (F.relu, F.gelu, F.silu, torch.relu, torch.tanh, torch.sigmoid)


class Found(NamedTuple):
    """A layer, or two that belong together, that can be sliced.

    Attributes:
        names: The names of the modules in the model.
        kind: "pair", "attention", "embedding by rows", "embedding by columns" or "convolution".
        what: A text that says what it is, with its sizes.
        why_not: Why it cannot be sliced over this number of ranks; an empty text if it can.
    """

    names: tuple[str, ...]
    kind: str
    what: str
    why_not: str


def find(model: nn.Module, ranks: int, smallest: int) -> Iterator[Found]:
    """Return what can be sliced, in the order of the model.

    Args:
        model: The model.
        ranks: The number of slices.
        smallest: Layers with fewer parameters are left out.
    """
    shared = _shared(model)
    for name, module in model.named_modules():
        dot = f"{name}." if name else ""
        for found in _in_module(module, dot, ranks):
            parts = [model.get_submodule(each) for each in found.names]
            if sum(p.numel() for part in parts for p in part.parameters()) < smallest:
                continue
            if any(id(each) in shared for part in parts for each in (part, *part.parameters())):
                found = found._replace(why_not="it is used in two places")
            yield found


def _shared(model: nn.Module) -> set[int]:
    """Return the ``id`` of each module and of each parameter that is used in two places."""
    modules = Counter(id(module) for _, module in model.named_modules(remove_duplicate=False))
    distinct = {id(module): module for module in model.modules()}.values()
    parameters = Counter(id(p) for module in distinct for p in module.parameters(recurse=False))
    return {each for each, count in (modules + parameters).items() if count > 1}


def _in_module(module: nn.Module, dot: str, ranks: int) -> Iterator[Found]:
    """Return what can be sliced in a module: itself, or some of its children."""
    name = dot.removesuffix(".")
    cls: Any = parametrize.type_before_parametrizations(module)
    if cls.forward is nn.Sequential.forward:
        if "forward" not in module.__dict__:
            yield from _pairs(module, dot, ranks)
    elif cls in (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer):
        between = [each for each in (module.activation, module.dropout) if isinstance(each, nn.Module)]
        found = _pair(module, dot, "linear1", between, "linear2", ranks)
        if type(module.activation) not in POINTWISE and module.activation not in FUNCTIONS:
            found = found._replace(why_not="its activation may look at several elements")
        yield found._replace(why_not=found.why_not or altered(module, ()))
    elif cls is nn.MultiheadAttention:
        what = f"attention of {module.num_heads} heads, width {module.embed_dim}"
        yield Found((name,), "attention", what, attention.can_slice(module, ranks))
    elif cls in convolution.KINDS:
        what = f"{cls.__name__} of {module.in_channels} to {module.out_channels} channels"
        why_not = convolution.can_slice(module, ranks) or altered(module)  # type: ignore[arg-type]
        yield Found((name,), "convolution", what, why_not)
    elif cls is nn.Embedding:
        assert isinstance(module, nn.Embedding)
        yield _embedding(module, name, ranks)


def _pairs(module: nn.Module, dot: str, ranks: int) -> Iterator[Found]:
    """Return the pairs of linear layers in an `nn.Sequential` with only pointwise layers between them."""
    first: str | None = None
    between: list[nn.Module] = []
    for name, child in module.named_children():
        cls = parametrize.type_before_parametrizations(child)
        if cls is nn.Linear:
            if first is not None and _are_chained(module, first, name):
                yield _pair(module, dot, first, between, name, ranks)
                first = None
            else:
                first, between = name, []
        elif cls in POINTWISE:
            between.append(child)
        else:
            first = None


def _are_chained(module: nn.Module, first: str, second: str) -> bool:
    one, other = (module.get_submodule(name) for name in (first, second))
    return isinstance(one, nn.Linear) and isinstance(other, nn.Linear) and one.out_features == other.in_features


def _pair(module: nn.Module, dot: str, first: str, between: Sequence[nn.Module], second: str, ranks: int) -> Found:
    one, other = (module.get_submodule(name) for name in (first, second))
    assert isinstance(one, nn.Linear)
    assert isinstance(other, nn.Linear)
    width = one.out_features
    why_not = f"width {width} is not divisible by {ranks} ranks" if width % ranks else ""
    if any(parametrize.type_before_parametrizations(each) is not nn.Linear for each in (one, other)):
        why_not = "its layers have forward passes of their own"
    what = f"pair of linear layers {one.in_features}-{width}-{other.out_features}"
    return Found((dot + first, dot + second), "pair", what, why_not or why_no_pair(one, between, other))


def why_no_pair(one: nn.Module, between: Iterable[nn.Module], other: nn.Module) -> str:
    """Return what a program has done to two layers, or to those between them, that slices would break; or an empty text."""
    whys = [altered(one), altered(other), watched(one, inputs=False), watched(other, results=False)]
    for each in between:
        whys += [altered(each, ()), watched(each)]
    return next(filter(None, whys), "")


def _embedding(module: nn.Embedding, name: str, ranks: int) -> Found:
    what, why_not = f"embedding of {module.num_embeddings} × {module.embedding_dim}", ""
    # torch compares padding_idx with numbers of rows that it has counted from the first row of the slice.
    by_rows = module.padding_idx is None
    length = module.num_embeddings if by_rows else module.embedding_dim
    if module.max_norm is not None or module.scale_grad_by_freq or module.sparse:
        why_not = "max_norm, scale_grad_by_freq and sparse need whole rows of all words"
    elif not by_rows and length % ranks:
        why_not = f"width {length} is not divisible by {ranks} ranks"
    why_not = why_not or altered(module, ["weight"])
    return Found((name,), "embedding by rows" if by_rows else "embedding by columns", what, why_not)
