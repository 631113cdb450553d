"""torch's fused step is used where it is the plain one's equal, and nowhere else."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from hvdlite_torch.step import fused
from hvdlite_torch.step.fused import FusedStep

LENGTHS = (1, 67, 4099)
"""What fills a vector register and what does not, and what is shared between threads."""

OFF_AND_ON: dict[type[torch.optim.Optimizer], dict[str, tuple[Any, ...]]] = {
    torch.optim.SGD: {
        "momentum": (0, 0.9),
        "dampening": (0, 0.3),
        "weight_decay": (0, 0.1),
        "nesterov": (False, True),
        "maximize": (False, True),
    },
    torch.optim.Adam: {
        "weight_decay": (0, 0.1),
        "amsgrad": (False, True),
        "maximize": (False, True),
        "decoupled_weight_decay": (False, True),
    },
    torch.optim.AdamW: {"weight_decay": (0, 0.1), "amsgrad": (False, True), "maximize": (False, True)},
    torch.optim.Adagrad: {
        "lr_decay": (0, 0.1),
        "weight_decay": (0, 0.1),
        "initial_accumulator_value": (0, 0.5),
        "maximize": (False, True),
    },
}


def options_of(cls: type[torch.optim.Optimizer]) -> Iterator[dict[str, Any]]:
    switches = OFF_AND_ON[cls]
    for values in itertools.product(*switches.values(), (0.1, torch.tensor(0.1))):
        options = dict(zip((*switches, "lr"), values, strict=True))
        if not (options.get("nesterov") and (options["dampening"] or not options["momentum"])):
            yield options


def numbers(dtype: torch.dtype, seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(length, generator=generator).to(dtype) for length in LENGTHS]


def stepped(
    cls: type[torch.optim.Optimizer], options: dict[str, Any], dtype: torch.dtype, switch: bool
) -> tuple[list[torch.Tensor], bool]:
    """The parameters after some steps, and whether these were fused."""
    parameters = [start.clone().requires_grad_() for start in numbers(dtype, 0)]
    optimizer = cls([{"params": parameters, **options}], lr=1.0)  # type: ignore[call-arg]
    fused_step, was_fused = FusedStep(optimizer), False
    for step in range(1, 5):
        for parameter, gradient in zip(parameters, numbers(dtype, step), strict=True):
            parameter.grad = gradient
        if switch:
            fused_step.switch()
        was_fused = bool(optimizer.param_groups[0]["fused"])
        optimizer.step()
        fused_step.back()
    return [parameter.detach() for parameter in parameters], was_fused


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("cls", fused.FUSED, ids=lambda cls: cls.__name__)
def test_every_option_of_every_optimizer(cls: type[torch.optim.Optimizer], dtype: torch.dtype) -> None:
    for options in options_of(cls):
        expected, _ = stepped(cls, options, dtype, switch=False)
        got, was_fused = stepped(cls, options, dtype, switch=True)
        assert was_fused is (dtype is torch.float32), options
        for start, one, other in zip(numbers(dtype, 0), expected, got, strict=True):
            if was_fused:
                assert (one - other).abs().max() <= 1e-5 * (one - start).abs().max(), options
            else:
                torch.testing.assert_close(other, one, rtol=0, atol=0, equal_nan=True)


def test_one_that_is_wrong_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """As torch 2.13's is for halves: full vectors are left as they are."""
    wrong = torch._fused_sgd_

    def leaves_full_vectors(parameters: list[torch.Tensor], *args: Any, **kwargs: Any) -> None:
        before = [parameter[: len(parameter) // 16 * 16].clone() for parameter in parameters]
        wrong(parameters, *args, **kwargs)
        for parameter, start in zip(parameters, before, strict=True):
            parameter[: len(start)] = start

    monkeypatch.setattr(fused, "_verdicts", {})
    assert stepped(torch.optim.SGD, {"momentum": 0.9}, torch.float32, switch=True)[1]
    monkeypatch.setattr(torch, "_fused_sgd_", leaves_full_vectors)
    fused._verdicts.clear()
    assert not stepped(torch.optim.SGD, {"momentum": 0.9}, torch.float32, switch=True)[1]
    assert stepped(torch.optim.Adam, {}, torch.float32, switch=True)[1]


def test_an_option_that_is_switched_on_later_is_tried_out_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "_verdicts", {})
    group = {"lr": 0.1, "momentum": 0.0, "name": "a program's own"}
    assert fused.agrees(torch.optim.SGD, group)
    assert fused.agrees(torch.optim.SGD, {**group, "lr": 0.05})
    assert len(fused._verdicts) == 1
    assert fused.agrees(torch.optim.SGD, {**group, "momentum": 0.9})
    assert len(fused._verdicts) == 2


def test_trying_out_is_not_seen_by_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "_verdicts", {})
    steps: list[object] = []
    handle = register_optimizer_step_pre_hook(lambda *_: steps.append(1))
    try:
        torch.manual_seed(3)
        expected = torch.rand(4)
        torch.manual_seed(3)
        assert all([fused.agrees(cls, cls([torch.zeros(1)]).param_groups[0]) for cls in fused.FUSED])  # type: ignore[call-arg]
        assert torch.equal(torch.rand(4), expected)
        assert not steps
    finally:
        handle.remove()


STATES: dict[str, Callable[[Any, torch.nn.Parameter], object]] = {
    "deleted": lambda state, parameter: state.pop(parameter),
    "emptied": lambda state, parameter: state[parameter].clear(),
    "none": lambda state, parameter: state[parameter].update(momentum_buffer=None),
    "of another dtype": lambda state, parameter: state[parameter].update(
        momentum_buffer=state[parameter]["momentum_buffer"].double()
    ),
    "in another order": lambda state, parameter: state[parameter].update(
        momentum_buffer=state[parameter]["momentum_buffer"].t().contiguous().t()
    ),
    "all deleted": lambda state, parameter: state.clear(),
}


@pytest.mark.parametrize("what", STATES)
def test_state_that_a_program_has_changed(what: str) -> None:
    ends = []
    for switch in (False, True):
        parameters = [torch.nn.Parameter(torch.ones(9, 8)) for _ in range(2)]
        optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
        fused_step = FusedStep(optimizer)
        for step in range(6):
            if step == 3:
                STATES[what](optimizer.state, parameters[0])
            for number, parameter in enumerate(parameters):
                parameter.grad = torch.arange(72.0).view(9, 8) * (number + step)
            if switch:
                fused_step.switch()
            optimizer.step()
            fused_step.back()
        ends.append(torch.stack([parameter.detach() for parameter in parameters]))
    torch.testing.assert_close(*ends)


def test_state_of_another_shape_is_for_torch_to_refuse() -> None:
    """The fused step would write beyond its end."""
    parameter = torch.nn.Parameter(torch.ones(5000))
    optimizer = torch.optim.Adam([parameter])
    fused_step = FusedStep(optimizer)
    parameter.grad = torch.ones(5000)
    fused_step.switch()
    optimizer.step()
    fused_step.back()
    optimizer.state[parameter]["exp_avg"] = torch.zeros(10)
    fused_step.switch()
    with pytest.raises(RuntimeError, match="size"):
        optimizer.step()
