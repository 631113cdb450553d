"""What a model does beyond its layers is done by its stages too, or refused: its own forward, hooks, modes, tied weights."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import hvdlite_torch as hvd
from hvdlite.errors import ArgumentError
from tests.conftest import UNDER_MPI

processes = pytest.mark.skipif(
    not UNDER_MPI, reason="torch.distributed is one for a process, so its ranks cannot be threads: mpirun"
)
TOLERANCE = 1e-12


@pytest.fixture(scope="module", autouse=True)
def process_group() -> Iterator[None]:
    if UNDER_MPI:
        hvd.init()
        torch.set_default_dtype(torch.float64)
    yield
    if UNDER_MPI:
        torch.set_default_dtype(torch.float32)
        hvd.barrier()
        if dist.is_initialized():
            dist.destroy_process_group()


def numbers(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


def mse(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return nn.functional.mse_loss(output, target)


def layers(count: int = 6) -> list[nn.Module]:
    torch.manual_seed(0)
    return [layer for _ in range(count) for layer in (nn.Linear(4, 4), nn.Tanh())]


def cuts(prefix: str = "", step: int = 2) -> list[str]:
    """The names of the layers with which the stages but the first begin."""
    return [f"{prefix}{step * number}" for number in range(1, hvd.size())]


def assert_trains_alike(model: nn.Module, x: Any, y: Any, loss: Callable[..., Any] = mse, **options: Any) -> None:
    """Train a model in stages and in one process, and compare losses, outputs and states."""
    alone, microbatches = copy.deepcopy(model), options.pop("microbatches", 2)
    pipeline = hvd.Pipeline(model, loss=loss, microbatches=microbatches, **options)
    ours, plain = (torch.optim.SGD(each.parameters(), lr=0.5, momentum=0.9) for each in (pipeline, alone))
    for _ in range(3):
        found = pipeline.step(x, y, ours)
        plain.zero_grad()
        expected = loss(alone(x), y)
        expected.backward()
        plain.step()
        assert found.item() == pytest.approx(expected.item(), abs=TOLERANCE)
    state = pipeline.full_state_dict()
    assert state.keys() == alone.state_dict().keys()
    for name, value in alone.state_dict().items():
        torch.testing.assert_close(state[name], value, rtol=0, atol=TOLERANCE)
    torch.testing.assert_close(pipeline.eval().predict(x), alone.eval()(x), rtol=0, atol=TOLERANCE)


class Scaled(nn.Sequential):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 10 * super().forward(x - 0.5)


class Paired(nn.Module):
    """It returns a tuple, and takes one as one argument, as layers of an nn.Sequential do."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, pair: Any, scale: float = 1.0) -> Any:
        first, second = pair if isinstance(pair, tuple) else (pair, pair)
        return scale * self.linear(first), second


class First(nn.Module):
    def forward(self, pair: Any) -> torch.Tensor:
        return pair[0] + pair[1]


@processes
def test_a_sequential_with_a_forward_of_its_own() -> None:
    x, y = numbers(8, 4), torch.zeros(8, 4)
    assert_trains_alike(Scaled(*layers()), x, y, cuts=cuts(), example=x[:4])
    with pytest.raises(ArgumentError, match="Scaled is no plain nn.Sequential.*give `example`"):
        hvd.Pipeline(Scaled(*layers()), loss=mse, cuts=cuts())


@processes
def test_layers_pass_on_tuples_as_an_nn_sequential_does() -> None:
    torch.manual_seed(0)
    x, y = numbers(8, 4), torch.zeros(8, 4)
    assert_trains_alike(nn.Sequential(*(Paired() for _ in range(6)), First()), x, y, cuts=cuts())


@processes
def test_hooks() -> None:
    x, y = numbers(8, 4), torch.zeros(8, 4)

    def ten_times(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        return 10 * output

    model = nn.Sequential(*layers())
    for layer in (model[0], model[-1]):
        layer.register_forward_hook(ten_times)
    assert_trains_alike(model, x, y, cuts=cuts())  # hooks of layers stay with them
    kinds = "forward_pre_hook", "forward_hook", "full_backward_pre_hook", "full_backward_hook"
    for kind, told in zip(kinds, ("forward pre", "forward ", "backward pre", "backward "), strict=True):
        model = nn.Sequential(*layers())
        getattr(model, f"register_{kind}")(ten_times)
        with pytest.raises(ArgumentError, match=f"the Sequential itself has hooks .{told}-?hook .*ten_times"):
            hvd.Pipeline(model, loss=mse, cuts=cuts())
    stack = nn.LSTM(4, 4, num_layers=4, batch_first=True)
    recurrent = nn.Sequential(stack, nn.Linear(4, 4))
    options: dict[str, Any] = {"loss": mse, "chunks": 2, "cuts": cuts("0.", 1)}
    hvd.Wavefront(recurrent, **options)
    with pytest.raises(ArgumentError, match=r"got a Recurrent, which does more than call its children"):
        hvd.Wavefront(type("Recurrent", (nn.Sequential,), {"forward": First.forward})(*recurrent), **options)
    hook = recurrent.register_forward_hook(ten_times)
    with pytest.raises(ArgumentError, match="the Sequential itself has hooks"):
        hvd.Wavefront(recurrent, **options)
    hook.remove()
    stack.register_forward_hook(ten_times)
    with pytest.raises(ArgumentError, match="the layer '0' has hooks .forward hook .*ten_times"):
        hvd.Wavefront(recurrent, **options)


class Residual(nn.Module):
    """No Sequential: values cross several stages, an integer too, and layers do different things in the two modes."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inlet = nn.Linear(4, 4)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.ReLU(inplace=True), nn.Linear(4, 4)) for _ in range(2 * hvd.size())
        )
        self.dropout = dropout

    def forward(self, x: torch.Tensor, *, scale: torch.Tensor | None = None) -> torch.Tensor:
        first = x = self.inlet(x)
        for block in self.blocks:
            x = nn.functional.dropout(block(x), self.dropout, self.training)
        return x + first if scale is None else x * scale + first


@processes
def test_a_recorded_model_in_both_modes() -> None:
    x, y = numbers(8, 4), torch.zeros(8, 4)
    assert_trains_alike(Residual(), x, y, cuts=cuts("blocks."), example=x[:4])
    pipeline = hvd.Pipeline(Residual(1.0), loss=mse, microbatches=2, cuts=cuts("blocks."), example=x[:4])
    alone = Residual(1.0)
    outputs = [pipeline.train(mode).predict(x) for mode in (True, False, True)]  # all is dropped in training
    assert [torch.equal(output, outputs[0]) for output in outputs] == [True, False, True]
    for mode, output in zip((True, False), outputs, strict=False):
        torch.testing.assert_close(output, alone.train(mode)(x), rtol=0, atol=TOLERANCE)
