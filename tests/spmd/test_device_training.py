"""Training with parameters on a pretended GPU: equals training in one process, in an order that is right on a real one."""

from __future__ import annotations

import copy
import functools
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

import hvdlite.gradients.device.make
import hvdlite_torch as hvd
import hvdlite_torch.sync.backward
import hvdlite_torch.sync.device
from hvdlite.api import world
from hvdlite.errors import ArgumentError, HvdliteError, MismatchError, UnsupportedTensorError
from hvdlite.gradients.device.bucket import DeviceBucket
from hvdlite.gradients.planner import plan_buckets
from hvdlite.testing import on_ranks
from hvdlite_torch.step.fused import FusedStep
from tests.spmd.test_torch_training import (
    MODEL,
    OPTIMIZERS,
    X,
    Y,
    assert_equal_everywhere,
    distance,
    flat,
    split,
    train,
    train_clipped,
    train_scaled,
)
from tests.support.fake_device import FakeDevice, fake_gpu

WAYS = {"whole": {}, "late": {"overlap": False}, "sharded": {"shard": True}}
every_way = pytest.mark.parametrize("options", WAYS.values(), ids=WAYS)


@pytest.fixture(autouse=True)
def several_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of small models, too; and exchanges with one rank, too."""

    def plan(order: Any, nbytes: Any, bucket_bytes: int, first_bytes: int) -> Any:
        return plan_buckets(order, nbytes, 256, 64)

    monkeypatch.setattr(hvdlite.gradients.device.make, "plan_buckets", plan)
    monkeypatch.setattr(hvdlite_torch.sync.device, "SPARE_ONE_RANK", False)


def on_gpu(check: Callable[..., Any]) -> Callable[..., Any]:
    """What a rank does, with a GPU."""

    @functools.wraps(check)
    def with_gpu(*args: Any) -> Any:
        exchanges = world().group().exchanges
        before = len(exchanges)
        with fake_gpu() as gpu:
            try:
                return check(gpu, *args)
            finally:
                del exchanges[before:]  # their GPU goes; under mpirun the world stays

    return with_gpu


def distributed(model: torch.nn.Module, kind: str = "adam", **options: Any) -> Any:
    return hvd.DistributedOptimizer(OPTIMIZERS[kind](model.parameters()), **options)


def exchange_of(optimizer: Any) -> Any:
    return optimizer._hvdlite_driver.sync


def step(model: torch.nn.Module, optimizer: Any, rows: slice, weighted: bool = True, passes: int = 1) -> None:
    """A step that says its weight before its backward passes, so that gradients may be sent early."""
    optimizer.zero_grad()
    x, y = X[rows], Y[rows]
    if weighted and hasattr(optimizer, "set_batch_weight"):
        optimizer.set_batch_weight(len(x))
    for part_x, part_y in zip(x.chunk(passes), y.chunk(passes), strict=True):
        if len(part_x):
            (F.cross_entropy(model(part_x), part_y) / passes).backward()
    optimizer.step()


@functools.cache
def alone(kind: str, steps: int) -> torch.Tensor:
    """The weights after training in one process on all rows."""
    model = copy.deepcopy(MODEL)
    optimizer = OPTIMIZERS[kind](model.parameters())
    for _ in range(steps):
        step(model, optimizer, slice(None))
    return flat(model)


@every_way
@pytest.mark.parametrize("shares", ["equal", "uneven", "one has all"])
@pytest.mark.parametrize("kind", ["adam"])
def test_equals_one_process_on_the_joined_batch(ranks: Any, kind: str, shares: str, options: Any) -> None:
    expected = alone(kind, 6)

    @on_gpu
    def check(gpu: FakeDevice) -> None:
        model = copy.deepcopy(MODEL)
        optimizer = distributed(model, kind, **options)
        rows = split(48, shares)
        for number in range(6):
            step(model, optimizer, rows)
            exchange = exchange_of(optimizer)
            assert len(exchange._reducer.buckets) > 1
            early = number >= 2 and options.get("overlap", True)
            assert exchange._backward.launches == options.get("overlap", True)
            assert exchange._backward.profile.learning == (number < 1)
            assert not early or exchange._backward.profile.passes == [int(rows.stop > rows.start)] * 4
        assert distance(flat(model), expected) <= 1e-5
        assert_equal_everywhere(flat(model))

    ranks(check)


@every_way
def test_weights_said_late(ranks: Any, options: Any) -> None:
    expected = alone("adam", 5)

    @on_gpu
    def check(gpu: FakeDevice) -> None:
        model = copy.deepcopy(MODEL)
        optimizer = distributed(model, **options)
        train(model, optimizer, split(48, "uneven"), steps=5)  # says its weight after backward
        assert distance(flat(model), expected) <= 1e-5
        assert exchange_of(optimizer)._backward.launches == (hvd.size() == 48)

    ranks(check)


def launches(optimizer: Any) -> list[int]:
    """Is filled with how many buckets are under way at the end of each backward pass."""
    seen: list[int] = []
    exchange = exchange_of(optimizer)
    before = exchange.combine

    def count() -> None:
        seen.append(exchange._reducer.launched)
        before()

    exchange.combine = count
    return seen


@pytest.mark.parametrize("how", ["any number", "said", "no_sync", "fewer at times"])
@pytest.mark.parametrize("options", [{}, {"shard": True}], ids=["whole", "sharded"])
def test_several_passes_before_a_step(ranks: Any, how: str, options: Any) -> None:
    expected = alone("adam", 5)

    @on_gpu
    def check(gpu: FakeDevice) -> None:
        model = copy.deepcopy(MODEL)
        optimizer = distributed(model, **options, **({"backward_passes_per_step": 2} if how == "said" else {}))
        sent = launches(optimizer)
        x, y = X[split(48, "equal")], Y[split(48, "equal")]
        for number in range(5):
            optimizer.zero_grad()
            if how == "no_sync":
                with optimizer.no_sync():
                    (F.cross_entropy(model(x[::2]), y[::2]) / 2).backward()
                (F.cross_entropy(model(x[1::2]), y[1::2]) / 2).backward()
            elif how == "fewer at times" and number == 3:
                F.cross_entropy(model(x), y).backward()
            else:
                for part in (slice(0, None, 2), slice(1, None, 2)):
                    (F.cross_entropy(model(x[part]), y[part]) / 2).backward()
            optimizer.step()
        assert distance(flat(model), expected) <= 1e-5
        all_but_one = len(exchange_of(optimizer)._reducer.buckets) - 1
        assert sent == [0, 0, all_but_one, 0 if how == "fewer at times" else all_but_one, all_but_one]

    ranks(check)


@every_way
@pytest.mark.parametrize("set_to_none", [True, False])
def test_gradients_that_stay_where_they_are(ranks: Any, set_to_none: bool, options: Any) -> None:
    expected = alone("sgd", 5)

    @on_gpu
    def check(gpu: FakeDevice) -> None:
        model = copy.deepcopy(MODEL)
        optimizer = distributed(model, "sgd", **options)
        optimizer.zero_grad = lambda: torch.optim.Optimizer.zero_grad(optimizer, set_to_none=set_to_none)
        for _ in range(5):
            step(model, optimizer, split(48, "uneven"))
        assert distance(flat(model), expected) <= 1e-5

    ranks(check)


@every_way
def test_clipping_equals_torch(ranks: Any, options: Any) -> None:
    single = copy.deepcopy(MODEL)
    train_clipped(single, OPTIMIZERS["sgd"](single.parameters()), 0.05, steps=5)

    @on_gpu
    def check(gpu: FakeDevice) -> None:
        model = copy.deepcopy(MODEL)
        optimizer = distributed(model, "sgd", max_grad_norm=0.05, **options)
        for _ in range(5):
            step(model, optimizer, split(48, "uneven"))
        assert distance(flat(model), flat(single)) <= 1e-5

    ranks(check)


class Parts(torch.nn.Module):
    """Layers of which a batch uses some."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        self.parts = torch.nn.ParameterList(torch.randn(5, 5, generator=generator) for _ in range(4))

    def forward(self, x: torch.Tensor, used: list[int]) -> torch.Tensor:
        for number in used:
            x = torch.tanh(x @ self.parts[number])
        return x.square().mean()


@pytest.mark.parametrize("options", [{}, {"shard": True}], ids=["whole", "sharded"])
def test_parameters_that_some_ranks_do_not_use(ranks: Any, options: Any) -> None:
    """Part 0 is used by all, 1 by rank 0 alone, 2 from the fourth step on, 3 by nobody, whom weight decay leaves alone."""
    x = torch.randn(6, 5, generator=torch.Generator().manual_seed(1))

    def used(rank: int, number: int) -> list[int]:
        return [0, *([1] if rank == 0 else []), *([2] if number >= 3 else [])]

    @on_gpu
    def check(gpu: FakeDevice) -> None:
        size, rank = hvd.size(), hvd.rank()
        single, model = Parts(), Parts()
        one = torch.optim.SGD(single.parameters(), 0.1, weight_decay=0.1)
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1, weight_decay=0.1), **options)
        for number in range(5):
            one.zero_grad()
            sum(single(x, used(other, number)) / size for other in range(size)).backward()
            one.step()
            optimizer.zero_grad()
            model(x, used(rank, number)).backward()
            optimizer.step()
            if not options:
                assert [p.grad is None for p in model.parts] == [p.grad is None for p in single.parts]
        assert distance(flat(model), flat(single)) <= 1e-5
        assert torch.equal(model.parts[3], Parts().parts[3])
        assert exchange_of(optimizer)._backward.launches

    ranks(check)


@pytest.mark.parametrize("op", ["Average", "Sum"])
@pytest.mark.parametrize("options", [{}, {"shard": True}], ids=["whole", "sharded"])
def test_parameters_that_freeze_and_thaw(ranks: Any, op: str, options: Any) -> None:
    @on_gpu
    def check(gpu: FakeDevice) -> None:
        size = hvd.size()
        single, model = copy.deepcopy(MODEL), copy.deepcopy(MODEL)
        one = OPTIMIZERS["sgd"](single.parameters())
        optimizer = distributed(model, "sgd", op=getattr(hvd, op), **options)
        rows = split(48, "equal")
        for number in range(9):
            for trained in (single, model):
                trained[0].weight.requires_grad_(not 3 <= number < 6)
            for trained, stepped, part in ((single, one, slice(None)), (model, optimizer, rows)):
                stepped.zero_grad()
                factor = size if trained is single and op == "Sum" else 1
                (F.cross_entropy(trained(X[part]), Y[part]) * factor).backward()
                stepped.step()
        assert distance(flat(model), flat(single)) <= 1e-5

    ranks(check)


def test_closures(ranks: Any) -> None:
    def lbfgs(model: torch.nn.Module) -> torch.optim.Optimizer:
        return torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=4)

    def run(model: torch.nn.Module, optimizer: Any, rows: slice) -> list[float]:
        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(X[rows].double()), Y[rows])
            loss.backward()
            return loss

        losses = []
        for _ in range(3):
            if hasattr(optimizer, "set_batch_weight"):
                optimizer.set_batch_weight(len(X[rows]))
            losses.append(float(optimizer.step(closure).detach()))
        return losses

    single = copy.deepcopy(MODEL).double()
    expected = run(single, lbfgs(single), slice(None))

    @on_gpu
    def check(gpu: FakeDevice) -> None:
        model = copy.deepcopy(MODEL).double()
        losses = run(model, hvd.DistributedOptimizer(lbfgs(model)), split(48, "uneven"))
        assert losses == pytest.approx(expected, rel=1e-6)
        assert distance(flat(model), flat(single)) <= 1e-5

    ranks(check)


@pytest.mark.parametrize("factor", [1.0, 4.0])
@pytest.mark.parametrize("compression", [hvd.Compression.fp16, hvd.Compression.bf16])
def test_compression(ranks: Any, compression: Any, factor: float) -> None:
    @on_gpu
    def check(gpu: FakeDevice) -> None:
        generator = torch.Generator().manual_seed(hvd.rank())
        dtype = getattr(torch, compression.DTYPE)
        parameters = [torch.nn.Parameter(torch.zeros(shape)) for shape in ((3, 40), (7,), ())]
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(parameters, 1.0), compression=compression, gradient_predivide_factor=factor
        )
        for _ in range(4):
            gradients = [torch.randn(p.shape, generator=generator) for p in parameters]
            everybody = hvd.allgather_object([g.double() for g in gradients])
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = gradient.clone()
            optimizer.step()
            for number, parameter in enumerate(parameters):
                mean = sum(each[number] for each in everybody) / hvd.size()
                largest = max(each[number].abs().max() for each in everybody)
                # Each rank rounds once, and so does each sum but the last: by half a unit of the largest number.
                assert (parameter.grad.double() - mean).abs().max() <= torch.finfo(dtype).eps * largest
                assert parameter.grad.dtype is torch.float32
        assert {flat.wire.dtype for bucket in exchange_of(optimizer)._reducer.buckets for flat in bucket.flats} == {
            dtype
        }

    ranks(check)


def test_float16_sums_stay_in_range(ranks: Any) -> None:
    @on_gpu
    def check(gpu: FakeDevice) -> None:
        model = torch.nn.Parameter(torch.zeros(20, dtype=torch.float16))
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([model], 1.0))
        model.grad = torch.full_like(model, 40_000.0)
        optimizer.set_batch_weight(1)
        optimizer.step()
        assert model.grad.float().sub(40_000).abs().max() <= 64

    ranks(check)


@every_way
def test_checkpoints_are_ordinary(ranks: Any, options: Any) -> None:
    """Half of the training in one process, then on the ranks, then in one process again."""
    half = copy.deepcopy(MODEL)
    begun = OPTIMIZERS["adam"](half.parameters())
    for _ in range(3):
        step(half, begun, slice(None))
    checkpoint = copy.deepcopy(begun.state_dict())

    @on_gpu
    def check(gpu: FakeDevice) -> None:
        model = copy.deepcopy(half)
        optimizer = distributed(model, **options)
        optimizer.load_state_dict(copy.deepcopy(checkpoint))
        for _ in range(4):
            step(model, optimizer, split(48, "uneven"))
        ending = copy.deepcopy(MODEL)
        ending.load_state_dict(model.state_dict())
        plain = OPTIMIZERS["adam"](ending.parameters())
        plain.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        if options.get("shard") and hvd.size() > 1:
            held = sum(value.numel() for state in optimizer.state.values() for value in state.values() if value.dim())
            whole = sum(value.numel() for state in plain.state.values() for value in state.values() if value.dim())
            assert sum(hvd.allgather_object(held)) == whole
        step(ending, plain, slice(None))
        assert distance(flat(ending), alone("adam", 8)) <= 1e-5

    ranks(check)


def test_memory_formats_and_half_precision(ranks: Any) -> None:
    images = torch.randn(12, 3, 6, 6, generator=torch.Generator().manual_seed(2))

    def make() -> torch.nn.Module:
        torch.manual_seed(5)
        return torch.nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)

    def run(model: torch.nn.Module, optimizer: torch.optim.Optimizer, rows: Any) -> None:
        for _ in range(4):
            optimizer.zero_grad()
            model(images[rows]).square().mean().backward()
            optimizer.step()

    with torch.random.fork_rng():
        start = make()
    single = copy.deepcopy(start)
    run(single, OPTIMIZERS["adam"](single.parameters()), slice(None))

    @on_gpu
    def check(gpu: FakeDevice) -> None:
        model = copy.deepcopy(start)
        optimizer = distributed(model)
        run(model, optimizer, slice(hvd.rank(), None, hvd.size()))
        if 12 % hvd.size() == 0:
            assert distance(flat(model), flat(single)) <= 1e-5
        assert model.weight.grad.is_contiguous(memory_format=torch.channels_last)
        other = copy.deepcopy(start).to(memory_format=torch.contiguous_format)
        if hvd.size() > 1:
            with pytest.raises(MismatchError, match="the ranks do not agree on"):
                distributed(other if hvd.rank() == 0 else model)

    ranks(check)


# What does not go on as it has begun


def test_gradients_changed_from_the_first_step_on(ranks: Any) -> None:
    single = copy.deepcopy(MODEL)
    one = torch.optim.SGD(single.parameters(), 0.1)
    for _ in range(5):
        one.zero_grad()
        (3 * F.cross_entropy(single(X), Y)).backward()
        one.step()

    @on_gpu
    def check(gpu: FakeDevice) -> None:
        for change in (torch.Tensor.mul_, lambda g, factor: g.data.mul_(factor)):  # which torch counts, and does not
            model = copy.deepcopy(MODEL)
            optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1))
            rows = split(48, "equal")
            for _ in range(5):
                optimizer.zero_grad()
                F.cross_entropy(model(X[rows]), Y[rows]).backward()
                for parameter in model.parameters():
                    change(parameter.grad, 3)
                optimizer.step()
            assert distance(flat(model), flat(single)) <= 1e-5

    ranks(check)


@every_way
@pytest.mark.parametrize("steps", [0, 1, 4], ids=["first", "learning", "later"])
def test_learning_rates_that_are_not_the_same(ranks: Any, steps: int, options: Any) -> None:
    """While the host waits in a step anyway, before it; later, in one of the next steps."""

    @on_gpu
    def check(gpu: FakeDevice) -> None:
        rank, size = hvd.rank(), hvd.size()
        model = copy.deepcopy(MODEL)
        optimizer = distributed(model, "sgd", **options)
        for _ in range(steps):
            step(model, optimizer, split(48, "equal"))
        optimizer.param_groups[0]["lr"] *= 1 + rank
        if size == 1:
            step(model, optimizer, split(48, "equal"))
            return
        words = r"(?s)rank 0: the learning rate of group 0" if steps < 2 else "learning rates of the ranks"
        if steps >= 2:
            step(model, optimizer, split(48, "equal"))
        with pytest.raises(MismatchError, match=words):
            step(model, optimizer, split(48, "equal"))

    ranks(check)


def two_passes(model: torch.nn.Module, optimizer: Any) -> None:
    for _ in range(2):
        F.cross_entropy(model(X), Y).backward()


def changed(model: torch.nn.Module, optimizer: Any) -> None:
    F.cross_entropy(model(X), Y).backward()
    for parameter in model.parameters():
        parameter.grad.mul_(2)
    optimizer.step()


def late_weight(model: torch.nn.Module, optimizer: Any) -> None:
    F.cross_entropy(model(X), Y).backward()
    optimizer.set_batch_weight(7)
    optimizer.step()


def step_left_out(model: torch.nn.Module, optimizer: Any) -> None:
    F.cross_entropy(model(X), Y).backward()
    optimizer.zero_grad()
    F.cross_entropy(model(X), Y).backward()


def skipped(model: torch.nn.Module, optimizer: Any) -> None:
    F.cross_entropy(model(X), Y).backward()
    with optimizer.skip_synchronize():
        optimizer.step()


@pytest.mark.parametrize("habit", [two_passes, changed, late_weight, step_left_out, skipped])
def test_a_broken_habit_is_an_error_on_all_ranks(ranks: Any, habit: Any) -> None:
    @on_gpu
    def check(gpu: FakeDevice) -> None:
        model = copy.deepcopy(MODEL)
        optimizer = distributed(model)
        for _ in range(4):
            step(model, optimizer, slice(None), weighted=False)
        if hvd.rank() == 0:
            optimizer.zero_grad()
            with pytest.raises(ArgumentError, match="gradients changed after they had been sent"):
                habit(model, optimizer)
        else:
            step(model, optimizer, slice(None), weighted=False)
            with pytest.raises(ArgumentError, match="on another rank, in an earlier step"):
                step(model, optimizer, slice(None), weighted=False)
        hvd.barrier()

    ranks(check)


def test_steps_that_cannot_be_made(ranks: Any) -> None:
    @on_gpu
    def check(gpu: FakeDevice) -> None:
        model = copy.deepcopy(MODEL)
        optimizer = distributed(model)
        for number in range(5):
            with pytest.raises(ArgumentError, match="a step without gradients"):
                optimizer.step()
            optimizer.set_batch_weight(0)
            optimizer.step()  # nobody has samples, and nobody has gradients
            optimizer.set_batch_weight(0)
            F.cross_entropy(model(X), Y).backward()
            with pytest.raises(HvdliteError, match="add up to 0"):
                optimizer.step()
            step(model, optimizer, slice(None), weighted=number > 2)
            optimizer.zero_grad()
        with pytest.raises(ArgumentError, match="expected the number of this rank's samples"):
            optimizer.set_batch_weight(-1)

    ranks(check)


@pytest.mark.parametrize("options", [{}, {"shard": True}], ids=["whole", "sharded"])
def test_a_rank_alone_has_no_average_without_samples(options: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hvdlite_torch.sync.device, "SPARE_ONE_RANK", True)

    @on_gpu
    def check(gpu: FakeDevice) -> None:
        model = copy.deepcopy(MODEL)
        optimizer = distributed(model, **options)
        optimizer.set_batch_weight(0)
        F.cross_entropy(model(X), Y).backward()
        before = flat(model)
        with pytest.raises(HvdliteError, match="add up to 0"):
            optimizer.step()
        assert torch.equal(flat(model), before)
        optimizer.step()
        assert not torch.equal(flat(model), before)

    on_ranks(1, check)


def test_what_it_refuses(ranks: Any) -> None:
    class Own:
        compress = staticmethod(lambda tensor: (tensor, None))
        decompress = staticmethod(lambda tensor, ctx: tensor)

    @on_gpu
    def check(gpu: FakeDevice) -> None:
        model = copy.deepcopy(MODEL)
        with pytest.raises(ArgumentError, match="compressed by casts only"):
            distributed(model, compression=Own())
        with pytest.raises(ArgumentError, match="Average or Sum"):
            distributed(model, op=hvd.Max)
        elsewhere = torch.nn.Parameter(torch.zeros(3, device="meta"))
        with pytest.raises(UnsupportedTensorError, match="are on cpu, meta; expected one device"):
            hvdlite_torch.sync.device.device_of([*model.parameters(), elsewhere])

    ranks(check)


def test_no_room_on_one_rank(ranks: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = DeviceBucket

    def make(*args: Any) -> Any:
        if hvd.rank() == 0:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return plain(*args)

    monkeypatch.setattr(hvdlite_torch.sync.device, "DeviceBucket", make)

    @on_gpu
    def check(gpu: FakeDevice) -> None:
        with pytest.raises(
            HvdliteError, match=r"rank 0: no room for 1\d* bytes of gradients on cpu: CUDA out of memory"
        ):
            distributed(copy.deepcopy(MODEL))

    ranks(check)


@pytest.mark.parametrize("sparse_as_dense", [False, True])
def test_sparse_gradients(ranks: Any, sparse_as_dense: bool) -> None:
    words = torch.arange(24) % 9

    def make(sparse: bool) -> torch.nn.Module:
        torch.manual_seed(2)
        return torch.nn.Sequential(torch.nn.Embedding(9, 4, sparse=sparse), torch.nn.Linear(4, 3))

    def run(model: torch.nn.Module, optimizer: torch.optim.Optimizer, rows: Any) -> None:
        for _ in range(5):
            optimizer.zero_grad()
            F.cross_entropy(model(words[rows]), words[rows] % 3).backward()
            optimizer.step()

    with torch.random.fork_rng():
        single, start = make(False), make(True)
    run(single, torch.optim.SGD(single.parameters(), 0.3), slice(None))

    @on_gpu
    def check(gpu: FakeDevice) -> None:
        model = copy.deepcopy(start)
        sgd = torch.optim.SGD(model.parameters(), 0.3)
        optimizer = hvd.DistributedOptimizer(sgd, sparse_as_dense=sparse_as_dense)
        run(model, optimizer, slice(hvd.rank(), None, hvd.size()))
        assert model[0].weight.grad.is_sparse != sparse_as_dense
        if 24 % hvd.size() == 0:
            assert distance(flat(model), flat(single)) <= 1e-5

    ranks(check)


@pytest.mark.parametrize("options", [{}, {"shard": True}], ids=["whole", "sharded"])
def test_loss_scaling_equals_one_process(ranks: Any, options: Any) -> None:
    expected = alone("sgd", 5)

    @on_gpu
    def check(gpu: FakeDevice) -> None:
        model = copy.deepcopy(MODEL)
        optimizer = distributed(model, "sgd", **options)
        scaler = torch.amp.GradScaler("cpu")
        rows = split(48, "uneven")
        for number in range(7):
            optimizer.zero_grad()
            optimizer.set_batch_weight(len(X[rows]))
            loss = scaler.scale(F.cross_entropy(model(X[rows]), Y[rows]))
            if number in (1, 4) and hvd.rank() == hvd.size() - 1:
                loss = loss * torch.inf
            loss.backward()
            scaler.step(optimizer)  # left out on all ranks if any has infinities
            scaler.update()
        assert distance(flat(model), expected) <= 1e-5

    ranks(check)


@pytest.mark.parametrize("options", [{}, {"shard": True}], ids=["whole", "sharded"])
def test_ranks_that_run_out_of_data(fresh_world: None, ranks: Any, options: Any) -> None:
    """Rank r has 4 + r steps, so each one has its last one alone with those after it."""

    @on_gpu
    def check(gpu: FakeDevice) -> None:
        size, rank = hvd.size(), hvd.rank()
        single, model = copy.deepcopy(MODEL), copy.deepcopy(MODEL)
        one, optimizer = OPTIMIZERS["adam"](single.parameters()), distributed(model, **options)
        for number in range(4 + size - 1):
            there = [other for other in range(size) if number < 4 + other]
            rows = torch.cat([torch.arange(other, 48, size)[: 48 // size] for other in there])
            one.zero_grad()
            F.cross_entropy(single(X[rows]), Y[rows]).backward()
            one.step()
        for _ in range(4 + rank):
            optimizer.zero_grad()
            mine = torch.arange(rank, 48, size)[: 48 // size]
            F.cross_entropy(model(X[mine]), Y[mine]).backward()
            optimizer.step()
        assert hvd.join() == size - 1
        assert distance(flat(model), flat(single)) <= 1e-5
        assert_equal_everywhere(flat(model))
        step(model, optimizer, slice(None))  # and again, in step
        assert_equal_everywhere(flat(model))

    ranks(check)


# On a real GPU all this goes on while the host is far ahead


class Account(TorchDispatchMode):
    """Tells the GPU what each of torch's operations reads and writes, on the current stream."""

    def __init__(self, gpu: FakeDevice) -> None:
        super().__init__()
        self._gpu = gpu
        self.host_reads = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten.copy_.default and (len(args) > 2 and args[2]):
            self._touch(args[1], False)  # to host memory, which belongs to no stream
            return func(*args, **kwargs)
        if func is torch.ops.aten._local_scalar_dense.default:
            self.host_reads += 1
        if not func.is_view:
            given = [*args, *kwargs.items()]
            for schema, value in zip(func._schema.arguments, args, strict=False):
                self._touch(value, schema.alias_info is not None and schema.alias_info.is_write)
            for name, value in kwargs.items():
                schema = next(each for each in func._schema.arguments if each.name == name)
                self._touch(value, schema.alias_info is not None and schema.alias_info.is_write)
            result = func(*args, **kwargs)
            old = {id(each) for each in tree_flatten(given)[0]}
            for made in tree_flatten(result)[0]:
                if isinstance(made, torch.Tensor) and id(made) not in old and made.numel():
                    self._gpu.ready(made)
            return result
        return func(*args, **kwargs)

    def _touch(self, value: Any, writes: bool) -> None:
        for each in value if isinstance(value, list | tuple) else [value]:
            if isinstance(each, torch.Tensor) and each.numel():
                self._gpu._tensor("write" if writes else "read", each)


@pytest.mark.parametrize("options", [{}, {"compression": hvd.Compression.bf16}, {"shard": True, "max_grad_norm": 0.1}])
def test_streams_are_in_order_and_the_host_never_waits(ranks: Any, options: Any) -> None:
    @on_gpu
    def check(gpu: FakeDevice) -> None:
        model = copy.deepcopy(MODEL)
        with Account(gpu) as account:
            optimizer = distributed(model, "sgd", **options)
            exchange = exchange_of(optimizer)
            sent = launches(optimizer)
            for number in range(6):
                if number == 4:
                    agreed = count_agreements(exchange)
                    waited, read = gpu.host_waits, account.host_reads
                optimizer.zero_grad()
                rows = split(48, "uneven")
                optimizer.set_batch_weight(len(X[rows]))
                F.cross_entropy(model(X[rows]), Y[rows]).backward()
                for parameter in model.parameters():
                    parameter.grad.sum()  # by the current stream, before and after
                optimizer.step()
                for parameter in model.parameters():
                    (parameter.detach() if "shard" in options else parameter.grad).sum()
        assert sent[2:] == [len(exchange._reducer.buckets) - 1] * 4
        assert (gpu.host_waits, account.host_reads) == (waited, read)
        assert agreed() == 0
        gpu.check_kept()

    ranks(check)


class Launches(TorchDispatchMode):
    """Counts torch's operations that would be launched, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.count: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view:
            self.count[func.name().removeprefix("aten::")] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("options", [{}, {"compression": hvd.Compression.bf16}, {"shard": True}])
def test_what_a_step_launches(ranks: Any, options: Any) -> None:
    """However many gradients a bucket has, it is a constant number of launches."""

    @on_gpu
    def check(gpu: FakeDevice) -> None:
        model = copy.deepcopy(MODEL)
        optimizer = distributed(model, "sgd", **options)
        for _ in range(4):
            step(model, optimizer, split(48, "equal"), weighted=False)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(X[split(48, "equal")]), Y[split(48, "equal")])
        optimizer.set_batch_weight(3)
        with Launches() as seen:
            loss.backward()
        backward = seen.count
        with Launches() as seen:
            exchange_of(optimizer).combine()
        count = backward + seen.count
        buckets = exchange_of(optimizer)._reducer.buckets
        assert count["_foreach_copy_"] == len(buckets) > 1
        assert count["fill_.Scalar"] == 2  # the weight, with the first bucket and with the last
        assert count["div.out"] == len(buckets)
        assert count["mul_.Tensor"] + count["mul.out"] == 2 * len(buckets)
        # The tail, and two for what the host may read later. A rank alone copies its share.
        assert count["copy_"] == 3 + len(buckets) * ("shard" in options and hvd.size() == 1)
        assert count["add_.Tensor"] == 1 and count["zero_"] == count["cat.out"] == 0

    ranks(check)


def test_how_often_the_host_looks_at_a_gradient(ranks: Any) -> None:
    """It looks as each bucket is launched, and once more in `step`: has anything changed since, do places overlap?"""

    @on_gpu
    def check(gpu: FakeDevice) -> None:
        model = copy.deepcopy(MODEL)
        optimizer = distributed(model, "sgd")
        for _ in range(5):
            step(model, optimizer, split(48, "equal"), weighted=False)
        looked = [0]
        plain = gpu.is_at

        def is_at(*arguments: Any) -> bool:
            looked[0] += 1
            return plain(*arguments)

        gpu.is_at = is_at  # type: ignore[method-assign]
        step(model, optimizer, split(48, "equal"), weighted=False)
        assert len(exchange_of(optimizer)._reducer.buckets) > 1
        assert looked[0] == 2 * len(list(model.parameters()))

    ranks(check)


def count_agreements(exchange: Any) -> Callable[[], int]:
    """How many plans of the engine this rank follows from now on: every control message belongs to one."""
    engine = exchange._context.group.engine
    before = engine._driver.plans
    return lambda: engine._driver.plans - before


def test_gradients_made_on_several_streams_are_sent_when_backward_is_over(ranks: Any) -> None:
    """Parts of a model may run on streams of their own. Their backward passes do, too, and end on the caller's."""

    @on_gpu
    def check(gpu: FakeDevice) -> None:
        main, other = gpu.current(), gpu.side()
        model = copy.deepcopy(MODEL)
        with Account(gpu):
            optimizer = distributed(model, "sgd")
            exchange = exchange_of(optimizer)
            take, at_end = exchange.ready, exchange._backward.at_end

            def take_there(index: int, parameter: torch.Tensor) -> None:
                with gpu.on((main, other)[index % 2]):
                    gpu.ready(parameter.grad)
                    take(index, parameter)

            def over() -> None:  # as torch does it
                main.wait(other.record())
                at_end()

            exchange.ready, exchange._backward.at_end = take_there, over
            exchange.make_hooks()
            sent = launches(optimizer)
            for _ in range(4):
                optimizer.zero_grad()
                other.wait(main.record())
                F.cross_entropy(model(X), Y).backward()
                main.wait(other.record())
                optimizer.step()
        assert sent == [0] * 4

    ranks(check)


@pytest.mark.parametrize("options", [{}, {"shard": True}], ids=["whole", "sharded"])
def test_clipping_of_what_a_fused_step_would_unscale(ranks: Any, options: Any) -> None:
    def make(model: torch.nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), 0.5, fused=True)

    single = copy.deepcopy(MODEL)
    train_clipped(single, make(single), 0.05, steps=4)

    @on_gpu
    def check(gpu: FakeDevice) -> None:
        model = copy.deepcopy(MODEL)
        optimizer = hvd.DistributedOptimizer(make(model), max_grad_norm=0.05, **options)
        train_scaled(model, optimizer, split(48, "uneven"), steps=4)
        assert distance(flat(model), flat(single)) <= 1e-5

    ranks(check)


def test_loss_scaling_where_a_rank_has_no_samples(ranks: Any) -> None:
    expected = alone("sgd", 5)

    @on_gpu
    def check(gpu: FakeDevice) -> None:
        model = copy.deepcopy(MODEL)
        optimizer = distributed(model, "sgd", shard=True)
        scaler = torch.amp.GradScaler("cpu")
        rows = split(48, "one has all")
        for _ in range(5):
            optimizer.zero_grad()
            optimizer.set_batch_weight(len(X[rows]))
            loss = scaler.scale(F.cross_entropy(model(X[rows]), Y[rows]))
            if len(X[rows]):
                loss.backward()
            scaler.step(optimizer)
            scaler.update()
        assert distance(flat(model), expected) <= 1e-5

    ranks(check)


def test_what_cannot_be_captured(ranks: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    capturing = threading.local()
    monkeypatch.setattr(hvdlite_torch.sync.backward, "is_capturing", lambda: getattr(capturing, "now", False))

    @on_gpu
    def check(gpu: FakeDevice) -> None:
        model = copy.deepcopy(MODEL)
        optimizer = distributed(model)
        for number in range(4):
            capturing.now = number == 0
            if number == 0:
                with pytest.raises(ArgumentError, match="one of the first 2 steps is captured"):
                    step(model, optimizer, slice(None))
            else:
                step(model, optimizer, slice(None))
        capturing.now = True
        step(model, optimizer, slice(None))
        F.cross_entropy(model(X), Y).backward()
        model[0].weight.grad = None
        with pytest.raises(ArgumentError, match="lacks the gradient of a parameter"):
            optimizer.step()
        optimizer.zero_grad()
        F.cross_entropy(model(X), Y).backward()
        capturing.now = False
        with pytest.raises(
            ArgumentError, match="the backward pass was captured into a CUDA graph, and the step was not"
        ):
            optimizer.step()
        step(model, optimizer, slice(None))
        assert_equal_everywhere(flat(model))

    ranks(check)


@pytest.mark.ranks(at_most=1)
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is (deprecated|not supported)")
@pytest.mark.parametrize("what", ["the step", "backward"])
def test_under_the_compiler(ranks: Any, what: str) -> None:
    expected = alone("sgd", 4)

    @on_gpu
    def check(gpu: FakeDevice) -> None:
        model = copy.deepcopy(MODEL)
        optimizer = distributed(model, "sgd")
        compiled = torch.compile(model, backend="eager")

        def backward() -> None:
            F.cross_entropy(compiled(X), Y).backward()

        compile_ = functools.partial(torch.compile, backend="eager")
        back, make_step = (
            (compile_(backward), optimizer.step) if what == "backward" else (backward, compile_(optimizer.step))
        )
        with torch._dynamo.config.patch(compiled_autograd=what == "backward"):
            for _ in range(4):
                optimizer.zero_grad()
                back()
                make_step()
        assert distance(flat(model), expected) <= 1e-5

    ranks(check)


def test_a_model_that_has_moved_is_not_switched_to_a_fused_step() -> None:
    parameter = torch.nn.Parameter(torch.zeros(3))
    parameter.grad = torch.ones(3)
    optimizer = torch.optim.SGD([parameter], 0.1)
    fused = FusedStep(optimizer)
    fused.switch()
    assert optimizer.param_groups[0]["fused"]
    fused.back()
    torch.utils.swap_tensors(parameter, torch.nn.Parameter(torch.zeros(3, device="meta")))
    fused.switch()
    assert not optimizer.param_groups[0]["fused"]


def meddle(what: str, model: torch.nn.Module) -> None:
    """What a program does to gradients: the same on all ranks, and linear, so that averages stay averages."""
    parameters = list(model.parameters())
    if what == "data is assigned":
        for parameter in parameters:
            parameter.grad.data = parameter.grad.data / 2  # type: ignore[union-attr]
    elif what == "swapped":
        for one, other in ((parameters[0], parameters[2]), (parameters[1], parameters[3])):
            if one.shape == other.shape:
                one.grad, other.grad = other.grad, one.grad
    else:
        for parameter in parameters:
            parameter.grad.data.mul_(0.5)  # type: ignore[union-attr]


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("what", ["data is assigned", "swapped", "data is scaled"])
def test_what_programs_do_to_gradients(ranks: Any, what: str, set_to_none: bool) -> None:
    torch.manual_seed(2)
    start = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
    x = torch.randn(12, 8)

    def train_meddled(model: torch.nn.Module, optimizer: Any, rows: slice) -> None:
        for _ in range(5):
            optimizer.zero_grad(set_to_none=set_to_none)
            (model(x[rows]) ** 2).mean().backward()
            meddle(what, model)
            optimizer.step()

    single = copy.deepcopy(start)
    train_meddled(single, OPTIMIZERS["adam"](single.parameters()), slice(None))

    @on_gpu
    def check(gpu: FakeDevice) -> None:
        model = copy.deepcopy(start)
        each = 12 // hvd.size()
        train_meddled(model, distributed(model), slice(hvd.rank() * each, (hvd.rank() + 1) * each))
        assert distance(flat(model), flat(single)) <= 1e-5

    ranks(check)


def test_gradients_that_a_program_keeps_are_not_overwritten(ranks: Any) -> None:
    @on_gpu
    def check(gpu: FakeDevice) -> None:
        model = copy.deepcopy(MODEL)
        optimizer = distributed(model)
        kept: list[tuple[torch.Tensor, torch.Tensor]] = []
        for _ in range(5):
            step(model, optimizer, split(48, "equal"))
            kept += [(p.grad.view(-1), p.grad.detach().clone()) for p in model.parameters()]  # type: ignore[union-attr]
        assert all(torch.equal(gradient.view_as(was), was) for gradient, was in kept)

    ranks(check)


def test_gradients_are_no_views(ranks: Any) -> None:
    @on_gpu
    def check(gpu: FakeDevice) -> None:
        model = copy.deepcopy(MODEL)
        optimizer = distributed(model)
        for _ in range(4):
            for parameter in model.parameters():
                if parameter.grad is not None:  # as torch's zero_grad once did
                    parameter.grad.detach_()
                    parameter.grad.zero_()
            F.cross_entropy(model(X), Y).backward()
            optimizer.step()

    ranks(check)
