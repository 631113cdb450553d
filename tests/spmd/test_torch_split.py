"""What looks across the parameters of a model that is split over ranks sees all of them: norms, infinities, states."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional as F

import hvdlite_torch as hvd
from hvdlite.errors import ArgumentError
from tests.support.processes import process_group as process_group
from tests.support.processes import processes

pytestmark = processes
DTYPE = torch.float64
ROWS = 8


def chain() -> nn.Sequential:
    """A model with a layer of weights for each rank, and one more."""
    torch.manual_seed(3)
    return nn.Sequential(*(nn.Sequential(nn.Linear(4, 4, dtype=DTYPE), nn.Tanh()) for _ in range(hvd.size() + 1)))


def cuts() -> list[str]:
    return [str(number) for number in range(1, hvd.size())]


def batch(step: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    x, y = torch.randn(2, ROWS, 4, generator=generator, dtype=DTYPE)
    return x, y


def own_grid() -> hvd.ProcessGrid:
    return hvd.ProcessGrid(dp=1, pp=hvd.size())


def staged(grid: hvd.ProcessGrid, loss: Any = F.mse_loss) -> hvd.Pipeline:
    return hvd.Pipeline(chain(), grid["pp"], loss=loss, microbatches=2, cuts=cuts())


def distance(found: dict[str, torch.Tensor], model: nn.Module) -> float:
    expected = model.state_dict()
    assert found.keys() == expected.keys()
    return max((found[name] - value).abs().max().item() for name, value in expected.items())


def alone(clip: Callable[[list[nn.Parameter]], object], freeze: Callable[[str], bool] = lambda name: False) -> Any:
    """Train a whole model, and clip its gradients."""
    model = chain()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not freeze(name))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.5)
    for step in range(3):
        x, y = batch(step)
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        clip(list(model.parameters()))
        optimizer.step()
    return model


@pytest.mark.parametrize("options", [{}, {"shard": True}], ids=str)
def test_max_grad_norm_is_over_all_stages(options: dict[str, Any]) -> None:
    grid = own_grid()
    pipeline = staged(grid)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(pipeline.parameters(), lr=1.0, momentum=0.5),
        pipeline.named_parameters(),
        process_set=grid["dp"],
        max_grad_norm=0.05,
        **options,
    )
    for step in range(3):
        pipeline.step(*batch(step), optimizer)
    expected = alone(lambda parameters: nn.utils.clip_grad_norm_(parameters, 0.05))
    assert distance(pipeline.full_state_dict(), expected) <= 1e-12


def test_max_grad_norm_of_a_wavefront() -> None:
    def model() -> nn.Sequential:
        torch.manual_seed(1)
        stack = nn.RNN(3, 3, num_layers=hvd.size(), batch_first=True, dtype=DTYPE)
        return nn.Sequential(stack, nn.Linear(3, 3, dtype=DTYPE))

    grid, whole = own_grid(), model()
    names = [f"0.{layer}" for layer in range(1, hvd.size())]
    wavefront = hvd.Wavefront(model(), grid["pp"], loss=F.mse_loss, chunks=2, cuts=names)
    sgd = torch.optim.SGD(wavefront.parameters(), lr=1.0)
    optimizer = hvd.DistributedOptimizer(sgd, process_set=grid["dp"], max_grad_norm=0.05)
    x, y = torch.randn(2, 4, 6, 3, generator=torch.Generator().manual_seed(0), dtype=DTYPE)
    wavefront.step(x, y, optimizer)
    F.mse_loss(whole[1](whole[0](x)[0]), y).backward()
    nn.utils.clip_grad_norm_(whole.parameters(), 0.05)
    torch.optim.SGD(whole.parameters(), lr=1.0).step()
    assert distance(wavefront.full_state_dict(), whole) <= 1e-12


@pytest.mark.parametrize("norm", [2.0, 1.0, float("inf")])
@pytest.mark.parametrize("frozen", ["", "0."], ids=["all", "a stage is frozen"])
def test_torch_clips_by_the_norm_over_all_stages(norm: float, frozen: str) -> None:
    """`clip_grad_norm_` returns that norm too, on a rank without gradients as well."""
    norms: list[float] = []
    expected = alone(
        lambda parameters: norms.append(float(nn.utils.clip_grad_norm_(parameters, 0.05, norm))),
        lambda name: bool(frozen) and name.startswith(frozen),
    )
    pipeline = staged(own_grid())
    for name, parameter in pipeline.named_parameters():
        parameter.requires_grad_(not frozen or not name.startswith(frozen))
    optimizer = torch.optim.SGD(pipeline.parameters(), lr=1.0, momentum=0.5)
    found = []
    for step in range(3):
        optimizer.zero_grad()
        pipeline.step(*batch(step))
        gradients = [p.grad for p in pipeline.parameters() if p.grad is not None]
        if not frozen:
            found.append(float(nn.utils.get_total_norm(gradients, norm)))
        found.append(float(nn.utils.clip_grad_norm_(pipeline.parameters(), 0.05, norm)))
        optimizer.step()
    assert distance(pipeline.full_state_dict(), expected) <= 1e-12
    expected_norms = norms if frozen else [norm for norm in norms for _ in range(2)]
    assert found == pytest.approx(expected_norms, rel=1e-6 if frozen else 1e-12)  # torch: float32 without gradients


def test_a_norm_that_is_not_finite_is_told_on_all_ranks() -> None:
    pipeline = staged(own_grid())
    pipeline.step(*batch())
    if hvd.rank() == 0:
        next(pipeline.parameters()).grad.fill_(float("nan"))  # type: ignore[union-attr]
    with pytest.raises(RuntimeError, match="non-finite"):
        nn.utils.clip_grad_norm_(pipeline.parameters(), 1.0, error_if_nonfinite=True)


class ByAllGradients(torch.optim.Optimizer):
    """An optimizer whose step depends on the norm of all gradients, as those of Prodigy and D-Adaptation do."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        gradients = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = sum((gradient.square().sum() for gradient in gradients), torch.zeros(())).sqrt()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p -= group["lr"] * p.grad / norm


class ByEachParameter(ByAllGradients):
    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p -= group["lr"] * p.grad / p.grad.norm()


class NeedsClosure(ByEachParameter):
    def step(self, closure: Any = None) -> None:
        closure()


@pytest.mark.parametrize("distributed", [False, True], ids=["plain", "distributed"])
def test_optimizers_that_look_across_stages_are_refused(distributed: bool) -> None:
    grid = own_grid()
    pipeline = staged(grid)

    def step(optimizer: Any) -> None:
        if distributed:
            optimizer = hvd.DistributedOptimizer(optimizer, process_set=grid["dp"])
        pipeline.step(*batch(), optimizer)

    for make, text in (
        (torch.optim.LBFGS, "LBFGS does not step each parameter by itself .its step needs all gradients at once."),
        (ByAllGradients, "ByAllGradients .* it changes one of shape .* one stage of a Pipeline on ranks 0"),
        (lambda parameters: ByAllGradients(list(parameters)[:1]), "does not step each parameter by itself"),
        (NeedsClosure, "cannot be tried out"),
    ):
        with pytest.raises(ArgumentError, match=text):
            step(make(pipeline.parameters()))
    step(ByEachParameter(pipeline.parameters()))
    with pytest.raises(ArgumentError, match="takes an optimizer of torch, plain or distributed; got a object"):
        pipeline.step(*batch(), object())  # type: ignore[arg-type]


def test_ranks_of_different_stages_exchange_nothing() -> None:
    """With the default process set, stages of equal shapes would be mixed up without a word."""
    pipeline = staged(own_grid())
    adam = torch.optim.Adam(list(pipeline.parameters())[:2])
    weight = next(pipeline.parameters())
    for call in (
        lambda: hvd.DistributedOptimizer(adam),
        lambda: hvd.broadcast_parameters(list(pipeline.parameters())[:2]),
        lambda: hvd.broadcast_parameters([("0.weight", weight.detach())]),  # what is in a state dict
        lambda: hvd.broadcast_optimizer_state(adam),
    ):
        with pytest.raises(ArgumentError, match=r"of a stage of a Pipeline .* process_set=grid\[\"dp\"\]"):
            call()
    with pytest.raises(ArgumentError, match="one stage of a Pipeline, and servers hold a model that all ranks have"):
        hvd.AsyncDistributedOptimizer(adam, nn.ParameterList(list(pipeline.parameters())[:2]))


def groups_of(model: Any) -> list[dict[str, Any]]:
    """Weights and biases in groups of their own, so that the order of the optimizer is not that of the model."""
    named = list(model.named_parameters())
    return [
        {"params": [p for name, p in named if name.endswith("bias")], "weight_decay": 0.0},
        {"params": [p for name, p in named if name.endswith("weight")]},
    ]


def adam(model: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups_of(model), lr=0.05, weight_decay=0.1)


def train_alone(model: nn.Module, optimizer: torch.optim.Optimizer, first: int, last: int) -> None:
    for step in range(first, last):
        x, y = batch(step)
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        optimizer.step()


def train(pipeline: hvd.Pipeline, optimizer: torch.optim.Optimizer, first: int, last: int) -> None:
    for step in range(first, last):
        pipeline.step(*batch(step), optimizer)


def test_a_checkpoint_is_that_of_the_whole_model(tmp_path: Path) -> None:
    """What a model in stages saves, one process loads, and other cuts; and the other way round."""
    folder, grid = Path(hvd.broadcast_object(str(tmp_path))), own_grid()
    whole = chain()
    alone = adam(whole)
    train_alone(whole, alone, 0, 3)

    for number, options in enumerate(({}, {"shard": True})):
        pipeline = staged(grid)
        optimizer = hvd.DistributedOptimizer(
            adam(pipeline), pipeline.named_parameters(), process_set=grid["dp"], **options
        )
        train(pipeline, optimizer, 0, 3)
        path = hvd.checkpoint.save(folder / str(number), model=pipeline, optimizer=optimizer, step=3)
        if hvd.rank() == 0:
            assert load_file(path / "model.safetensors").keys() == whole.state_dict().keys()
        hvd.barrier()

        # one process
        model = chain()
        one = adam(model)
        found = hvd.checkpoint.load(folder / str(number), model=model, optimizer=one)
        assert found is not None
        assert found["step"] == 3
        assert distance(model.state_dict(), whole) <= 1e-12
        for ours, wanted in zip(one.state_dict()["state"].values(), alone.state_dict()["state"].values(), strict=True):
            assert (ours["exp_avg"] - wanted["exp_avg"]).abs().max().item() <= 1e-12
        assert one.state_dict()["param_groups"] == alone.state_dict()["param_groups"]
        train_alone(model, one, 3, 5)

        # other cuts, and the same ones
        later = [*cuts()[:-1], str(hvd.size())]
        for where in (cuts(), later):
            again = hvd.Pipeline(chain(), grid["pp"], loss=F.mse_loss, microbatches=4, cuts=where)
            resumed = hvd.DistributedOptimizer(adam(again), process_set=grid["dp"], **options)
            hvd.checkpoint.load(folder / str(number), model=again, optimizer=resumed)
            train(again, resumed, 3, 5)
            assert distance(again.full_state_dict(), model) <= 1e-12

        # the state of one process, in stages
        hvd.checkpoint.save(folder / f"one {number}", model=whole, optimizer=alone)
        hvd.checkpoint.load(folder / f"one {number}", model=again, optimizer=resumed)
        train(again, resumed, 3, 5)
        assert distance(again.full_state_dict(), model) <= 1e-12

        # by hand
        state, moments = pipeline.full_state_dict(), pipeline.full_optimizer_state_dict(optimizer)
        again.load_state_dict(state)
        again.load_optimizer_state_dict(resumed, moments)
        train(again, resumed, 3, 5)
        assert distance(again.full_state_dict(), model) <= 1e-12


def test_groups_that_differ_between_stages_are_refused() -> None:
    """Their settings would be those of rank 0, for the parameters of others."""
    pipeline = staged(own_grid())
    in_order = adam(pipeline)
    swapped = torch.optim.AdamW(groups_of(pipeline)[::-1], lr=0.05, weight_decay=0.1)
    pipeline.step(*batch(), in_order)
    whole = pipeline.full_optimizer_state_dict(in_order)
    if hvd.size() > 1:
        with pytest.raises(
            ArgumentError, match=r"group 0 of the optimizers has weight_decay=0.. on one stage, 0.. on another"
        ):
            pipeline.full_optimizer_state_dict(in_order if hvd.rank() else swapped)
    for state in (whole, pipeline.full_optimizer_state_dict(in_order)):
        with pytest.raises(ArgumentError, match="in group 1 of the optimizer, and here it is in group 0"):
            pipeline.load_optimizer_state_dict(swapped, state)
    pipeline.load_optimizer_state_dict(in_order, whole)


def test_states_of_other_models_are_refused(tmp_path: Path) -> None:
    folder, grid = Path(hvd.broadcast_object(str(tmp_path))), own_grid()
    pipeline = staged(grid)
    optimizer = adam(pipeline)
    own = pipeline.state_dict()
    last = hvd.broadcast_object(own, hvd.size() - 1)
    if hvd.rank() == 0:
        with pytest.raises(ArgumentError, match="this state lacks '0.0.weight'.*its own stage only"):
            pipeline.load_state_dict(last)
    with pytest.raises(ArgumentError, match=r"groups have \[1, 1\] parameters, and here are"):
        pipeline.load_optimizer_state_dict(optimizer, adam(chain()[:1]).state_dict())
    alone = [hvd.new_group([rank]) for rank in range(hvd.size())][hvd.rank()]
    for objects in ({"model": pipeline}, {"optimizer": optimizer}):
        with pytest.raises(ArgumentError, match="parts of .* are on ranks 0"):
            hvd.checkpoint.save(folder, process_set=alone, **objects)
    weight = nn.Parameter(torch.ones(2))
    apart = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=0.1), process_set=alone)
    with pytest.raises(ArgumentError, match="optimizer is trained by rank 0 and, apart, by rank 1"):
        hvd.checkpoint.save(folder, optimizer=apart)


@pytest.mark.parametrize("options", [{}, {"shard": True}], ids=str)
def test_the_state_of_another_stage_is_refused(options: dict[str, Any]) -> None:
    """Its tensors have the same shapes. A state of this stage is loaded."""
    grid = own_grid()
    pipeline = staged(grid)
    adam = torch.optim.Adam(pipeline.parameters())
    optimizer = hvd.DistributedOptimizer(adam, pipeline.named_parameters(), process_set=grid["dp"], **options)
    pipeline.step(*batch(), optimizer)
    states = hvd.allgather_object(optimizer.state_dict())
    optimizer.load_state_dict(states[hvd.rank()])
    for other in set(range(hvd.size())) - {hvd.rank()}:
        with pytest.raises(ArgumentError, match=r"load_state_dict: this is the state of '.*the stage of this rank has"):
            optimizer.load_state_dict(states[other])
    pipeline.step(*batch(), optimizer)


def test_an_elastic_state_has_all_stages() -> None:
    grid = own_grid()

    def make() -> tuple[hvd.Pipeline, Any, Any]:
        pipeline = staged(grid)
        optimizer = hvd.DistributedOptimizer(adam(pipeline), process_set=grid["dp"])
        return pipeline, optimizer, hvd.elastic.TorchState(pipeline, optimizer, step=0)

    pipeline, optimizer, state = make()
    train(pipeline, optimizer, 0, 2)
    state.sync()  # which changes nothing
    train(pipeline, optimizer, 2, 3)
    state.step = 3
    state.save()
    train(pipeline, optimizer, 3, 4)
    state.restore()
    train(pipeline, optimizer, 3, 5)
    whole = chain()
    train_alone(whole, alone := adam(whole), 0, 5)
    assert distance(pipeline.full_state_dict(), whole) <= 1e-12
    # ranks that are new get the stages that rank 0 has saved, which are those of all
    again, resumed, other = make()
    if hvd.rank() == 0:
        other.set_saved(state.saved())
        other.restore()
    other.sync()
    assert other.step == 3
    train(again, resumed, 3, 5)
    assert distance(again.full_state_dict(), whole) <= 1e-12
    del alone


@pytest.mark.parametrize("distributed", [False, True], ids=["plain", "distributed"])
def test_all_stages_skip_a_step_that_overflows_in_one(distributed: bool) -> None:
    grid, scaler = own_grid(), torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=100)
    pipeline = staged(grid, lambda output, target: scaler.scale(F.mse_loss(output, target)))
    optimizer: Any = torch.optim.SGD(pipeline.parameters(), lr=1.0, momentum=0.5)
    if distributed:
        optimizer = hvd.DistributedOptimizer(optimizer, process_set=grid["dp"])
    for step in range(4):
        optimizer.zero_grad()
        pipeline.step(*batch(step))
        if step == 1 and hvd.rank() == 0:
            next(pipeline.parameters()).grad.fill_(float("inf"))  # type: ignore[union-attr]
        if step == 2:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(pipeline.parameters(), 0.05)
        scaler.step(optimizer)
        scaler.update()
    assert scaler.get_scale() == 2.0
    whole = chain()
    plain = torch.optim.SGD(whole.parameters(), lr=1.0, momentum=0.5)
    for step in (0, 2, 3):
        x, y = batch(step)
        plain.zero_grad()
        F.mse_loss(whole(x), y).backward()
        if step == 2:
            nn.utils.clip_grad_norm_(whole.parameters(), 0.05)
        plain.step()
    assert distance(pipeline.full_state_dict(), whole) <= 1e-6  # torch's scaler divides in float32
