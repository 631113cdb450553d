"""Parameters that are sliced over ranks: torch's `DTensor`. The ranks of a process set exchange the slices that they hold.

A `DTensor` keeps this rank's slice in a plain tensor. hvdlite works with that tensor. During an exchange the tensor has the
gradient of the slice as its own ``grad`` (`slices_have_gradients`). The program sees `DTensor` only.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch

from hvdlite.errors import ArgumentError, ranks_text

_PLAIN = frozenset((torch.Tensor, torch.nn.Parameter))


def is_sliced(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is a `DTensor`."""
    if type(tensor) in _PLAIN:
        return False
    distributed = sys.modules.get("torch.distributed.tensor")  # without it there is no DTensor
    return distributed is not None and isinstance(tensor, distributed.DTensor)


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's slice of a `DTensor`, which shares its memory; a plain tensor itself."""
    if type(tensor) in _PLAIN or not is_sliced(tensor):
        return tensor
    local: torch.Tensor = tensor._local_tensor  # type: ignore[attr-defined]
    return local


def sliced_like(local: torch.Tensor, whole: Any) -> torch.Tensor:
    """Return `local` as this rank's slice of a `DTensor` that is sliced as `whole` is."""
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        local, whole.device_mesh, whole.placements, run_check=False, shape=whole.shape, stride=whole.stride()
    )


def check_apart(tensors: Sequence[torch.Tensor], ranks: Collection[int], own: int) -> None:
    """Raise an error if ranks that exchange tensors hold different slices of one of them.

    Args:
        tensors: The tensors.
        ranks: The world ranks that exchange them.
        own: This rank.

    Raises:
        ArgumentError: The text says which ranks hold slices of one tensor.
    """
    for tensor in tensors:
        if is_sliced(tensor):
            mesh = tensor.device_mesh  # type: ignore[attr-defined]
            together = sorted(set(mesh.mesh.flatten().tolist()) & set(ranks))
            if together != [own]:
                raise ArgumentError(
                    f"a tensor of shape {tuple(tensor.shape)} is a DTensor on a mesh with {ranks_text(together)} of this "
                    "process set, so these ranks do not hold the same elements. Pass the ranks that hold the same slice: "
                    'process_set=grid["dp"] of hvd.ProcessGrid(dp=…, tp=…). If FSDP has sliced it, it also averages its '
                    "gradients: use the plain optimizer."
                )


@contextlib.contextmanager
def slices_have_gradients(parameters: Sequence[Any]) -> Iterator[None]:
    """Return a context manager: in its body ``grad`` of each slice is the slice of the gradient, and may be replaced.

    Args:
        parameters: The parameters, of which some are sliced.
    """
    sliced = [parameter for parameter in parameters if is_sliced(parameter)]
    for parameter in sliced:
        if parameter.grad is not None:
            if parameter.grad.placements != parameter.placements:  # ranks of the mesh have parts of a sum, for example
                parameter.grad = parameter.grad.redistribute(placements=parameter.placements)
            local_of(parameter).grad = waited_for(local_of(parameter.grad))
    try:
        yield
    finally:
        for parameter in sliced:
            local = local_of(parameter)
            gradient, local.grad = local.grad, None
            if gradient is None:
                parameter.grad = None
            elif parameter.grad is None or local_of(parameter.grad) is not gradient:
                parameter.grad = sliced_like(gradient, parameter)


def waited_for(local: Any) -> Any:
    """Return a tensor that a collective has written. DTensor may hold one that a collective still writes."""
    wait = getattr(local, "wait", None)
    return local if wait is None else wait()


def joint_squares(
    parameters: Sequence[torch.Tensor],
    squares_of: Callable[[Sequence[int]], float],
) -> float:
    """Return the sum of the squares of all gradients, over all slices. All ranks of the parameters' meshes call this.

    Args:
        parameters: The parameters, of which some are sliced.
        squares_of: Returns the sum of the squares of the gradients of the parameters with these numbers: of this rank's slices.
    """
    numbers: dict[tuple[Any, tuple[int, ...]], list[int]] = {}
    for number, parameter in enumerate(parameters):
        numbers.setdefault(axes_of(parameter), []).append(number)
    total = 0.0
    for (mesh, axes), some in numbers.items():
        squares = torch.tensor(squares_of(some), dtype=torch.float64)
        for axis in axes:
            torch.distributed.all_reduce(squares, group=mesh.get_group(axis))
        total += float(squares)
    return total


def axes_of(parameter: Any) -> tuple[Any, tuple[int, ...]]:
    """Return the mesh of a parameter, and the axes of it over which the parameter is sliced."""
    if not is_sliced(parameter):
        return None, ()
    return parameter.device_mesh, tuple(
        n for n, placement in enumerate(parameter.placements) if not placement.is_replicate()
    )


State = dict[Any, dict[str, Any]]
"""The type of ``optimizer.state``: for each parameter, its state by name."""


def is_elementwise(value: Any, parameter: torch.Tensor) -> bool:
    """Return whether a value of a parameter's state has a number for each element. A step count, of no dimension, has not."""
    return isinstance(value, torch.Tensor) and value.shape == parameter.shape and value.dim() > 0


def copy_of(value: Any) -> Any:
    """Return a value of a state that changes apart from the given one."""
    return value.clone() if isinstance(value, torch.Tensor) else value


def local_state(state: State) -> State:
    """Return the state of an optimizer with this rank's slices in place of all `DTensor`, as keys and as values."""
    return {
        _local(key): {name: _local(value) for name, value in values.items()} if _local(key) is not key else values
        for key, values in state.items()
    }


def _local(value: Any) -> Any:
    return local_of(value) if isinstance(value, torch.Tensor) else value


def program_state(state: State, parameters: Sequence[torch.Tensor]) -> State:
    """Return the inverse of `local_state`.

    Args:
        state: The state of an optimizer, by parameters and slices of parameters.
        parameters: All parameters of the optimizer.
    """
    whole = {id(local_of(parameter)): parameter for parameter in parameters if is_sliced(parameter)}

    def shown(value: Any, parameter: torch.Tensor) -> Any:
        is_slice = isinstance(value, torch.Tensor) and value.dim() > 0 and value.shape == local_of(parameter).shape
        return sliced_like(value, parameter) if is_slice else value

    return {
        whole.get(id(key), key): (
            {name: shown(value, whole[id(key)]) for name, value in values.items()} if id(key) in whole else values
        )
        for key, values in state.items()
    }


# Whole tensors, as one process has them


def full_tensor(value: Any) -> Any:
    """Return the whole tensor of slices, of which all ranks call this; anything else itself."""
    return value.full_tensor() if isinstance(value, torch.Tensor) and is_sliced(value) else value  # type: ignore[attr-defined]


def cut_like(whole: Any, like: Any, name: str) -> Any:
    """Return a whole tensor, sliced as `like` is, if that is sliced.

    Args:
        whole: A tensor, which all ranks of the mesh have; or anything else, which is returned.
        like: A tensor, sliced or not.
        name: What it is, for the error.

    Raises:
        ArgumentError: The whole tensors have different shapes.
    """
    if not isinstance(like, torch.Tensor) or not is_sliced(like) or is_sliced(whole):
        return whole
    if whole.shape != like.shape:
        raise ArgumentError(f"{name} has the shape {tuple(whole.shape)}, and here {tuple(like.shape)}.")
    from torch.distributed.tensor import distribute_tensor

    mesh, placements = like.device_mesh, like.placements  # type: ignore[attr-defined]
    return distribute_tensor(whole.to(local_of(like).device), mesh, placements, src_data_rank=None)


def full_state_dict(model: torch.nn.Module) -> dict[str, Any]:
    """Return the state of a model with whole tensors, under the names that it had before it was sliced.

    All ranks that hold slices call this. Without slices it is ``model.state_dict()``.
    """
    return {name: full_tensor(value) for name, value in model.state_dict().items()}


def load_full_state_dict(model: torch.nn.Module, state: Mapping[str, Any]) -> None:
    """Load a state with whole tensors, as `full_state_dict` has returned it, into a model that may be sliced.

    Args:
        model: The model, or a stage of one.
        state: The state of the model, or of more than that.

    Raises:
        ArgumentError: A tensor of the model is not in `state`, or has another shape there.
    """
    own = model.state_dict()
    missing = [name for name in own if name not in state]
    if missing:
        raise ArgumentError(
            f"this state lacks {', '.join(map(repr, missing[:3]))} and {len(missing)} in all of the {len(own)} tensors here. A "
            "model in stages takes the state of the whole model, or one of the same stages: each rank's state_dict() has its "
            "own stage only, so save full_state_dict(), or use hvd.checkpoint.save(…), from all ranks of the pipeline axis."
        )
    model.load_state_dict({name: cut_like(state[name], value, name) for name, value in own.items()})
