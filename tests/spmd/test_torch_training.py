"""Training on several ranks equals training in one process on the joined batch."""

from __future__ import annotations

import copy
import pickle
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F

import hvdlite.gradients.bucket
import hvdlite_torch as hvd
from hvdlite.errors import ArgumentError, HvdliteError, MismatchError

_generator = torch.Generator().manual_seed(7)
X = torch.randn(48, 10, generator=_generator)
Y = torch.randint(0, 4, (48,), generator=_generator)
# Made once, for ranks that are threads share torch's random numbers; from a seed, for those that are processes do not.
torch.manual_seed(7)
MODEL = torch.nn.Sequential(torch.nn.Linear(10, 32), torch.nn.Tanh(), torch.nn.Linear(32, 4))

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=1e-3),
    "adam": lambda p: torch.optim.Adam(p, lr=1e-2),
}


def split(rows: int, shares: str) -> slice:
    """This rank's rows: equal shares, uneven ones, or all on the last rank."""
    rank, size = hvd.rank(), hvd.size()
    weights = {"equal": [1] * size, "uneven": list(range(1, size + 1)), "one has all": [0] * (size - 1) + [1]}[shares]
    ends = np.cumsum([0, *weights]) * rows // sum(weights)
    return slice(int(ends[rank]), int(ends[rank + 1]))


def flat(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().reshape(-1).double() for p in model.parameters()])


def distance(got: torch.Tensor, expected: torch.Tensor) -> float:
    return float((got - expected).abs().max() / expected.abs().max())


def assert_equal_everywhere(weights: torch.Tensor) -> None:
    assert all(torch.equal(weights, other) for other in hvd.allgather_object(weights))


def train(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, rows: slice, steps: int = 20, passes: int = 1
) -> None:
    """Full batches of the rows; with several passes, each on its part of them."""
    x, y = X[rows], Y[rows]
    for _ in range(steps):
        optimizer.zero_grad()
        for part_x, part_y in zip(x.chunk(passes), y.chunk(passes), strict=True):
            if len(part_x):
                (F.cross_entropy(model(part_x), part_y) / passes).backward()
        if hasattr(optimizer, "set_batch_weight"):
            optimizer.set_batch_weight(len(x))
        optimizer.step()


def train_scaled(model: torch.nn.Module, optimizer: Any, rows: slice, steps: int) -> None:
    """Train with a scaled loss, on this rank's rows."""
    scaler = torch.amp.GradScaler("cpu")
    for _ in range(steps):
        optimizer.zero_grad()
        optimizer.set_batch_weight(len(X[rows]))
        scaler.scale(F.cross_entropy(model(X[rows]), Y[rows])).backward()
        scaler.step(optimizer)
        scaler.update()


def train_clipped(model: torch.nn.Module, optimizer: torch.optim.Optimizer, max_norm: float, steps: int) -> None:
    """Train alone on all rows, with gradients clipped by torch."""
    for _ in range(steps):
        optimizer.zero_grad()
        F.cross_entropy(model(X), Y).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()


@pytest.fixture(autouse=True)
def small_gradients_are_not_copied_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """As large ones are not. (tests/spmd/test_sharded.py leaves them to be.)"""
    monkeypatch.setattr(hvdlite.gradients.bucket, "LARGE_BYTES", 0)


every_way = pytest.mark.parametrize(
    "options", [{"overlap": False}, {"shard": True}, {"overlap": True}], ids=["whole", "sharded", "overlapped"]
)


@every_way
@pytest.mark.parametrize("shares", ["equal", "uneven", "one has all"])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_equals_one_process_on_the_joined_batch(ranks: Any, kind: str, shares: str, options: Any) -> None:
    single = copy.deepcopy(MODEL)
    train(single, OPTIMIZERS[kind](single.parameters()), slice(None))

    def check() -> None:
        model = copy.deepcopy(MODEL)
        optimizer = hvd.DistributedOptimizer(OPTIMIZERS[kind](model.parameters()), model.named_parameters(), **options)
        train(model, optimizer, split(48, shares))
        assert distance(flat(model), flat(single)) <= 1e-5
        assert_equal_everywhere(flat(model))

    ranks(check)


@every_way
def test_several_passes_before_a_step(ranks: Any, options: Any) -> None:
    single = copy.deepcopy(MODEL)
    train(single, OPTIMIZERS["adam"](single.parameters()), slice(None))

    def check() -> None:
        model = copy.deepcopy(MODEL)
        optimizer = hvd.DistributedOptimizer(OPTIMIZERS["adam"](model.parameters()), **options)
        train(model, optimizer, split(48, "equal"), passes=2)
        assert distance(flat(model), flat(single)) <= 1e-5

    ranks(check)


@every_way
@pytest.mark.parametrize("set_to_none", [True, False])
def test_gradients_that_stay_where_they_are(ranks: Any, set_to_none: bool, options: Any) -> None:
    single = copy.deepcopy(MODEL)
    train(single, OPTIMIZERS["sgd"](single.parameters()), slice(None), steps=3)

    def check() -> None:
        model = copy.deepcopy(MODEL)
        optimizer = hvd.DistributedOptimizer(OPTIMIZERS["sgd"](model.parameters()), **options)
        optimizer.zero_grad = lambda: torch.optim.Optimizer.zero_grad(optimizer, set_to_none=set_to_none)
        train(model, optimizer, split(48, "uneven"), steps=3)
        assert distance(flat(model), flat(single)) <= 1e-5

    ranks(check)


@every_way
@pytest.mark.parametrize("replace", [False, True])
def test_gradients_changed_before_a_step_count_as_changed(ranks: Any, replace: bool, options: Any) -> None:
    single = copy.deepcopy(MODEL)
    alone = torch.optim.SGD(single.parameters(), lr=0.1)
    for _ in range(3):
        alone.zero_grad()
        (3 * F.cross_entropy(single(X), Y)).backward()
        alone.step()

    def check() -> None:
        model = copy.deepcopy(MODEL)
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), **options)
        rows = split(48, "equal")
        for _ in range(3):
            optimizer.zero_grad()
            F.cross_entropy(model(X[rows]), Y[rows]).backward()
            for parameter in model.parameters():
                if replace:
                    parameter.grad = parameter.grad * 3
                else:
                    parameter.grad.mul_(3)
            optimizer.step()
        assert distance(flat(model), flat(single)) <= 1e-5

    ranks(check)


class Branches(torch.nn.Module):
    """Three layers; an input chooses the first or the second; the third is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(10, 4) for _ in range(3))

    def forward(self, x: torch.Tensor, branch: int) -> torch.Tensor:
        result: torch.Tensor = self.layers[branch](x)
        return result


BRANCHES = Branches()


@every_way
def test_unused_parameters(ranks: Any, options: Any) -> None:
    """Unused on some ranks: zero there. Unused everywhere: no gradient, so that weight decay leaves them alone."""

    def check() -> None:
        rank, size = hvd.rank(), hvd.size()
        model, single = copy.deepcopy(BRANCHES), copy.deepcopy(BRANCHES)
        optimizer = hvd.DistributedOptimizer(OPTIMIZERS["sgd"](model.parameters()), **options)
        alone = OPTIMIZERS["sgd"](single.parameters())
        rows = [slice(10 * r, 10 * r + 10) for r in range(size)]
        for _ in range(4):
            optimizer.zero_grad()
            F.cross_entropy(model(X[rows[rank]], rank % 2), Y[rows[rank]]).backward()
            optimizer.step()
            alone.zero_grad()
            sum(F.cross_entropy(single(X[rows[r]], r % 2), Y[rows[r]]) / size for r in range(size)).backward()
            alone.step()
        assert distance(flat(model), flat(single)) <= 1e-5
        assert model.layers[2].weight.grad is None
        assert torch.equal(model.layers[2].weight, BRANCHES.layers[2].weight)

    ranks(check)


def test_a_closure_is_evaluated_together(ranks: Any) -> None:
    def lbfgs(model: torch.nn.Module) -> torch.optim.Optimizer:
        return torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=5)

    def run(model: torch.nn.Module, optimizer: torch.optim.Optimizer, rows: slice) -> float:
        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            if not len(X[rows]):
                return torch.tensor(0.0)
            loss = F.cross_entropy(model(X[rows]), Y[rows])
            loss.backward()
            return loss

        if hasattr(optimizer, "set_batch_weight"):
            optimizer.set_batch_weight(len(X[rows]))
        return optimizer.step(closure).item()

    single = copy.deepcopy(MODEL)
    expected_loss = run(single, lbfgs(single), slice(None))

    def check() -> None:
        for shares in ("uneven", "one has all"):
            model = copy.deepcopy(MODEL)
            loss = run(model, hvd.DistributedOptimizer(lbfgs(model)), split(48, shares))
            assert loss == pytest.approx(expected_loss, rel=1e-6)
            assert distance(flat(model), flat(single)) <= 1e-4
            assert_equal_everywhere(flat(model))

    ranks(check)


@every_way
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16, torch.complex64])
def test_parameters_of_other_dtypes(ranks: Any, dtype: torch.dtype, options: Any) -> None:
    def check() -> None:
        rank, size = hvd.rank(), hvd.size()
        parameters = [torch.nn.Parameter(torch.ones(3, dtype=dtype)), torch.nn.Parameter(torch.ones(2))]
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(parameters, lr=1.0), **options)
        for step in range(1, 3):
            optimizer.zero_grad()
            for parameter in parameters:
                parameter.grad = torch.full_like(parameter, 2.0 * rank)
            optimizer.step()
            for parameter in parameters:
                assert (parameter == 1 - step * (size - 1)).all()
                assert parameter.grad is not None
                assert parameter.grad.dtype == parameter.dtype

    ranks(check)


def test_it_stays_the_optimizer_that_it_was(ranks: Any) -> None:
    def check() -> None:
        model = copy.deepcopy(MODEL)
        plain = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        before = torch.optim.lr_scheduler.StepLR(plain, step_size=1)
        calls = []
        plain.register_step_pre_hook(lambda *_: calls.append(model[0].weight.grad.clone()))
        optimizer = hvd.DistributedOptimizer(plain)
        assert optimizer is plain
        assert isinstance(optimizer, torch.optim.SGD)
        assert type(optimizer).__name__ == "SGD"
        assert repr(optimizer).startswith("SGD (")
        after = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        model[0].weight.grad = torch.full_like(model[0].weight, float(hvd.rank()))
        optimizer.step()
        assert (calls[0] == (hvd.size() - 1) / 2).all()  # a hook that was there before sees the average
        before.step()
        after.step()
        assert optimizer.param_groups[0]["lr"] == pytest.approx(0.1 * 0.1 * 0.5)
        state = optimizer.state_dict()
        other = torch.optim.SGD(copy.deepcopy(MODEL).parameters(), lr=1.0, momentum=0.9)
        other.load_state_dict(state)
        optimizer.load_state_dict(other.state_dict())
        optimizer.zero_grad(set_to_none=False)
        assert (model[0].weight.grad == 0).all()
        optimizer.zero_grad(set_to_none=True)
        assert model[0].weight.grad is None
        for twin in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
            assert type(twin) is torch.optim.SGD

    ranks(check)


@every_way
def test_schedulers_made_before_the_wrap_do_not_bypass_it(ranks: Any, options: Any) -> None:
    def check() -> None:
        parameter = torch.nn.Parameter(torch.zeros(1))
        optimizer = torch.optim.SGD([parameter], lr=1.0)
        torch.optim.lr_scheduler.StepLR(optimizer, 1)  # replaces optimizer.step on the instance
        hvd.DistributedOptimizer(optimizer, **options)
        parameter.grad = torch.tensor([float(hvd.rank())])
        optimizer.step()
        assert parameter.item() == -(hvd.size() - 1) / 2

    ranks(check)


def test_synchronize_then_step_exchanges_once(ranks: Any) -> None:
    def check() -> None:
        parameter = torch.nn.Parameter(torch.zeros(1))
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([parameter], lr=1.0), op=hvd.Sum)
        for step in range(1, 3):
            parameter.grad = torch.ones(1)
            optimizer.synchronize()
            assert parameter.grad.item() == hvd.size()
            optimizer.step()
            assert parameter.item() == -step * hvd.size()

    ranks(check)


def test_a_step_left_out_after_synchronize_spares_the_next_nothing(ranks: Any) -> None:
    def check() -> None:
        parameter = torch.nn.Parameter(torch.zeros(1))
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([parameter], lr=1.0))
        parameter.sum().backward()
        optimizer.synchronize()
        optimizer.zero_grad()
        (parameter.sum() * hvd.rank()).backward()
        optimizer.step()
        assert parameter.item() == -(hvd.size() - 1) / 2

    ranks(check)


@every_way
def test_groups_and_frozen_parameters_may_change(ranks: Any, options: Any) -> None:
    def check() -> None:
        size = hvd.size()
        first, second = torch.nn.Parameter(torch.zeros(2)), torch.nn.Parameter(torch.zeros(3))
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([first], lr=1.0), op=hvd.Sum, **options)
        optimizer.add_param_group({"params": [second]})
        for frozen in (False, True, False):
            first.requires_grad_(not frozen)
            before = first.detach().clone(), second.detach().clone()
            first.grad = None if frozen else torch.ones(2)
            second.grad = torch.ones(3)
            optimizer.step()
            assert torch.equal(first.detach(), before[0] - (0 if frozen else size))
            assert torch.equal(second.detach(), before[1] - size)

    ranks(check)


@pytest.mark.ranks(at_least=3)
@every_way
def test_a_process_set_trains_alone(ranks: Any, options: Any) -> None:
    def check() -> None:
        pair = hvd.add_process_set([0, hvd.size() - 1])
        if pair.included():
            parameter = torch.nn.Parameter(torch.zeros(1))
            optimizer = hvd.DistributedOptimizer(
                torch.optim.SGD([parameter], lr=1.0), op=hvd.Sum, process_set=pair, **options
            )
            parameter.grad = torch.ones(1)
            optimizer.step()
            assert parameter.item() == -2
        hvd.barrier()
        hvd.remove_process_set(pair)

    ranks(check)


def test_bad_use(ranks: Any) -> None:
    def check() -> None:
        model = copy.deepcopy(MODEL)
        sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        names = list(model.named_parameters())
        for bad, text in (
            ([names[0], *names], "occur more than once: 0.weight"),
            (names[1:], "1 parameters of the optimizer are not among"),
            ([parameter for _, parameter in names], "expected pairs"),
        ):
            with pytest.raises(ArgumentError, match=text):
                hvd.DistributedOptimizer(sgd, bad)
        with pytest.raises(ArgumentError, match="Average or Sum"):
            hvd.DistributedOptimizer(sgd, op=hvd.Max)
        with pytest.raises(ArgumentError, match="no parameters that require"):
            hvd.DistributedOptimizer(torch.optim.SGD([torch.zeros(1)], lr=0.1))
        hvd.DistributedOptimizer(sgd)
        with pytest.raises(ArgumentError, match="distributed already"):
            hvd.DistributedOptimizer(sgd)
        with pytest.raises(ArgumentError, match="0 or more"):
            sgd.set_batch_weight(-1)
        with pytest.raises(ArgumentError, match="no meaning"):
            hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), op=hvd.Sum).set_batch_weight(2)
        model[0].weight.grad = torch.ones_like(model[0].weight)
        sgd.set_batch_weight(0)
        with pytest.raises(HvdliteError, match="add up to 0"):
            sgd.step()
        with pytest.raises(ArgumentError, match="groups: a parameter is in more than one"):
            hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), groups=[[model[0].weight]] * 2)
        for wrong in ({"num_groups": -1}, {"backward_passes_per_step": 0}, {"max_grad_norm": 0}):
            with pytest.raises(ArgumentError, match=next(iter(wrong)).removeprefix("num_")):
                hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), **wrong)

    ranks(check)


def test_different_models_are_a_mismatch(ranks: Any) -> None:
    def check() -> None:
        if hvd.size() > 1:
            parameter = torch.nn.Parameter(torch.zeros(3 + hvd.rank()))
            with pytest.raises(MismatchError, match=r"rank 0: parameter 0 is float32 of shape \(3,\)"):
                hvd.DistributedOptimizer(torch.optim.SGD([parameter], lr=0.1))

    ranks(check)


def test_broadcast_parameters(ranks: Any) -> None:
    def check() -> None:
        root = hvd.size() - 1
        model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2)).bfloat16()
        for what in (dict(model.named_parameters()), list(model.named_parameters()), model.state_dict(), model):
            for value in model.state_dict().values():
                value.fill_(hvd.rank() + 1)
            hvd.broadcast_parameters(what, root)
            sent = model.state_dict() if what is model or isinstance(what, OrderedDict) else dict(what)
            assert all((value == root + 1).all() for value in sent.values())
        with pytest.raises(ArgumentError, match="'epoch' is a int"):
            hvd.broadcast_parameters({"epoch": 3})
        if hvd.size() > 1:
            with pytest.raises(MismatchError, match="float32"):
                hvd.broadcast_parameters({"x": torch.ones(2 + hvd.rank())})
            layers = {f"layer{(number + hvd.rank()) % 2}.weight": torch.ones(2) for number in range(2)}
            hvd.broadcast_parameters(layers)  # the names count, not their order
            layers[f"head{min(1, hvd.rank())}.weight"] = torch.ones(2)
            with pytest.raises(MismatchError, match=r"(?s)rank 0: 'head0\.weight'.*rank.* 1.*: 'head1\.weight'"):
                hvd.broadcast_parameters(layers)
            fewer = dict(list(layers.items())[: 2 + min(1, hvd.rank())])
            with pytest.raises(MismatchError, match="rank 0: no more than these 2"):
                hvd.broadcast_parameters({str(number): value for number, value in enumerate(fewer.values())})

    ranks(check)


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("trained", [True, False])
def test_broadcast_optimizer_state(ranks: Any, kind: str, trained: bool) -> None:
    def check() -> None:
        rank, root = hvd.rank(), hvd.size() - 1
        model = copy.deepcopy(MODEL)
        optimizer = OPTIMIZERS[kind](model.parameters())
        before = flat(model)
        if rank == root:
            optimizer.param_groups[0]["lr"] = 0.25
            if trained:
                F.cross_entropy(model(X), Y).backward()
                optimizer.step()
                before = flat(model)
        hvd.broadcast_optimizer_state(optimizer, root)
        assert torch.equal(flat(model), before)  # no step was taken to make the state
        assert optimizer.param_groups[0]["lr"] == 0.25
        states = hvd.allgather_object(optimizer.state_dict())
        assert bool(states[0]["state"]) == trained
        for state in states:
            torch.testing.assert_close(state, states[root], rtol=0, atol=0)

    ranks(check)
