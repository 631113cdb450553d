"""allreduce with op=Adasum, on every kind of tensor, against its definition in float64."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

import hvdlite as hvd
from hvdlite.config import Config
from hvdlite.errors import ArgumentError, MismatchError, UnsupportedTensorError
from hvdlite.testing import on_ranks
from tests.support.adasum_reference import adasum_of

STEP = {"float16": 2**-11, "bfloat16": 2**-8, "float32": 1e-6, "float64": 1e-14}
"""Rounding, relative to the largest element."""


def vectors_of(size: int, shape: tuple[int, ...], seed: int = 0) -> list[Any]:
    rng = np.random.default_rng(seed)
    common = rng.normal(size=shape)
    return [common + rng.normal(size=shape) for _ in range(size)]


def assert_close(result: Any, expected: Any, dtype: str) -> None:
    got = result.double().numpy() if isinstance(result, torch.Tensor) else np.asarray(result).astype(np.float64)
    np.testing.assert_allclose(got, expected, rtol=0, atol=STEP[dtype] * max(1.0, np.abs(expected).max(initial=0.0)))


@pytest.mark.parametrize("dtype", STEP)
@pytest.mark.parametrize("kind", ["numpy", "torch"])
@pytest.mark.parametrize("inplace", [False, True])
def test_of_one_tensor(ranks: Any, kind: str, dtype: str, inplace: bool) -> None:
    def make(values: Any) -> Any:
        if kind == "torch":
            return torch.tensor(values).to(getattr(torch, dtype))
        return values.astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)

    def exact(tensor: Any) -> Any:
        return tensor.double().numpy() if kind == "torch" else tensor.astype(np.float64)

    def check() -> None:
        for shape in ((), (1,), (0, 3), (5, 7), (3000,)):
            everybody = [make(np.asarray(values)) for values in vectors_of(hvd.size(), shape)]
            mine = everybody[hvd.rank()]
            expected = adasum_of([exact(tensor) for tensor in everybody])
            result = hvd.allreduce(mine, hvd.Adasum, inplace=inplace)
            assert (result is mine) == inplace
            assert result.dtype == mine.dtype
            assert tuple(result.shape) == shape
            assert_close(result, expected, dtype)
            if not inplace:
                np.testing.assert_array_equal(exact(mine), exact(make(vectors_of(hvd.size(), shape)[hvd.rank()])))
            bits = [each.tobytes() for each in hvd.allgather_object(exact(result))]
            assert len(set(bits)) == 1

    ranks(check)


def test_tensors_of_a_list_and_calls_in_flight_are_combined_one_by_one(ranks: Any) -> None:
    def check() -> None:
        rank, size = hvd.rank(), hvd.size()
        shapes = [(3, 4), (), (50,), (0,), (2, 2)]
        dtypes = ["float32", "float64", "float32", "float32", "float16"]
        everybody = [
            [values.astype(dtype) for values in vectors_of(size, shape, seed)]
            for seed, (shape, dtype) in enumerate(zip(shapes, dtypes, strict=True))
        ]
        expected = [adasum_of([values.astype(np.float64) for values in each]) for each in everybody]
        mine = [each[rank] for each in everybody]
        together = hvd.allreduce(mine, hvd.Adasum)
        handles = [hvd.allreduce_async(each, hvd.Adasum) for each in mine]  # fused where the dtypes are the same
        apart = [handle.wait() for handle in handles]
        for results in (together, apart):
            for result, truth, dtype in zip(results, expected, dtypes, strict=True):
                assert_close(result, truth, dtype)

    ranks(check)


def test_factors(ranks: Any) -> None:
    def check() -> None:
        everybody = vectors_of(hvd.size(), (20,))
        mine = everybody[hvd.rank()]
        result = hvd.allreduce(mine, hvd.Adasum, prescale_factor=0.5, postscale_factor=3.0)
        assert_close(result, 1.5 * adasum_of(everybody), "float64")
        half = [values.astype(np.float16) for values in everybody]
        result = hvd.allreduce(half[hvd.rank()], hvd.Adasum, postscale_factor=3.0)
        assert_close(result, 3 * adasum_of([values.astype(np.float64) for values in half]), "float16")

    ranks(check)


@pytest.mark.ranks(at_least=3)
def test_on_a_process_set(ranks: Any) -> None:
    def check() -> None:
        rank, size = hvd.rank(), hvd.size()
        others = hvd.add_process_set(range(1, size))
        everybody = vectors_of(size, (17,))
        if others.included():
            result = hvd.allreduce(everybody[rank], hvd.Adasum, process_set=others)
            assert_close(result, adasum_of(everybody[1:]), "float64")
        assert_close(hvd.allreduce(everybody[rank], hvd.Adasum), adasum_of(everybody), "float64")
        hvd.remove_process_set(others)

    ranks(check)


def test_what_it_is_not_defined_for(ranks: Any) -> None:
    def check() -> None:
        for dtype in ("int32", "bool", "complex64"):
            with pytest.raises(UnsupportedTensorError, match=f"Adasum of {dtype} is not defined"):
                hvd.allreduce(np.ones(3, dtype), hvd.Adasum)
        with pytest.raises(ArgumentError, match="one algorithm only"):
            hvd.allreduce(np.ones(3), hvd.Adasum, algorithm="ring")
        with pytest.raises(ArgumentError, match="Adasum: reducescatter takes Sum"):
            hvd.reducescatter(np.ones(3), hvd.Adasum)
        if hvd.size() > 1:
            with pytest.raises(MismatchError, match="adasum"):
                hvd.allreduce(np.ones(3), hvd.Adasum if hvd.rank() == 0 else hvd.Sum)

    ranks(check)


@pytest.mark.parametrize("size", [4, 5, 8])
def test_ranks_of_several_hosts(size: int) -> None:
    """With memory shared inside of each host, and an algorithm set for the other operations."""

    def check() -> None:
        everybody = [values.astype(np.float32) for values in vectors_of(size, (1000,))]
        result = hvd.allreduce(everybody[hvd.rank()], hvd.Adasum)
        assert_close(result, adasum_of([values.astype(np.float64) for values in everybody]), "float32")

    on_ranks(size, check, hosts=[rank // 2 for rank in range(size)], config=Config(algorithm="ring"))
