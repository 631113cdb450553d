"""A step of a pipeline is that of one process with the whole batch, whatever the batch and the loss are; or all ranks raise."""

from __future__ import annotations

import contextlib
import copy
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import hypothesis
import pytest
import torch
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

import hvdlite_torch as hvd
from hvdlite.adapter.pipeline.schedules import (
    Pass,
    Schedule,
    forward_only,
    gpipe,
    one_forward_one_backward,
    there_and_back,
)
from hvdlite.errors import ArgumentError, HvdliteError
from hvdlite_torch.pipeline.values import TensorCodec
from tests.support.processes import processes

DTYPE = torch.float64
TOLERANCE: dict[str, Any] = {"rtol": 0, "atol": 1e-12}


def numbers(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=DTYPE)


def linear(a: int, b: int) -> nn.Linear:
    return nn.Linear(a, b, dtype=DTYPE)


Module = TypeVar("Module", bound=nn.Module)


def seeded(module: Module) -> Module:
    """Give a module weights that are the same on every rank. (Ranks may be threads, which share torch's random state.)"""
    for number, parameter in enumerate(module.parameters()):
        parameter.data = numbers(*parameter.shape, seed=number) / 2
    return module


def network(stages: int, *more: nn.Module) -> tuple[nn.Sequential, list[str]]:
    """A model, and the layers with which its stages but the first begin. A stage begins by changing its input in place."""
    layers: list[nn.Module] = [linear(4, 6)]
    for _ in range(stages):
        layers += [nn.ReLU(inplace=True), linear(6, 6)]
    layers[1] = nn.Tanh()
    model = seeded(nn.Sequential(*layers, *more, nn.Tanh(), linear(6, 3)))
    return model, [str(2 * stage + 1) for stage in range(1, stages)]


def gradients(layers: Any) -> dict[str, torch.Tensor]:
    return {name: parameter.grad.clone() for name, parameter in layers.named_parameters() if parameter.grad is not None}


def assert_gradients(pipeline: Any, model: nn.Module) -> None:
    expected, found = gradients(model), gradients(pipeline)
    assert found.keys() == {name for name, _ in pipeline.named_parameters()} & expected.keys()
    for name, value in found.items():
        torch.testing.assert_close(value, expected[name], **TOLERANCE)


def cut(tensor: torch.Tensor, count: int) -> Sequence[torch.Tensor]:
    return tensor.tensor_split(count)


HOW: dict[str, dict[str, Any]] = {"1f1b": {}, "gpipe": {}, "interleaved": {"stages_per_rank": 2}}


@pytest.mark.parametrize("schedule", HOW)
def test_any_batch(ranks: Any, schedule: str) -> None:
    """Micro-batches of different sizes, fewer rows than micro-batches; gradients that add up, those of inputs; statistics."""

    def check() -> None:
        stages = hvd.size() * (2 if schedule == "interleaved" else 1)
        model, cuts = network(stages, nn.BatchNorm1d(6, dtype=DTYPE))
        alone = copy.deepcopy(model)
        pipeline = hvd.Pipeline(model, loss=F.mse_loss, microbatches=4, cuts=cuts, schedule=schedule, **HOW[schedule])
        for rows in (8, 11, 14, 8):
            x, y = numbers(rows, 4), numbers(rows, 3, seed=2)
            ours, plain = (x.clone().requires_grad_() for _ in range(2))
            loss = torch.zeros((), dtype=DTYPE)
            for a, b in zip(cut(plain, 4), cut(y, 4), strict=True):
                share = F.mse_loss(alone(a), b) * len(a) / rows
                share.backward()
                loss += share.detach()
            torch.testing.assert_close(pipeline.step(ours, y), loss, **TOLERANCE)
            assert_gradients(pipeline, alone)  # which add up
            torch.testing.assert_close(ours.grad, plain.grad, **TOLERANCE)
        for name, value in pipeline.full_state_dict().items():
            torch.testing.assert_close(value, alone.state_dict()[name], **TOLERANCE)
        pipeline.eval()
        alone.eval()
        for rows in (1, 3, 9):
            torch.testing.assert_close(pipeline.predict(x[:rows]), alone(x[:rows]), **TOLERANCE)
            model_grad = gradients(pipeline)
            torch.testing.assert_close(
                pipeline.step(x[:rows], y[:rows]), F.mse_loss(alone(x[:rows]), y[:rows]), **TOLERANCE
            )
            assert model_grad.keys() == gradients(pipeline).keys()
        assert f"4 micro-batches, {schedule}" in pipeline.report()

    ranks(check)


def tokens() -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs (8, 5, 4), and classes (8, 5) of which many are ignored; in two micro-batches there are none."""
    y = torch.randint(0, 3, (8, 5), generator=torch.Generator().manual_seed(3))
    y[0, 3:] = y[2:4] = y[5, 1:] = y[6:] = -100
    return numbers(8, 5, 4), y


def entropy(o: Any, t: Any, **options: Any) -> torch.Tensor:
    return F.cross_entropy(o.flatten(0, -2), t.flatten(), **options)


def masked(o: Any, t: Any) -> torch.Tensor:
    each = entropy(o, t.clamp(min=0), reduction="none")
    return (each * (t.flatten() >= 0)).sum()


WEIGHTS = torch.tensor([1.0, 3.0, 0.5], dtype=DTYPE)
SCALE = torch.tensor(1024.0, dtype=DTYPE)
MEANS: dict[str, tuple[Any, Any]] = {  # the loss of the pipeline, and of one process
    "ignored": (entropy, entropy),
    "weights of classes": (lambda o, t: entropy(o, t, weight=WEIGHTS), lambda o, t: entropy(o, t, weight=WEIGHTS)),
    "a module": (
        lambda o, t: nn.CrossEntropyLoss(label_smoothing=0.1)(o.transpose(1, 2), t.clamp(min=0)),
        lambda o, t: entropy(o, t.clamp(min=0), label_smoothing=0.1),
    ),
    "scaled": (lambda o, t: SCALE * entropy(o, t) / 2, lambda o, t: SCALE * entropy(o, t) / 2),
    "a pair": (
        lambda o, t: (masked(o, t), (t >= 0).sum()),
        lambda o, t: masked(o, t) / (t >= 0).sum(),
    ),
    "samples": (lambda o, t: o.square().mean() + 1, lambda o, t: o.square().mean() + 1),
    "random": (lambda o, t: (o + 0 * torch.rand(1)).square().mean(), lambda o, t: o.square().mean()),
    "a sum": (nn.MSELoss(reduction="sum"), lambda o, t: (o - 0.5).square().sum()),
}


@pytest.mark.ranks(at_least=2)
def test_what_a_mean_is_over(ranks: Any) -> None:
    """The gradient is that of the whole batch, whatever the micro-batches count."""

    def check() -> None:
        x, y = tokens()
        for name, (loss, whole) in MEANS.items():
            for schedule, microbatches in (("1f1b", 8), ("1f1b", 3), ("gpipe", 4)):
                model, cuts = network(hvd.size())
                alone = copy.deepcopy(model)
                target = torch.full((8, 5, 3), 0.5, dtype=DTYPE) if name == "a sum" else y
                pipeline = hvd.Pipeline(model, loss=loss, microbatches=microbatches, schedule=schedule, cuts=cuts)
                for _ in range(2):  # the second time, gradients are added to those that are there
                    expected = whole(alone(x), target)
                    expected.backward()
                    torch.testing.assert_close(pipeline.step(x, target), expected.detach(), **TOLERANCE)
                    for key, value in gradients(pipeline).items():
                        torch.testing.assert_close(value, gradients(alone)[key], rtol=1e-12, atol=1e-12)
        model, cuts = network(hvd.size())
        pipeline = hvd.Pipeline(model, loss=masked, reduction="sum", microbatches=3, cuts=cuts)
        expected = masked(model(x), y)
        torch.testing.assert_close(pipeline.step(x, y), expected.detach(), **TOLERANCE)
        pipeline = hvd.Pipeline(model, loss=entropy, microbatches=2, cuts=cuts)
        sgd = torch.optim.SGD(pipeline.parameters(), lr=1.0)
        assert math.isnan(pipeline.step(x, torch.full_like(y, -100), sgd))  # as in one process
        assert all((value == 0).all() for value in gradients(pipeline).values())

    ranks(check)


NO_MEANS: dict[str, tuple[str, Callable[..., Any]]] = {
    "it is their sum": ("a sum that does not say so", lambda o, t: o.square().sum()),
    "it divides by something else": ("a mask", lambda o, t: masked(o, t) / (t >= 0).sum().clamp(min=1)),
    "it is neither their mean": (
        "each with each",
        lambda o, t: torch.logsumexp((o.flatten(1) @ o.flatten(1).T).flatten(), 0),
    ),
    "the loss returned \\(8?2?4?1?, 5, 3\\)": ("no number", lambda o, t: o),
    "the loss returned float": ("no tensor", lambda o, t: 1.0),
    "a sum and its count for one micro-batch, and a mean": (
        "a change of mind",
        lambda o, t: (o.sum(), 1) if t[0, 0] < 0 else o.square().mean(),
    ),
}


@pytest.mark.ranks(at_least=2)
def test_losses_that_are_no_means(ranks: Any) -> None:
    def check() -> None:
        x, y = tokens()
        y[0, 0] = -100
        for text, (_, loss) in NO_MEANS.items():
            model, cuts = network(hvd.size())
            pipeline = hvd.Pipeline(model, loss=loss, microbatches=4, cuts=cuts)
            with pytest.raises(ArgumentError, match=text):
                pipeline.step(x, y)
            assert not gradients(pipeline)
        for options in ({"loss": nn.MSELoss(reduction="none")}, {"loss": F.mse_loss, "reduction": "none"}):
            with pytest.raises(ArgumentError, match="reduction='none': expected 'mean' or 'sum'"):
                hvd.Pipeline(model, cuts=cuts, **options)

    ranks(check)


class Broken(nn.Module):
    """Raises in the forward or the backward pass of a call."""

    def __init__(self) -> None:
        super().__init__()
        self.at: tuple[str, int] | None = None
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.at == ("forward", self.calls):
            raise KeyError("too hot")
        if self.at == ("backward", self.calls) and x.requires_grad:
            x.register_hook(self._fail)
        return x.clone()

    def _fail(self, gradient: torch.Tensor) -> None:
        raise KeyError("too hot")


@pytest.mark.ranks(at_least=2)
@pytest.mark.parametrize("schedule", HOW)
def test_an_error_on_one_rank_is_raised_on_all(ranks: Any, schedule: str) -> None:
    def check() -> None:
        stages = hvd.size() * (2 if schedule == "interleaved" else 1)
        x, y = numbers(6, 4), numbers(6, 3, seed=2)
        layers: list[nn.Module] = [linear(4, 6)]
        for _ in range(stages):
            layers += [Broken(), linear(6, 6)]
        model, cuts = seeded(nn.Sequential(*layers, linear(6, 3))), [str(2 * stage + 1) for stage in range(1, stages)]
        alone = copy.deepcopy(model)
        fails = [""]

        def loss(o: Any, t: Any) -> torch.Tensor:
            if fails[0] == "loss":
                raise KeyError("too hot")
            return F.mse_loss(o, t)

        pipeline = hvd.Pipeline(model, loss=loss, microbatches=3, cuts=cuts, schedule=schedule, **HOW[schedule])
        F.mse_loss(alone(x), y).backward()
        pipeline.step(x, y)
        assert_gradients(pipeline, alone)
        for stage in range(stages):
            broken = layers[2 * stage + 1]
            assert isinstance(broken, Broken)
            for at in (("forward", 1), ("forward", 3), ("backward", 1), ("backward", 3)):
                broken.at, broken.calls = at, 0
                failed = stage % hvd.size()
                with pytest.raises(
                    KeyError if hvd.rank() == failed else HvdliteError,
                    match="too hot" if hvd.rank() == failed else f"^rank {failed} could not make this step.*too hot",
                ):
                    pipeline.step(x, y)
                assert_gradients(pipeline, alone)  # they are as they were
            broken.at = "forward", 1
            broken.calls = 0
            with pytest.raises((KeyError, HvdliteError)):
                pipeline.predict(x)
            broken.at = None
        fails[0] = "loss"
        with pytest.raises((KeyError, HvdliteError), match="too hot"):
            pipeline.step(x, y)
        fails[0] = ""
        F.mse_loss(alone(x), y).backward()
        pipeline.step(x, y)  # it goes on
        assert_gradients(pipeline, alone)
        torch.testing.assert_close(pipeline.predict(x), alone(x), **TOLERANCE)

    ranks(check)


@pytest.mark.ranks(at_least=2)
def test_an_error_in_the_step_of_one_optimizer_ends_the_next_step_of_all(ranks: Any) -> None:
    def check() -> None:
        model, cuts = network(hvd.size())
        pipeline = hvd.Pipeline(model, loss=F.mse_loss, microbatches=3, cuts=cuts)
        optimizer = torch.optim.SGD(pipeline.parameters(), lr=0.1)
        x, y = numbers(6, 4), numbers(6, 3, seed=2)
        pipeline.step(x, y, optimizer)
        if hvd.rank() == 1:
            optimizer.register_step_pre_hook(_too_hot)
            with pytest.raises(KeyError, match="too hot"):
                pipeline.step(x, y, optimizer)
        else:
            pipeline.step(x, y, optimizer)
            with pytest.raises(
                HvdliteError, match="^rank 1 has failed in the optimizer's step of the pipeline: KeyError"
            ):
                pipeline.step(x, y, optimizer)

    ranks(check)


def _too_hot(*_: Any) -> None:
    raise KeyError("too hot")


@pytest.mark.ranks(at_least=2)
def test_calls_that_do_not_fit(ranks: Any) -> None:
    """Whatever the ranks are called with, none waits in vain, and the pipeline can be used again."""

    def check() -> None:
        model, cuts = network(hvd.size())
        alone = copy.deepcopy(model)
        pipeline = hvd.Pipeline(model, loss=F.mse_loss, microbatches=4, cuts=cuts)
        x, y, last = numbers(8, 4), numbers(8, 3, seed=2), hvd.size() - 1
        sgd = torch.optim.SGD(pipeline.parameters(), lr=0.5)
        lbfgs = torch.optim.LBFGS(pipeline.parameters())

        def short(rank: int) -> None:
            rows = 3 if hvd.rank() == rank else 8
            pipeline.step(x[:rows], y[:rows])

        calls: list[tuple[str, Callable[[], Any]]] = [
            ("LBFGS does not step each parameter by itself", lambda: pipeline.step(x, y, lbfgs)),
            ("different numbers of samples: 8, and .5, 3.", lambda: pipeline.step(x, y[:5], sgd)),
            ("different numbers of samples", lambda: pipeline.step(x, y[: 8 if hvd.rank() else 5], sgd)),
            ("there are no samples", lambda: pipeline.step(x[:0], y[:0], sgd)),
            ("there are no samples", lambda: pipeline.predict(x[:0])),
            ("mask: an nn.Sequential takes no keyword", lambda: pipeline.step(x, y, mask=x)),
            ("called with different batches: .*micro-batches to train.*4 micro-batches", lambda: short(last)),
            ("called with different batches: .*micro-batches to train.*3 micro-batches", lambda: short(0)),
            (
                "called with different batches: .*micro-batches to predict",
                lambda: pipeline.predict(x) if hvd.rank() == last else pipeline.step(x, y),
            ),
        ]
        for text, call in calls:
            with pytest.raises(HvdliteError, match=text):
                call()
        pipeline.step(x, y)
        F.mse_loss(alone(x), y).backward()
        assert_gradients(pipeline, alone)

    ranks(check)


class Arc(nn.Module):
    """A loss with a weight of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(numbers(3, 3))

    def forward(self, o: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(o @ self.weight, t)


@pytest.mark.ranks(at_least=2)
def test_losses_that_use_parameters(ranks: Any) -> None:
    def penalized(o: torch.Tensor, t: torch.Tensor, some: Any) -> torch.Tensor:
        return F.mse_loss(o, t) + 0.1 * sum(parameter.square().sum() for parameter in some)

    def check() -> None:
        model, cuts = network(hvd.size())
        alone = copy.deepcopy(model)
        x, y, free = numbers(7, 4), numbers(7, 3, seed=2), torch.ones((), requires_grad=True)
        refused: list[tuple[str, Any]] = [
            (r"its parameter 'weight' of shape \(3, 3\)", Arc()),
            ("a tensor of shape", lambda o, t: penalized(o, t, model.parameters())),
            (r"a tensor of shape \(6, 4\)", lambda o, t: penalized(o, t, [model[0].weight])),
            (r"a tensor of shape \(\)", lambda o, t: free * F.mse_loss(o, t)),
        ]
        for text, loss in refused:
            pipeline = hvd.Pipeline(model, loss=loss, microbatches=2, cuts=cuts)
            with pytest.raises(ArgumentError, match=f"the loss uses {text}.*nobody would train it"):
                pipeline.step(x, y)
            assert not gradients(pipeline)
        own, same = (lambda o, t, w=m[-1].weight: penalized(o.add_(0), t, [w]) for m in (model, alone))
        pipeline = hvd.Pipeline(model, loss=own, microbatches=2, cuts=cuts)  # of the last stage
        pipeline.step(x, y)
        same(alone(x), y).backward()
        assert_gradients(pipeline, alone)
        # what the error says
        pipeline = hvd.Pipeline(model, loss=F.mse_loss, microbatches=2, cuts=cuts)
        for layers in (pipeline, alone):
            for parameter in layers.parameters():
                parameter.grad = None
        pipeline.step(x, y)
        (0.1 * sum(parameter.square().sum() for parameter in pipeline.parameters())).backward()
        penalized(alone(x), y, alone.parameters()).backward()
        assert_gradients(pipeline, alone)

    ranks(check)


@pytest.mark.ranks(at_least=2)
@pytest.mark.parametrize("schedule", HOW)
def test_hooks_of_parameters_see_the_gradient_of_the_batch(ranks: Any, schedule: str) -> None:
    def check() -> None:
        model, cuts = network(hvd.size() * (2 if schedule == "interleaved" else 1))
        model[-1].weight = model[-3].weight = nn.Parameter(numbers(6, 6) / 2)  # tied, over no or some stages
        model[-1].bias = nn.Parameter(numbers(6) / 2)
        alone, told = copy.deepcopy(model), {False: [], True: []}  # type: ignore[var-annotated]
        fails: list[int] = []

        def clamp(gradient: torch.Tensor) -> torch.Tensor:
            if hvd.rank() in fails:
                raise KeyError("too hot")
            return gradient.clamp(-0.01, 0.01)

        def note(parameter: torch.Tensor, name: str, alone: bool) -> None:
            assert parameter.grad is not None
            told[alone].append((name, parameter.grad.clone()))

        for layers in (model, alone):
            for name, parameter in layers.named_parameters():
                parameter.register_hook(clamp)
                parameter.register_post_accumulate_grad_hook(functools.partial(note, name=name, alone=layers is alone))

        def loss(o: torch.Tensor, t: torch.Tensor) -> tuple[torch.Tensor, int]:  # the count is known at the end only
            return (o - t).square().sum(), o.numel()

        pipeline = hvd.Pipeline(model, loss=loss, microbatches=3, cuts=cuts, schedule=schedule, **HOW[schedule])
        x, y = numbers(7, 4), numbers(7, 6, seed=2)
        for _ in range(2):  # the second is added to the first
            pipeline.step(x, y)
            F.mse_loss(alone(x), y).backward()
            assert_gradients(pipeline, alone)
        number = len(list(pipeline.parameters()))
        assert len(told[False]) == 2 * number
        totals = dict(told[True])
        for name, gradient in told[False][number:]:
            torch.testing.assert_close(gradient, totals[name], **TOLERANCE)
        fails.append(0)
        with pytest.raises((KeyError, HvdliteError), match="too hot"):
            pipeline.step(x, y)
        assert_gradients(pipeline, alone)
        fails.clear()
        pipeline.step(x, y)
        F.mse_loss(alone(x), y).backward()
        assert_gradients(pipeline, alone)

    ranks(check)


@pytest.mark.ranks(at_least=2)
def test_a_step_within_autocast(ranks: Any) -> None:
    """Only the forward pass is cast, as in one process."""

    class Exact(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cpu", enabled=False):
                return self.linear(x.float())

    def check() -> None:
        model = seeded(nn.Sequential(*(Exact() if n % 2 else nn.Linear(4, 4) for n in range(hvd.size() + 1)))).float()
        alone = copy.deepcopy(model)
        cuts = [str(n + 1) for n in range(1, hvd.size())]
        pipeline = hvd.Pipeline(model, loss=F.mse_loss, microbatches=1, cuts=cuts)
        sgd, plain = (torch.optim.SGD(layers.parameters(), lr=0.5) for layers in (pipeline, alone))
        x, y = numbers(6, 4).float(), numbers(6, 4, seed=2).float()
        with torch.autocast("cpu", torch.bfloat16):
            pipeline.predict(x)
            for _ in range(2):
                pipeline.step(x, y, sgd)
        for _ in range(2):
            plain.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                loss = F.mse_loss(alone(x), y)
            loss.backward()
            plain.step()
        expected = dict(alone.named_parameters())
        for name, parameter in pipeline.named_parameters():
            torch.testing.assert_close(parameter, expected[name], rtol=0, atol=0)

    ranks(check)


@pytest.mark.ranks(at_least=2)
def test_a_layer_with_statistics_in_two_stages(ranks: Any) -> None:
    def check() -> None:
        norm, n = nn.BatchNorm1d(6, dtype=DTYPE), hvd.size()
        model = seeded(nn.Sequential(linear(4, 6), norm, *(linear(6, 6) for _ in range(n - 1)), norm, linear(6, 3)))
        pipeline = hvd.Pipeline(model, loss=F.mse_loss, microbatches=1, cuts=[str(2 + k) for k in range(n - 1)])
        x, y, before = numbers(6, 4), numbers(6, 3, seed=2), copy.deepcopy(norm.state_dict())
        for call in (lambda: pipeline.step(x, y), lambda: pipeline.predict(x)):
            with pytest.raises(
                ArgumentError, match=r"the stages \[0, .\] use .*running_mean, and the forward pass changes"
            ):
                call()
        assert all(torch.equal(value, before[name]) for name, value in norm.state_dict().items())
        pipeline.eval().step(x, y)  # nothing changes
        F.mse_loss(copy.deepcopy(model).eval()(x), y)

    ranks(check)


class Two(nn.Module):
    """Takes two tensors, and returns tensors with and without gradients, and more."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = linear(4, 6), linear(5, 6)

    def forward(self, x: torch.Tensor, z: torch.Tensor) -> dict[str, Any]:
        found = self.one(x) + self.other(z)
        return {"sum": found, "rows": (torch.arange(len(x)), x > 0), "half": x.half(), "more": [None, 3, found[:, :0]]}


class Middle(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = linear(6, 6)

    def forward(self, given: dict[str, Any]) -> dict[str, Any]:
        assert given["more"][:2] == [None, 3] and given["more"][2].shape[1] == 0
        assert given["half"].dtype == torch.float16 and given["rows"][1].dtype == torch.bool
        return {**given, "passed": (given["sum"], given["sum"].detach()), "sum": torch.tanh(self.linear(given["sum"]))}


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = linear(6, 3), linear(6, 2)

    def forward(self, given: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
        assert not given["passed"][1].requires_grad
        return self.one(given["sum"] + given["passed"][0]) * given["rows"][0][:, None], self.other(given["sum"])


def test_nested_values(ranks: Any) -> None:
    """Several inputs, tuples and dicts as targets, and whatever goes from stage to stage."""

    def check() -> None:
        middle = [Middle() for _ in range(max(hvd.size() - 1, 1))]
        layers = [Two(), *middle, Heads()]
        seeded(nn.Sequential(*layers))
        alone = copy.deepcopy(layers)
        x, z, t, u = numbers(9, 4), numbers(9, 5), numbers(9, 3), numbers(9, 2)

        def loss(o: Any, target: Any) -> torch.Tensor:
            first, second = target if isinstance(target, tuple) else (target["t"], target["more"][0])
            return F.mse_loss(o[0], first) + F.mse_loss(o[1], second)

        cuts = [str(number + 1) for number in range(hvd.size() - 1)]
        pipeline = hvd.Pipeline(nn.Sequential(*layers), loss=loss, microbatches=3, cuts=cuts)
        for target in ((t, u), {"t": t, "more": [u]}):
            found = pipeline.step((x, z), target, torch.optim.SGD(pipeline.parameters(), lr=0.0))
            outputs = [torch.zeros(0, 3, dtype=DTYPE), torch.zeros(0, 2, dtype=DTYPE)]
            for rows in (slice(0, 3), slice(3, 6), slice(6, 9)):  # `rows` counts within a micro-batch
                value = alone[0](x[rows], z[rows])
                for layer in alone[1:]:
                    value = layer(value)
                outputs = [torch.cat(pair) for pair in zip(outputs, value, strict=True)]
            expected = loss(outputs, (t, u))
            for layer in alone:
                layer.zero_grad()
            expected.backward()
            torch.testing.assert_close(found, expected.detach(), **TOLERANCE)
            assert_gradients(pipeline, nn.Sequential(*alone))
        for ours, plain in zip(pipeline.predict((x, z)), outputs, strict=True):
            torch.testing.assert_close(ours, plain.detach(), **TOLERANCE)

    ranks(check)


class Blocks(nn.Module):
    """A model that torch.export cuts. A mask is used by all its stages, and what the first one computes by the last one."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(linear(4, 4) for _ in range(4))

    def forward(self, x: torch.Tensor, mask: torch.Tensor, flag: bool = False) -> torch.Tensor:
        skip = x
        for number, block in enumerate(self.blocks):
            x = torch.tanh(block(x)) * mask
            if number == 0:
                skip, other = x.chunk(2, 1)
        return x + torch.cat([skip, other], 1)


@processes
def test_keyword_arguments(ranks: Any) -> None:
    def check() -> None:
        model = seeded(Blocks())
        alone = copy.deepcopy(model)
        x, y, mask = numbers(8, 4), numbers(8, 4), (numbers(8, 1) > 0).to(DTYPE)
        cuts = [f"blocks.{number}" for number in range(1, hvd.size())]
        examples = {"example": x[:2], "example_keywords": {"mask": mask[:2]}}
        pipeline = hvd.Pipeline(model, loss=F.mse_loss, microbatches=4, cuts=cuts, **examples)
        for _ in range(2):
            F.mse_loss(alone(x, mask), y).backward()
            pipeline.step(x, y, mask=mask)
            assert_gradients(pipeline, alone)
        torch.testing.assert_close(pipeline.predict(x, mask=mask), alone(x, mask=mask), **TOLERANCE)
        for rows in (7, 3):
            pipeline.step(x[:rows], y[:rows], mask=mask[:rows])
            F.mse_loss(alone(x[:rows], mask[:rows]), y[:rows]).backward()
            assert_gradients(pipeline, alone)

    ranks(check)


def test_means_over_several_pipelines(ranks: Any) -> None:
    """What a loss counts goes on to the distributed optimizer, so that pipelines with more words count more."""

    def check() -> None:
        grid = hvd.ProcessGrid(dp=hvd.size(), pp=1)
        x, y = (
            numbers(4 * hvd.size(), 5, 4),
            torch.randint(0, 3, (4 * hvd.size(), 5), generator=torch.Generator().manual_seed(2)),
        )
        y[:5, 1:] = -100
        y[2:4] = -100
        for loss in (entropy, lambda o, t: (masked(o, t), (t >= 0).sum())):
            model, _ = network(1)
            alone = copy.deepcopy(model)
            pipeline = hvd.Pipeline(model, grid["pp"], loss=loss, microbatches=2, cuts=[])
            sgd = torch.optim.SGD(pipeline.parameters(), lr=0.5)
            optimizer = hvd.DistributedOptimizer(sgd, pipeline.named_parameters(), process_set=grid["dp"])
            plain = torch.optim.SGD(alone.parameters(), lr=0.5)
            rows = slice(4 * hvd.rank(), 4 * hvd.rank() + 4)
            for _ in range(3):
                pipeline.step(x[rows], y[rows], optimizer)
                plain.zero_grad()
                entropy(alone(x), y).backward()
                plain.step()
            for name, value in pipeline.full_state_dict().items():
                torch.testing.assert_close(value, alone.state_dict()[name], **TOLERANCE)

    ranks(check)


def test_sequences_with_padding(ranks: Any) -> None:
    """A chunk in which all is padding counts nothing; an error on one rank of a wavefront is raised on all."""

    def check() -> None:
        stack = nn.LSTM(4, 4, num_layers=max(2, hvd.size()), batch_first=True, dtype=DTYPE)
        model = seeded(nn.Sequential(stack, Broken(), linear(4, 3)))
        alone = copy.deepcopy(model)
        x, y = numbers(3, 10, 4), torch.randint(0, 3, (3, 10), generator=torch.Generator().manual_seed(1))
        y[0, 2:] = y[1, 5:] = y[2, 4:] = -100
        cuts = [f"0.{layer}" for layer in range(1, hvd.size())]

        def output(x: torch.Tensor) -> torch.Tensor:
            return alone[2](alone[0](x)[0])  # type: ignore[no-any-return]

        for loss in (entropy, lambda o, t: (masked(o, t), (t >= 0).sum())):
            wavefront = hvd.Wavefront(model, loss=loss, chunks=4, cuts=cuts, stepwise=[Broken])
            wavefront.step(x, y, torch.optim.SGD(wavefront.parameters(), lr=0.0))
            alone.zero_grad()
            ours = x.clone().requires_grad_()
            plain = x.clone().requires_grad_()
            for _ in range(2):
                entropy(output(plain), y).backward()
            found = wavefront.step(ours, y)
            torch.testing.assert_close(found, entropy(output(x), y).detach(), **TOLERANCE)
            assert_gradients(wavefront, alone)
            torch.testing.assert_close(2 * ours.grad, plain.grad, **TOLERANCE)
        torch.testing.assert_close(wavefront.predict(x), output(x), **TOLERANCE)
        before = gradients(wavefront)
        assert isinstance(model[1], Broken)
        for at in ("forward", 2), ("backward", 2):
            model[1].at, model[1].calls = at, 0
            with pytest.raises((KeyError, HvdliteError), match="too hot"):
                wavefront.step(x, y)
            assert all(torch.equal(value, before[name]) for name, value in gradients(wavefront).items())
        sums = hvd.Wavefront(model, loss=lambda o, t: o.sum(), chunks=4, cuts=cuts, stepwise=[Broken])
        model[1].at = None
        with pytest.raises(ArgumentError, match="the loss is no mean over time steps"):
            sums.step(x, y)

    ranks(check)


# Without ranks


@hypothesis.given(st.integers(1, 5), st.integers(1, 11), st.integers(1, 3))
def test_schedules(places: int, parts: int, per_rank: int) -> None:
    """Each pass is made once; in order, no rank waits in vain; and 1F1B holds few micro-batches at a time."""
    schedules: list[Schedule] = [forward_only, gpipe, there_and_back, one_forward_one_backward]
    for schedule in schedules:
        plans = [list(schedule(place, places, parts, per_rank)) for place in range(places)]
        stages = places * per_rank
        made: set[Pass] = set()
        waiting = [list(plan) for plan in plans]
        moved = True
        while moved:
            moved = False
            for place, plan in enumerate(waiting):
                while plan and _ready(plan[0], made, stages):
                    assert plan[0].stage % places == place
                    made.add(plan.pop(0))
                    moved = True
        assert not any(waiting)
        kinds = (True,) if schedule is forward_only else (False, True)
        assert made == {Pass(f, part, stage) for f in kinds for part in range(parts) for stage in range(stages)}
        for forward in kinds:  # messages arrive in the order in which they are sent
            orders = {
                stage: [each.part for each in plans[stage % places] if each.stage == stage and each.forward is forward]
                for stage in range(stages)
            }
            assert len({tuple(order) for order in orders.values()}) == 1
        if schedule is one_forward_one_backward and per_rank == 1:
            for place, plan in enumerate(plans):
                held = most = 0
                for each in plan:
                    held += 1 if each.forward else -1
                    most = max(most, held)
                assert most == min(places - place, parts)


def _ready(each: Pass, made: set[Pass], stages: int) -> bool:
    if each.forward:
        return each.stage == 0 or each._replace(stage=each.stage - 1) in made
    if each._replace(forward=True) not in made:
        return False
    return each.stage == stages - 1 or each._replace(stage=each.stage + 1) in made


def test_values_of_all_kinds() -> None:
    codec = TensorCodec(torch.device("cpu"))
    kinds = (torch.float32, torch.bfloat16, torch.bool, torch.complex64, torch.int64, torch.float8_e4m3fn, torch.uint8)
    values = {
        "kinds": [torch.arange(6).reshape(2, 3).to(kind).t() for kind in kinds],
        "empty": (torch.zeros(0, 3), torch.tensor(5)),
        "others": [None, True, 2.5, "text"],
        "leaf": torch.ones(2, requires_grad=True),
    }
    packed = codec.pack(values)
    arrays, made = codec.unpack(packed.described)
    for ours, theirs in zip(arrays, packed.arrays, strict=True):
        ours[:] = theirs
    found = made()
    assert found["others"] == values["others"] and found["leaf"].requires_grad
    for ours, theirs in zip([*found["kinds"], *found["empty"]], [*values["kinds"], *values["empty"]], strict=True):
        assert ours.dtype is theirs.dtype and torch.equal(ours.to(torch.complex64), theirs.to(torch.complex64))
    for odd in ({1, 2}, torch.eye(2).to_sparse()):
        with pytest.raises(HvdliteError, match="the output of a stage has a (set|Tensor)"), contextlib.nullcontext():
            codec.pack([odd])
