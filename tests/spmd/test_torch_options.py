"""The arguments and methods of a distributed optimizer, each against training in one process."""

from __future__ import annotations

import copy
import dataclasses
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F

import hvdlite.gradients.bucket
import hvdlite_torch as hvd
from hvdlite.api import world
from hvdlite.errors import ArgumentError, MismatchError, UnsupportedTensorError
from tests.conftest import UNDER_MPI
from tests.spmd.test_torch_training import (
    MODEL,
    OPTIMIZERS,
    X,
    Y,
    assert_equal_everywhere,
    distance,
    every_way,
    flat,
    split,
    train,
    train_scaled,
)

TOKENS = torch.randint(0, 50, (48, 5), generator=torch.Generator().manual_seed(3))


@pytest.fixture(autouse=True, params=[0, 2**14], ids=["large", "small"])
def large_bytes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients take another road if they are large."""
    monkeypatch.setattr(hvdlite.gradients.bucket, "LARGE_BYTES", request.param)


class Halving:
    """A compressor of our own, which loses nothing."""

    def compress(self, tensor: torch.Tensor) -> tuple[torch.Tensor, torch.dtype]:
        return tensor.double() / 2, tensor.dtype

    def decompress(self, tensor: torch.Tensor, ctx: torch.dtype) -> torch.Tensor:
        return (tensor * 2).to(ctx)


@pytest.mark.parametrize(
    ("compression", "tolerance"),
    [(hvd.Compression.fp16, 2e-3), (hvd.Compression.bf16, 2e-2), (Halving(), 1e-5)],
    ids=["fp16", "bf16", "own"],
)
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("predivide", [1.0, 4.0])
def test_compression(ranks: Any, compression: Any, tolerance: float, overlap: bool, predivide: float) -> None:
    single = copy.deepcopy(MODEL)
    train(single, OPTIMIZERS["sgd"](single.parameters()), slice(None), steps=5)

    def check() -> None:
        model = copy.deepcopy(MODEL)
        optimizer = hvd.DistributedOptimizer(
            OPTIMIZERS["sgd"](model.parameters()),
            compression=compression,
            overlap=overlap,
            gradient_predivide_factor=predivide,
        )
        train(model, optimizer, split(48, "uneven"), steps=5)
        assert distance(flat(model), flat(single)) <= tolerance
        assert_equal_everywhere(flat(model))
        assert all(p.grad.dtype is torch.float32 for p in model.parameters())

    ranks(check)


def test_predividing_keeps_float16_in_range(ranks: Any) -> None:
    def check() -> None:
        for factor, finite in ((1.0, False), (100.0, True)):
            parameter = torch.nn.Parameter(torch.zeros(5))
            optimizer = hvd.DistributedOptimizer(
                torch.optim.SGD([parameter], lr=1.0),
                compression=hvd.Compression.fp16,
                gradient_predivide_factor=factor,
            )
            (parameter * 1e5).sum().backward()
            optimizer.synchronize()
            assert bool(torch.isfinite(parameter.grad).all()) is finite
        torch.testing.assert_close(parameter.grad, torch.full((5,), 1e5), rtol=1e-3, atol=0)

    ranks(check)


class Embedding(torch.nn.Module):
    def __init__(self, sparse: bool) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(50, 6, sparse=sparse)
        self.other = torch.nn.Embedding(50, 6, sparse=sparse)
        self.linear = torch.nn.Linear(6, 4)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.linear(self.table(tokens).mean(1))


torch.manual_seed(11)
EMBEDDING = Embedding(sparse=False)


def embedding(sparse: bool) -> Embedding:
    model = Embedding(sparse)
    model.load_state_dict(EMBEDDING.state_dict())
    return model


def train_embedding(model: torch.nn.Module, optimizer: Any, rows: slice, steps: int = 6) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        if len(TOKENS[rows]):
            F.cross_entropy(model(TOKENS[rows]), Y[rows]).backward()
        if hasattr(optimizer, "set_batch_weight"):
            optimizer.set_batch_weight(len(TOKENS[rows]))
        optimizer.step()


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("as_dense", [False, True])
@pytest.mark.parametrize("shares", ["uneven", "one has all"])
def test_sparse_gradients(ranks: Any, as_dense: bool, overlap: bool, shares: str) -> None:
    single = embedding(sparse=False)
    train_embedding(single, torch.optim.SGD(single.parameters(), lr=0.5), slice(None))

    def check() -> None:
        model = embedding(sparse=True)
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.5), sparse_as_dense=as_dense, overlap=overlap
        )
        train_embedding(model, optimizer, split(48, shares))
        assert distance(flat(model), flat(single)) <= 1e-5
        assert_equal_everywhere(flat(model))
        assert model.table.weight.grad.is_sparse is not as_dense
        assert model.other.weight.grad is None

    ranks(check)


def test_sparse_adam_and_rows_of_one_rank_alone(ranks: Any) -> None:
    single = embedding(sparse=True)
    table = [single.table.weight]
    train_embedding(single, torch.optim.SparseAdam(table, lr=0.1), slice(None))

    def check() -> None:
        model = embedding(sparse=True)
        optimizer = hvd.DistributedOptimizer(torch.optim.SparseAdam([model.table.weight], lr=0.1))
        train_embedding(model, optimizer, split(48, "uneven"))
        assert distance(flat(model), flat(single)) <= 1e-4
        model = embedding(sparse=True)
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.5), shard=True)
        with pytest.raises(UnsupportedTensorError, match="cannot be sharded"):
            train_embedding(model, optimizer, split(48, "equal"))

    ranks(check)


def clipped_alone() -> torch.nn.Module:
    """Six steps in one process, the gradients clipped."""
    model = copy.deepcopy(MODEL)
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    for _ in range(6):
        optimizer.zero_grad()
        F.cross_entropy(model(X), Y).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        optimizer.step()
    return model


@pytest.mark.parametrize("options", [{}, {"shard": True}], ids=["whole", "sharded"])
def test_clipping(ranks: Any, options: Any) -> None:
    single = clipped_alone()

    def check() -> None:
        model = copy.deepcopy(MODEL)
        optimizer = hvd.DistributedOptimizer(OPTIMIZERS["sgd"](model.parameters()), max_grad_norm=0.05, **options)
        train(model, optimizer, split(48, "uneven"), steps=6)
        assert distance(flat(model), flat(single)) <= 1e-5

    ranks(check)


def test_clipping_as_horovod_does_it(ranks: Any) -> None:
    single = clipped_alone()

    def check() -> None:
        model = copy.deepcopy(MODEL)
        optimizer = hvd.DistributedOptimizer(OPTIMIZERS["sgd"](model.parameters()))
        rows = split(48, "equal")
        for _ in range(6):
            optimizer.zero_grad()
            F.cross_entropy(model(X[rows]), Y[rows]).backward()
            optimizer.set_batch_weight(len(X[rows]))
            optimizer.synchronize()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
            with optimizer.skip_synchronize():
                optimizer.step()
        assert distance(flat(model), flat(single)) <= 1e-5

    ranks(check)


@pytest.mark.parametrize("options", [{"overlap": False}, {"overlap": True}, {"shard": True}, {"op": "adasum"}], ids=str)
@pytest.mark.parametrize("dance", [False, True])
def test_all_ranks_skip_a_step_in_which_one_overflows(ranks: Any, options: Any, dance: bool) -> None:
    if dance and ("shard" in options or "op" in options):
        return  # synchronize() has no meaning there

    def check() -> None:
        more = {"op": hvd.Adasum} if "op" in options else options
        model = copy.deepcopy(MODEL)
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), **more)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=100)
        rows = split(48, "equal")
        scales, stepped = [], []
        for step in range(6):
            before = flat(model)
            optimizer.zero_grad()
            loss = F.cross_entropy(model(X[rows]), Y[rows])
            if step in (2, 3) and hvd.rank() == hvd.size() - 1:
                loss = loss * float("inf")
            scaler.scale(loss).backward()
            if dance:
                optimizer.synchronize()
                scaler.unscale_(optimizer)
                with optimizer.skip_synchronize():
                    scaler.step(optimizer)
            else:
                scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
            stepped.append(not torch.equal(before, flat(model)))
        assert scales == [8, 8, 4, 2, 2, 2]
        assert stepped == [True, True, False, False, True, True]
        assert torch.isfinite(flat(model)).all()
        assert_equal_everywhere(flat(model))

    ranks(check)


def test_loss_scaling_equals_one_process(ranks: Any) -> None:
    single = copy.deepcopy(MODEL)
    train(single, OPTIMIZERS["sgd"](single.parameters()), slice(None), steps=5)

    def check() -> None:
        for options in ({}, {"shard": True}):
            model = copy.deepcopy(MODEL)
            optimizer = hvd.DistributedOptimizer(OPTIMIZERS["sgd"](model.parameters()), **options)
            train_scaled(model, optimizer, split(48, "uneven"), steps=5)
            assert distance(flat(model), flat(single)) <= 1e-5

    ranks(check)


@every_way
def test_autocast_to_bfloat16(ranks: Any, options: Any) -> None:
    """Rows are independent in a forward pass, so only sums over them differ from one process, in float32."""
    single = copy.deepcopy(MODEL)
    alone = OPTIMIZERS["sgd"](single.parameters())
    for _ in range(5):
        alone.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = F.cross_entropy(single(X), Y)
        loss.backward()
        alone.step()

    def check() -> None:
        model = copy.deepcopy(MODEL)
        optimizer = hvd.DistributedOptimizer(OPTIMIZERS["sgd"](model.parameters()), **options)
        rows = split(48, "uneven")
        for _ in range(5):
            optimizer.zero_grad()
            optimizer.set_batch_weight(len(X[rows]))
            with torch.autocast("cpu", torch.bfloat16):
                loss = F.cross_entropy(model(X[rows]), Y[rows])
            loss.backward()
            optimizer.step()
        assert (
            distance(flat(model), flat(single)) <= 1e-2
        )  # gradients themselves are rounded to bfloat16 in a backward pass
        assert_equal_everywhere(flat(model))

    ranks(check)


@every_way
def test_three_passes_the_last_one_partial(ranks: Any, options: Any) -> None:
    single = copy.deepcopy(MODEL)
    train(single, OPTIMIZERS["adam"](single.parameters()), slice(None), steps=6)

    def check() -> None:
        model = copy.deepcopy(MODEL)
        optimizer = hvd.DistributedOptimizer(
            OPTIMIZERS["adam"](model.parameters()), backward_passes_per_step=3, **options
        )
        rows = split(48, "uneven")
        x, y = X[rows], Y[rows]
        third = -(-len(x) // 3) + 1  # so that the last pass has fewer rows
        for _ in range(6):
            optimizer.zero_grad()
            optimizer.set_batch_weight(len(x))
            with optimizer.no_sync():
                for start in (0, third):
                    part = slice(start, start + third)
                    (F.cross_entropy(model(x[part]), y[part], reduction="sum") / len(x)).backward()
            (F.cross_entropy(model(x[2 * third :]), y[2 * third :], reduction="sum") / len(x)).backward()
            optimizer.step()
        assert distance(flat(model), flat(single)) <= 1e-5

    ranks(check)


def test_more_passes_than_declared_are_an_error(ranks: Any) -> None:
    def check() -> None:
        model = copy.deepcopy(MODEL)
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), backward_passes_per_step=2)
        for _ in range(2):
            for _ in range(2):
                F.cross_entropy(model(X), Y).backward()
            optimizer.step()
        optimizer.set_backward_passes_per_step(3)
        for _ in range(3):
            F.cross_entropy(model(X), Y).backward()
        with pytest.raises(ArgumentError, match="4 backward passes without a step, and backward_passes_per_step=3"):
            F.cross_entropy(model(X), Y).backward()

    ranks(check)


def adasum(vectors: list[np.ndarray]) -> np.ndarray:
    """By definition, in float64, in pairs of neighbours."""
    if len(vectors) == 1:
        return vectors[0]
    if len(vectors) == 3:  # the third is folded in beforehand
        vectors = [adasum([vectors[0], vectors[1]]), vectors[2]]
    a, b = vectors
    return (1 - a @ b / (2 * a @ a)) * a + (1 - a @ b / (2 * b @ b)) * b


@pytest.mark.ranks(at_most=3)
def test_adasum_combines_steps(ranks: Any) -> None:
    def check() -> None:
        size = hvd.size()
        start = copy.deepcopy(MODEL)
        changes = []
        for rank in range(size):
            alone = copy.deepcopy(start)
            optimizer = torch.optim.Adam(alone.parameters(), lr=1e-2)
            F.cross_entropy(alone(X[rank::size]), Y[rank::size]).backward()
            optimizer.step()
            changes.append(
                [(a - b).detach().double().numpy() for a, b in zip(alone.parameters(), start.parameters(), strict=True)]
            )
        model = copy.deepcopy(start)
        optimizer = hvd.DistributedOptimizer(torch.optim.Adam(model.parameters(), lr=1e-2), op=hvd.Adasum)
        F.cross_entropy(model(X[hvd.rank() :: size]), Y[hvd.rank() :: size]).backward()
        optimizer.step()
        for number, (new, old) in enumerate(zip(model.parameters(), start.parameters(), strict=True)):
            expected = adasum([change[number].reshape(-1) for change in changes])
            got = (new - old).detach().double().numpy().reshape(-1)
            np.testing.assert_allclose(got, expected, atol=1e-6)
        assert_equal_everywhere(flat(model))

    ranks(check)


def test_a_step_without_backward(ranks: Any) -> None:
    def check() -> None:
        for options in ({}, {"shard": True}):
            model = copy.deepcopy(MODEL)
            optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), **options)
            with pytest.raises(ArgumentError, match="a step without gradients"):
                optimizer.step()
            before = flat(model)
            optimizer.set_batch_weight(0)
            optimizer.step()
            assert torch.equal(before, flat(model))

    ranks(check)


def test_layers_in_another_order(ranks: Any) -> None:
    def check() -> None:
        here = world()
        config, here.config = here.config, dataclasses.replace(here.config, advice=True)
        layers = [torch.nn.Linear(4, 4, bias=False) for _ in range(3)]
        hvd.broadcast_parameters({str(number): layer.weight for number, layer in enumerate(layers)})
        odd = hvd.rank() == hvd.size() - 1 > 0  # the last two change places there
        order = [0, 2, 1] if odd else [0, 1, 2]
        parameters = [layers[number].weight for number in order]
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(parameters, lr=0.1))
        here.config = config
        sum(layer(torch.ones(hvd.rank() + 1, 4)).sum() for layer in layers).backward()
        if hvd.size() == 1:
            optimizer.step()
            return
        words = rf"parameter 1 of rank 0 \(float32 of shape \(4, 4\)\) is parameter 2 of rank {hvd.size() - 1}\."
        before = layers[0].weight.detach().clone()
        with pytest.raises(MismatchError, match=words):
            optimizer.step()
        assert torch.equal(before, layers[0].weight)

    ranks(check)


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("same data", "read the same data"),
        ("default rate", "hvd.scale_lr"),
        ("apart", "broadcast_parameters"),
        ("", ""),
    ],
)
def test_advice(ranks: Any, what: str, words: str) -> None:
    def check() -> tuple[int, int]:
        here = world()
        config, here.config = here.config, dataclasses.replace(here.config, advice=True)
        model = copy.deepcopy(MODEL)
        if what == "apart":
            with torch.no_grad():
                model[0].bias += hvd.rank()
        plain = torch.optim.SGD(model.parameters(), **({} if what == "default rate" else {"lr": 0.1}))
        optimizer = hvd.DistributedOptimizer(plain)
        here.config = config
        train(model, optimizer, slice(None) if what == "same data" else split(48, "equal"), steps=3)
        return hvd.size(), hvd.rank()

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        places = ranks(check)
    texts = [str(each.message) for each in caught if str(each.message).startswith("hvdlite:")]
    size = places[0][0]
    speaks = size > 1 and (not UNDER_MPI or hvd.rank() == 0)  # threads share their warnings
    assert len(texts) == (speaks and bool(words))
    assert all(words in text for text in texts)
