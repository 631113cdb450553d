"""SyncBatchNorm against torch's batch norm on the joined batch."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrize, prune

import hvdlite_torch as hvd
from hvdlite.errors import ArgumentError
from hvdlite_torch.training.sync_batch_norm import SyncBatchNorm

PLAIN: dict[int, type[nn.Module]] = {0: nn.BatchNorm1d, 1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}
TOLERANCE = {torch.float64: 1e-11, torch.float32: 2e-5, torch.bfloat16: 0.03}
CHANNELS = 3

Lengths = Callable[[int], list[int]]
LENGTHS: dict[str, Lengths] = {
    "even": lambda size: [4] * size,
    "uneven": lambda size: [2 + 3 * rank for rank in range(size)],
    "empty on the first rank": lambda size: [0] + [3] * (size - 1) if size > 1 else [3],
    "empty on all but one rank": lambda size: [0] * (size - 1) + [5],
}


def batches_of(lengths: list[int], spatial: int, dtype: torch.dtype, seed: int) -> list[torch.Tensor]:
    """For each rank a batch of other mean and variance than the others'."""
    generator = torch.Generator().manual_seed(seed)
    return [
        (torch.randn(n, CHANNELS, *[2] * spatial, generator=generator, dtype=torch.float64) * (rank + 1) + rank).to(
            dtype
        )
        for rank, n in enumerate(lengths)
    ]


def assert_close(actual: torch.Tensor | None, expected: torch.Tensor | None, dtype: torch.dtype) -> None:
    assert actual is not None and expected is not None
    assert actual.dtype == expected.dtype
    torch.testing.assert_close(actual, expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


def shuffle_affine(layer: Any) -> None:
    with torch.no_grad():
        for parameter, low in ((layer.weight, 0.5), (layer.bias, -1.0)):
            parameter.copy_(torch.linspace(low, low + 1.7, CHANNELS))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("spatial", PLAIN)
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
def test_equals_batch_norm_on_the_joined_batch(ranks: Any, lengths: Lengths, spatial: int, dtype: torch.dtype) -> None:
    def check() -> None:
        rank, size = hvd.rank(), hvd.size()
        parameters = torch.float64 if dtype is torch.float64 else torch.float32
        joined = PLAIN[spatial](CHANNELS, eps=1e-3, dtype=parameters)
        layer = SyncBatchNorm(CHANNELS, eps=1e-3, dtype=parameters)
        shuffle_affine(joined)
        shuffle_affine(layer)
        for step in range(2):
            batches = batches_of(lengths(size), spatial, dtype, seed=step)
            starts = np.cumsum([0, *(len(batch) for batch in batches)])
            mine = slice(int(starts[rank]), int(starts[rank + 1]))
            everything = torch.cat(batches).requires_grad_()
            own = batches[rank].clone().requires_grad_()
            upstream = torch.sin(torch.arange(everything.numel(), dtype=torch.float64)).reshape(everything.shape)

            expected = joined(everything)
            (expected * upstream).sum().backward()
            output = layer(own)
            (output * upstream[mine]).sum().backward()

            assert_close(output, expected[mine], dtype)
            assert_close(own.grad, everything.grad[mine], dtype)  # type: ignore[index]
            for name in ("running_mean", "running_var"):
                assert_close(getattr(layer, name), getattr(joined, name), dtype)
            assert layer.num_batches_tracked == step + 1
        for ours, theirs in zip(layer.parameters(), joined.parameters(), strict=True):
            # Of all ranks together; those of the samples of one rank are one term.
            assert_close(hvd.allreduce(ours.grad, op=hvd.Sum), theirs.grad, dtype)

        joined.eval()
        layer.eval()
        alone = torch.randn(2, CHANNELS, *[2] * spatial).to(dtype) if rank == 0 else None
        if alone is not None:  # no other rank takes part
            assert_close(layer(alone), joined(alone), dtype)

    ranks(check)


def test_all_channels_of_a_half_precision_model(ranks: Any) -> None:
    def check() -> None:
        batches = batches_of([4] * hvd.size(), 2, torch.bfloat16, seed=0)
        layer = SyncBatchNorm(CHANNELS, dtype=torch.bfloat16)
        own = batches[hvd.rank()].requires_grad_()
        output = layer(own)
        output.sum().backward()
        expected = nn.BatchNorm2d(CHANNELS)(torch.cat(batches).float())
        mine = slice(4 * hvd.rank(), 4 * hvd.rank() + 4)
        torch.testing.assert_close(output.float(), expected[mine], rtol=0.02, atol=0.02)
        assert [p.grad.dtype for p in layer.parameters()] == [torch.bfloat16] * 2  # type: ignore[union-attr]
        assert own.grad is not None and own.grad.dtype is torch.bfloat16

    ranks(check)


@pytest.mark.parametrize(("dtype", "mean"), [(torch.float32, 1e3), (torch.float64, 1e8)], ids=str)
def test_a_mean_far_larger_than_the_deviations(ranks: Any, dtype: torch.dtype, mean: float) -> None:
    def check() -> None:
        size = hvd.size()
        rng = np.random.default_rng(0)
        everything = (rng.normal(size=(64 * size, CHANNELS)) + mean).astype(str(dtype).removeprefix("torch."))
        layer = SyncBatchNorm(CHANNELS, affine=False, momentum=1.0, dtype=dtype)
        layer(torch.from_numpy(everything[64 * hvd.rank() :][:64]))
        exact = (everything.astype(np.longdouble) - mean).var(axis=0, ddof=1).astype(np.float64)
        np.testing.assert_allclose(layer.running_var.numpy(), exact, rtol=1e-4 if dtype is torch.float32 else 1e-7)

    ranks(check)


@pytest.mark.parametrize(
    "options",
    [
        {"affine": False},
        {"momentum": None},
        {"track_running_stats": False},
        {"momentum": 0.3, "eps": 0.1},
    ],
    ids=str,
)
def test_options(ranks: Any, options: dict[str, Any]) -> None:
    def check() -> None:
        rank, size = hvd.rank(), hvd.size()
        joined = nn.BatchNorm1d(CHANNELS, dtype=torch.float64, **options)
        layer = SyncBatchNorm(CHANNELS, dtype=torch.float64, **options)
        for step in range(3):
            batches = batches_of([4] * size, 0, torch.float64, seed=step)
            mine = slice(4 * rank, 4 * rank + 4)
            assert_close(layer(batches[rank]), joined(torch.cat(batches))[mine], torch.float64)
        assert layer.state_dict().keys() == joined.state_dict().keys()
        for name, value in joined.state_dict().items():
            assert_close(layer.state_dict()[name].double(), value.double(), torch.float64)
        if not layer.track_running_stats:  # there is nothing but the batch's own, in evaluation too
            layer.eval()
            joined.eval()
            assert_close(layer(batches[rank]), joined(torch.cat(batches))[mine], torch.float64)

    ranks(check)


def network() -> nn.Sequential:
    torch.manual_seed(0)
    convolutions = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten())
    return nn.Sequential(convolutions, nn.Linear(36, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)).double()


Batches = list[tuple[torch.Tensor, torch.Tensor]]


def train(model: nn.Module, optimizer: torch.optim.Optimizer, batches: Batches, mean_sizes: list[float]) -> None:
    for (inputs, targets), mean_size in zip(batches, mean_sizes, strict=True):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs), targets, reduction="sum") / mean_size
        loss.backward()
        optimizer.step()


def test_training_equals_that_of_one_process(ranks: Any) -> None:
    generator = torch.Generator().manual_seed(0)
    data = [
        (
            torch.randn(n, 1, 5, 5, generator=generator, dtype=torch.float64),
            torch.randint(3, (n,), generator=generator),
        )
        for n in (12, 12, 7, 5, 2)
    ]
    start = network()
    alone = copy.deepcopy(start)
    train(alone, torch.optim.SGD(alone.parameters(), lr=0.1, momentum=0.9), data, [len(targets) for _, targets in data])

    def check() -> None:
        rank, size = hvd.rank(), hvd.size()
        model = SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(start))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
        # The last batch has a sample for two ranks only.
        shares = [(inputs[rank::size], targets[rank::size]) for inputs, targets in data]
        train(model, optimizer, shares, [len(targets) / size for _, targets in data])
        for name, value in alone.state_dict().items():
            torch.testing.assert_close(model.state_dict()[name], value, rtol=1e-9, atol=1e-9)

    ranks(check)


@pytest.mark.ranks(at_least=3)
def test_on_a_process_set(ranks: Any) -> None:
    def check() -> None:
        rank, size = hvd.rank(), hvd.size()
        others = hvd.add_process_set(range(1, size))
        if others.included():
            batches = batches_of([4] * (size - 1), 0, torch.float64, seed=0)
            layer = SyncBatchNorm(CHANNELS, dtype=torch.float64, process_set=others)
            own = batches[rank - 1].clone().requires_grad_()
            everything = torch.cat(batches).requires_grad_()
            expected = nn.BatchNorm1d(CHANNELS, dtype=torch.float64)(everything)
            output = layer(own)
            mine = slice(4 * (rank - 1), 4 * rank)
            assert_close(output, expected[mine], torch.float64)
            output.square().sum().backward()
            expected.square().sum().backward()
            assert_close(own.grad, everything.grad[mine], torch.float64)  # type: ignore[index]
        hvd.barrier()
        hvd.remove_process_set(others)

    ranks(check)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # of torch's compiler
def test_in_a_compiled_model(ranks: Any) -> None:
    def check() -> None:
        rank, size = hvd.rank(), hvd.size()
        batches = batches_of([4] * size, 0, torch.float64, seed=0)
        own, everything = batches[rank].clone().requires_grad_(), torch.cat(batches).requires_grad_()
        model = nn.Sequential(SyncBatchNorm(CHANNELS, dtype=torch.float64), nn.Tanh())
        joined = nn.Sequential(nn.BatchNorm1d(CHANNELS, dtype=torch.float64), nn.Tanh())
        torch.compile(model, backend="eager")(own).square().sum().backward()
        joined(everything).square().sum().backward()
        assert_close(own.grad, everything.grad[4 * rank : 4 * rank + 4], torch.float64)  # type: ignore[index]

    ranks(check)


def test_conversion_keeps_parameters_and_places() -> None:
    shared = nn.BatchNorm1d(4)
    model = nn.ModuleDict(
        {
            "first": nn.Sequential(nn.Linear(4, 4), shared),
            "second": shared,
            "image": nn.BatchNorm2d(2, eps=0.5, momentum=None, affine=False).eval(),
            "volume": nn.BatchNorm3d(2, track_running_stats=False),
            "instance": nn.InstanceNorm2d(2),
            "torch's own": nn.SyncBatchNorm(2),
        }
    )
    before = dict(model.state_dict(keep_vars=True))
    converted = SyncBatchNorm.convert_sync_batchnorm(model)
    assert converted is model
    after = model.state_dict(keep_vars=True)
    assert before.keys() == after.keys()
    assert all(before[name] is after[name] for name in before)
    assert model["first"][1] is model["second"]  # type: ignore[index]
    kinds = {name: type(layer) for name, layer in model.items()}
    assert [name for name, kind in kinds.items() if kind is SyncBatchNorm] == [
        "second",
        "image",
        "volume",
        "torch's own",
    ]
    image: Any = model["image"]
    assert (image.eps, image.momentum, image.affine, image.training) == (0.5, None, False, False)
    assert SyncBatchNorm.convert_sync_batchnorm(model)["second"] is model["second"]  # once is enough
    assert type(SyncBatchNorm.convert_sync_batchnorm(nn.BatchNorm1d(3))) is SyncBatchNorm
    with pytest.raises(ArgumentError, match="does not know its num_features"):
        SyncBatchNorm.convert_sync_batchnorm(nn.Sequential(nn.LazyBatchNorm1d()))


def test_bad_input(ranks: Any) -> None:
    def check() -> None:
        if hvd.size() == 1:
            with pytest.raises(ValueError, match="more than 1 value per channel"):  # torch's own
                SyncBatchNorm(2)(torch.ones(1, 2))
            return
        with pytest.raises(ArgumentError, match=r"expected an input of shape \(N, 2, ...\); got \(4, 3\)"):
            SyncBatchNorm(2)(torch.ones(4, 3))
        with pytest.raises(ArgumentError, match="got \\(2,\\)"):
            SyncBatchNorm(2)(torch.ones(2))
        with pytest.raises(ArgumentError, match="all ranks together have 1"):
            SyncBatchNorm(2)(torch.ones(int(hvd.rank() == 0), 2))
        with pytest.raises(ArgumentError, match="all ranks together have 0"):
            SyncBatchNorm(2)(torch.ones(0, 2))
        assert SyncBatchNorm(2)(torch.ones(1, 2)).shape == (1, 2)

    ranks(check)


@pytest.mark.ranks(at_least=2)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_running_statistics_in_halves_are_rounded_once(ranks: Any, dtype: torch.dtype) -> None:
    """As torch rounds them; with each step they would come further from those in float32."""

    def check() -> None:
        layer = hvd.SyncBatchNorm(64, dtype=dtype)
        before = torch.linspace(1, 3, 64).to(dtype)
        assert layer.running_mean is not None
        layer.running_mean.copy_(before)
        x = torch.arange(8 * 64).view(8, 64).remainder(13).to(dtype)
        layer(x[::2] if hvd.rank() == 0 else x[1::2])
        mean = torch.cat([x[::2], *[x[1::2]] * (hvd.size() - 1)]).double().mean(0)
        expected = 0.9 * before.double() + 0.1 * mean
        assert ((layer.running_mean.double() - expected).abs() <= 0.501 * torch.finfo(dtype).eps * expected).all()

    ranks(check)


class Activated(nn.BatchNorm2d):
    """A subclass that adds to torch's forward pass."""

    def __init__(self, features: int) -> None:
        super().__init__(features, dtype=torch.float64)
        self.act, self.note = nn.Tanh(), "kept"

    def forward(self, input: torch.Tensor, factor: float = 1.0) -> torch.Tensor:
        return self.act(super().forward(input)) * factor


class Direct(Activated):
    """A subclass that calls F.batch_norm itself, as timm's BatchNormAct2d does."""

    def forward(self, input: torch.Tensor, factor: float = 1.0) -> torch.Tensor:
        of_batch = self.training or self.running_mean is None
        self.num_batches_tracked.add_(1)  # type: ignore[union-attr]
        running = (self.running_mean, self.running_var)
        return factor * self.act(
            F.batch_norm(input, *running, self.weight, self.bias, training=of_batch, momentum=0.3, eps=self.eps)
        )


class Frozen(nn.BatchNorm2d):
    """A subclass that never takes the statistics of the batch."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return F.batch_norm(input, self.running_mean, self.running_var, self.weight, self.bias, False, 0.0, self.eps)


class Ghost(nn.BatchNorm2d):
    """A subclass with statistics of its own."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return (input - input.mean((0, 2, 3), keepdim=True)) * 2


class Named(nn.BatchNorm2d):
    """A subclass without a forward pass of its own."""


def weight_doubled(layer: nn.Module) -> nn.Module:
    class Double(nn.Module):
        def forward(self, weight: torch.Tensor) -> torch.Tensor:
            return 2 * weight

    parametrize.register_parametrization(layer, "weight", Double())
    return layer


def hooked(layer: nn.Module) -> nn.Module:
    layer.register_forward_pre_hook(lambda module, args: (args[0] * 2, *args[1:]))
    layer.register_forward_hook(lambda module, args, result: result.square())
    layer.register_full_backward_hook(lambda module, of_input, of_output: (of_input[0] * 3,))
    return layer


KINDS: dict[str, Callable[[], nn.Module]] = {
    "a forward pass that calls super": lambda: Activated(CHANNELS),
    "a forward pass that calls F.batch_norm": lambda: Direct(CHANNELS),
    "a frozen one": lambda: Frozen(CHANNELS),
    "no forward pass of its own": lambda: Named(CHANNELS),
    "hooks": lambda: hooked(nn.BatchNorm2d(CHANNELS)),
    "a parametrization": lambda: weight_doubled(nn.BatchNorm2d(CHANNELS)),
    "a parametrized subclass": lambda: weight_doubled(Activated(CHANNELS)),
    "pruned": lambda: prune.random_unstructured(nn.BatchNorm2d(CHANNELS), "weight", amount=1),
}


@pytest.mark.parametrize("kind", KINDS)
def test_conversion_keeps_what_a_layer_does(ranks: Any, kind: str) -> None:
    def make() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(nn.Conv2d(2, CHANNELS, 2), KINDS[kind](), nn.Conv2d(CHANNELS, 1, 1)).double()

    models = [(make(), make()) for _ in range(4)]  # before the threads, which share torch's random state

    def check() -> None:
        rank, size = hvd.rank(), hvd.size()
        model, joined = models[rank]
        before = model[1]
        assert hvd.SyncBatchNorm.convert_sync_batchnorm(model) is model
        assert model[1] is before and isinstance(before, SyncBatchNorm)
        model = model if kind == "pruned" else copy.deepcopy(model)  # torch cannot copy what prune() has made
        everything = torch.randn(4 * size, 2, 3, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        x, own = everything.clone().requires_grad_(), everything[4 * rank : 4 * rank + 4].clone().requires_grad_()
        expected, output = joined(x), model(own)
        expected.square().sum().backward()
        output.square().sum().backward()
        mine = slice(4 * rank, 4 * rank + 4)
        assert_close(output, expected[mine], torch.float64)
        assert_close(own.grad, x.grad[mine], torch.float64)  # type: ignore[index]
        for (name, ours), theirs in zip(model.named_parameters(), joined.parameters(), strict=True):
            assert ours.grad is not None, name
            assert_close(hvd.allreduce(ours.grad, op=hvd.Sum), theirs.grad, torch.float64)
        for ours, theirs in zip(model.buffers(), joined.buffers(), strict=True):
            assert_close(ours.double(), theirs.double(), torch.float64)
        model.eval()
        joined.eval()
        assert_close(model(own), joined(x)[mine], torch.float64)

    ranks(check)


def test_converted_subclasses_are_saved_and_stay_what_they_were() -> None:
    layer: Any = SyncBatchNorm.convert_sync_batchnorm(Activated(CHANNELS))
    assert isinstance(layer, Activated) and layer.note == "kept" and type(layer).__name__ == "Activated"
    loaded = pickle.loads(pickle.dumps(layer))
    assert type(loaded) is type(layer) and loaded.note == "kept"
    doubled = SyncBatchNorm.convert_sync_batchnorm(weight_doubled(nn.BatchNorm2d(2)))
    parametrize.remove_parametrizations(doubled, "weight")
    assert type(doubled) is SyncBatchNorm


@pytest.mark.ranks(at_least=2)
def test_what_cannot_be_converted_is_named(ranks: Any) -> None:
    def check() -> None:
        ghost = SyncBatchNorm.convert_sync_batchnorm(Ghost(CHANNELS))
        with pytest.raises(ArgumentError, match="Ghost.forward called F.batch_norm .* 0 times, expected once"):
            ghost(torch.ones(2, CHANNELS, 1, 1))
        wrapped = nn.BatchNorm2d(3)
        wrapped.forward = wrapped.forward  # type: ignore[method-assign]
        with pytest.raises(ArgumentError, match=r"the layer '0', a BatchNorm2d, has a forward pass that was put on"):
            SyncBatchNorm.convert_sync_batchnorm(nn.Sequential(wrapped))

        class OfTorch(nn.SyncBatchNorm):
            pass

        with pytest.raises(ArgumentError, match=r"the layer '0', a OfTorch, is made for torch.distributed"):
            SyncBatchNorm.convert_sync_batchnorm(nn.Sequential(OfTorch(3)))

    ranks(check)


def penalised(critic: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """The loss of a critic whose gradient should have length 1 for each row (WGAN-GP), summed over the rows."""
    x = x.clone().requires_grad_()
    scores = critic(x)
    (slopes,) = torch.autograd.grad(scores.sum(), x, create_graph=True)
    return scores.sum() + 10 * (slopes.flatten(1).norm(dim=1) - 1).square().sum()


@pytest.mark.parametrize("lengths", ["even", "uneven", "empty on the first rank"])
def test_gradients_of_gradients_are_those_of_the_joined_batch(ranks: Any, lengths: str) -> None:
    torch.manual_seed(0)
    start = nn.Sequential(
        *(nn.Conv2d(CHANNELS, 4, 2), nn.BatchNorm2d(4), nn.Tanh(), nn.Flatten()),
        *(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Softplus(), nn.Linear(5, 1)),
    ).double()

    def check() -> None:
        joined = copy.deepcopy(start)
        critic = SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(start))
        batches = batches_of(LENGTHS[lengths](hvd.size()), 2, torch.float64, seed=0)
        penalised(joined, torch.cat(batches)).backward()
        penalised(critic, batches[hvd.rank()]).backward()
        for ours, theirs in zip(critic.parameters(), joined.parameters(), strict=True):
            own = torch.zeros_like(ours) if ours.grad is None else ours.grad
            assert_close(hvd.allreduce(own, op=hvd.Sum), theirs.grad, torch.float64)

    ranks(check)
