"""Optimizers whose gradients travel in few bytes: ranks stay equal, state is saved, and what does not fit together says so."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import hvdlite_torch as hvd
from hvdlite.errors import ArgumentError, MismatchError

Ranks = Callable[..., list[Any]]
ROWS, STEPS = 12, 6
MAKES: dict[str, Callable[[], Any]] = {
    "powersgd": lambda: hvd.Compression.powersgd(rank=2),
    "topk": lambda: hvd.Compression.topk(0.1, smallest=20),
}
both = pytest.mark.parametrize("make", MAKES.values(), ids=list(MAKES))


def model_of() -> nn.Sequential:
    model = nn.Sequential(nn.Linear(20, 24), nn.Tanh(), nn.Linear(24, 18), nn.Tanh(), nn.Linear(18, 1))
    chance = torch.Generator().manual_seed(0)  # ranks that are threads share torch's own
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.3 * torch.randn(parameter.shape, generator=chance))
    return model


def batch(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    chance = torch.Generator().manual_seed(100 * step + rank)
    x = torch.randn(ROWS, 20, generator=chance)
    return x, x.sum(1, keepdim=True).sin()


def adam(model: nn.Module, **options: Any) -> Any:
    return hvd.DistributedOptimizer(torch.optim.Adam(model.parameters(), lr=0.01), model.named_parameters(), **options)


def train(model: nn.Module, optimizer: Any, steps: range, passes: int = 1) -> None:
    for step in steps:
        optimizer.zero_grad()
        for part in range(passes):
            x, y = (each.chunk(passes)[part] for each in batch(step, hvd.rank()))
            (nn.functional.mse_loss(model(x), y) / passes).backward()
        optimizer.step()


def weights(model: nn.Module) -> torch.Tensor:
    return nn.utils.parameters_to_vector(model.parameters()).detach().clone()


@both
def test_ranks_stay_equal_and_passes_add_up(ranks: Ranks, make: Callable[[], Any]) -> None:
    def check() -> None:
        found = []
        for passes in (1, 3):
            model = model_of()
            train(model, adam(model, compression=make()), range(STEPS), passes)
            hvd.assert_in_sync(model)
            found.append(weights(model))
        torch.testing.assert_close(found[0], found[1], atol=1e-5, rtol=0)
        plain = model_of()
        train(plain, adam(plain), range(STEPS))
        assert not torch.equal(weights(plain), found[0])  # something was compressed

    ranks(check)


@both
def test_small_parameters_are_trained_as_ever(ranks: Ranks, make: Callable[[], Any]) -> None:
    def check() -> None:
        models = [nn.Linear(3, 2), nn.Linear(3, 2)]
        models[1].load_state_dict(models[0].state_dict())
        hvd.broadcast_parameters(models[0], 0)
        hvd.broadcast_parameters(models[1], 0)
        optimizers = adam(models[0], compression=make()), adam(models[1])
        for step in range(STEPS):
            for model, optimizer in zip(models, optimizers, strict=True):
                optimizer.zero_grad()
                model(batch(step, hvd.rank())[0][:, :3]).square().mean().backward()
                optimizer.step()
        torch.testing.assert_close(weights(models[0]), weights(models[1]))

    ranks(check)


@both
def test_training_goes_on_from_a_checkpoint(ranks: Ranks, make: Callable[[], Any]) -> None:
    def check() -> None:
        whole = model_of()
        train(whole, adam(whole, compression=make()), range(STEPS))
        model = model_of()
        optimizer = adam(model, compression=make())
        train(model, optimizer, range(STEPS // 2))
        file = io.BytesIO()
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
        file.seek(0)
        saved = torch.load(file)  # with weights_only, the default of torch
        fresh = nn.Sequential(*model_of())
        again = adam(fresh, compression=make())
        fresh.load_state_dict(saved["model"])
        again.load_state_dict(saved["optimizer"])
        train(fresh, again, range(STEPS // 2, STEPS))
        assert torch.equal(weights(fresh), weights(whole))

    ranks(check)


@pytest.mark.ranks(at_least=2)
def test_a_state_that_only_one_rank_has_loaded(ranks: Ranks) -> None:
    def check() -> None:
        model = model_of()
        optimizer = adam(model, compression=hvd.Compression.powersgd(2))
        train(model, optimizer, range(2))
        state = optimizer.state_dict()
        train(model, optimizer, range(2, 4))
        if hvd.rank() == 0:
            optimizer.load_state_dict(state)
        with pytest.raises(MismatchError, match=r"different states.*broadcast_optimizer_state"):
            train(model, optimizer, range(4, 5))
        hvd.broadcast_optimizer_state(optimizer, 0)
        hvd.broadcast_parameters(model, 0)
        train(model, optimizer, range(4, 6))
        hvd.assert_in_sync(model)

    ranks(check)


@both
def test_parameters_that_are_frozen_later(ranks: Ranks, make: Callable[[], Any]) -> None:
    """What is left to send belongs to its parameter, although the numbers of parameters change."""

    def check() -> None:
        model = model_of()
        optimizer = adam(model, compression=make())
        train(model, optimizer, range(2))
        before = optimizer.state_dict()["aggregator"]["errors"]
        model[0].requires_grad_(False)
        model[0].weight.grad = model[0].bias.grad = None
        seen: list[dict[int, Any]] = []
        aggregator = optimizer._hvdlite_aggregator
        aggregate = aggregator.aggregate

        def note(*given: Any) -> None:
            seen.append(aggregator.state_dict()["errors"])
            aggregate(*given)

        aggregator.aggregate = note
        train(model, optimizer, range(2, 3))
        kept = {number - 2: error for number, error in before.items() if number >= 2}
        assert seen[0].keys() == kept.keys()
        for number, error in kept.items():
            torch.testing.assert_close(torch.from_numpy(seen[0][number]), error)
        hvd.assert_in_sync(model)

    ranks(check)


@pytest.mark.ranks(at_least=2)
@both
def test_ranks_with_more_or_less_data(ranks: Ranks, make: Callable[[], Any]) -> None:
    def check() -> None:
        model = model_of()
        optimizer = adam(model, compression=make())
        train(model, optimizer, range(2 + hvd.rank()))
        last = hvd.join()
        assert last == hvd.size() - 1
        hvd.assert_in_sync(model)

    ranks(check)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"shard": True}, r"shard=True and aggregator=powersgd\(rank=4.* do not go together"),
        ({"overlap": True}, "overlap=True and aggregator=powersgd"),
        ({"op": hvd.Sum}, "op=.* and aggregator=powersgd"),
        ({"aggregator": hvd.Compression.topk(0.1)}, r"compression=powersgd.* and aggregator= both combine gradients"),
    ],
)
def test_what_does_not_go_together(ranks: Ranks, options: dict[str, Any], message: str) -> None:
    def check() -> None:
        with pytest.raises(ArgumentError, match=message):
            adam(model_of(), compression=hvd.Compression.powersgd(), **options)
        with pytest.raises(ArgumentError, match=r"compression=TopK is a class: make one for this optimizer"):
            adam(model_of(), compression=hvd.Compression.topk)
        with pytest.raises(ArgumentError, match=r"expected hvd.Compression.none, fp16 or bf16"):
            hvd.allreduce(torch.ones(3), compression=hvd.Compression.topk(0.1))

    ranks(check)


@pytest.mark.ranks(at_least=2)
def test_ranks_with_different_settings(ranks: Ranks) -> None:
    def check() -> None:
        with pytest.raises(MismatchError, match=r"powersgd\(rank=1.*powersgd\(rank=2|aggregator"):
            adam(model_of(), compression=hvd.Compression.powersgd(1 + hvd.rank() % 2))

    ranks(check)
