"""What torch.export would leave out of a model without a word is refused."""

from __future__ import annotations

import contextlib
import random
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NoReturn
from unittest import mock

import numpy as np
import torch
from torch import nn
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import CheckpointFunction

from hvdlite.errors import ArgumentError
from hvdlite_torch.checks.plain import hooks_of
from hvdlite_torch.pipeline.values import nodes_below

_RECORDED = (WeightNorm, SpectralNorm)
"""Hooks that compute tensors from tensors and do nothing else: torch.export records that."""
_OF_MODULES = {
    *vars(nn.Module()),
    "_flat_weights",
    "_flat_weight_refs",
}  # the latter are parameters, of recurrent layers
_PLAIN = (bool, int, float, str, type(None))
_one_model = threading.Lock()  # ranks may be threads, and torch.export changes torch while it records


def refuse(what: str) -> NoReturn:
    """Raise for what a model does and torch.export does not record."""
    raise ArgumentError(
        f"{what}, which torch.export would leave out of the stages. Remove it, or write the model as an nn.Sequential of "
        "layers, which is cut without torch.export."
    )


@contextlib.contextmanager
def faithfully(model: nn.Module) -> Iterator[Callable[[Any], None]]:
    """Refuse what a model does while it is recorded, and what would be left out.

    Yields:
        A function that is called with the output at the end of the forward pass.
        (torch.export takes back what the pass does to the model.)

    Raises:
        ArgumentError: It has hooks, gradients of its own, attributes that a forward pass changes, or random numbers of Python.
    """
    with _one_model:
        apply, register = torch.autograd.Function.apply.__func__, torch.Tensor.register_hook  # type: ignore[attr-defined]
        thread = threading.get_ident()

        def own_gradient(function: type, *args: Any, **kwargs: Any) -> Any:
            # A checkpoint only saves memory; its gradients are those of what it computes.
            if function is not CheckpointFunction and threading.get_ident() == thread:
                refuse(f"the forward pass uses {function.__name__}, an autograd.Function with a gradient of its own")
            return apply(function, *args, **kwargs)

        def own_hook(tensor: torch.Tensor, hook: Any) -> Any:
            if threading.get_ident() == thread:
                refuse(f"the forward pass registers the hook {getattr(hook, '__qualname__', hook)} for a tensor")
            return register(tensor, hook)  # type: ignore[no-untyped-call]

        attributes, drawn = _attributes(model), _random_states()
        with (
            mock.patch.object(torch.autograd.Function, "apply", classmethod(own_gradient)),
            mock.patch.object(torch.Tensor, "register_hook", own_hook),
            warnings.catch_warnings(),
        ):
            warnings.filterwarnings("ignore", "The tensor attributes?.*assigned during export")

            def settle(output: Any) -> None:
                _check_gradients(output)
                _check(model, attributes, drawn)

            yield settle


def _check(model: nn.Module, attributes: dict[str, list[Any]], drawn: tuple[Any, ...]) -> None:
    """Raise if a model has changed attributes since, or if random numbers were drawn."""
    if _random_states() != drawn:
        refuse("the forward pass draws random numbers of Python or NumPy")
    now = _attributes(model)
    for name in sorted(now.keys() | attributes.keys()):
        if not _are_same(attributes.get(name, []), now.get(name, [])):
            refuse(f"the forward pass changes {name!r}")


def _check_gradients(output: Any) -> None:
    """Raise for what is in the graph and cannot be patched.

    That is an autograd.Function (``square = Square.apply`` of a program is older than what is patched), or a hook of a node.
    """
    tensors = [leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor)]
    for node in (node for tensor in tensors for node in nodes_below(tensor)):
        kind = getattr(type(node), "_forward_cls", None)
        if kind not in (None, CheckpointFunction):
            refuse(f"the forward pass uses {kind.__name__}, an autograd.Function with a gradient of its own")
        if _has_hooks(node):
            refuse(f"the forward pass registers a hook for the node {type(node).__name__} of autograd's graph")


def _has_hooks(node: Any) -> bool:
    """Return whether a node of autograd's graph has hooks. They can be seen only in the dictionary where a new one goes."""
    for register in (node.register_hook, node.register_prehook):
        handle = register(lambda *_: None)
        count = len(handle.hooks_dict_ref())
        handle.remove()
        if count > 1:
            return True
    return False


def refuse_hooks_within(model: nn.Module) -> None:
    """Raise for hooks of the modules of a model that is recorded.

    Raises:
        ArgumentError: There are some.
    """
    for name, module in model.named_modules():
        if hooks := hooks_of(module, but=_RECORDED):
            refuse(f"the {f'layer {name!r}' if name else type(module).__name__} has hooks ({', '.join(hooks)})")


def _attributes(model: nn.Module) -> dict[str, list[Any]]:
    """Return for each attribute what shows a change of it, without what ``nn.Module`` itself has: that is recorded."""
    return {
        f"{name}.{key}".lstrip("."): [_mark(value), *_parts(value)]
        for name, module in model.named_modules()
        for key, value in vars(module).items()
        if key not in _OF_MODULES
        and key not in (hook.name for hook in module._forward_pre_hooks.values() if isinstance(hook, _RECORDED))
    }


def _mark(value: Any) -> Any:
    return repr(value) if type(value) in _PLAIN else value


def _parts(value: Any) -> list[Any]:
    """Return the items of a container, or how often a tensor was changed in place."""
    if isinstance(value, torch.Tensor):
        return [repr(value._version)]
    if isinstance(value, dict):
        return list(map(_mark, (*value, *value.values())))
    return list(map(_mark, value)) if isinstance(value, list | tuple | set | frozenset) else []


def _are_same(one: list[Any], other: list[Any]) -> bool:
    same = (a is b or (type(a) is type(b) is str and a == b) for a, b in zip(one, other, strict=False))
    return len(one) == len(other) and all(same)


def _random_states() -> tuple[Any, ...]:
    kind, keys, *rest = np.random.get_state()
    return random.getstate(), kind, bytes(memoryview(keys)), *rest  # type: ignore[arg-type]
