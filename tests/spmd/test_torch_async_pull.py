"""Values of a push that come while the program goes on: each layer waits for its own."""

from __future__ import annotations

import copy
import io
import threading
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import nn

import hvdlite_torch as hvd
from hvdlite.async_sgd.training.pull import Pull
from hvdlite.async_sgd.worker import Worker
from hvdlite_torch import ArgumentError

MODES: dict[str, dict[str, Any]] = {
    "sync": {"mode": "sync"},
    "ssp": {"mode": "ssp", "staleness": 1},
    "async": {"mode": "async"},
}


class Translator(nn.Module):
    """Its attention reads parameters of a module that it does not call, and its output those of the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(7, 8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.words(x)
        h = h + self.attention(h, h, h)[0]
        return nn.functional.linear(h + self.layers(h), self.words.weight)


def make() -> Translator:
    model = Translator().double()
    generator = torch.Generator().manual_seed(hvd.rank())  # torch's own is shared by ranks that are threads
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(0.3 * torch.randn(p.shape, generator=generator, dtype=p.dtype))
    return model


def train(steps: int, **options: Any) -> nn.Module:
    """Train on batches that depend on the rank and on the number of the step."""
    model = make()
    plain = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer = hvd.AsyncDistributedOptimizer(plain, model, **options)
    for step in range(steps):
        x = torch.randint(7, (3, 5), generator=torch.Generator().manual_seed(10 * step + hvd.rank()))
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    optimizer.finish()
    return model


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hvdlite.async_sgd.deal._CHUNK_BYTES", 64)


@pytest.mark.parametrize("options", [{}, {"servers": 1}, {"push_every": 2}, {"overlap": True}], ids=str)
def test_it_trains_as_without(ranks: Any, options: dict[str, Any]) -> None:
    def check() -> None:
        if options.get("servers") and hvd.size() == 1:
            return
        found = []
        for overlap_pull in (False, True):
            if options.get("servers") and hvd.rank() == hvd.size() - 1:
                model: nn.Module = make()
                plain = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
                with hvd.AsyncDistributedOptimizer(plain, model, mode="sync", overlap_pull=overlap_pull, **options):
                    pass
            else:
                model = train(5, mode="sync", overlap_pull=overlap_pull, **options)
            found.append(model.state_dict())
        for name, value in found[0].items():
            assert torch.equal(value, found[1][name]), name

    ranks(check)


@pytest.mark.parametrize("mode", MODES)
def test_the_servers_change_by_what_was_pushed(ranks: Any, mode: str) -> None:
    """Gradients are whole numbers and the learning rate is 1, so sums are exact. Each rank makes its own number of steps."""

    def check() -> None:
        model = nn.Sequential(*(nn.Linear(9, 9) for _ in range(4))).double()
        for p in model.parameters():
            nn.init.zeros_(p)
        optimizer = hvd.AsyncDistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=1.0), model, overlap_pull=True, **MODES[mode]
        )
        steps = 5 if mode == "sync" else 3 + hvd.rank()
        for step in range(steps):
            for p in model.parameters():
                p.grad = torch.full_like(p, 1.0 + step)
            optimizer.step()
            if step % 2:
                optimizer.wait()
                model(torch.ones(9, dtype=torch.float64))
        optimizer.finish()
        everybody = 1 if mode == "sync" else hvd.size()
        total = sum(sum(range(1, 1 + (5 if mode == "sync" else 3 + rank))) for rank in range(everybody))
        assert all(bool((p == -total).all()) for p in model.parameters())

    ranks(check)


def test_a_layer_waits_for_its_own_values_only(ranks: Any) -> None:
    """The values of the last layer come after the first layer has computed: else this would not end."""
    pull = Worker.pull

    def check() -> None:
        model = nn.Sequential(nn.Linear(9, 9), nn.Linear(9, 9)).double()
        optimizer = hvd.AsyncDistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=1.0), model, mode="sync", servers="sharded", overlap_pull=True
        )
        may_end = threading.Event()
        worker = optimizer._hvdlite_training.worker

        def slow(hint: str, note: Callable[[Iterable[int]], None]) -> None:
            def after_the_first(numbers: Iterable[int]) -> None:
                if max(numbers) > 1:
                    assert may_end.wait(30)
                note(numbers)

            pull(worker, hint, after_the_first)

        worker.pull = slow  # type: ignore[method-assign,assignment]
        old = [p.detach().clone() for p in model.parameters()]
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        optimizer.step()
        model[0](torch.ones(9, dtype=torch.float64))
        new = [torch.equal(p, before - 1.0) for p, before in zip(model.parameters(), old, strict=True)]
        assert new == [True, True, False, False]
        may_end.set()
        optimizer.finish()
        assert all(torch.equal(p, before - 1.0) for p, before in zip(model.parameters(), old, strict=True))

    ranks(check)


@pytest.mark.parametrize("how", ["state_dict", "load_state_dict", "wait"])
def test_what_else_reads_parameters(ranks: Any, how: str) -> None:
    def check() -> None:
        model = nn.Sequential(nn.Linear(9, 9), nn.Linear(9, 9)).double()
        optimizer = hvd.AsyncDistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=1.0), model, mode="sync", overlap_pull=True
        )
        expected = model[1].bias.detach() - 1.0
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        optimizer.step()
        if how == "state_dict":
            assert torch.equal(model.state_dict()["1.bias"], expected)
        elif how == "load_state_dict":
            optimizer.load_state_dict(torch.optim.SGD(model.parameters(), lr=1.0).state_dict())
            assert torch.equal(model[1].bias, expected)
        else:
            optimizer.wait()
            file = io.BytesIO()
            torch.save(model, file)
            file.seek(0)
            for read in (copy.deepcopy(model), torch.load(file, weights_only=False)):
                assert torch.equal(read[1].bias, expected)
                read(torch.ones(9, dtype=torch.float64))
                read.state_dict()
        optimizer.finish()
        assert not model[0]._forward_pre_hooks

    ranks(check)


def test_a_parameter_that_is_read_without_its_module(ranks: Any) -> None:
    """What the first step does is learned, and what comes later is an error, and no wrong value."""

    def check() -> None:
        model = nn.Sequential(nn.Linear(9, 9), nn.Linear(9, 9)).double()
        optimizer = hvd.AsyncDistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=1.0), model, mode="sync", overlap_pull=True
        )
        for _ in range(3):
            optimizer.zero_grad()
            nn.functional.linear(model[0](torch.ones(9, dtype=torch.float64)), model[1].weight).sum().backward()
            optimizer.step()
        with pytest.raises(ArgumentError, match=r"'1.bias' was used without a call of its module while its new value"):
            model[1].bias.sum().backward()
        optimizer.finish()

    ranks(check)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"named_parameters": None}, "overlap_pull=True needs the model"),
        ({"hogwild": True}, "hogwild=True with overlap_pull=True: nothing is pulled"),
    ],
)
def test_arguments(ranks: Any, arguments: dict[str, Any], text: str) -> None:
    def check() -> None:
        model = nn.Linear(2, 2)
        with pytest.raises(ArgumentError, match=text):
            hvd.AsyncDistributedOptimizer(
                torch.optim.SGD(model.parameters(), lr=1.0),
                **{"named_parameters": model, "overlap_pull": True, **arguments},
            )

    ranks(check)


def test_an_error_reaches_all_that_wait() -> None:
    def receive(note: Callable[[Iterable[int]], None]) -> None:
        note([0])
        raise hvd.CommunicationError("the server is gone")

    pull = Pull(range(2), receive)
    pull.wait([0])
    for wait in (lambda: pull.wait([0, 1]), pull.end):
        with pytest.raises(hvd.CommunicationError, match="the server is gone"):
            wait()
