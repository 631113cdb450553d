"""The learning rates and other settings of an optimizer's groups, which travel with each push. So a worker's schedule works."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch

_OWN = frozenset({"params", "param_names"})


def pack(groups: Sequence[Mapping[str, Any]]) -> bytes:
    """Return the numbers, truth values, texts and lists of the groups, as JSON. Equal settings give equal bytes."""
    return json.dumps(
        [{key: _plain(value) for key, value in group.items() if _travels(key, value)} for group in groups]
    ).encode()


def unpack(settings: bytes, groups: Sequence[dict[str, Any]], rate: float = 1.0) -> None:
    """Give the groups of a server's optimizer the settings that `pack` has packed.

    Args:
        settings: What `pack` has packed.
        groups: The groups of a server's optimizer.
        rate: A number by which learning rates are multiplied.
    """
    for group, given in zip(groups, json.loads(settings), strict=True):
        for key, said in given.items():
            value = said * rate if key == "lr" else said
            present = group.get(key)
            if isinstance(present, torch.Tensor):
                present.fill_(value)
            else:
                group[key] = tuple(value) if isinstance(present, tuple) else value


def _travels(key: str, value: Any) -> bool:
    if isinstance(value, tuple | list):
        return all(_travels(key, item) for item in value)
    plain = value is None or isinstance(value, bool | int | float | str)
    return key not in _OWN and (plain or (isinstance(value, torch.Tensor) and value.numel() == 1))


def _plain(value: Any) -> Any:
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    return value.item() if isinstance(value, torch.Tensor) else value
