"""A parameter server for torch: what each mode computes, what arrives, and what is refused."""

from __future__ import annotations

import copy
import functools
import math
import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import hvdlite_torch as hvd
from hvdlite.async_sgd import deal
from hvdlite.errors import (
    ArgumentError,
    CommunicationError,
    DistributedAlreadyError,
    MismatchError,
    UnsupportedTensorError,
)
from tests.spmd.test_torch_idioms import IDIOMS
from tests.support.replicas import DTYPE, MODEL, STEPS, Idiom, Job, distance, on_this_rank, truth

pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks")  # torch's optimizers make sparse tensors

MODES: dict[str, dict[str, Any]] = {
    "sync": {"mode": "sync"},
    "ssp": {"mode": "ssp", "staleness": 1},
    "async": {"mode": "async"},
}
OPTIMIZERS: dict[str, Callable[[Sequence[torch.Tensor]], torch.optim.Optimizer]] = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.01, nesterov=True),
    "Adam": lambda parameters: torch.optim.Adam(parameters, lr=0.01, amsgrad=True),
    "groups": lambda parameters: torch.optim.AdamW(
        [{"params": parameters[:2], "lr": 0.02, "betas": (0.8, 0.9)}, {"params": parameters[2:]}], lr=0.01
    ),
}
TOLERANCE = 1e-12  # in float64


def whole(*shape: int) -> nn.Parameter:
    """A parameter of whole numbers, which differ between the ranks: rank 0's count."""
    return nn.Parameter(torch.arange(math.prod(shape), dtype=torch.float32).reshape(shape) + 100 * hvd.rank())


def idiom_with_schedule(job: Job) -> None:
    """The learning rate changes from step to step, and some parameters have no gradient in some steps."""
    job.backward()
    for group in job.optimizer.param_groups:
        group["lr"] = group.setdefault("first", group["lr"]) * (1 - 0.1 * job.step)
    if (job.step + job.rank) % 3 == 0:
        job.parameters[3].grad = None
    job.parameters[5].grad = None


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("idiom", [Job.backward, idiom_with_schedule])
def test_sync_is_the_joined_batch(ranks: Any, name: str, idiom: Idiom) -> None:
    def check() -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        job = Job(
            hvd.rank(),
            OPTIMIZERS[name],
            lambda optimizer: hvd.AsyncDistributedOptimizer(optimizer, mode="sync"),
        )
        for step in range(STEPS):
            job.step = step
            idiom(job)
            job.optimizer.step()
        job.optimizer.finish()
        return [p.detach().clone() for p in job.parameters], on_this_rank(idiom, OPTIMIZERS[name])

    results = ranks(check)
    expected = truth(idiom, OPTIMIZERS[name], len(results))
    for parameters, distributed in results:
        assert distance(parameters, expected) < TOLERANCE
        assert distance(parameters, distributed) < TOLERANCE
        assert all(map(torch.equal, parameters, results[0][0]))


SMALL_CHUNKS = 600
"""In bytes: so the model of tests/support/replicas.py has several chunks."""


@pytest.mark.ranks(3)
@pytest.mark.parametrize("name", sorted(IDIOMS.keys() - {"parameters go to float32 and back"}))  # a pull undoes that
def test_what_programs_do_to_gradients_that_travel_early(
    ranks: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deal, "_CHUNK_BYTES", SMALL_CHUNKS)
    idiom, make = IDIOMS[name], OPTIMIZERS["SGD"]

    def check() -> tuple[list[torch.Tensor], int, int]:
        wrap = functools.partial(hvd.AsyncDistributedOptimizer, mode="sync", overlap=True)
        job = Job(hvd.rank(), make, wrap)
        for step in range(STEPS):
            job.step = step
            idiom(job)
            job.optimizer.step()
        job.optimizer.finish()
        training = job.optimizer._hvdlite_training
        return [p.detach().clone() for p in job.parameters], training.worker.early_chunks, training.early.failed

    results = ranks(check)
    expected = truth(idiom, make, len(results))
    for parameters, early, failed in results:
        assert distance(parameters, expected) < TOLERANCE
        assert (early > 0) == (name != "gradients with a graph")  # for which torch calls no hooks
        if name in ("nothing", "gradients of zeros"):
            assert early % STEPS == failed == 0
        if name in ("two passes", "data.clamp_"):
            assert failed == 2  # in the first and the third of five steps


@pytest.mark.parametrize("before", [True, False])
def test_sync_with_weights_and_a_scheduler_of_torch(ranks: Any, before: bool) -> None:
    """The ranks have different numbers of samples; the truth is one process with all of them."""

    def batch(step: int, rank: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(10 * step + rank)
        return torch.randn(1 + (rank + step) % 3, 4, 12, generator=generator, dtype=DTYPE)

    def train(model: nn.Module, wrap: bool, rows: Callable[[int], torch.Tensor]) -> list[torch.Tensor]:
        optimizer: Any = torch.optim.Adam(model.parameters(), lr=0.02)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 7) if before else None
        if wrap:
            optimizer = hvd.AsyncDistributedOptimizer(optimizer, model, mode="sync")
        schedule = schedule or torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 7)
        for step in range(7):
            optimizer.zero_grad()
            x = rows(step)

            def loss(x: torch.Tensor = x) -> torch.Tensor:
                value: torch.Tensor = (model(x) ** 2).mean()
                value.backward()
                return value

            if wrap:
                optimizer.set_batch_weight(len(x))
            returned = optimizer.step(loss)
            assert returned.shape == ()
            schedule.step()
        if wrap:
            optimizer.finish()
        return [p.detach().clone() for p in model.parameters()]

    def check() -> float:
        rank, size = hvd.rank(), hvd.size()
        mine = train(copy.deepcopy(MODEL), True, lambda step: batch(step, rank))
        alone = train(copy.deepcopy(MODEL), False, lambda step: torch.cat([batch(step, r) for r in range(size)]))
        return distance(mine, alone)

    assert max(ranks(check)) < TOLERANCE


@pytest.mark.parametrize("servers", ["sharded", 1])
def test_messages_of_about_the_size_that_mpi_sends_at_once(ranks: Any, servers: Any) -> None:
    """4096 bytes in a host, 65,536 between hosts: pushes and values of all ranks cross."""

    def check() -> None:
        if servers == 1 and hvd.size() == 1:
            return
        for length in (1000, 1008, 1016, 1024, 1025, 16_376, 16_384):
            parameters = [whole(length) for _ in range(hvd.size())]
            before = parameters[0].detach() - 100 * hvd.rank()
            optimizer = hvd.AsyncDistributedOptimizer(torch.optim.SGD(parameters, lr=1.0), mode="sync", servers=servers)
            if optimizer.is_server:
                optimizer.serve()
            else:
                for _ in range(3):
                    for p in parameters:
                        p.grad = torch.ones_like(p)
                    optimizer.step()
            optimizer.finish()
            assert all(torch.equal(p, before - 3) for p in parameters)

    ranks(check)


@pytest.mark.parametrize("servers", ["sharded", 1])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("push_every", [1, 3])
def test_the_servers_change_by_what_was_pushed(ranks: Any, mode: str, servers: Any, push_every: int) -> None:
    """Gradients are whole numbers and SGD has the learning rate 1, so that sums are exact. Each rank makes its own number of
    steps; the last one makes none if it trains.
    """

    def check() -> Any:
        rank, size = hvd.rank(), hvd.size()
        if servers == 1 and size == 1:
            return None
        parameters = [whole(50), whole(3, 2), whole(1), whole(0)]
        before = [p.detach().clone() - 100 * rank for p in parameters]
        optimizer = hvd.AsyncDistributedOptimizer(
            torch.optim.SGD(parameters, lr=1.0), servers=servers, push_every=push_every, **MODES[mode]
        )
        assert all(map(torch.equal, parameters, before))
        assert optimizer.is_server == (servers == 1 and rank == size - 1)
        assert optimizer.workers == tuple(range(size - (servers == 1)))
        pushed = [torch.zeros_like(p) for p in parameters]
        if optimizer.is_server:
            optimizer.serve()
        else:
            steps = 12 if mode == "sync" else 0 if rank == len(optimizer.workers) - 1 > 0 else 4 + 3 * rank
            for step in range(steps):
                for number, p in enumerate(parameters):
                    p.grad = None
                    if (step + number + rank) % 2:
                        p.grad = torch.full_like(p, float(len(optimizer.workers) * (step + 1 + rank)))
                        pushed[number] -= p.grad
                optimizer.step()
            optimizer.finish()
            assert optimizer.pushes == math.ceil(steps / push_every)
        optimizer.finish()
        return before, pushed, [p.detach().clone() for p in parameters], len(optimizer.workers)

    results = [each for each in ranks(check) if each is not None]
    for _, _, after, workers in results:
        for number, (before, value) in enumerate(zip(results[0][0], after, strict=True)):
            total = sum(pushed[number] for _, pushed, _, _ in results)
            assert torch.equal(value, before + total / (workers if mode == "sync" else 1))


@pytest.mark.parametrize("servers", ["sharded", 1])
@pytest.mark.parametrize("mode", MODES)
def test_the_servers_change_by_what_was_pushed_after_early_chunks(
    ranks: Any, mode: str, servers: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each rank does what it likes between its steps. Gradients are whole numbers, and the learning rate is 1."""
    monkeypatch.setattr(deal, "_CHUNK_BYTES", 64)

    def check() -> Any:
        rank, size = hvd.rank(), hvd.size()
        if servers == 1 and size == 1:
            return None
        draw = random.Random(f"{rank} {mode}")
        parameters = [whole(5), whole(3, 2), whole(1), whole(0), whole(30), whole(2)]
        before = [p.detach() - 100 * rank for p in parameters]
        pushed = [torch.zeros_like(p) for p in parameters]
        optimizer = hvd.AsyncDistributedOptimizer(
            torch.optim.SGD(parameters, lr=1.0), servers=servers, overlap=True, **MODES[mode]
        )
        workers = len(optimizer.workers)

        def backward() -> None:
            for p in reversed(parameters):
                if draw.random() < 0.8:
                    (p * (workers * draw.randint(-9, 9))).sum().backward()

        def double() -> None:
            for p in parameters:
                if p.grad is not None:
                    p.grad.mul_(2)

        def refuse() -> None:
            backward()
            parameters[4].grad = torch.full_like(parameters[4], math.nan)
            with pytest.raises(ArgumentError, match="NaN"):
                optimizer.step()
            parameters[4].grad = None

        for _ in range(0 if optimizer.is_server else 12 if mode == "sync" else 6 * rank):
            optimizer.zero_grad()
            for act in draw.choices(
                [backward, double, refuse, optimizer.zero_grad], [6, 1, 1, 1], k=draw.choice([1, 3])
            ):
                act()
            if mode != "sync" and draw.random() < 0.2:
                optimizer.set_batch_weight(0)
            else:
                pushed = [
                    there if p.grad is None else there - p.grad for there, p in zip(pushed, parameters, strict=True)
                ]
            optimizer.step()
        if not optimizer.is_server:
            backward()  # of which nothing is pushed
            assert optimizer._hvdlite_training.worker.early_chunks
        optimizer.finish()
        backward()  # when the servers are gone
        return before, pushed, [p.detach().clone() for p in parameters], workers

    results = [each for each in ranks(check) if each is not None]
    for _, _, after, workers in results:
        for number, (start, value) in enumerate(zip(results[0][0], after, strict=True)):
            total = sum(pushed[number] for _, pushed, _, _ in results)
            assert torch.equal(value, start + total / (workers if mode == "sync" else 1))


@pytest.mark.parametrize("mode", MODES)
def test_state_goes_out_and_in(ranks: Any, mode: str) -> None:
    """A training that is saved and continued ends like one that is not. Here only rank 0 pushes gradients, in turns with
    meetings, so that the order of the steps is known.
    """

    def make() -> tuple[list[nn.Parameter], Any]:
        parameters = [nn.Parameter(torch.linspace(0, 1, 6, dtype=DTYPE)), nn.Parameter(torch.ones(4, dtype=DTYPE))]
        frozen = nn.Parameter(torch.ones(2), requires_grad=False)
        return parameters, torch.optim.Adam([{"params": [frozen, *parameters], "betas": (0.8, 0.99)}], lr=0.1)

    def steps(parameters: list[nn.Parameter], optimizer: Any, numbers: range, plain: bool) -> None:
        for number in numbers:
            if plain or hvd.rank() == 0:
                for p in parameters:
                    p.grad = torch.full_like(p, number + 1.0) * p.detach()
                optimizer.step()
            if not plain:
                optimizer.synchronize()

    def check() -> None:
        alone, plain = make()
        steps(alone, plain, range(6), True)

        first, optimizer = make()
        optimizer = hvd.AsyncDistributedOptimizer(optimizer, **MODES[mode])
        assert optimizer.state_dict()["state"] == {}
        steps(first, optimizer, range(3), False)
        saved = copy.deepcopy(optimizer.state_dict())
        assert sorted(saved["state"]) == [1, 2]
        assert saved["param_groups"] == plain.state_dict()["param_groups"]
        steps(first, optimizer, range(3, 5), False)  # which does not count

        second, other = make()
        other = hvd.AsyncDistributedOptimizer(other, **MODES[mode])
        halfway, until_there = make()
        steps(halfway, until_there, range(3), True)
        with torch.no_grad():
            for p, value in zip(second, halfway, strict=True):
                p.copy_(value if hvd.rank() == 0 else value + 1)
        other.load_state_dict(saved)
        steps(second, other, range(3, 6), False)
        other.finish()
        optimizer.finish()
        assert all(map(torch.equal, second, alone))
        assert other.state_dict()["state"].keys() == saved["state"].keys()
        continued, plainly = other.state_dict()["state"], plain.state_dict()["state"]
        for number, state in plainly.items():
            assert all(torch.equal(value, continued[number][key]) for key, value in state.items())

    ranks(check)


def test_state_from_before_the_wrap_is_kept(ranks: Any) -> None:
    def check() -> None:
        ones, others = (
            [nn.Parameter(torch.ones(5, dtype=DTYPE)), nn.Parameter(torch.ones(3, dtype=DTYPE))] for _ in "ab"
        )
        plain, optimizer = (torch.optim.SGD(parameters, lr=0.1, momentum=0.9) for parameters in (ones, others))
        for parameters, each in ((ones, plain), (others, optimizer)):
            for p in parameters:
                p.grad = torch.ones_like(p)
            each.step()
        wrapped = hvd.AsyncDistributedOptimizer(optimizer, mode="sync")
        for _ in range(2):
            plain.step()
            wrapped.step()
        wrapped.finish()
        with torch.no_grad():
            assert distance(ones, others) < TOLERANCE

    ranks(check)


@pytest.mark.ranks(at_least=2)
@pytest.mark.parametrize("purpose", ["state_dict", "synchronize"])
def test_servers_that_only_serve_take_part_in_meetings(ranks: Any, purpose: str) -> None:
    def check() -> Any:
        parameters = [whole(5), whole(7)]
        optimizer = hvd.AsyncDistributedOptimizer(torch.optim.Adam(parameters, lr=0.5), servers=1)
        if optimizer.is_server:
            with pytest.raises(ArgumentError, match=r"step\(\): rank \d only serves"):
                optimizer.step()
            optimizer.serve()
            return None
        with pytest.raises(ArgumentError, match=r"serve\(\): rank \d trains"):
            optimizer.serve()
        found = []
        for _ in range(3):
            for p in parameters:
                p.grad = torch.ones_like(p)
            optimizer.step()
            found.append(getattr(optimizer, purpose)())
        optimizer.load_state_dict(optimizer.state_dict())
        optimizer.finish()
        return found

    for found in ranks(check)[:-1]:
        if purpose == "state_dict":
            workers = found[0]["state"][0]["step"].item()
            assert [each["state"][1]["step"].item() for each in found] == [workers, 2 * workers, 3 * workers]


@pytest.mark.parametrize("mode", MODES)
def test_nan_is_refused_before_anything_is_pushed(ranks: Any, mode: str) -> None:
    def check() -> None:
        model = nn.Linear(3, 2)
        optimizer = hvd.AsyncDistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), model, **MODES[mode])
        before = [p.detach().clone() for p in model.parameters()]
        for wrong in (math.nan, math.inf, -math.inf):
            for p in model.parameters():
                p.grad = torch.ones_like(p)
            assert model.bias.grad is not None
            model.bias.grad[1] = wrong
            with pytest.raises(
                ArgumentError, match=rf"rank {hvd.rank()}: the gradient of 'bias' has elements that are NaN"
            ):
                optimizer.step()
        optimizer.finish()
        assert all(map(torch.equal, before, model.parameters()))
        assert optimizer.pushes == 0

    ranks(check)


@pytest.mark.parametrize("options", [*MODES.values(), {"hogwild": True}], ids=str)
def test_nan_is_passed_on_whole(ranks: Any, options: dict[str, Any]) -> None:
    """Only one element of the gradients of the last rank is NaN. All other elements of its push count like those of others."""

    def check() -> None:
        model = nn.Linear(3, 2)
        optimizer = hvd.AsyncDistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=1.0), model, on_nan="pass on", **options
        )
        before = [p.detach().clone() for p in model.parameters()]
        hvd.barrier()
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        assert model.bias.grad is not None
        if hvd.rank() == hvd.size() - 1:
            model.bias.grad[1] = math.nan
        optimizer.step()
        optimizer.finish()
        steps = 1 if options.get("mode") == "sync" else hvd.size()
        torch.testing.assert_close(model.weight.detach(), before[0] - steps)
        assert model.bias.isnan().tolist() == [False, True]
        torch.testing.assert_close(model.bias[0].detach(), before[1][0] - steps)

    ranks(check)


def test_large_finite_gradients_pass(ranks: Any) -> None:
    def check() -> None:
        p = nn.Parameter(torch.zeros(4))
        with hvd.AsyncDistributedOptimizer(torch.optim.SGD([p], lr=1e-38), mode="sync") as optimizer:
            p.grad = torch.full((4,), 3e38)  # whose sum is infinite
            optimizer.set_batch_weight(0.25 / hvd.size())
            optimizer.step()
        assert torch.isfinite(p).all()

    ranks(check)


TAKES_ROWS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "Adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=0.1),
    "SparseAdam": lambda parameters: torch.optim.SparseAdam(parameters, lr=0.1),
}


def embeddings() -> nn.ModuleList:
    """Two sparse layers, of which the second one has a row for padding."""
    generator = torch.Generator().manual_seed(7)
    sizes = (7, 3), (5, 2)
    weights = [torch.randn(size, generator=generator, dtype=DTYPE) for size in sizes]
    return nn.ModuleList(
        nn.Embedding.from_pretrained(weight, freeze=False, sparse=True, padding_idx=padding)
        for weight, padding in zip(weights, (None, 0), strict=True)
    )


def look_up(layers: nn.ModuleList, rank: int, step: int) -> None:
    """Make sparse gradients of a batch of 4, in which rows occur several times; in some steps, of one layer only."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    for number, layer in enumerate(layers):
        assert isinstance(layer, nn.Embedding)
        count = 0 if number == 0 and (step + rank) % 5 == 1 else 3  # a batch may have nothing to look up
        indices = torch.randint(layer.num_embeddings, (4, count), generator=generator)
        if number == 0 or (step + rank) % 3:
            (layer(indices) ** 2).sum().div(4).backward()


@pytest.mark.parametrize("name", TAKES_ROWS)
def test_sync_with_rows_is_the_joined_batch(ranks: Any, name: str) -> None:
    def check() -> float:
        rank, size = hvd.rank(), hvd.size()
        alone, layers = embeddings(), embeddings()
        plain = TAKES_ROWS[name](alone.parameters())
        optimizer = hvd.AsyncDistributedOptimizer(TAKES_ROWS[name](layers.parameters()), layers, mode="sync")
        for step in range(6):
            plain.zero_grad()
            for each in range(size):
                look_up(alone, each, step)
            for p in alone.parameters():
                if p.grad is not None:
                    p.grad = (p.grad / size).coalesce()
            plain.step()
            optimizer.zero_grad()
            look_up(layers, rank, step)
            optimizer.step()
        optimizer.finish()
        with torch.no_grad():
            return distance(list(layers.parameters()), list(alone.parameters()))

    assert max(ranks(check)) < TOLERANCE


@pytest.mark.parametrize("servers", ["sharded", 1])
@pytest.mark.parametrize("push_every", [1, 3])
@pytest.mark.parametrize("mode", MODES)
def test_all_rows_arrive(ranks: Any, mode: str, push_every: int, servers: Any) -> None:
    """Gradients are whole numbers: sparse, dense, or of both kinds in one push."""

    def check() -> Any:
        rank, size = hvd.rank(), hvd.size()
        if servers == 1 and size == 1:
            return None
        parameters = [whole(6, 3), whole(9, 2), whole(4)]
        before = [p.detach() - 100 * rank for p in parameters]
        pushed = [torch.zeros_like(p) for p in parameters]
        optimizer = hvd.AsyncDistributedOptimizer(
            torch.optim.SGD(parameters, lr=1.0), servers=servers, push_every=push_every, **MODES[mode]
        )
        for step in range(0 if optimizer.is_server else 7):
            for number, p in enumerate(parameters):
                p.grad = torch.full_like(p, float(len(optimizer.workers) * (1 + step)))
                if number < 2 and (step + number + rank) % 4:
                    chosen = torch.tensor([step % len(p), 2, 2])
                    entries = torch.arange(3 * p.shape[1]).view(3, -1).to(p) * len(optimizer.workers)
                    p.grad = None
                    p.grad = torch.sparse_coo_tensor(chosen[None], entries, p.shape, check_invariants=True)
                pushed[number] -= p.grad.to_dense()
            optimizer.step()
            for p in parameters:
                assert p.grad is not None
                p.grad.zero_()  # what was added up must not notice
        optimizer.finish()
        return before, pushed, [p.detach().clone() for p in parameters], len(optimizer.workers)

    results = [each for each in ranks(check) if each is not None]
    for _, _, after, workers in results:
        for number, (start, value) in enumerate(zip(results[0][0], after, strict=True)):
            total = sum(pushed[number] for _, pushed, _, _ in results)
            assert torch.equal(value, start + total / (workers if mode == "sync" else 1))


def test_gradients_that_the_optimizer_does_not_take(ranks: Any) -> None:
    """They are refused before anything is pushed, and again when the settings change."""

    def check() -> None:
        layer = nn.Embedding(5, 3, sparse=True)
        for make, text in (
            (lambda p: torch.optim.Adam(p), r"which Adam does not take .* sparse=False.*does not support sparse"),
            (lambda p: torch.optim.Adagrad(p, weight_decay=0.1), "Adagrad does not take with these settings"),
        ):
            optimizer = hvd.AsyncDistributedOptimizer(make(layer.parameters()), layer)
            layer(torch.tensor([1, 2])).sum().backward()
            with pytest.raises(UnsupportedTensorError, match=rf"rank {hvd.rank()}: the gradient of 'weight' .*{text}"):
                optimizer.step()
            optimizer.zero_grad()
            assert optimizer.pushes == 0
            optimizer.finish()
        optimizer = hvd.AsyncDistributedOptimizer(torch.optim.Adagrad(layer.parameters(), weight_decay=0.1))
        for decay in (0.1, 0.0, 0.1):
            optimizer.param_groups[0]["weight_decay"] = decay
            optimizer.zero_grad()
            layer(torch.tensor([1, 2])).sum().backward()
            if decay:
                with pytest.raises(UnsupportedTensorError, match="does not take with these settings"):
                    optimizer.step()
            else:
                optimizer.step()
        optimizer.finish()
        assert optimizer.pushes == 1
        p = whole(3)
        optimizer = hvd.AsyncDistributedOptimizer(torch.optim.SparseAdam([p]))
        p.grad = torch.ones(3)
        with pytest.raises(UnsupportedTensorError, match="SparseAdam takes sparse gradients only"):
            optimizer.step()
        optimizer.finish()
        p = whole(3, 2)
        with hvd.AsyncDistributedOptimizer(torch.optim.SGD([p], lr=1.0)) as optimizer:
            p.grad = torch.ones(3, 2).to_sparse(2)
            with pytest.raises(UnsupportedTensorError, match="sparse in another way than by rows"):
                optimizer.step()

    ranks(check)


def test_nan_in_rows_is_refused(ranks: Any) -> None:
    def check() -> None:
        p = whole(4, 2)
        with hvd.AsyncDistributedOptimizer(torch.optim.SGD([p], lr=1.0)) as optimizer:
            values = torch.tensor([[1.0, 2.0], [3.0, math.nan]])
            p.grad = torch.sparse_coo_tensor(torch.tensor([[0, 3]]), values, p.shape, check_invariants=True)
            with pytest.raises(ArgumentError, match="the gradient of parameter 0 .* NaN or infinite"):
                optimizer.step()
        assert torch.equal(p, torch.arange(8.0).view(4, 2)) and optimizer.pushes == 0

    ranks(check)


# Delay compensation


@pytest.mark.parametrize("mode", ["async", "ssp"])
@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize(
    "option", [hvd.StalenessRate(), hvd.DCASGD(0.3), hvd.DCASGD(2.0, mean_square_decay=0.9)], ids=str
)
def test_delay_compensation(ranks: Any, option: Any, mode: str, sparse: bool) -> None:
    """The ranks push in turns, each twice, so that the delays are known. The truth is the formula in NumPy."""

    def gradient(rank: int, turn: int) -> np.ndarray[Any, Any]:
        generator = np.random.default_rng(10 * turn + rank)
        rows = generator.normal(size=(5, 2))
        if sparse:
            rows[generator.permutation(5)[:3]] = 0
        return rows

    def truth(size: int, values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        w, pulled, seen, square = values, [values] * size, [0] * size, np.zeros_like(values)
        for number, (turn, rank) in enumerate((turn, rank) for turn in range(2) for rank in range(size)):
            g, rate, lr = gradient(rank, turn), 1.0, 0.1 * (1 + rank)
            if isinstance(option, hvd.DCASGD):
                strength: Any = option.strength
                if (m := option.mean_square_decay) is not None:
                    there = (g != 0).any(1, keepdims=True) | (not sparse)  # rows that were not pushed keep theirs
                    square = np.where(there, m * square + (1 - m) * g**2, square)
                    strength = strength / np.sqrt(square + 1e-7)
                g = g + strength * g * g * (w - pulled[rank])
            else:
                rate = 1 / max(1, number - seen[rank])
            w = w - lr * rate * g
            pulled[rank], seen[rank] = w, number + 1
        return w

    def check() -> float:
        p = nn.Parameter(torch.linspace(-1, 1, 10, dtype=DTYPE).view(5, 2))
        scalar = nn.Parameter(torch.tensor(1.0, dtype=DTYPE))
        expected = truth(hvd.size(), p.detach().numpy().copy())
        staleness = {"staleness": hvd.size()} if mode == "ssp" else {}
        optimizer = hvd.AsyncDistributedOptimizer(
            torch.optim.SGD([p, scalar], lr=0.1 * (1 + hvd.rank())),
            mode=mode,
            delay_compensation=option,
            **staleness,
        )
        optimizer.param_groups[0]["lr"] = 0.1 * (1 + hvd.rank())
        for turn in range(2):
            for rank in range(hvd.size()):
                if rank == hvd.rank():
                    dense = torch.from_numpy(gradient(rank, turn))
                    p.grad = None
                    p.grad = dense.to_sparse(1) if sparse else dense
                    scalar.grad = None if sparse else torch.zeros_like(scalar)
                    optimizer.step()
                hvd.barrier()
        saved = optimizer.state_dict()
        optimizer.load_state_dict(saved)
        loaded = optimizer.state_dict()["state"]
        optimizer.finish()
        keeps = isinstance(option, hvd.DCASGD) and option.mean_square_decay is not None
        assert ("delay_mean_square" in saved["state"].get(0, {})) == keeps
        if keeps:
            assert torch.equal(loaded[0]["delay_mean_square"], saved["state"][0]["delay_mean_square"])
        return float(np.abs(p.detach().numpy() - expected).max())

    assert max(ranks(check)) < TOLERANCE


def test_what_a_compensation_does_not_fit(ranks: Any) -> None:
    def check() -> None:
        plain = torch.optim.SGD([nn.Parameter(torch.ones(2, dtype=torch.complex64))], lr=0.1)
        for arguments, error, text in (
            ({"mode": "sync", "delay_compensation": hvd.DCASGD()}, ArgumentError, 'is for mode="ssp" and mode="async"'),
            ({"delay_compensation": 0.04}, ArgumentError, "delay_compensation=0.04: expected None, hvd.StalenessRate"),
            ({"delay_compensation": hvd.DCASGD()}, UnsupportedTensorError, "is for real numbers"),
        ):
            with pytest.raises(error, match=text):
                hvd.AsyncDistributedOptimizer(plain, **arguments)

    ranks(check)


@pytest.mark.parametrize("mode", MODES)
def test_halves_and_other_dtypes(ranks: Any, mode: str) -> None:
    def check() -> None:
        parameters = [nn.Parameter(torch.zeros(3, dtype=d)) for d in (torch.bfloat16, torch.float16, torch.complex64)]
        transposed = nn.Parameter(torch.zeros(3, 2).t())
        optimizer = hvd.AsyncDistributedOptimizer(torch.optim.SGD([*parameters, transposed], lr=1.0), **MODES[mode])
        for p in (*parameters, transposed):
            p.grad = torch.arange(p.numel()).reshape(p.shape).to(p.dtype)
        optimizer.step()
        optimizer.finish()
        for p in (*parameters, transposed):
            expected = -torch.arange(p.numel()).reshape(p.shape) * (1 if mode == "sync" else hvd.size())
            assert torch.equal(p, expected.to(p.dtype))

    ranks(check)


def test_hooks_run_once(ranks: Any) -> None:
    def check() -> None:
        p = nn.Parameter(torch.zeros(2))
        plain = torch.optim.SGD([p], lr=1.0)
        seen: list[str] = []
        plain.register_step_pre_hook(lambda *_: seen.append("before"))
        optimizer = hvd.AsyncDistributedOptimizer(plain)
        optimizer.register_step_post_hook(lambda *_: seen.append("after"))
        for _ in range(2):
            p.grad = torch.ones(2)
            optimizer.step()
        optimizer.finish()
        assert seen == ["before", "after"] * 2
        assert isinstance(optimizer, torch.optim.SGD) and isinstance(optimizer, hvd.AsyncDistributed)

    ranks(check)


# What is refused

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "unknown mode": ({"mode": "fast"}, "mode='fast': expected one of 'sync', 'ssp', 'async'"),
    "no staleness": ({"mode": "ssp"}, 'staleness=None: mode="ssp" needs the number of steps'),
    "negative staleness": ({"mode": "ssp", "staleness": -1}, "staleness=-1: .* 0 or more"),
    "true staleness": ({"mode": "ssp", "staleness": True}, "staleness=True"),
    "staleness elsewhere": ({"mode": "async", "staleness": 3}, "staleness=3 is for mode=\"ssp\"; got mode='async'"),
    "no push": ({"push_every": 0}, "push_every=0: expected a number of steps"),
    "no overlap": ({"overlap": "yes"}, "overlap='yes': expected None, True or False"),
    "several steps": ({"overlap": True, "push_every": 2}, "overlap=True sends the gradients of one step"),
    "no NaN": ({"on_nan": "ignore"}, "on_nan='ignore': expected 'raise' or 'pass on'"),
    "no servers": ({"servers": 0}, 'servers=0: expected "sharded"'),
    "only servers": ({"servers": 99}, "servers=99: expected .* ranks only serve"),
    "named servers": ({"servers": "all"}, "servers='all': expected \"sharded\""),
    "names alone": ({"named_parameters": ["a"]}, "expected pairs of name and parameter"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_arguments(ranks: Any, what: str) -> None:
    arguments, text = REFUSED[what]

    def check() -> None:
        optimizer = torch.optim.SGD([whole(3)], lr=1.0)
        with pytest.raises(ArgumentError, match=text):
            hvd.AsyncDistributedOptimizer(optimizer, **arguments)
        hvd.AsyncDistributedOptimizer(optimizer).finish()  # it is as before

    ranks(check)


class Together(torch.optim.SGD):
    """Its step depends on the norm over all gradients."""

    def step(self, closure: Any = None) -> Any:
        torch.nn.utils.clip_grad_norm_([p for group in self.param_groups for p in group["params"]], 0.1)
        return super().step(closure)


def test_optimizers_that_do_not_fit(ranks: Any) -> None:
    def check() -> None:
        p = whole(3)
        for make, text in (
            (lambda: torch.optim.LBFGS([p]), "LBFGS needs all gradients at once"),
            (lambda: Together([p, whole(4)], lr=0.1), "Together does not step each parameter by itself"),
            (
                lambda: torch.optim.SGD([nn.Parameter(p.detach(), False)], lr=0.1),
                "no parameters that require a gradient",
            ),
            (lambda: nn.Linear(2, 2), "wraps an optimizer of torch; got a Linear"),
        ):
            with pytest.raises(ArgumentError, match=text):
                hvd.AsyncDistributedOptimizer(make())  # type: ignore[operator]
        optimizer = hvd.AsyncDistributedOptimizer(torch.optim.SGD([p], lr=0.1))
        for wrap in (hvd.AsyncDistributedOptimizer, hvd.DistributedOptimizer):
            with pytest.raises(DistributedAlreadyError, match="distributed already"):
                wrap(optimizer)
        with pytest.raises(DistributedAlreadyError):
            hvd.AsyncDistributedOptimizer(hvd.DistributedOptimizer(torch.optim.SGD([whole(2)], lr=0.1)))
        for call, text in (
            (lambda: optimizer.add_param_group({"params": [whole(2)]}), "Add all groups before"),
            (lambda: copy.deepcopy(optimizer), "cannot be copied"),
            (lambda: hvd.broadcast_optimizer_state(optimizer), "which is one for all ranks"),
            (lambda: optimizer.set_batch_weight(-1), "expected the number of this rank's samples"),
        ):
            with pytest.raises(ArgumentError, match=text):
                call()
        optimizer.finish()
        optimizer.finish()
        for call in (optimizer.step, optimizer.synchronize, lambda: optimizer.load_state_dict(optimizer.state_dict())):
            with pytest.raises(ArgumentError, match="finish.. was called"):
                call()

    ranks(check)


def test_a_parameter_that_no_server_has(ranks: Any) -> None:
    def check() -> None:
        parameters = [whole(3), whole(2)]
        parameters[1].requires_grad = False
        optimizer = hvd.AsyncDistributedOptimizer(torch.optim.SGD(parameters, lr=0.1))
        parameters[1].requires_grad = True
        for p in parameters:
            p.grad = torch.ones_like(p)
        with pytest.raises(ArgumentError, match="no server has it"):
            optimizer.step()
        optimizer.finish()

    ranks(check)


class Fails(torch.optim.SGD):
    """Raises in its third step."""

    def step(self, closure: Any = None) -> Any:
        self.made = getattr(self, "made", 0) + 1
        if self.made == 3:
            raise ZeroDivisionError("the third step")
        return super().step(closure)


@pytest.mark.parametrize("mode", MODES)
def test_an_optimizer_that_fails_on_its_server(ranks: Any, mode: str) -> None:
    def check() -> int:
        p = whole(3)
        optimizer = hvd.AsyncDistributedOptimizer(Fails([p], lr=0.1), **MODES[mode])
        for step in range(4):  # noqa: B007  # returned
            p.grad = torch.ones(3)
            try:
                optimizer.step()
            except CommunicationError as error:
                text = str(error)
                break
        assert "the optimizer has failed on its server: ZeroDivisionError: the third step" in text
        with pytest.raises(CommunicationError, match="third step"):
            optimizer.finish()
        return step

    assert max(ranks(check)) <= 2


@pytest.mark.ranks(at_least=2)
def test_what_the_ranks_do_differently(ranks: Any) -> None:
    def check() -> None:
        rank = hvd.rank()
        with pytest.raises(MismatchError, match="what AsyncDistributedOptimizer is given"):
            hvd.AsyncDistributedOptimizer(torch.optim.SGD([whole(3 + rank)], lr=0.1))
        with pytest.raises(MismatchError, match="push_every"):
            hvd.AsyncDistributedOptimizer(torch.optim.SGD([whole(3)], lr=0.1), push_every=1 + rank)
        p = whole(3)
        optimizer = hvd.AsyncDistributedOptimizer(torch.optim.SGD([p], lr=0.1), mode="sync")
        optimizer.param_groups[0]["lr"] = 1.0 + rank
        p.grad = torch.ones(3)
        with pytest.raises(CommunicationError, match="push with different learning rates"):
            optimizer.step()
        other = hvd.AsyncDistributedOptimizer(torch.optim.SGD([whole(3)], lr=0.1))
        with pytest.raises(
            CommunicationError, match=r"the ranks meet for different calls: rank 0 finish\(\), rank 1 s"
        ):
            other.finish() if rank == 0 else other.synchronize()

    ranks(check)


@pytest.mark.ranks(at_least=2)
def test_some_ranks_only(ranks: Any) -> None:
    def check() -> None:
        first = hvd.new_group([0, hvd.size() - 1])
        if first.included():
            p = whole(4)
            with hvd.AsyncDistributedOptimizer(torch.optim.SGD([p], lr=1.0), process_set=first) as optimizer:
                for _ in range(3):
                    p.grad = torch.ones(4)
                    optimizer.step()
            assert torch.equal(p, torch.arange(4.0) - 6)
        hvd.barrier()

    ranks(check)


def test_a_scaler_that_would_shift_the_steps_of_ranks_is_refused(ranks: Any) -> None:
    def check() -> None:
        weight = torch.nn.Parameter(torch.zeros(2))
        scaler = torch.amp.GradScaler("cpu")
        with hvd.AsyncDistributedOptimizer(torch.optim.SGD([weight], lr=1.0), mode="sync") as optimizer:
            scaler.scale(weight.sum()).backward()
            with pytest.raises(ArgumentError, match="would be paired with this one of the others"):
                scaler.step(optimizer)

    ranks(check)
