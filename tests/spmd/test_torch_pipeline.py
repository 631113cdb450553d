"""Pipelines and grids equal training in one process; cuts balance the stages; wrong arguments are named."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from typing import Any

import hypothesis
import pytest
import torch
from hypothesis import strategies as st
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import hvdlite_torch as hvd
from hvdlite.adapter.pipeline.bubble import theoretical
from hvdlite.errors import ArgumentError
from hvdlite_torch.pipeline.costs import Cost, balance, measure
from tests.spmd.test_torch_distributed import (
    BATCH,
    STEPS,
    TOLERANCE,
    adam,
    batch,
    check,
    expected,
    loss_of,
    make_model,
    whole,
)
from tests.spmd.test_torch_distributed import train as train_alone
from tests.support.processes import process_group as process_group
from tests.support.processes import processes

DTYPE = torch.float64


def train(pipeline: hvd.Pipeline, optimizer: Any = None, rows: slice = slice(None)) -> list[float]:
    optimizer = optimizer or adam(pipeline.parameters())
    x, y = batch(DTYPE)
    return [float(pipeline.step(x[rows], y[rows], optimizer)) for _ in range(STEPS)]


def losses() -> list[float]:
    model = make_model(DTYPE)
    optimizer, (x, y) = adam(model.parameters()), batch(DTYPE)
    found = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = loss_of(model(x), y)
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


CUTS = {2: ["3"], 3: ["2", "4"], 4: ["2", "4", "6"], 6: ["1", "2", "4", "5", "6"]}


@processes
@pytest.mark.parametrize("microbatches", [1, 2, 8])
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_a_pipeline_trains_as_one_process_does(schedule: str, microbatches: int) -> None:
    pipeline = hvd.Pipeline(
        make_model(DTYPE), loss=loss_of, microbatches=microbatches, schedule=schedule, cuts=CUTS[hvd.size()]
    )
    found = train(pipeline)
    check(pipeline.state_dict(), DTYPE)
    check(pipeline.full_state_dict(), DTYPE)
    assert pipeline.full_state_dict().keys() == expected(DTYPE).keys()
    assert found == pytest.approx(losses(), abs=1e-12)
    assert "micro-batches" in pipeline.report()


@processes
@pytest.mark.parametrize(("rows", "width"), [(16, 64), (8, 128), (4, 256), (16, 63), (64, 256)])
def test_activations_of_about_the_size_that_mpi_sends_at_once(rows: int, width: int) -> None:
    """4096 bytes in a host. Both neighbours of a stage wait for what they have sent before they look at what has come."""

    def model() -> nn.Sequential:
        torch.manual_seed(3)
        return nn.Sequential(*[nn.Linear(width, width) for _ in range(2 * hvd.size())])

    x, y = torch.randn(2, 8 * rows, width, generator=torch.Generator().manual_seed(1))
    reference = model()
    cuts = [str(2 * stage) for stage in range(1, hvd.size())]
    pipeline = hvd.Pipeline(model(), loss=loss_of, microbatches=8, cuts=cuts)
    loss = loss_of(reference(x), y)
    loss.backward()
    assert float(pipeline.step(x, y)) == pytest.approx(loss.item(), rel=1e-5)
    of_all = dict(reference.named_parameters())
    for name, parameter in pipeline.named_parameters():
        torch.testing.assert_close(parameter.grad, of_all[name].grad)


@processes
def test_a_layer_that_is_there_twice() -> None:
    def model() -> nn.Sequential:
        torch.manual_seed(5)
        tanh = nn.Tanh()
        layers = [layer for _ in range(4) for layer in (nn.Linear(12, 12, dtype=DTYPE), tanh)]
        return nn.Sequential(*layers)

    x, y = batch(DTYPE)
    for options in ({"cuts": ["2", "4", "6"][4 - hvd.size() :]}, {"example": x[:3]}):
        pipeline = hvd.Pipeline(model(), loss=loss_of, microbatches=4, **options)
        reference = model()
        assert float(pipeline.step(x, y)) == pytest.approx(loss_of(reference(x), y).item(), abs=1e-12)


@processes
def test_interleaved_stages_and_cuts_by_measurement() -> None:
    layers = [layer for _ in range(8) for layer in (nn.Linear(12, 12, dtype=DTYPE), nn.Tanh())]
    torch.manual_seed(0)
    model = nn.Sequential(*layers)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    x, y = batch(DTYPE)
    pipeline = hvd.Pipeline(model, loss=loss_of, microbatches=2 * hvd.size(), schedule="interleaved", example=x[:3])
    assert pipeline.stages == [hvd.rank(), hvd.rank() + hvd.size()]
    rows = slice(0, BATCH if hvd.size() != 4 else 24)
    train(pipeline, rows=rows)
    reference = nn.Sequential(*[nn.Linear(12, 12, dtype=DTYPE) if i % 2 == 0 else nn.Tanh() for i in range(16)])
    reference.load_state_dict(state)
    train_alone(reference, adam(reference.parameters()), x, y)
    for name, value in pipeline.full_state_dict().items():
        assert (value - reference.state_dict()[name]).abs().max().item() <= 1e-12


class Blocks(nn.Module):
    """A model that is no Sequential."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.inlet = nn.Linear(12, 16, dtype=DTYPE)
        self.blocks = nn.ModuleList(nn.Linear(16, 16, dtype=DTYPE) for _ in range(5))
        self.outlet = nn.Linear(16, 12, dtype=DTYPE)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inlet(x)
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return self.outlet(x)


class Branches(Blocks):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        return y if y.sum() > 0 else -y


@processes
def test_a_model_that_torch_traces() -> None:
    x, y = batch(DTYPE)
    reference = Blocks()
    pipeline = hvd.Pipeline(Blocks(), loss=loss_of, microbatches=6, example=x[:4])
    assert all(cut.startswith("blocks.") for cut in pipeline.cuts)
    train(pipeline)
    train_alone(reference, adam(reference.parameters()), x, y)
    for name, value in pipeline.full_state_dict().items():
        assert (value - reference.state_dict()[name]).abs().max().item() <= 1e-12
    output = pipeline.eval().predict(x)
    assert (output - reference(x)).abs().max().item() <= 1e-12
    loss = loss_of(reference(x[:12]), y[:12]).item()  # another batch size
    assert float(pipeline.step(x[:12], y[:12])) == pytest.approx(loss, abs=1e-12)


@processes
def test_wrong_arguments() -> None:
    x, _ = batch(DTYPE)
    model, cuts = make_model(DTYPE), CUTS[hvd.size()]
    refused: list[tuple[str, dict[str, Any]]] = [
        ("schedule='zigzag': expected one of '1f1b'", {"schedule": "zigzag", "cuts": cuts}),
        ("microbatches=0", {"microbatches": 0, "cuts": cuts}),
        ("stages_per_rank=2 is for", {"stages_per_rank": 2, "cuts": cuts}),
        ("give `cuts`", {}),
        ("expected the names of", {"cuts": [*cuts, "7"]}),
        ("expected the names of", {"cuts": ["77", *cuts[1:]]}),
        ("expected the names of", {"cuts": ["0", *cuts[1:]]}),
        ("has no parameters", {"cuts": ["7"] if hvd.size() == 2 else [*cuts[:-1], "7"]}),
    ]
    for text, options in refused:
        with pytest.raises(ArgumentError, match=text):
            hvd.Pipeline(model, loss=loss_of, **options)
    with pytest.raises(ArgumentError, match=r"stages need at least \d layers; Linear has 0"):
        hvd.Pipeline(nn.Linear(2, 2), loss=loss_of, example=torch.ones(1, 2))
    with pytest.raises(ArgumentError, match="stages need at least . layers with parameters; Sequential has 1"):
        hvd.Pipeline(nn.Sequential(nn.Linear(2, 2), *[nn.Tanh()] * 5), loss=loss_of, example=torch.ones(1, 2))
    with pytest.raises(ArgumentError, match=r"Branches cannot be split automatically.*data"):
        hvd.Pipeline(Branches(), loss=loss_of, example=x[:4])


@processes
@pytest.mark.parametrize("shard", [False, True])
def test_pipelines_side_by_side(shard: bool) -> None:
    if hvd.size() % 2:
        pytest.skip("a grid of 2 × 2 needs 4 ranks; with 3 there is none")
    grid = hvd.ProcessGrid(dp=hvd.size() // 2, pp=2)
    pipeline = hvd.Pipeline(make_model(DTYPE), grid["pp"], loss=loss_of, microbatches=2, cuts=CUTS[2])
    optimizer = hvd.DistributedOptimizer(adam(pipeline.parameters()), process_set=grid["dp"], shard=shard)
    rows = BATCH // grid.axes["dp"]
    train(pipeline, optimizer, slice(grid.place["dp"] * rows, (grid.place["dp"] + 1) * rows))
    check(pipeline.state_dict(), DTYPE)
    for name, value in pipeline.state_dict().items():
        replicas = hvd.allgather(value.reshape(1, -1), name=name, process_set=grid["dp"])
        assert all(torch.equal(replica, replicas[0]) for replica in replicas)


@processes
def test_data_and_tensor_parallel() -> None:
    if hvd.size() % 2:
        pytest.skip("a grid of 2 × 2 needs 4 ranks; with 3 there is none")
    grid = hvd.ProcessGrid(dp=hvd.size() // 2, tp=2)
    mesh = grid.to_torch()
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel(), "4": ColwiseParallel(), "6": RowwiseParallel()}
    model = parallelize_module(make_model(DTYPE), mesh["tp"], plan)
    fully_shard(model, mesh=mesh["dp"])
    optimizer, (x, y) = adam(model.parameters()), batch(DTYPE)
    rows = BATCH // grid.axes["dp"]
    mine = slice(grid.place["dp"] * rows, (grid.place["dp"] + 1) * rows)
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss_of(model(x[mine]), y[mine]).backward()
        optimizer.step()
    check(whole(model), DTYPE)


# Without processes


@hypothesis.given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9), st.booleans()), min_size=1, max_size=7), st.integers(1, 4)
)
def test_the_best_cuts(layers: list[tuple[int, int, bool]], stages: int) -> None:
    may_begin = [allowed for _, _, allowed in layers]
    possible = [
        cuts
        for cuts in itertools.combinations(range(1, len(layers)), stages - 1)
        if all(may_begin[cut] for cut in cuts)
    ]
    hypothesis.assume(possible)

    def largest(values: list[int], cuts: tuple[int, ...]) -> int:
        ends = [0, *cuts, len(values)]
        return max(sum(values[a:b]) for a, b in itertools.pairwise(ends))

    seconds, nbytes = [s for s, _, _ in layers], [n for _, n, _ in layers]
    fastest = min(largest(seconds, cuts) for cuts in possible)
    smallest = min(largest(nbytes, cuts) for cuts in possible if largest(seconds, cuts) <= 1.03 * fastest)
    found = tuple(balance([Cost(s, n) for s, n, _ in layers], stages, may_begin))
    assert found in possible
    assert largest(seconds, found) <= 1.03 * fastest
    assert largest(nbytes, found) == smallest


class Slow(nn.Module):
    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds, self.weight = seconds, nn.Parameter(torch.ones(10))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(self.seconds)  # the layer takes long; nothing is synchronised by it
        return x * self.weight


def test_the_cost_of_layers() -> None:
    model = nn.Sequential(nn.BatchNorm1d(10), Slow(0.02), Slow(0.0))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    costs = measure(model, dict(model.named_children()), (torch.randn(4, 10),))
    assert list(costs) == ["0", "1", "2"]
    assert costs["1"].seconds > costs["2"].seconds
    assert costs["2"].nbytes == 4 * 10 * 4 + 4 * 10 * 4
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_the_theoretical_bubble() -> None:
    call: Callable[..., float] = theoretical
    assert call(2, 8, 1) == pytest.approx(1 / 9)
    assert call(4, 1, 1) == pytest.approx(3 / 4)
    assert call(8, 8, 2) == pytest.approx(3 / 19)
    assert TOLERANCE[DTYPE] == 1e-12
