"""`Tied`: parameters that stages on several ranks have, such as an embedding whose weight the output layer uses too."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import nn

from hvdlite.api import world
from hvdlite.comm.ordered.calls import CollectiveCall
from hvdlite.comm.ordered.communicator import Communicator
from hvdlite.errors import ArgumentError, HvdliteError, ranks_text
from hvdlite.protocols import Array, ReduceOp
from hvdlite.ranks.process_set import ProcessSet
from hvdlite_torch.tensors.sliced import is_sliced

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_EXACT = (torch.float32, torch.float64, torch.complex64, torch.complex128)


class Shared(NamedTuple):
    """A parameter that several stages have.

    Attributes:
        name: Its first name in the model.
        parameter: The parameter.
        stages: The numbers of the stages.
    """

    name: str
    parameter: nn.Parameter
    stages: Sequence[int]


def shared_parameters(modules: Sequence[nn.Module]) -> list[Shared]:
    """Return the parameters that several stages have.

    Args:
        modules: The stages of all ranks.
    """
    found: dict[int, tuple[str, nn.Parameter, list[int]]] = {}
    for number, module in enumerate(modules):
        for name, parameter in module.named_parameters():
            found.setdefault(id(parameter), (name, parameter, []))[2].append(number)
    return [Shared(*each) for each in found.values() if len(each[2]) > 1]


class SharedBuffers:
    """The buffers that several stages have, such as those of one BatchNorm that is there twice. Nobody joins their changes.

    Args:
        modules: The stages of all ranks.
        own: The numbers of this rank's stages.
    """

    def __init__(self, modules: Sequence[nn.Module], own: Iterable[int]) -> None:
        stages: dict[int, list[int]] = {}
        for number, module in enumerate(modules):
            for buffer in module.buffers():
                stages.setdefault(id(buffer), []).append(number)
        self._places = {
            (name, modules[number]): stages[id(buffer)]
            for number in own
            for name, buffer in modules[number].named_buffers()
            if len(stages[id(buffer)]) > 1
        }

    @contextlib.contextmanager
    def unchanged(self) -> Iterator[None]:
        """Return a context manager, after whose body the buffers must be as before.

        Raises:
            ArgumentError: They are not. Then they are as they were.
        """
        before = {place: place[1].get_buffer(place[0]) for place in self._places}
        values = {place: buffer.clone() for place, buffer in before.items()}
        yield
        changed = []
        for (name, module), buffer in before.items():
            value = values[name, module]
            if module.get_buffer(name) is not buffer or _digest(buffer) != _digest(value):
                changed.append((name, module))
                path, _, last = name.rpartition(".")
                setattr(module.get_submodule(path), last, buffer)
                with torch.no_grad():
                    buffer.copy_(value)
        for place in changed:
            raise differing(place[0], self._places[place])


def differing(name: str, stages: Sequence[int]) -> ArgumentError:
    """Return the error for what the forward pass of several stages changes."""
    return ArgumentError(
        f"the stages {list(stages)} use {name}, and the forward pass changes it, so it would not be the same for both. Cut so "
        "that the layers which share it are in one stage."
    )


class Tied:
    """The parameters that several ranks of a pipeline have. Each has a copy, and gets the sum of the gradients of all copies.

    That is the gradient of the parameter in one process. Sums have the same bits on all ranks, so their optimizers step all
    copies alike.

    Args:
        shared: The parameters that several stages have. All ranks of the pipeline give the same.
        process_set: The ranks of the pipeline; stage s is on rank s modulo their number.
        own: The place of this rank among them.

    Attributes:
        copies: The parameters of this rank that are counted by another one, in norms of the whole model.
    """

    def __init__(self, shared: Sequence[Shared], process_set: ProcessSet, own: int) -> None:
        if any(is_sliced(each.parameter) for each in shared):
            raise ArgumentError(
                f"the parameter {next(each.name for each in shared if is_sliced(each.parameter))} is tied over stages and "
                "sliced. Leave it out of the plan of slices."
            )
        members = list(process_set.members)
        groups: dict[tuple[int, ...], list[Shared]] = {}
        for each in shared:
            places = tuple(sorted({stage % len(members) for stage in each.stages}))
            if len(places) > 1:  # also one that is frozen: a program may train it later
                groups.setdefault(places, []).append(each)
        self._groups: list[tuple[Communicator, Mapping[str, nn.Parameter]]] = []
        self.copies: list[nn.Parameter] = []
        for places, some in groups.items():
            if own in places:
                ranks = sorted(members[place] for place in places)
                communicator = world("Pipeline()").communicators.new(ranks, f"the tied weights of {ranks_text(ranks)}")
                self._groups.append((communicator, {each.name: each.parameter for each in some}))
                self.copies += [each.parameter for each in some if own != places[0]]

    def check(self) -> None:
        """Check that the copies are still equal. All ranks of the pipeline call this.

        Raises:
            HvdliteError: They are not, on all ranks that have them.
        """
        apart = []
        for communicator, parameters in self._groups:  # all of them: a rank of another group waits for this one
            own = np.array([_digest(parameter) for parameter in parameters.values()], np.int64)
            most = np.concatenate([own, -own])
            _reduce(communicator, most, ReduceOp.MAX)
            highest, lowest = most[: len(own)], -most[len(own) :]
            apart += [
                (name, communicator) for name, high, low in zip(parameters, highest, lowest, strict=True) if high != low
            ]
        for name, communicator in apart:
            raise HvdliteError(
                f"the parameter {name} is tied over stages on {ranks_text(list(communicator.members.ranks))}, and its "
                "copies differ. Change it on all of these ranks alike: load states on all of them, and use the same "
                "optimizer with the same options."
            )

    def add_up(self) -> None:
        """Give all copies the sum of their gradients. All ranks of the pipeline call this, after the backward pass."""
        for communicator, parameters in self._groups:
            has = np.array([parameter.grad is not None for parameter in parameters.values()], np.int64)
            _reduce(communicator, has, ReduceOp.MAX)
            for parameter, anybody in zip(parameters.values(), has, strict=True):
                if anybody:
                    parameter.grad = _total(communicator, parameter)


def _total(communicator: Communicator, parameter: nn.Parameter) -> torch.Tensor:
    gradient = parameter.grad
    if gradient is None:
        gradient = torch.zeros_like(parameter)
    elif gradient.layout is not torch.strided:
        gradient = gradient.to_dense()
    exact = gradient.detach().to("cpu", gradient.dtype if gradient.dtype in _EXACT else torch.float32)
    exact = exact.clone(memory_format=torch.contiguous_format)
    flat = (torch.view_as_real(exact) if exact.is_complex() else exact).view(-1)
    _reduce(communicator, flat.numpy(), ReduceOp.SUM)
    return exact.to(gradient.device, gradient.dtype)


def _reduce(communicator: Communicator, data: Array, op: ReduceOp) -> None:
    text = f"tied weights({data.dtype}[{data.size}], {op.name})"
    communicator.run(CollectiveCall(text, lambda collectives: collectives.allreduce(data, op)))


def _digest(parameter: torch.Tensor) -> int:
    """Return a number that tells different bits apart, but for rare cases."""
    data = parameter.detach().contiguous()
    data = torch.view_as_real(data) if data.is_complex() else data
    return int(data.view(_BITS[data.element_size()]).sum(dtype=torch.int64)) % 2**62
