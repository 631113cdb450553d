"""Models and programs of all kinds train on several ranks as in one process on the joined batch."""

from __future__ import annotations

import copy
import io
import pickle
import shutil
import threading
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations
from torch.optim.swa_utils import AveragedModel
from torch.utils.checkpoint import checkpoint

import hvdlite.gradients.bucket
import hvdlite_torch as hvd
from hvdlite.errors import ArgumentError
from tests.conftest import UNDER_MPI
from tests.spmd.test_torch_training import X, Y, assert_equal_everywhere, distance, every_way, split


@pytest.fixture(autouse=True)
def large_bytes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients take another road if they are large: here most weights do, and biases do not."""
    monkeypatch.setattr(hvdlite.gradients.bucket, "LARGE_BYTES", getattr(request, "param", 150))


each_road = pytest.mark.parametrize("large_bytes", [0, 2**14], ids=["large", "small"], indirect=True)

whole_ways = pytest.mark.parametrize("options", [{"overlap": False}, {"overlap": True}], ids=["whole", "overlapped"])

SGD: Any = lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=1e-3)  # noqa: E731
ADAM: Any = lambda p: torch.optim.Adam(p, lr=1e-2)  # noqa: E731


def flat(model: nn.Module) -> torch.Tensor:
    """Parameters and buffers of any dtype, as float64."""
    values = [value.detach() for value in [*model.parameters(), *model.buffers()]]
    real = [torch.view_as_real(value) if value.is_complex() else value for value in values]
    return torch.cat([value.reshape(-1).double() for value in real])


def begin(optimizer: Any, samples: int, set_to_none: bool = True) -> None:
    """A step begins. The weight is said before the backward pass, so that gradients may travel early."""
    optimizer.zero_grad(set_to_none=set_to_none)
    if hasattr(optimizer, "set_batch_weight"):
        optimizer.set_batch_weight(samples)


def classify(model: Any, optimizer: Any, rows: slice, steps: int = 8) -> None:
    for _ in range(steps):
        begin(optimizer, len(X[rows]))
        F.cross_entropy(model(X[rows]), Y[rows]).backward()
        optimizer.step()


Program = Callable[[Any, Any, slice], Any]
"""Trains a model with an optimizer on some rows."""


def assert_same_training(
    ranks: Any,
    start: nn.Module,
    make: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer],
    options: dict[str, Any],
    program: Program = classify,
    tolerance: float = 1e-5,
    shares: str = "uneven",
) -> None:
    """A program on all rows in one process, and on each rank's share of them, ends with the same parameters."""
    single = copy.deepcopy(start)
    expected = program(single, make(single.parameters()), slice(None))

    def check() -> None:
        model = copy.deepcopy(start)
        optimizer = hvd.DistributedOptimizer(make(model.parameters()), model.named_parameters(), **options)
        result = program(model, optimizer, split(48, shares))
        assert distance(flat(model), flat(single)) <= tolerance
        assert_equal_everywhere(flat(model))
        if expected is not None:
            assert result == pytest.approx(expected, rel=1e-5)

    ranks(check)


# Models


class Tied(nn.Module):
    """Words in and words out share one table."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(20, 10)
        self.middle = nn.Linear(10, 10)
        self.out = nn.Linear(10, 20, bias=False)
        self.out.weight = self.table.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        words = (x.abs() * 7).long() % 20
        hidden = self.middle(self.table(words).mean(1) + x)
        result: torch.Tensor = self.out(hidden)
        return result


class Checkpointed(nn.Module):
    """Used twice, and computed once more in the backward pass."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.first, self.again, self.last = nn.Linear(10, 8), nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.first(x))
        for _ in range(2):
            # Threads that save the state of torch's generator at a time, one of them while Python collects garbage, wait for
            # each other for ever: that one has torch's lock then, and the other thread has Python's.
            again = checkpoint(self.again, hidden, use_reentrant=self.reentrant, preserve_rng_state=False)
            hidden = torch.tanh(again)
        result: torch.Tensor = self.last(hidden)
        return result


def plain() -> nn.Module:
    return nn.Sequential(nn.Linear(10, 16), nn.Tanh(), nn.Linear(16, 4))


def convolutional() -> nn.Module:
    layers = nn.Sequential(
        nn.Unflatten(1, (2, 5, 1)), nn.Conv2d(2, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 4, (5, 1))
    )
    return nn.Sequential(layers, nn.Flatten())


def recurrent() -> nn.Module:
    class Last(nn.Module):
        def forward(self, outputs: tuple[torch.Tensor, Any]) -> torch.Tensor:
            return outputs[0][:, -1]

    return nn.Sequential(nn.Unflatten(1, (5, 2)), nn.LSTM(2, 4, batch_first=True), Last())


MODELS: dict[str, Callable[[], nn.Module]] = {
    "compiled, eager": lambda: torch.compile(plain(), backend="eager"),
    "compiled, aot_eager": lambda: torch.compile(plain(), backend="aot_eager"),
    "weight norm": lambda: nn.Sequential(parametrizations.weight_norm(nn.Linear(10, 16)), nn.Tanh(), nn.Linear(16, 4)),
    "orthogonal": lambda: nn.Sequential(parametrizations.orthogonal(nn.Linear(10, 10)), nn.Tanh(), nn.Linear(10, 4)),
    "spectral norm": lambda: nn.Sequential(parametrizations.spectral_norm(nn.Linear(10, 4)), nn.Tanh()),
    "tied": Tied,
    "checkpointed": lambda: Checkpointed(reentrant=False),
    "checkpointed, reentrant": lambda: Checkpointed(reentrant=True),
    "channels last": lambda: convolutional().to(memory_format=torch.channels_last),
    "recurrent": recurrent,
}


_DRAWING = threading.Lock()


def made(make: Callable[[], Any], seed: int = 5) -> Any:
    """A model of equal parameters on all ranks; those that are threads share torch's random numbers."""
    with _DRAWING:
        torch.manual_seed(seed)
        return make()


@every_way
@pytest.mark.parametrize("kind", MODELS)
def test_models(ranks: Any, kind: str, options: Any) -> None:
    assert_same_training(ranks, made(MODELS[kind]), ADAM, options)


@every_way
def test_a_model_compiled_after_the_wrap(ranks: Any, options: Any) -> None:
    def compiled(model: Any, optimizer: Any, rows: slice) -> None:
        classify(torch.compile(model, backend="aot_eager"), optimizer, rows)

    assert_same_training(ranks, made(plain), ADAM, options, compiled)


@pytest.mark.slow
@every_way
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # of torch's own code
@pytest.mark.skipif(not any(map(shutil.which, ("g++", "clang++"))), reason="torch's inductor needs a C++ compiler")
@pytest.mark.skipif(UNDER_MPI, reason="each process would compile for itself, for half a minute")
def test_a_model_compiled_by_inductor(ranks: Any, options: Any) -> None:
    with torch._inductor.config.patch(compile_threads=1):  # or processes for it stay behind
        assert_same_training(ranks, torch.compile(made(plain), backend="inductor"), ADAM, options)


class Transposed(nn.Module):
    """Its first parameter lies in memory in another order than its indices say."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.randn(16, 10).t() / 3)
        self.second = nn.Parameter(torch.randn(16, 4) / 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x @ self.first) @ self.second


@every_way
@pytest.mark.parametrize("implementation", [{}, {"fused": True}], ids=["default", "fused"])
def test_parameters_that_are_not_contiguous(ranks: Any, implementation: Any, options: Any) -> None:
    start = made(Transposed)
    assert not copy.deepcopy(start).first.is_contiguous()
    assert_same_training(ranks, start, lambda p: torch.optim.Adam(p, lr=1e-2, **implementation), options)


@whole_ways
def test_parameters_that_are_not_contiguous_and_compressed(ranks: Any, options: Any) -> None:
    more = {**options, "compression": hvd.Compression.fp16}
    assert_same_training(ranks, made(Transposed), SGD, more, tolerance=2e-3)


@every_way
def test_a_parameter_with_gaps(ranks: Any, options: Any) -> None:
    def check() -> None:
        rank, size = hvd.rank(), hvd.size()
        everything = torch.zeros(6, 8)
        parameter = nn.Parameter(everything[:, ::2])
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([parameter], lr=1.0), **options)
        slope = torch.arange(24.0).view(6, 4)
        for step in range(1, 6):
            optimizer.zero_grad()
            (parameter * slope * rank).sum().backward()
            optimizer.step()
            torch.testing.assert_close(parameter.detach(), -step * slope * (size - 1) / 2)
        assert not everything[:, 1::2].any()

    ranks(check)


@whole_ways
def test_a_gradient_that_is_replaced_by_one_in_another_order(ranks: Any, options: Any) -> None:
    """After the exchange, which is no reason for the step to read it in the wrong order."""

    def check() -> None:
        parameter = nn.Parameter(torch.zeros(4, 6))
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([parameter], lr=1.0), **options)
        for step in range(1, 6):
            optimizer.zero_grad()
            parameter.sum().backward()
            optimizer.synchronize()
            parameter.grad = torch.arange(24.0).view(6, 4).t()
            optimizer.step()
            torch.testing.assert_close(parameter.detach(), -step * torch.arange(24.0).view(6, 4).t())

    ranks(check)


@every_way
@pytest.mark.parametrize("kept", [True, False], ids=["parameters too", "parameters in another order"])
def test_state_that_is_not_contiguous(ranks: Any, kept: bool, options: Any) -> None:
    start = made(MODELS["channels last"])
    begun = ADAM(start.parameters())
    classify(start, begun, slice(None), steps=3)
    checkpoint = begun.state_dict()
    assert not all(value.is_contiguous() for state in checkpoint["state"].values() for value in state.values())
    start.to(memory_format=torch.channels_last if kept else torch.contiguous_format)
    single = copy.deepcopy(start)
    alone = ADAM(single.parameters())
    alone.load_state_dict(copy.deepcopy(checkpoint))
    classify(single, alone, slice(None), steps=4)

    def check() -> None:
        for loaded_before_the_wrap in (True, False):
            model = copy.deepcopy(start)
            optimizer = ADAM(model.parameters())
            if loaded_before_the_wrap:
                optimizer.load_state_dict(copy.deepcopy(checkpoint))
            hvd.DistributedOptimizer(optimizer, **options)
            if not loaded_before_the_wrap:
                optimizer.load_state_dict(copy.deepcopy(checkpoint))
            classify(model, optimizer, split(48, "uneven"), steps=4)
            assert distance(flat(model), flat(single)) <= 1e-5
            state, expected = optimizer.state_dict()["state"], alone.state_dict()["state"]
            torch.testing.assert_close(state, expected, rtol=1e-4, atol=1e-6)

    ranks(check)


class Mixed(nn.Module):
    """Parameters of all dtypes, of no dimension and of no element, each with a loss of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.of_scalar = nn.Parameter(torch.tensor(0.5))
        self.of_empty = nn.Parameter(torch.zeros(0, 3))
        self.of_single = nn.Parameter(torch.randn(10))
        self.of_double = nn.Parameter(torch.randn(10, dtype=torch.float64))
        self.of_complex = nn.Parameter(torch.randn(10, dtype=torch.complex64))
        self.of_half = nn.Parameter(torch.randn(10).bfloat16())

    def loss(self, x: torch.Tensor) -> torch.Tensor:
        terms = [
            (x - self.of_scalar).square().mean(1),
            (x - self.of_single).square().mean(1),
            (x.double() - self.of_double).square().mean(1),
            (x * (1 + 2j) - self.of_complex).abs().square().mean(1),
            (x - self.of_half).square().mean(1),
            x.new_zeros(len(x)) + self.of_empty.sum(),
        ]
        return torch.stack([term.double() for term in terms]).sum(0).mean()


@each_road
@every_way
@pytest.mark.parametrize(("make", "clip"), [(SGD, 0.5), (ADAM, None)], ids=["clipped", "free"])
def test_parameters_of_all_dtypes_and_sizes_in_one_optimizer(ranks: Any, make: Any, clip: Any, options: Any) -> None:
    start, single = made(Mixed), made(Mixed)

    def fit(model: Any, optimizer: Any, rows: slice, clips: bool) -> None:
        for _ in range(6):
            begin(optimizer, len(X[rows]))
            model.loss(X[rows]).backward()
            if clips:
                torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()

    fit(single, make(single.parameters()), slice(None), clip is not None)

    def check() -> None:
        model: Any = copy.deepcopy(start)
        optimizer = hvd.DistributedOptimizer(make(model.parameters()), max_grad_norm=clip, **options)
        fit(model, optimizer, split(48, "uneven"), False)
        # A bfloat16 gradient is rounded on each rank; that goes into the norm of all.
        tolerance = 1e-5 if clip is None else 1e-3
        for (name, got), expected in zip(model.named_parameters(), single.parameters(), strict=True):
            assert got.dtype is expected.dtype
            assert got.shape == expected.shape
            within = 2e-2 if name == "of_half" else tolerance
            torch.testing.assert_close(got, expected, rtol=within, atol=within)
        assert_equal_everywhere(flat(model))

    ranks(check)


@every_way
def test_an_optimizer_of_empty_parameters_alone(ranks: Any, options: Any) -> None:
    def check() -> None:
        parameter = nn.Parameter(torch.zeros(0, 3))
        optimizer = hvd.DistributedOptimizer(ADAM([parameter]), **options)
        for _ in range(4):
            optimizer.zero_grad()
            parameter.sum().backward()
            optimizer.step()
        assert parameter.grad is None or parameter.grad.shape == (0, 3)

    ranks(check)


class Conjugate(torch.autograd.Function):
    """The identity, whose gradient is one that torch has not conjugated yet."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return (gradient * (1 + 2j)).conj()


@each_road
@every_way
def test_gradients_that_are_conjugate_views(ranks: Any, options: Any) -> None:
    def check() -> None:
        rank, size = hvd.rank(), hvd.size()
        parameter = nn.Parameter(torch.zeros(40, dtype=torch.complex64))
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([parameter], lr=1.0), **options)
        for step in range(1, 6):
            optimizer.zero_grad()
            (Conjugate.apply(parameter).real.sum() * rank).backward()
            assert parameter.grad is not None
            optimizer.step()
            torch.testing.assert_close(
                parameter.detach(), torch.full((40,), -step * (1 - 2j) * (size - 1) / 2, dtype=torch.complex64)
            )

    ranks(check)


# Programs


class Adversaries(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(4, 12), nn.Tanh(), nn.Linear(12, 10))
        self.critic = nn.Sequential(nn.Linear(10, 12), nn.Tanh(), nn.Linear(12, 1))


def play(model: Any, generator: Any, critic: Any, rows: slice) -> None:
    """In turns; noise is a function of the row, so that it is the same on however many ranks.

    The generator's backward pass goes through the critic, whose gradients then are not what its next step is to use; the
    generated samples' graph is used by both.
    """
    real, noise = X[rows], X[rows, :4].cos()
    yes, no = torch.ones(len(real), 1), torch.zeros(len(real), 1)
    for _ in range(6):
        fake = model.generator(noise)
        for _ in range(2):
            begin(critic, len(real))
            F.binary_cross_entropy_with_logits(model.critic(real), yes).backward()
            F.binary_cross_entropy_with_logits(model.critic(fake), no).backward(retain_graph=True)
            critic.step()
        begin(generator, len(real))
        F.binary_cross_entropy_with_logits(model.critic(model.generator(noise)), yes).backward()
        generator.step()


@every_way
def test_two_models_two_optimizers_in_turns(ranks: Any, options: Any) -> None:
    start, single = made(Adversaries), made(Adversaries)
    play(single, ADAM(single.generator.parameters()), SGD(single.critic.parameters()), slice(None))

    def check() -> None:
        model: Any = copy.deepcopy(start)
        generator = hvd.DistributedOptimizer(
            ADAM(model.generator.parameters()), model.generator.named_parameters(), **options
        )
        critic = hvd.DistributedOptimizer(SGD(model.critic.parameters()), model.critic.named_parameters(), **options)
        play(model, generator, critic, split(48, "uneven"))
        assert distance(flat(model), flat(single)) <= 1e-5
        assert_equal_everywhere(flat(model))

    ranks(check)


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(10, 12)
        self.heads = nn.ModuleList([nn.Linear(12, 4), nn.Linear(12, 4)])

    def forward(self, x: torch.Tensor, head: int) -> torch.Tensor:
        result: torch.Tensor = self.heads[head](torch.tanh(self.body(x)))
        return result


def optimizers_of(model: Any) -> list[torch.optim.Optimizer]:
    """Both have the body."""
    return [ADAM([*model.body.parameters(), *head.parameters()]) for head in model.heads]


def train_heads(model: Any, optimizers: Any, rows: slice, at_once: bool) -> None:
    for _ in range(6):
        if at_once:
            for optimizer in optimizers:
                begin(optimizer, len(X[rows]))
            loss = sum(F.cross_entropy(model(X[rows], n), (Y[rows] + n) % 4) for n in range(2))
            loss.backward(retain_graph=True)
            loss.backward()
            for optimizer in optimizers:
                optimizer.step()
        else:
            for n, optimizer in enumerate(optimizers):
                begin(optimizer, len(X[rows]))
                F.cross_entropy(model(X[rows], n), (Y[rows] + n) % 4).backward()
                optimizer.step()


@whole_ways
@pytest.mark.parametrize("at_once", [False, True], ids=["in turns", "at once"])
def test_two_optimizers_that_share_parameters(ranks: Any, at_once: bool, options: Any) -> None:
    start, single = made(Heads), made(Heads)
    train_heads(single, optimizers_of(single), slice(None), at_once)

    def check() -> None:
        model = copy.deepcopy(start)
        optimizers = [hvd.DistributedOptimizer(each, **options) for each in optimizers_of(model)]
        train_heads(model, optimizers, split(48, "uneven"), at_once)
        assert distance(flat(model), flat(single)) <= 1e-5
        assert_equal_everywhere(flat(model))

    ranks(check)


def test_sharded_optimizers_cannot_share_parameters(ranks: Any) -> None:
    def check() -> None:
        model = made(Heads)
        first, second = (hvd.DistributedOptimizer(each, shard=True) for each in optimizers_of(model))
        F.cross_entropy(model(X, 0), Y).backward()
        with pytest.raises(ArgumentError, match="given other memory"):
            first.step()
        second.step()

    ranks(check)


@every_way
def test_each_rank_uses_one_head_only(ranks: Any, options: Any) -> None:
    """One of the two optimizers has no gradient of most of its parameters there."""
    start, single = made(Heads), made(Heads)

    def optimizers(model: Any) -> list[torch.optim.Optimizer]:
        return [SGD([*model.body.parameters(), *model.heads[0].parameters()]), SGD(model.heads[1].parameters())]

    def check() -> None:
        rank, size = hvd.rank(), hvd.size()
        model, joined = copy.deepcopy(start), copy.deepcopy(single)
        distributed = [hvd.DistributedOptimizer(each, **options) for each in optimizers(model)]
        alone = optimizers(joined)
        rows = [slice(10 * r, 10 * r + 10) for r in range(size)]
        for step in range(6):
            for optimizer in (*distributed, *alone):
                optimizer.zero_grad()
            F.cross_entropy(model(X[rows[rank]], (rank + step) % 2), Y[rows[rank]]).backward()
            losses = [F.cross_entropy(joined(X[rows[r]], (r + step) % 2), Y[rows[r]]) for r in range(size)]
            (sum(losses) / size).backward()
            for optimizer in (*distributed, *alone):
                if any(p.grad is not None for group in optimizer.param_groups for p in group["params"]) or size > 1:
                    optimizer.step()
        assert distance(flat(model), flat(joined)) <= 1e-5
        assert_equal_everywhere(flat(model))

    ranks(check)


@every_way
def test_parameters_are_frozen_and_thawed(ranks: Any, options: Any) -> None:
    def program(model: Any, optimizer: Any, rows: slice) -> None:
        for step in range(12):
            model[0].requires_grad_(step % 4 != 1)
            model[2].bias.requires_grad_(step < 6)
            classify(model, optimizer, rows, steps=1)

    assert_same_training(ranks, made(plain), ADAM, options, program)


@every_way
def test_groups_are_added_while_training(ranks: Any, options: Any) -> None:
    start, single = made(plain), made(plain)

    def program(model: Any, optimizer: Any, rows: slice) -> None:
        classify(model, optimizer, rows, steps=5)
        optimizer.add_param_group({"params": list(model[0].parameters()), "lr": 1e-3})
        classify(model, optimizer, rows, steps=5)

    program(single, ADAM(single[2].parameters()), slice(None))

    def check() -> None:
        model = copy.deepcopy(start)
        optimizer = hvd.DistributedOptimizer(ADAM(model[2].parameters()), **options)
        program(model, optimizer, split(48, "uneven"))
        assert distance(flat(model), flat(single)) <= 1e-5
        assert_equal_everywhere(flat(model))

    ranks(check)


@every_way
def test_gradients_set_to_none_and_to_zero_by_turns(ranks: Any, options: Any) -> None:
    """A head that is not used has no gradient or a zero one; the latter lets weight decay change it."""

    def program(model: Any, optimizer: Any, rows: slice) -> None:
        for step in range(9):
            begin(optimizer, len(X[rows]), set_to_none=step % 3 == 0)
            F.cross_entropy(model(X[rows], step % 2), Y[rows]).backward()
            optimizer.step()

    assert_same_training(ranks, made(Heads), SGD, options, program)


@every_way
@pytest.mark.parametrize("how", ["penalty", "graph kept", "assigned"])
@pytest.mark.filterwarnings("ignore:Using backward\\(\\) with create_graph=True")
def test_gradients_of_gradients(ranks: Any, how: str, options: Any) -> None:
    def program(model: Any, optimizer: Any, rows: slice) -> None:
        x = X[rows].clone().requires_grad_()
        for _ in range(6):
            begin(optimizer, len(x))
            loss = F.cross_entropy(model(x), Y[rows])
            if how == "assigned":
                parameters = list(model.parameters())
                for parameter, gradient in zip(
                    parameters, torch.autograd.grad(loss, parameters, create_graph=True), strict=True
                ):
                    parameter.grad = gradient
            elif how == "graph kept":
                loss.backward(create_graph=True)
                model[0].bias.grad.square().sum().detach()
            else:
                (slope,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
                (loss + 0.01 * slope.square().sum(1).mean()).backward()
            optimizer.step()
        optimizer.zero_grad()  # or parameter, gradient and graph would hold each other

    assert_same_training(ranks, made(plain), SGD, options, program)


SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "lambda": lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda step: 1 / (1 + step)),
    "one cycle": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, max_lr=0.1, total_steps=10),
    "plateau": lambda o: torch.optim.lr_scheduler.ReduceLROnPlateau(o, patience=0, factor=0.5, threshold=0.5),
}


@every_way
@pytest.mark.parametrize(("kind", "before"), [("lambda", True), ("one cycle", False), ("plateau", True)])
def test_schedulers(ranks: Any, kind: str, before: bool, options: Any) -> None:
    def program(model: Any, optimizer: Any, scheduler: Any, rows: slice, joined: Callable[[torch.Tensor], Any]) -> Any:
        rates = []
        for _ in range(8):
            begin(optimizer, len(X[rows]))
            loss = F.cross_entropy(model(X[rows]), Y[rows])
            loss.backward()
            optimizer.step()
            scheduler.step(*([joined(loss.detach())] if kind == "plateau" else []))
            rates.append(optimizer.param_groups[0]["lr"])
        return rates

    start, single = made(plain), made(plain)
    alone = SGD(single.parameters())
    expected = program(single, alone, SCHEDULERS[kind](alone), slice(None), float)
    assert len(set(expected)) > 1

    def check() -> None:
        model = copy.deepcopy(start)
        optimizer = SGD(model.parameters())
        scheduler = SCHEDULERS[kind](optimizer) if before else None
        hvd.DistributedOptimizer(optimizer, **options)
        scheduler = SCHEDULERS[kind](optimizer) if scheduler is None else scheduler
        rates = program(
            model, optimizer, scheduler, split(48, "equal"), lambda loss: float(hvd.allreduce(loss, name="loss"))
        )
        assert rates == pytest.approx(expected)
        assert distance(flat(model), flat(single)) <= 1e-5

    ranks(check)


@whole_ways
def test_lbfgs(ranks: Any, options: Any) -> None:
    """Whose line search evaluates a closure as often as the losses say: on all ranks equally."""

    def make(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.LBFGS(parameters, lr=0.5, max_iter=4, line_search_fn="strong_wolfe")

    def program(model: Any, optimizer: Any, rows: slice) -> list[float]:
        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(X[rows].double()), Y[rows])
            loss.backward()
            return loss

        losses = []
        for _ in range(4):
            if hasattr(optimizer, "set_batch_weight"):
                optimizer.set_batch_weight(len(X[rows]))
            losses.append(optimizer.step(closure).item())
        return losses

    assert_same_training(ranks, made(plain).double(), make, options, program)


@whole_ways
def test_copies_of_model_and_optimizer_go_on_alone_or_together(ranks: Any, options: Any) -> None:
    single = made(plain)
    alone = ADAM(single.parameters())
    classify(single, alone, slice(None), steps=4)
    half = copy.deepcopy(single)
    classify(single, alone, slice(None), steps=4)

    def check() -> None:
        model = made(plain)
        optimizer = hvd.DistributedOptimizer(ADAM(model.parameters()), **options)
        classify(model, optimizer, split(48, "uneven"), steps=4)
        both: Any = model, optimizer
        buffer = io.BytesIO()
        torch.save(both, buffer)
        buffer.seek(0)
        for twin, other in (
            copy.deepcopy(both),
            pickle.loads(pickle.dumps(both)),
            torch.load(buffer, weights_only=False),
        ):
            assert type(other) is torch.optim.Adam
            apart = copy.deepcopy((twin, other))
            classify(*apart, slice(None), steps=4)  # in one process, with all rows
            assert distance(flat(apart[0]), flat(single)) <= 1e-5
            again = hvd.DistributedOptimizer(other, **options)
            classify(twin, again, split(48, "uneven"), steps=4)
            assert distance(flat(twin), flat(single)) <= 1e-5
            assert_equal_everywhere(flat(twin))
        assert distance(flat(model), flat(half)) <= 1e-5  # which no copy has touched

    ranks(check)


@every_way
def test_averaged_weights(ranks: Any, options: Any) -> None:
    """torch's own copy of a model, updated after each step."""
    single = made(plain)
    alone, expected = ADAM(single.parameters()), AveragedModel(single)
    for _ in range(6):
        classify(single, alone, slice(None), steps=1)
        expected.update_parameters(single)

    def check() -> None:
        model = made(plain)
        optimizer = hvd.DistributedOptimizer(ADAM(model.parameters()), **options)
        average = AveragedModel(model)
        for _ in range(6):
            classify(model, optimizer, split(48, "uneven"), steps=1)
            average.update_parameters(model)
        assert distance(flat(average), flat(expected)) <= 1e-5

    ranks(check)


@every_way
def test_a_checkpoint_is_resumed_on_another_number_of_ranks(ranks: Any, options: Any) -> None:
    """Some of the ranks, then all of them, then one."""
    single = made(plain)
    classify(single, ADAM(single.parameters()), slice(None), steps=9)

    def saved(model: nn.Module, optimizer: Any) -> bytes:
        buffer = io.BytesIO()
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, buffer)
        return buffer.getvalue()

    def resumed(checkpoint: bytes, **more: Any) -> tuple[nn.Module, Any]:
        model = made(plain, seed=6)
        optimizer = ADAM(model.parameters())
        if more:
            optimizer = hvd.DistributedOptimizer(optimizer, **more)
        state = torch.load(io.BytesIO(checkpoint))
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        return model, optimizer

    def check() -> None:
        rank, size = hvd.rank(), hvd.size()
        few = hvd.add_process_set(range(max(1, size - 1))) if size > 1 else hvd.global_process_set
        checkpoint = None
        if few.included():
            model = made(plain)
            optimizer = hvd.DistributedOptimizer(ADAM(model.parameters()), process_set=few, **options)
            number = few.size() or 1
            classify(model, optimizer, slice(48 * rank // number, 48 * (rank + 1) // number), steps=3)
            checkpoint = saved(model, optimizer)
        checkpoint = hvd.broadcast_object(checkpoint)
        model, optimizer = resumed(checkpoint, **options)
        classify(model, optimizer, split(48, "uneven"), steps=3)
        model, optimizer = resumed(saved(model, optimizer))
        classify(model, optimizer, slice(None), steps=3)
        assert distance(flat(model), flat(single)) <= 1e-5
        assert_equal_everywhere(flat(model))
        hvd.barrier()
        if few is not hvd.global_process_set:
            hvd.remove_process_set(few)

    ranks(check)


@every_way
def test_two_process_sets_train_two_models_at_the_same_time(ranks: Any, options: Any) -> None:
    """Models of other kinds, with other numbers of steps; the sets never wait for each other."""

    def check() -> None:
        rank, size = hvd.rank(), hvd.size()
        cut = -(-size // 2)
        sets = [hvd.add_process_set(part) for part in (range(cut), range(cut, size)) if 0 < len(part) < size]
        mine = next((each for each in sets if each.included()), hvd.global_process_set)
        number, members = mine.rank() or 0, mine.size() or 1
        start, steps = (made(plain), 4) if rank < cut else (made(Tied), 7)
        single, model = copy.deepcopy(start), copy.deepcopy(start)
        classify(single, ADAM(single.parameters()), slice(None), steps)
        optimizer = hvd.DistributedOptimizer(ADAM(model.parameters()), process_set=mine, **options)
        classify(model, optimizer, slice(48 * number // members, 48 * (number + 1) // members), steps)
        assert distance(flat(model), flat(single)) <= 1e-5
        hvd.barrier()
        for each in sets:
            hvd.remove_process_set(each)

    ranks(check)


@every_way
def test_synchronous_batch_norm(ranks: Any, options: Any) -> None:
    """Against batch norm on the joined batch; running statistics too."""

    def network() -> nn.Module:
        convolutions = nn.Sequential(nn.Unflatten(1, (2, 5, 1)), nn.Conv2d(2, 4, (3, 1)), nn.BatchNorm2d(4), nn.ReLU())
        return nn.Sequential(convolutions, nn.Flatten(), nn.Linear(12, 6), nn.BatchNorm1d(6), nn.Linear(6, 4)).double()

    start = made(network)

    def fit(model: Any, optimizer: Any, rows: slice, mean_size: float) -> None:
        for _ in range(6):
            optimizer.zero_grad()
            (F.cross_entropy(model(X[rows].double()), Y[rows], reduction="sum") / mean_size).backward()
            optimizer.step()

    single = copy.deepcopy(start)
    fit(single, SGD(single.parameters()), slice(None), 48)

    def check() -> None:
        model = hvd.SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(start))
        optimizer = hvd.DistributedOptimizer(SGD(model.parameters()), model.named_parameters(), **options)
        fit(model, optimizer, split(48, "uneven"), 48 / hvd.size())
        assert distance(flat(model), flat(single)) <= 1e-9
        assert_equal_everywhere(flat(model))

    ranks(check)


@every_way
def test_two_runs_are_the_same_bit_for_bit(ranks: Any, options: Any) -> None:
    def check() -> None:
        runs = []
        for _ in range(2):
            model = made(MODELS["tied"])
            optimizer = hvd.DistributedOptimizer(ADAM(model.parameters()), max_grad_norm=1.0, **options)
            classify(model, optimizer, split(48, "uneven"))
            runs.append(flat(model))
        assert torch.equal(*runs)

    ranks(check)


@every_way
def test_a_backward_pass_without_a_step_at_the_end(ranks: Any, options: Any) -> None:
    """On one rank: what it has begun to exchange is given up when the job ends."""

    def check() -> None:
        model = made(plain)
        optimizer = hvd.DistributedOptimizer(SGD(model.parameters()), **options)
        classify(model, optimizer, split(48, "equal"), steps=5)
        if hvd.rank() == 0:
            F.cross_entropy(model(X), Y).backward()
        hvd.barrier()

    ranks(check)
