"""Values between stages: nested tensors as bytes, and where gradients of what has arrived come together."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from hvdlite.adapter.pipeline.messages import Packed
from hvdlite.errors import UnsupportedTensorError
from hvdlite.protocols import Array

_PLAIN = (bool, int, float, str, type(None))


class _Kind(NamedTuple):
    """What a tensor looks like."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    requires_grad: bool


class TensorCodec:
    """Converts nested tensors. Python's numbers, texts and None travel with what the values look like.

    Args:
        device: Where tensors that arrive are put.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def pack(self, values: Any) -> Packed:
        arrays: list[Array] = []

        def described(value: Any) -> Any:
            if not isinstance(value, torch.Tensor):
                if not isinstance(value, _PLAIN):
                    raise UnsupportedTensorError(
                        f"the output of a stage has a {type(value).__name__} in it, which does not go from rank to rank: "
                        "expected tensors, numbers, texts or None, in tuples, lists and dicts. Cut where the layers pass on "
                        "tensors."
                    )
                return value
            if type(value) not in (torch.Tensor, torch.nn.Parameter) or value.layout is not torch.strided:
                raise UnsupportedTensorError(
                    f"the output of a stage has a {type(value).__name__} of the layout {value.layout} in it: expected plain "
                    "dense tensors. Cut elsewhere, or convert it at the end of the stage."
                )
            arrays.append(_bytes(value.detach().resolve_conj().resolve_neg().contiguous().cpu()))
            return _Kind(value.dtype, tuple(value.shape), value.requires_grad)

        return Packed(tree_map(described, values), arrays)

    def unpack(self, described: Any) -> tuple[Sequence[Array], Callable[[], Any]]:
        leaves, structure = tree_flatten(described, is_leaf=lambda leaf: isinstance(leaf, _Kind))
        made = [torch.empty(leaf.shape, dtype=leaf.dtype) if isinstance(leaf, _Kind) else leaf for leaf in leaves]

        def values() -> Any:
            tensors = [
                tensor.to(self._device).requires_grad_(leaf.requires_grad) if isinstance(leaf, _Kind) else tensor
                for leaf, tensor in zip(leaves, made, strict=True)
            ]
            return tree_unflatten(tensors, structure)

        return [_bytes(each) for each in made if isinstance(each, torch.Tensor)], values


def _bytes(tensor: torch.Tensor) -> Array:
    array: Array = tensor.reshape(-1).view(torch.uint8).numpy()
    return array


class Inlet:
    """Values that a stage has received, as autograd sees them; and their gradients after the backward pass.

    Layers may change what they are given in place, as in one process. So the tensors are no leaves of autograd's graph.

    Args:
        values: Nested tensors. Those that require gradients get them.
        trains: Whether there will be gradients.

    Attributes:
        values: The same, for the stage to work with.
        gradients: For each tensor that requires one, its gradient, or None if nothing depends on it.
    """

    def __init__(self, values: Any, trains: bool = True) -> None:
        leaves, structure = tree_flatten(values)
        numbers = [number for number, leaf in enumerate(leaves) if trains and wants_gradient(leaf)]
        self.gradients: list[torch.Tensor | None] = [None] * len(numbers)
        self._tensors: list[torch.Tensor] = [leaves[number].detach() for number in numbers]
        self.values = values
        if numbers:
            anchor = torch.empty((), requires_grad=True)
            for number, tensor in zip(numbers, _Enter.apply(anchor, self), strict=True):  # type: ignore[no-untyped-call]
                leaves[number] = tensor
            self.values = tree_unflatten(leaves, structure)

    def take(self) -> list[torch.Tensor]:
        tensors, self._tensors = self._tensors, []
        return tensors


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, inlet: Inlet) -> tuple[torch.Tensor, ...]:
        ctx.gradients = inlet.gradients
        ctx.set_materialize_grads(False)
        return tuple(inlet.take())

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[None, None]:
        ctx.gradients[:] = gradients
        return None, None


def wants_gradient(value: Any) -> bool:
    """Return whether a value is a tensor that requires a gradient."""
    return isinstance(value, torch.Tensor) and value.requires_grad


def gradient_targets(values: Any) -> list[torch.Tensor]:
    """Return the tensors in nested values that require gradients."""
    return [leaf for leaf in tree_flatten(values)[0] if wants_gradient(leaf)]


def nodes_below(tensor: torch.Tensor, ends: Sequence[Any] = ()) -> Iterator[Any]:
    """Yield the nodes of autograd's graph from which a tensor was computed, but not what has come from another stage.

    Args:
        tensor: The tensor.
        ends: Nodes that are left out, as is what lies below them.
    """
    nodes, seen = [tensor.grad_fn], {None, *ends}
    while nodes:
        node: Any = nodes.pop()
        if node not in seen and getattr(type(node), "_forward_cls", None) is not _Enter:
            seen.add(node)
            nodes += [following for following, _ in node.next_functions]
            yield node
