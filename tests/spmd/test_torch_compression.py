"""Compression: what travels is half as long, and what comes back is as exact as that allows."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import pytest
import torch

import hvdlite_torch as hvd
from hvdlite.errors import MismatchError

# Bits of the significand, so that 2^-BITS is the rounding error relative to a value.
BITS = {"fp16": 11, "bf16": 8}


def of_rank(rank: int, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(rank).uniform(0.5, 2.0, shape))


@pytest.mark.parametrize("name", BITS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_sums_within_the_precision(ranks: Any, name: str, dtype: torch.dtype) -> None:
    compression = getattr(hvd.Compression, name)

    def check() -> None:
        rank, size = hvd.rank(), hvd.size()
        for shape in ((), (0,), (size + 1, 50)):
            each = [of_rank(r, shape) for r in range(size)]
            x = each[rank].to(dtype)
            # Each rank's values are rounded once, and the sum once.
            bound = (size + 1) * 2.0 * 2.0 ** -BITS[name]
            total = torch.stack(each).sum(0)
            results = [
                (hvd.allreduce(x, compression=compression, op=hvd.Sum), total),
                (hvd.allreduce(x, compression=compression), total / size),
                (hvd.grouped_allreduce([x, x], compression=compression, op=hvd.Sum)[1], total),
            ]
            if shape:
                rows = torch.tensor_split(total, size)[rank]
                results += [
                    (hvd.reducescatter(x, compression=compression, op=hvd.Sum), rows),
                    (hvd.grouped_reducescatter([x], compression=compression)[0], rows / size),
                ]
            for result, expected in results:
                assert result.dtype is dtype
                assert result.shape == expected.shape
                np.testing.assert_allclose(result.numpy(), expected.numpy(), rtol=0, atol=bound)
            assert x.dtype is dtype and torch.equal(x, each[rank].to(dtype))
            if x.numel() > 1:  # and it was not exact, so that it has been compressed
                assert not torch.equal(results[0][0].double(), total)

    ranks(check)


@pytest.mark.parametrize("name", BITS)
def test_gradients_travel_compressed_too(ranks: Any, name: str) -> None:
    def check() -> None:
        size = hvd.size()
        x = torch.ones(3, requires_grad=True)
        result = hvd.allreduce(x, compression=getattr(hvd.Compression, name), op=hvd.Sum)
        # 1 + 2^-12 is 1 in both dtypes of the wire.
        (result * (1 + 2.0**-12)).sum().backward()
        assert x.grad.dtype is torch.float32
        assert x.grad.tolist() == [size] * 3

    ranks(check)


def test_ranks_that_compress_differently_are_told(ranks: Any) -> None:
    def check() -> None:
        if hvd.size() > 1:
            mine = hvd.Compression.fp16 if hvd.rank() else hvd.Compression.none
            with pytest.raises(MismatchError, match="float16"):
                hvd.allreduce(torch.ones(2), compression=mine)

    ranks(check)


def test_a_compressor_of_the_program(ranks: Any) -> None:
    """Signs only, scaled by the mean of the absolute values; as an object, with state."""

    class Signs:
        compressed: ClassVar[list[int]] = []

        def compress(self, tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            self.compressed.append(tensor.numel())
            return tensor.sign().to(torch.int8), tensor.abs().mean()

        def decompress(self, tensor: torch.Tensor, ctx: torch.Tensor) -> torch.Tensor:
            return tensor * ctx

    def check() -> None:
        x = torch.tensor([2.0, -2.0, 2.0])
        assert hvd.allreduce(x, op=hvd.Sum, compression=Signs()).tolist() == [2.0 * hvd.size() * s for s in (1, -1, 1)]
        assert set(Signs.compressed) == {3}

    ranks(check)
