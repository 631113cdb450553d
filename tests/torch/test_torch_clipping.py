"""A program that clips gradients before they are combined is told so, once; if they never are, that is an error."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn.utils import clip_grad_norm_

import hvdlite_torch as hvd
from hvdlite.config import Config
from hvdlite.errors import ArgumentError
from hvdlite.testing import on_ranks

CLIP: dict[str, Callable[[Any], object]] = {
    "by its name": lambda parameters: clip_grad_norm_(parameters, 1.0),
    "by its place": lambda parameters: torch.nn.utils.clip_grad_norm_(iter(parameters), max_norm=1.0),
    "one": lambda parameters: clip_grad_norm_(parameters[0], 1.0),
    "values": lambda parameters: torch.nn.utils.clip_grad_value_(parameters, 0.5),
}


def said(n: int, program: Callable[..., None], **options: Any) -> list[str]:
    """What the program is told about clipping, on n ranks."""

    def run() -> None:
        parameters = [torch.nn.Parameter(torch.full((3,), 1.0)) for _ in range(2)]
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(parameters, lr=1.0), **options)
        for _ in range(3):
            optimizer.zero_grad()
            (sum(parameter.sum() for parameter in parameters) * (hvd.rank() + 1.0)).backward()
            program(parameters, optimizer)

    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        on_ranks(n, run, config=Config(advice=True))
    return [str(each.message) for each in found if "clip" in str(each.message)]


@pytest.mark.parametrize("how", CLIP)
def test_clipping_before_the_exchange(how: str) -> None:
    def program(parameters: Any, optimizer: Any) -> None:
        CLIP[how](parameters)
        optimizer.step()

    (text,) = said(2, program)
    assert (
        "clip_grad_value_() clips this" if how == "values" else "clip_grad_norm_() clips by the norm of this"
    ) in text
    assert "max_grad_norm" in text
    assert "synchronize()" in text


@pytest.mark.parametrize("how", CLIP)
@pytest.mark.parametrize("advice", [True, False])
def test_clipping_with_a_sharded_optimizer(how: str, advice: bool) -> None:
    def run() -> None:
        parameters = [torch.nn.Parameter(torch.full((3,), 1.0)) for _ in range(2)]
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(parameters, lr=1.0), shard=True)
        optimizer.zero_grad()
        sum(parameter.sum() for parameter in parameters).backward()
        with pytest.raises(
            ArgumentError, match=r"clip_grad_\w+\(\) has no meaning with shard=True.* pass max_grad_norm"
        ):
            CLIP[how](parameters)

    on_ranks(2, run, config=Config(advice=advice))


def test_clipping_of_combined_gradients() -> None:
    def program(parameters: Any, optimizer: Any) -> None:
        optimizer.synchronize()
        clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        norm = torch.stack([parameter.grad.norm() for parameter in parameters]).norm()
        assert abs(float(norm) - 1.0) < 1e-5

    assert not said(2, program)


def test_a_norm_with_gradients_that_nobody_combines() -> None:
    """One process clips by the norm of all. Here each rank would clip by another one."""
    other = torch.nn.Parameter(torch.ones(3))

    def program(parameters: Any, optimizer: Any) -> None:
        optimizer.synchronize()
        clip_grad_norm_([*parameters, other], 1.0)
        optimizer.step()

    assert not said(2, program)  # it has no gradient
    other.grad = torch.ones(3)
    (text,) = said(2, program)
    assert (
        "clip_grad_norm_() counts 1 gradients that no DistributedOptimizer combines, such as one of shape (3,)" in text
    )


def test_a_norm_over_two_optimizers() -> None:
    def run() -> None:
        parameters = [torch.nn.Parameter(torch.full((3,), 1.0)) for _ in range(3)]
        parameters[2].requires_grad_(False).grad = torch.ones(3)  # frozen, with its last combined gradient
        optimizers = [
            hvd.DistributedOptimizer(torch.optim.SGD(own, lr=1.0)) for own in (parameters[:1], parameters[1:])
        ]
        (sum(parameter.sum() for parameter in parameters) * (hvd.rank() + 1.0)).backward()
        for optimizer in optimizers:
            optimizer.synchronize()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            clip_grad_norm_(parameters, 1.0)

    on_ranks(2, run, config=Config(advice=True))


def test_clipping_by_a_hook_of_the_step() -> None:
    def program(parameters: Any, optimizer: Any) -> None:
        handle = optimizer.register_step_pre_hook(lambda *_: clip_grad_norm_(parameters, 1.0) and None)
        optimizer.step()
        handle.remove()

    assert not said(2, program)


def test_clipping_that_is_nobodys_business() -> None:
    other = torch.nn.Parameter(torch.ones(3))

    def program(parameters: Any, optimizer: Any) -> None:
        clip_grad_norm_([other], 1.0)
        optimizer.step()

    assert not said(2, program)
    assert not said(2, program, max_grad_norm=0.1)
    assert not said(1, lambda parameters, optimizer: CLIP["by its name"](parameters))
    assert not said(2, lambda parameters, optimizer: CLIP["by its name"](parameters), op=hvd.Adasum)
