"""torch's `clip_grad_norm_` and `get_total_norm` for models that are split over ranks: one norm over all slices and stages.

torch clips by the norm of the gradients that it is given: of one stage. And it refuses gradients of which some are `DTensor`.
It has no hook there, so its two inner functions are wrapped. Gradients of models that are not split go to torch as before.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.nn.utils import clip_grad

from hvdlite_torch.tensors.sliced import is_sliced
from hvdlite_torch.tensors.split import Stages, all_stages, gradients_of_stages

_MARK = "_hvdlite_joint"
_WHAT = "the norm that torch clips by"


def teach() -> None:
    """Let torch's functions clip by the norm of whole models. This is done once in a process."""
    _wrap("_get_total_norm", _joint_norm)
    _wrap("_clip_grads_with_norm_", _clip)
    _wrap("clip_grad_value_", _clip_each_kind)


def _wrap(name: str, replacement: Callable[..., Any]) -> None:
    plain = getattr(clip_grad, name, None)
    if plain is None or hasattr(plain, _MARK):
        return

    @functools.wraps(plain)
    def taught(*args: Any, **kwargs: Any) -> Any:
        return replacement(plain, *args, **kwargs)

    setattr(taught, _MARK, True)
    for place in (clip_grad, torch.nn.utils):
        for each, value in list(vars(place).items()):
            if value is plain:  # torch gives the inner functions public names, too
                setattr(place, each, taught)


def _joint_norm(
    plain: Callable[..., torch.Tensor],
    tensors: torch.Tensor | Iterable[torch.Tensor],
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> torch.Tensor:
    gradients = _listed(tensors)
    parts = gradients_of_stages(gradients)
    joined = [stages.number for stages, _ in parts if stages is not None]
    if joined or len(_kinds(gradients)) > 1:
        norms = []
        for stages, some in parts:
            own = _combined([_whole(plain(kind, norm_type, False, foreach)) for kind in _kinds(some)], norm_type)
            norms.append(own if stages is None else _over_stages(stages, own, norm_type))
        total = _combined(norms, norm_type)
        _check_finite(total, norm_type, error_if_nonfinite)
    else:
        total = plain(gradients, norm_type, error_if_nonfinite, foreach)
    total._hvdlite_norm = joined, norm_type, error_if_nonfinite  # type: ignore[attr-defined]  # for `_clip`
    return total


def _clip(
    plain: Callable[..., None],
    parameters: torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    total_norm: torch.Tensor,
    foreach: bool | None = None,
) -> None:
    listed = _listed(parameters)
    joined, norm_type, error_if_nonfinite = getattr(total_norm, "_hvdlite_norm", (None, 2.0, False))
    # The norm was made of gradients. Stages of which this rank has none are known by their parameters only.
    missing = [] if joined is None else [stages for stages in all_stages(listed) if stages.number not in joined]
    if missing:
        nothing = torch.zeros_like(total_norm)
        norms = [total_norm, *(_over_stages(stages, nothing, norm_type) for stages in missing)]
        total_norm.copy_(_combined(norms, norm_type))
        _check_finite(total_norm, norm_type, error_if_nonfinite)
    for kind in _kinds([parameter for parameter in listed if parameter.grad is not None]):
        plain(kind, max_norm, _for_kind(total_norm, kind), foreach)


def _clip_each_kind(
    plain: Callable[..., None], parameters: Any, clip_value: float, foreach: bool | None = None
) -> None:
    for kind in _kinds(_listed(parameters)):
        plain(kind, clip_value, foreach)


def _listed(tensors: torch.Tensor | Iterable[torch.Tensor]) -> list[torch.Tensor]:
    return [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)


def _kinds(tensors: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Return the tensors, apart by the mesh over which they are sliced: torch's functions take those of one at a time."""
    kinds: dict[Any, list[torch.Tensor]] = {}
    for tensor in tensors:
        kinds.setdefault(tensor.device_mesh if is_sliced(tensor) else None, []).append(tensor)  # type: ignore[attr-defined]
    return list(kinds.values()) or [[]]


def _for_kind(total_norm: torch.Tensor, kind: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return a norm as a plain tensor for plain gradients. torch multiplies a `DTensor` by a number of either kind."""
    return total_norm if kind and is_sliced(kind[0]) else _whole(total_norm)


def _whole(norm: Any) -> torch.Tensor:
    whole: torch.Tensor = norm.full_tensor() if is_sliced(norm) else norm
    return whole


def _combined(norms: Sequence[torch.Tensor], norm_type: float) -> torch.Tensor:
    """Return the norm of all, from the norms of parts."""
    if len(norms) == 1:
        return norms[0]
    device = norms[0].device
    stacked = torch.stack([norm.to(device, norms[0].dtype) for norm in norms])
    total: torch.Tensor = torch.linalg.vector_norm(stacked, float(norm_type))
    return total


def _over_stages(stages: Stages, own: torch.Tensor, norm_type: float) -> torch.Tensor:
    """Return a norm over the gradients of all stages. Every rank of the stages calls this, and gets the same bits."""
    told = stages.gather(float(own), _WHAT)
    whole: torch.Tensor = torch.linalg.vector_norm(torch.tensor(told, dtype=torch.float64), float(norm_type))
    return whole.to(own.device, own.dtype)


def _check_finite(norm: torch.Tensor, norm_type: float, error_if_nonfinite: bool) -> None:
    if error_if_nonfinite and not math.isfinite(float(norm)):
        raise RuntimeError(
            f"The total norm of order {norm_type} for gradients from `parameters` is non-finite, so it cannot be clipped. To "
            "disable this error and scale the gradients by the non-finite norm anyway, set `error_if_nonfinite=False`"
        )
