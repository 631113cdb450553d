"""Whether a module does what its class says and nothing else, for what takes its place and would leave the rest out."""

from __future__ import annotations

from torch import nn

_KINDS = {
    "_forward_pre_hooks": "forward pre-hook",
    "_forward_hooks": "forward hook",
    "_backward_pre_hooks": "backward pre-hook",
    "_backward_hooks": "backward hook",
}


def hooks_of(module: nn.Module, but: tuple[type, ...] = ()) -> list[str]:
    """Return the hooks that run when a module itself is called, or in its backward pass: each as its kind and its name.

    Args:
        module: The module.
        but: The types of hooks that do not count.
    """
    return [
        f"{kind} {getattr(hook, '__qualname__', type(hook).__name__)}"
        for attribute, kind in _KINDS.items()
        for hook in (getattr(module, attribute) or {}).values()
        if not isinstance(hook, but)
    ]


def is_plain_sequential(model: nn.Module) -> bool:
    """Return whether a model is an ``nn.Sequential`` that calls its children one after the other and does no more."""
    kind = type(model)
    return (
        isinstance(model, nn.Sequential)
        and kind.forward is nn.Sequential.forward
        and kind.train is nn.Module.train
        and kind.__call__ is nn.Module.__call__
        and not {"forward", "train"} & vars(model).keys()
        and not (model._parameters or model._buffers)
    )
