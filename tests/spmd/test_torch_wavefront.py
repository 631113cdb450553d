"""A wavefront trains as one process does with whole sequences; wrong models and arguments are named."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import hvdlite_torch as hvd
from hvdlite.errors import ArgumentError
from tests.support.processes import process_group as process_group
from tests.support.processes import processes

TOLERANCE = 1e-12
SAMPLES, TIME_STEPS, LETTERS, BATCHES = 3, 13, 7, 4


def letters() -> tuple[torch.Tensor, torch.Tensor]:
    text = torch.randint(LETTERS, (BATCHES, SAMPLES, TIME_STEPS + 1), generator=torch.Generator().manual_seed(1))
    return text[:, :, :-1], text[:, :, 1:]


def lstm(**options: Any) -> nn.Sequential:
    torch.manual_seed(0)
    stack = nn.LSTM(5, 6, num_layers=4, batch_first=True, dtype=torch.float64, **options)
    width = stack.proj_size or 6
    return nn.Sequential(
        nn.Embedding(LETTERS, 5, dtype=torch.float64), stack, nn.Linear(width, LETTERS, dtype=torch.float64)
    )


def gru(kind: type[nn.RNNBase] = nn.GRU, **options: Any) -> nn.Sequential:
    """Time steps come first, and the layers are children of the model, not of a stack."""
    torch.manual_seed(0)
    layers: list[nn.Module] = [nn.Embedding(LETTERS, 6, dtype=torch.float64)]
    for _ in range(3):
        layers += [kind(6, 6, dtype=torch.float64, **options), nn.Tanh(), nn.LayerNorm(6, dtype=torch.float64)]
    return nn.Sequential(*layers, nn.Linear(6, LETTERS, dtype=torch.float64))


def output_of(model: nn.Sequential, x: torch.Tensor) -> torch.Tensor:
    """What the model computes from whole sequences in one process."""
    for layer in model:
        x = layer(x)[0] if isinstance(layer, nn.RNNBase) else layer(x)
    return x


def loss_of(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())


def train_alone(model: nn.Sequential, x: torch.Tensor, y: torch.Tensor) -> list[float]:
    optimizer, losses = torch.optim.Adam(model.parameters(), lr=0.01), []
    for inputs, targets in zip(x, y, strict=True):
        optimizer.zero_grad()
        loss = loss_of(output_of(model, inputs), targets)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def assert_same(found: dict[str, torch.Tensor], model: nn.Sequential) -> None:
    expected = model.state_dict()
    assert found.keys() == expected.keys()
    assert max((found[name] - value).abs().max().item() for name, value in expected.items()) <= TOLERANCE


MODELS: dict[str, Callable[[], nn.Sequential]] = {
    "LSTM": lstm,
    "LSTM, projections, no bias": lambda: lstm(proj_size=4, bias=False),
    "GRU": gru,
    "RNN, ReLU": lambda: gru(nn.RNN, nonlinearity="relu"),
}
CUTS = {
    "LSTM": ["1.1", "1.2", "1.3"],
    "GRU": ["3", "4", "9"],
}


@processes
@pytest.mark.parametrize("chunks", [1, 4, 13])
@pytest.mark.parametrize("name", MODELS)
def test_a_wavefront_trains_as_one_process_does(name: str, chunks: int) -> None:
    make = MODELS[name]
    is_first = "LSTM" in name
    x, y = letters() if is_first else (each.transpose(1, 2).contiguous() for each in letters())
    cuts = CUTS["LSTM" if is_first else "GRU"][4 - hvd.size() :]
    wavefront = hvd.Wavefront(make(), loss=loss_of, chunks=chunks, cuts=cuts)
    optimizer = torch.optim.Adam(wavefront.parameters(), lr=0.01)
    alone = make()
    expected = train_alone(alone, x, y)
    found = [wavefront.step(inputs, targets, optimizer).item() for inputs, targets in zip(x, y, strict=True)]
    assert found == pytest.approx(expected, abs=TOLERANCE)
    assert_same(wavefront.full_state_dict(), alone)
    torch.testing.assert_close(wavefront.predict(x[0]), output_of(alone, x[0]), rtol=0, atol=TOLERANCE)
    assert f"{hvd.size()} stages, {chunks} chunks, wavefront: the ranks waited for" in wavefront.report()


@processes
def test_it_measures_and_has_dropout_only_while_it_trains() -> None:
    x, _ = letters()
    wavefront = hvd.Wavefront(lstm(dropout=0.5), loss=loss_of, chunks=2, example=x[0])
    alone = lstm(dropout=0.5)
    assert_same(wavefront.full_state_dict(), alone)
    torch.testing.assert_close(wavefront.eval().predict(x[0]), output_of(alone.eval(), x[0]), rtol=0, atol=TOLERANCE)
    assert not torch.equal(wavefront.train().predict(x[0]), wavefront.predict(x[0]))
    wavefront.load_state_dict({name: value + 1 for name, value in alone.state_dict().items()})
    for name, value in wavefront.state_dict().items():
        assert torch.equal(value, alone.state_dict()[name] + 1)


@processes
def test_layers_that_are_not_trained() -> None:
    """Gradients go through them, or end there, as in one process."""
    x, y = letters()
    for frozen in (("0", "1.weight_ih_l0"), ("1", "2")):
        models = lstm(), lstm()
        for model in models:
            for name, parameter in model.named_parameters():
                parameter.requires_grad_(not name.startswith(frozen))
        wavefront = hvd.Wavefront(models[0], loss=loss_of, chunks=3, cuts=CUTS["LSTM"][: hvd.size() - 1])
        loss_of(output_of(models[1], x[0]), y[0]).backward()
        wavefront.step(x[0], y[0])
        expected = dict(models[1].named_parameters())
        for name, parameter in wavefront.named_parameters():
            gradient = expected[name].grad
            if gradient is None:
                assert parameter.grad is None
            else:
                torch.testing.assert_close(parameter.grad, gradient, rtol=0, atol=TOLERANCE)


@processes
def test_wavefronts_side_by_side() -> None:
    side_by_side = 2 if hvd.size() % 2 == 0 else hvd.size()
    x, y = letters()
    x, y = (torch.cat([each.roll(number, 0) for number in range(side_by_side)], 1) for each in (x, y))
    grid = hvd.ProcessGrid(dp=side_by_side, pp=-1)
    cuts = CUTS["LSTM"][: grid["pp"].size() - 1]
    wavefront = hvd.Wavefront(lstm(), grid["pp"], loss=loss_of, chunks=4, cuts=cuts)
    optimizer = torch.optim.Adam(wavefront.parameters(), lr=0.01)
    optimizer = hvd.DistributedOptimizer(optimizer, wavefront.named_parameters(), process_set=grid["dp"])
    place = grid.place["dp"]
    for inputs, targets in zip(x, y, strict=True):
        wavefront.step(inputs.chunk(side_by_side)[place], targets.chunk(side_by_side)[place], optimizer)
    alone = lstm()
    train_alone(alone, x, y)
    assert_same(wavefront.full_state_dict(), alone)


class Mixes(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.flip(1)


class Doubles(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * x


LSTM = nn.LSTM(5, 5, batch_first=True)
WRONG: dict[str, tuple[nn.Module, dict[str, Any]]] = {
    "an nn.Sequential, whose children are cut; got a LSTM": (LSTM, {}),
    "layer '1' is a Mixes, which may compute a time step from others.*stepwise=\\[Mixes\\]": (
        nn.Sequential(LSTM, Mixes()),
        {},
    ),
    "layer '1' is a Conv1d": (nn.Sequential(LSTM, nn.Conv1d(5, 5, 3)), {}),
    "layer '1' is a LayerNorm": (nn.Sequential(LSTM, nn.LayerNorm((9, 5))), {}),
    "layer '1' is a Sequential": (nn.Sequential(LSTM, nn.Sequential(nn.Linear(5, 5), Mixes())), {}),
    "layer '0' is bidirectional": (nn.Sequential(nn.LSTM(5, 5, bidirectional=True)), {}),
    "has no nn.LSTM, nn.GRU or nn.RNN.*use hvd.Pipeline": (nn.Sequential(nn.Linear(5, 5)), {}),
    "batch_first differs": (nn.Sequential(LSTM, nn.GRU(5, 5)), {}),
    "chunks=0: expected a whole number from 1 on": (nn.Sequential(LSTM), {"chunks": 0}),
    "the layers are 0, 1": (nn.Sequential(LSTM, Doubles()), {"stepwise": [Doubles], "cuts": ["7"] * 3}),
}


@processes
@pytest.mark.parametrize("message", WRONG)
def test_wrong_models(message: str) -> None:
    model, options = WRONG[message]
    with pytest.raises(ArgumentError, match=message):
        hvd.Wavefront(model, **{"loss": loss_of, "cuts": [], **options})


@processes
def test_wrong_batches() -> None:
    x, y = letters()
    wavefront = hvd.Wavefront(lstm(), loss=loss_of, chunks=5, cuts=CUTS["LSTM"][: hvd.size() - 1])
    with pytest.raises(ArgumentError, match=r"x: 4 time steps cannot be cut into 5 chunks \(shape \(3, 4\)"):
        wavefront.step(x[0, :, :4], y[0, :, :4])
    with pytest.raises(ArgumentError, match=r"x has the shape \(3, 13\), and y \(3, 12\)"):
        wavefront.step(x[0], y[0, :, 1:])
    with pytest.raises(
        ArgumentError, match=r"y: expected a tensor of the shape \(samples, time steps, ...\); got \(3,\)"
    ):
        wavefront.step(x[0], y[0, :, 0])
