"""A compressor with a memory sees each gradient of each step once, and nothing else."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import hvdlite.gradients.bucket
import hvdlite_torch as hvd
from hvdlite.errors import ArgumentError, HvdliteError, MismatchError
from hvdlite.protocols import TensorInfo

SHAPES = (40, 3), (7,), (2, 2, 2)
STEPS = 5


@pytest.fixture(autouse=True, params=[0, 2**16], ids=["large", "small"])
def large_or_small(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hvdlite.gradients.bucket, "LARGE_BYTES", request.param)


class Quantizer:
    """Rounds to whole numbers, and adds what was lost to the next gradient (Seide et al., Interspeech 2014)."""

    def __init__(self) -> None:
        self.seen: dict[torch.Size, list[torch.Tensor]] = {}
        self.lost: dict[torch.Size, torch.Tensor] = {}

    def compress(self, tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Size]:
        shape = tensor.shape
        self.seen.setdefault(shape, []).append(tensor.detach().clone())
        wanted = tensor.detach() + self.lost.get(shape, 0.0)
        sent = wanted.round()
        self.lost[shape] = wanted - sent
        return sent.reshape(-1), shape

    def decompress(self, tensor: torch.Tensor, ctx: torch.Size) -> torch.Tensor:
        return tensor.reshape(ctx)


class SizedQuantizer(Quantizer):
    def compress(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        return super().compress(tensor)[0], None

    def encoded(self, info: TensorInfo) -> TensorInfo:
        return TensorInfo(info.dtype, (torch.Size(info.shape).numel(),))

    def decompress(self, tensor: torch.Tensor, ctx: None) -> torch.Tensor:
        assert ctx is None
        return tensor.reshape(next(shape for shape in SHAPES if torch.Size(shape).numel() == tensor.numel()))


QUANTIZERS = pytest.mark.parametrize("quantizer", [Quantizer, SizedQuantizer])
overlaps = pytest.mark.parametrize("overlap", [False, True], ids=["plain", "overlapped"])


def gradient_of(rank: int, step: int, number: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * rank + 10 * step + number)
    return torch.randn(SHAPES[number], generator=generator) * 2


def parameters() -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.zeros(shape)) for shape in SHAPES]


def sgd(given: list[torch.nn.Parameter], compressor: Any, **options: Any) -> Any:
    return hvd.DistributedOptimizer(torch.optim.SGD(given, lr=1.0), compression=compressor, **options)


def run(given: list[torch.nn.Parameter], optimizer: Any, step: int, numbers: Any = (0, 1, 2)) -> None:
    """A step with the gradients of these parameters."""
    optimizer.zero_grad()
    losses = [(given[n] * gradient_of(hvd.rank(), step, n)).sum() for n in numbers]
    if losses:
        sum(losses).backward()
    optimizer.step()


@overlaps
@QUANTIZERS
def test_error_feedback(ranks: Any, quantizer: type[Quantizer], overlap: bool) -> None:
    """What is sent and what is lost add up to the gradients, on each rank: so the parameters have a closed form."""

    def check() -> None:
        compressor, given = quantizer(), parameters()
        optimizer = sgd(given, compressor, overlap=overlap)
        assert not compressor.seen
        for step in range(STEPS):
            run(given, optimizer, step)
            assert {shape: len(seen) for shape, seen in compressor.seen.items()} == dict.fromkeys(SHAPES, step + 1)
        for number, parameter in enumerate(given):
            seen = compressor.seen[parameter.shape]
            assert all(torch.equal(each, gradient_of(hvd.rank(), step, number)) for step, each in enumerate(seen))
            lost = hvd.allgather_object(compressor.lost[parameter.shape])
            everything = [gradient_of(r, step, number) for r in range(hvd.size()) for step in range(STEPS)]
            expected = -(sum(everything) - sum(lost)) / hvd.size()
            torch.testing.assert_close(parameter.detach(), expected, rtol=0, atol=1e-4)

    ranks(check)


@overlaps
@QUANTIZERS
def test_ranks_without_a_gradient(ranks: Any, quantizer: type[Quantizer], overlap: bool) -> None:
    """Parameter n has gradients on rank n alone, the last one from the third step on; the first one on all ranks."""

    def has(rank: int, number: int, step: int, size: int) -> bool:
        if number == 2:
            return step >= 2 and rank == size - 1
        return number == 0 or rank == number % size

    def check() -> None:
        rank, size = hvd.rank(), hvd.size()
        compressor, given = quantizer(), parameters()
        optimizer = sgd(given, compressor, overlap=overlap)
        for step in range(STEPS):
            run(given, optimizer, step, [n for n in range(len(SHAPES)) if has(rank, n, step, size)])
            assert (given[2].grad is None) == (step < 2)
        for number, parameter in enumerate(given):
            mine = [gradient_of(rank, step, number) for step in range(STEPS) if has(rank, number, step, size)]
            seen = compressor.seen.get(parameter.shape, [])
            assert len(seen) == len(mine) and all(map(torch.equal, seen, mine))
            lost = hvd.allgather_object(compressor.lost.get(parameter.shape, torch.zeros(parameter.shape)))
            everything = [
                gradient_of(r, step, number) for r in range(size) for step in range(STEPS) if has(r, number, step, size)
            ]
            expected = -(sum(everything) - sum(lost)) / size
            torch.testing.assert_close(parameter.detach(), expected, rtol=0, atol=1e-4)

    ranks(check)


def test_a_sparse_gradient_does_not_show_the_others_twice(ranks: Any) -> None:
    def check() -> None:
        compressor, given = Quantizer(), parameters()
        table = torch.nn.Embedding(6, 2, sparse=True)
        torch.nn.init.zeros_(table.weight)
        optimizer = sgd([*given, table.weight], compressor)
        for step in range(3):
            optimizer.zero_grad()
            losses = [(each * gradient_of(hvd.rank(), step, n)).sum() for n, each in enumerate(given)]
            if step:  # the rows are new in the second step
                losses.append(table(torch.tensor([hvd.rank() % 6])).sum())
            sum(losses).backward()
            optimizer.step()
            assert {shape: len(seen) for shape, seen in compressor.seen.items()} == dict.fromkeys(SHAPES, step + 1)
        assert float(table.weight.detach().sum()) == pytest.approx(-2 * 2.0)

    ranks(check)


def test_a_rank_joins_after_the_first_step(ranks: Any) -> None:
    def check() -> None:
        compressor, given = Quantizer(), parameters()
        optimizer = sgd(given, compressor)
        run(given, optimizer, 0)
        if hvd.rank() == 0:
            run(given, optimizer, 1)
        hvd.join()
        assert {len(seen) for seen in compressor.seen.values()} == {1 + (hvd.rank() == 0)}
        assert len({tuple(p.detach().flatten().tolist()) for p in hvd.allgather_object(given[0].detach())}) == 1

    ranks(check)


@QUANTIZERS
def test_a_rank_joins_before_the_first_step(ranks: Any, quantizer: type[Quantizer]) -> None:
    def check() -> None:
        compressor, given = quantizer(), parameters()
        optimizer = sgd(given, compressor)
        if hvd.rank() == 0:
            if quantizer is SizedQuantizer or hvd.size() == 1:
                run(given, optimizer, 0)
            else:
                with pytest.raises(
                    ArgumentError, match=r"has joined, and does not know .* Quantizer .* `encoded\(info\)`"
                ):
                    run(given, optimizer, 0)
        hvd.join()

    ranks(check)


def test_what_is_known_must_stay(ranks: Any) -> None:
    class Growing(Quantizer):
        def compress(self, tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Size]:
            sent, shape = super().compress(tensor)
            return (sent if len(self.seen[shape]) < 2 else torch.cat([sent, sent])), shape

    class Odd(Quantizer):
        def compress(self, tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Size]:
            sent, shape = super().compress(tensor)
            return sent.to(torch.float64 if hvd.rank() else torch.float32), shape

    def check() -> None:
        given = parameters()
        optimizer = sgd(given, Growing())
        run(given, optimizer, 0)
        with pytest.raises(ArgumentError, match=r"Growing has made float32 of shape \(240,\) .* \(120,\)"):
            run(given, optimizer, 1)
        given = parameters()
        optimizer = sgd(given, Odd())
        if hvd.size() > 1:
            with pytest.raises(MismatchError, match="Odd does not make the same"):
                run(given, optimizer, 0)

    ranks(check)


def test_a_context_that_cannot_be_sent(ranks: Any) -> None:
    class Closed(Quantizer):
        def compress(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
            sent, shape = super().compress(tensor)
            return sent, lambda: shape

        def decompress(self, tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
            return tensor.reshape(ctx())

    def check() -> None:
        given = parameters()
        optimizer = sgd(given, Closed())
        if hvd.rank() == 0:
            run(given, optimizer, 0)
        else:
            with pytest.raises(
                ArgumentError, match="Closed needs to decompress those of other ranks cannot be pickled"
            ):
                run(given, optimizer, 0, [])

    ranks(check)


def test_an_inherited_size_says_nothing_of_another_compression(ranks: Any) -> None:
    class Whole(hvd.Compression.fp16):  # type: ignore[misc, name-defined]
        @classmethod
        def compress(cls, tensor: torch.Tensor) -> tuple[torch.Tensor, str]:
            return tensor.double(), "float32"

    def check() -> None:
        given = parameters()
        optimizer = sgd(given, Whole)
        for step in range(2):
            run(given, optimizer, step)
        for number, parameter in enumerate(given):
            everything = [gradient_of(r, step, number) for r in range(hvd.size()) for step in range(2)]
            torch.testing.assert_close(parameter.detach(), -sum(everything) / hvd.size())

    ranks(check)


def test_passes_are_counted_before_the_size_is_known(ranks: Any) -> None:
    def check() -> None:
        given = parameters()
        optimizer = sgd(given, Quantizer(), backward_passes_per_step=1)
        optimizer.set_backward_passes_per_step(2)
        loss = sum(parameter.sum() for parameter in given)
        loss.backward(retain_graph=True)
        loss.backward(retain_graph=True)
        with pytest.raises(HvdliteError, match="3 backward passes without a step"):
            loss.backward()

    ranks(check)
