"""Ranks that make steps of their own and meet at times train as the formulas say; wrong use is named."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import hvdlite_torch as hvd
from hvdlite.errors import ArgumentError, HvdliteError, MismatchError

Ranks = Callable[..., list[Any]]
DTYPE = torch.float64
STEPS, ROWS = 10, 6
TOLERANCE = {"atol": 1e-12, "rtol": 0}


def outer(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.5, momentum=0.8, nesterov=True)


HOWS = {"LocalSGD": hvd.LocalSGD(every=3), "DiLoCo": hvd.DiLoCo(every=3, outer=outer)}
both = pytest.mark.parametrize("how", HOWS.values(), ids=list(HOWS))


def model_of() -> nn.Sequential:
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 1)).to(DTYPE)
    chance = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=chance, dtype=DTYPE))
    return model


def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int, rank: int, passes: int = 1) -> None:
    """Make a step; the gradient is accumulated in some backward passes."""
    x = torch.randn(ROWS, 4, generator=torch.Generator().manual_seed(100 * number + rank), dtype=DTYPE)
    optimizer.zero_grad()
    for part in x.chunk(passes):
        (nn.functional.mse_loss(model(part), part.sum(1, keepdim=True).sin()) / passes).backward()
    optimizer.step()


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.02)


def distributed(model: nn.Module, how: hvd.LocalSGD, **options: Any) -> Any:
    return hvd.DistributedOptimizer(adam(model), model.named_parameters(), local_steps=how, **options)


def weights(model: nn.Module) -> torch.Tensor:
    return nn.utils.parameters_to_vector(model.parameters()).detach().clone()


def in_one_process(size: int, how: hvd.LocalSGD, steps: int, samples: list[float], last: bool) -> list[torch.Tensor]:
    """Train the models of all ranks one after the other, and combine them by the formula. Return all models' weights."""
    models = [model_of() for _ in range(size)]
    optimizers = [adam(model) for model in models]
    start, momentum = weights(models[0]), torch.zeros(())
    for number in range(steps):
        for rank, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            step(model, optimizer, number, rank)
        if (number + 1) % how.every == 0 or (last and number == steps - 1):
            mean = sum(share * weights(model) for share, model in zip(samples, models, strict=True)) / sum(samples)
            if isinstance(how, hvd.DiLoCo):
                gradient = start - mean
                momentum = 0.8 * momentum + gradient
                start = start - 0.5 * (gradient + 0.8 * momentum)
                mean = start
            for model in models:
                nn.utils.vector_to_parameters(mean.clone(), model.parameters())
    return [weights(model) for model in models]


@both
@pytest.mark.parametrize("weighted", [False, True])
def test_it_trains_as_the_formula_says(ranks: Ranks, how: hvd.LocalSGD, weighted: bool) -> None:
    def check() -> None:
        samples = [2.0 + rank if weighted else 1.0 for rank in range(hvd.size())]
        for steps, last in ((STEPS, False), (STEPS, True), (9, True)):
            model = model_of()
            optimizer = distributed(model, how, backward_passes_per_step=3)
            for number in range(steps):
                if weighted:
                    optimizer.set_batch_weight(samples[hvd.rank()])
                step(model, optimizer, number, hvd.rank(), passes=1 + number % 3)
            if last:
                optimizer.average_parameters()  # after 9 steps the ranks have met already
                hvd.assert_in_sync(model)
            expected = in_one_process(hvd.size(), how, steps, samples, last and steps == STEPS)
            torch.testing.assert_close(weights(model), expected[hvd.rank()], **TOLERANCE)

    ranks(check)


def test_a_mean_after_each_step_of_sgd_is_a_mean_of_gradients(ranks: Ranks) -> None:
    def check() -> None:
        models = model_of(), model_of()
        plain, local = (
            hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), local_steps=how)
            for model, how in zip(models, (None, hvd.LocalSGD(every=1)), strict=True)
        )
        for number in range(4):
            step(models[0], plain, number, hvd.rank())
            step(models[1], local, number, hvd.rank())
        torch.testing.assert_close(weights(models[0]), weights(models[1]), **TOLERANCE)

    ranks(check)


def test_outer_gradients_that_are_compressed(ranks: Ranks) -> None:
    def check() -> None:
        model = model_of()
        optimizer = distributed(model, HOWS["DiLoCo"], compression=hvd.Compression.fp16)
        for number in range(6):
            step(model, optimizer, number, hvd.rank())
        hvd.assert_in_sync(model)
        expected = in_one_process(hvd.size(), HOWS["DiLoCo"], 6, [1.0] * hvd.size(), False)[0]
        away = (weights(model) - expected).abs().max().item()
        assert 0 < away < 1e-3  # half a unit in the eleventh bit of 0.06, several times

    ranks(check)


@both
def test_training_goes_on_from_a_checkpoint(ranks: Ranks, how: hvd.LocalSGD) -> None:
    def check() -> None:
        model, fresh = model_of(), nn.Sequential(*model_of())
        optimizer = distributed(model, how)
        for number in range(5):
            step(model, optimizer, number, hvd.rank())
        file = io.BytesIO()
        torch.save([model.state_dict(), optimizer.state_dict()], file)
        file.seek(0)
        again = distributed(fresh, how)
        for each, state in zip((fresh, again), torch.load(file), strict=True):
            each.load_state_dict(state)
        for number in range(5, STEPS):
            step(model, optimizer, number, hvd.rank())
            step(fresh, again, number, hvd.rank())
        assert torch.equal(weights(model), weights(fresh))

    ranks(check)


@both
@pytest.mark.ranks(at_least=2)
def test_one_rank_loads_and_the_others_follow(ranks: Ranks, how: hvd.LocalSGD) -> None:
    def check() -> None:
        model = model_of()
        optimizer = distributed(model, how)
        for number in range(4):
            step(model, optimizer, number, hvd.rank())
        hvd.broadcast_parameters(model, 0)
        hvd.broadcast_optimizer_state(optimizer, 0)
        for number in range(4, 6):
            step(model, optimizer, number, hvd.rank())
        hvd.assert_in_sync(model)

    ranks(check)


@both
@pytest.mark.ranks(at_least=2)
def test_ranks_with_more_or_less_data(ranks: Ranks, how: hvd.LocalSGD) -> None:
    def check() -> None:
        model = model_of()
        optimizer = distributed(model, how)
        for number in range(4 + 3 * hvd.rank()):
            step(model, optimizer, number, hvd.rank())
        assert hvd.join() == hvd.size() - 1
        hvd.assert_in_sync(model)
        step(model, optimizer, 50, hvd.rank())
        optimizer.average_parameters()
        hvd.assert_in_sync(model)

    ranks(check)


@pytest.mark.ranks(at_least=2)
def test_ranks_that_begin_with_different_weights(ranks: Ranks) -> None:
    def check() -> None:
        model = model_of()
        with torch.no_grad():
            model[0].bias += hvd.rank()
        optimizer = distributed(model, HOWS["DiLoCo"])
        step(model, optimizer, 0, hvd.rank())
        step(model, optimizer, 1, hvd.rank())
        with pytest.raises(MismatchError, match=r"different parameters. Begin with hvd.broadcast_parameters"):
            step(model, optimizer, 2, hvd.rank())

    ranks(check)


@pytest.mark.ranks(at_least=2)
def test_weights_that_only_some_ranks_say(ranks: Ranks) -> None:
    def check() -> None:
        model = model_of()
        optimizer = distributed(model, hvd.LocalSGD(every=1))
        if hvd.rank() == 0:
            optimizer.set_batch_weight(5)
        with pytest.raises(MismatchError, match=r"1 of \d ranks have set batch weights"):
            step(model, optimizer, 0, hvd.rank())

    ranks(check)


def test_a_parameter_that_is_frozen_later(ranks: Ranks) -> None:
    def check() -> None:
        model = model_of()
        optimizer = distributed(model, HOWS["DiLoCo"])
        step(model, optimizer, 0, hvd.rank())
        model[0].bias.requires_grad_(False)
        step(model, optimizer, 1, hvd.rank())
        with pytest.raises(ArgumentError, match="frozen or added since its outer optimizer was made"):
            step(model, optimizer, 2, hvd.rank())
        sgd = distributed(model, HOWS["LocalSGD"])
        sgd.average_parameters()  # no steps, so nothing happens
        sgd.set_batch_weight(0)
        step(model, sgd, 0, hvd.rank())
        with pytest.raises(HvdliteError, match="the batch weights of all ranks are 0"):
            sgd.average_parameters()

    ranks(check)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"shard": True}, r"shard=True and local_steps=LocalSGD\(every=3\) do not go together"),
        ({"op": hvd.Sum}, r"op=.* and local_steps=LocalSGD"),
        ({"compression": hvd.Compression.topk(0.1)}, r"aggregator='topk.* and local_steps"),
        (
            {"compression": hvd.Compression.fp16},
            r"compression='FP16Compressor' and local_steps=LocalSGD.* would be rounded",
        ),
        ({"overlap": True}, r"overlap=True has no meaning for local_steps"),
        ({"max_grad_norm": 1.0}, r"max_grad_norm=1.0 has no meaning for local_steps.*clip_grad_norm_ before the step"),
    ],
)
def test_what_does_not_go_together(ranks: Ranks, options: dict[str, Any], message: str) -> None:
    def check() -> None:
        with pytest.raises(ArgumentError, match=message):
            distributed(model_of(), HOWS["LocalSGD"], **options)

    ranks(check)


def test_wrong_arguments(ranks: Ranks) -> None:
    def check() -> None:
        with pytest.raises(ArgumentError, match=r"local_steps=8: expected hvd.LocalSGD\(every=8\) or hvd.DiLoCo"):
            distributed(model_of(), 8)  # type: ignore[arg-type]
        with pytest.raises(ArgumentError, match="DiLoCo: outer=SGD: expected a function that makes an optimizer"):
            distributed(model_of(), hvd.DiLoCo(outer=torch.optim.SGD([torch.ones(1)])))
        with pytest.raises(ArgumentError, match=r"DiLoCo: every=0: expected a number of steps from 1 on"):
            hvd.DiLoCo(every=0)
        if hvd.size() > 1:
            with pytest.raises(MismatchError, match=r"LocalSGD\(every=1\)"):
                distributed(model_of(), hvd.LocalSGD(every=1 + hvd.rank()))

    ranks(check)


def test_parameters_are_brought_together_only_with_local_steps(ranks: Ranks) -> None:
    def check() -> None:
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model_of().parameters(), lr=0.1))
        with pytest.raises(ArgumentError, match="for optimizers that are made with local_steps="):
            optimizer.average_parameters()

    ranks(check)
