"""Finds the layers of a model that can be sliced over ranks, without running it.

Only layers whose forward pass is known are sliced: classes of torch itself, layers in an `nn.Sequential`, layers in a forward
pass that can be read (`chains`), and blocks of models of transformers (`transformers_models`). A layer that is used in two
places, or shares a weight with another one, is left alone; but an embedding and a head with one weight are sliced together.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrize

from hvdlite_torch.slicing import attention, convolution
from hvdlite_torch.slicing.chains import chains_of
from hvdlite_torch.slicing.linear import conv1d, features
from hvdlite_torch.slicing.transformers_models import SlicedBlock, blocks_of, is_activation, plan_of, planned
from hvdlite_torch.slicing.whole import altered, watched

POINTWISE = frozenset(
    getattr(nn, name)
    for name in (
        *("CELU", "Dropout", "ELU", "GELU", "Hardsigmoid", "Hardswish", "Hardtanh", "Identity", "LeakyReLU", "Mish"),
        *("ReLU", "ReLU6", "SELU", "SiLU", "Sigmoid", "Softplus", "Softsign", "Tanh"),
    )
)
"""Layers that work on each element by itself, so that they can stand between columns and rows."""

FUNCTIONS = (F.relu, F.gelu, F.silu, F.mish, F.elu, F.leaky_relu, F.relu6, torch.relu, torch.tanh, torch.sigmoid)


class Found(NamedTuple):
    """A layer, or several that belong together, that can be sliced.

    Attributes:
        names: The names of the modules in the model. In a pair, and in heads, the last one is sliced by rows.
        kind: "pair", "heads", "attention", "embedding" or "convolution"; "unknown" if it cannot be sliced anyway.
        what: A text that says what it is, with its sizes.
        why_not: Why it cannot be sliced over this number of ranks; an empty text if it can.
        owner: The name of the module that computes an attention with "heads".
        parts: In how many parts the columns are.
    """

    names: tuple[str, ...]
    kind: str
    what: str
    why_not: str
    owner: str = ""
    parts: int = 1


def find(model: nn.Module, ranks: int, smallest: int) -> Iterator[Found]:
    """Return what can be sliced, in the order of the model.

    Args:
        model: The model.
        ranks: The number of slices.
        smallest: Layers with fewer parameters are left out.
    """
    shared, plan = _shared(model), plan_of(model)
    seen: set[str] = set()
    for name, module in model.named_modules():
        dot = f"{name}." if name else ""
        for found in (*_in_module(module, dot, ranks), *_in_models(module, dot, ranks, plan)):
            if not seen.isdisjoint(found.names):
                continue
            if found.kind == "embedding" and id(module.weight) in shared:
                found = _tied(model, found, module.weight)
            seen.update(found.names)
            parts = [model.get_submodule(each) for each in found.names]
            if sum(p.numel() for part in parts for p in part.parameters()) < smallest:
                continue
            sliced = parts if len(parts) > 1 and found.kind == "embedding" else [*parts, *_parameters(parts)]
            if any(id(each) in shared for each in sliced):
                found = found._replace(why_not="it is used in two places")
            yield found


def _parameters(modules: Iterable[nn.Module]) -> list[nn.Parameter]:
    return [parameter for module in modules for parameter in module.parameters()]


def _tied(model: nn.Module, found: Found, weight: Any) -> Found:
    """Return an embedding with the layers that have its weight too, if all of them can be sliced by rows."""
    holders = {
        name: module
        for name, module in model.named_modules()
        for parameter in module.parameters(recurse=False)
        if parameter is weight
    }
    for module in holders.values():
        if type(module) not in (nn.Embedding, nn.Linear) or altered(module, ["weight"]):
            return found
        if type(module) is nn.Embedding and not found.why_not:
            found = found._replace(why_not=_why_no_rows(module))
    heads = sum(type(module) is nn.Linear for module in holders.values())
    names = (*found.names, *(name for name in holders if name not in found.names))
    return found._replace(names=names, what=found.what + (", and the head with its weight" if heads else ""))


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
        if not is_pointwise(module.activation):
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
        yield _embedding(module, name)


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
        elif is_pointwise(child):
            between.append(child)
        else:
            first = None


def _are_chained(module: nn.Module, first: str, second: str) -> bool:
    one, other = (module.get_submodule(name) for name in (first, second))
    return isinstance(one, nn.Linear) and isinstance(other, nn.Linear) and one.out_features == other.in_features


def _pair(module: nn.Module, dot: str, first: str, between: Sequence[nn.Module], second: str, ranks: int) -> Found:
    return _columns_and_rows(module, dot, [first], between, second, ranks)


def _columns_and_rows(
    module: nn.Module,
    dot: str,
    columns: Sequence[str],
    between: Iterable[nn.Module],
    rows: str,
    ranks: int,
    parts: int = 1,
) -> Found:
    """Return linear layers of which the last is sliced by rows, with nothing but elementwise layers and heads between them."""
    layers: list[Any] = [module.get_submodule(name) for name in (*columns, rows)]
    names = tuple(dot + name for name in (*columns, rows))
    if not all(map(is_linear, layers)):
        return Found(names, "pair", "pair of linear layers", "its layers have forward passes of their own")
    (given, width), (inside, result) = features(layers[0]), features(layers[-1])
    why_not = f"width {inside} is not divisible by {ranks} ranks" if inside % ranks else ""
    if any(features(each)[1] != inside * parts for each in layers[:-1]):
        why_not = "its layers have different widths"
    what = f"{'pair' if len(layers) == 2 else 'group'} of linear layers {given}-{width}-{result}"
    return Found(names, "pair", what, why_not or why_no_pair(layers[:-1], between, layers[-1]), parts=parts)


def is_linear(layer: Any) -> bool:
    """Return whether a layer is an `nn.Linear`, or a ``Conv1D`` of transformers, and no subclass with another forward pass."""
    cls = parametrize.type_before_parametrizations(layer)
    return cls is nn.Linear or cls is conv1d()


def is_pointwise(what: Any) -> bool:
    """Return whether a layer or a function works on each element by itself."""
    if isinstance(what, nn.Module):
        return parametrize.type_before_parametrizations(what) in POINTWISE or is_activation(what)
    return any(what is each for each in FUNCTIONS)


def _in_models(module: nn.Module, dot: str, ranks: int, plan: Mapping[str, str]) -> Iterator[Found]:
    """Return what can be sliced in a module of a program or of transformers, and the linear layers that cannot."""
    if type(module).__module__.startswith("torch."):
        return
    seen: set[str] = set()
    found: Found | None
    for block, why_not in blocks_of(module):
        found = _block(module, dot, block, ranks)
        yield found._replace(why_not=why_not or found.why_not)
        seen.update(found.names)
    chains = () if "forward" in module.__dict__ else chains_of(module, is_linear, is_pointwise)
    for chain in chains:
        between = [module.get_submodule(name) for name in chain.between]
        found = _columns_and_rows(module, dot, chain.columns, between, chain.rows, ranks)
        yield found
        seen.update(found.names)
    if plan and (found := _planned(module, dot, ranks, plan)) and seen.isdisjoint(found.names):
        yield found
        seen.update(found.names)
    rest = tuple(dot + name for name, child in module.named_children() if is_linear(child) and dot + name not in seen)
    if len(rest) > 1:
        why_not = "what its forward pass does between them is not known: say a plan"
        yield Found(rest, "unknown", f"linear layers of a {type(module).__name__}", why_not)


def _block(module: nn.Module, dot: str, block: SlicedBlock, ranks: int) -> Found:
    """Return a block of a model of transformers."""
    between = [each for name in block.between if isinstance(each := _attribute(module, name), nn.Module)]
    found = _columns_and_rows(module, dot, block.columns, between, block.rows, ranks, block.parts)
    why_not = found.why_not
    if not all(is_pointwise(_attribute(module, name)) for name in block.between):
        why_not = why_not or "its activation may look at several elements"
    for names, inputs in ((block.opened, False), (block.entered, True)):
        for name in names:
            why_not = why_not or watched(module.get_submodule(name), inputs=inputs, results=not inputs)
    if not block.heads:
        return found._replace(why_not=why_not)
    heads, owner = _attribute(module, block.heads), f"{dot}{block.heads}".rpartition(".")[0]
    if heads % ranks:
        why_not = why_not or f"{heads} heads are not divisible by {ranks} ranks"
    return found._replace(kind="heads", what=f"attention of {heads} heads", why_not=why_not, owner=owner)


def _planned(module: nn.Module, dot: str, ranks: int, plan: Mapping[str, str]) -> Found | None:
    """Return an attention that a model of transformers has a plan for."""
    name = dot.removesuffix(".")
    if (of_plan := planned(name, module, plan)) is None:
        return None
    columns, rows, why_not = of_plan
    layers = [module.get_submodule(each) for each in (*columns, rows)]
    if not why_not and all(map(is_linear, layers)):
        head: Any = module.head_dim
        counts = sorted({features(layer)[1] // head for layer in layers[:-1]})
        if any(count % ranks for count in counts):
            why_not = f"{' and '.join(map(str, counts))} heads are not divisible by {ranks} ranks"
        why_not = why_not or why_no_pair(layers[:-1], (), layers[-1])
        what = f"attention of {counts[-1]} heads"
    else:
        what, why_not = "attention", why_not or "its layers have forward passes of their own"
    names = tuple(dot + each for each in (*columns, rows))
    return Found(names, "heads", what, why_not, owner=name)


def _attribute(module: nn.Module, path: str) -> Any:
    return functools.reduce(getattr, path.split("."), module)


def why_no_pair(columns: Iterable[nn.Module], between: Iterable[nn.Module], rows: nn.Module) -> str:
    """Return what a program has done to layers, or to those between them, that slices would break; or an empty text."""
    whys = [altered(rows), watched(rows, results=False)]
    for each in columns:
        whys += [altered(each), watched(each, inputs=False)]
    for each in between:
        whys += [altered(each, ()), watched(each)]
    return next(filter(None, whys), "")


def _embedding(module: nn.Embedding, name: str) -> Found:
    what = f"embedding of {module.num_embeddings} × {module.embedding_dim}"
    return Found((name,), "embedding", what, _why_no_rows(module))


def _why_no_rows(module: nn.Embedding) -> str:
    if module.max_norm is not None or module.scale_grad_by_freq or module.sparse:
        return "max_norm, scale_grad_by_freq and sparse need whole rows of all words"
    return altered(module, ["weight"])
