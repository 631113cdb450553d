"""A checkpoint is loaded on any number of ranks, with ``shard=True`` or without it; and other programs read its weights."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
import safetensors.torch
import torch

import hvdlite_torch as hvd
from hvdlite.config import Config
from hvdlite.testing import on_ranks
from tests.spmd.test_torch_checkpoint import Training


def run(size: int, fn: Any, *args: Any) -> list[Any]:
    return on_ranks(size, fn, *args, config=Config(advice=False))


@pytest.mark.parametrize("saved", ["whole", "sharded"])
def test_on_other_numbers_of_ranks(tmp_path: Path, saved: str) -> None:
    """What four ranks saved gives the same as their state in memory, on one, two and four."""

    def begin() -> list[Any]:
        training = Training(options=saved)
        training.steps(0, 3)
        hvd.checkpoint.save(tmp_path, **training.objects(), step=3)
        return training.state()

    state = run(4, begin)[0]

    def go_on(loaded: str, from_disk: bool) -> list[Any]:
        training = Training(options=loaded)
        if from_disk:
            assert hvd.checkpoint.load(tmp_path, **training.objects()) == {"step": 3}
        else:
            for target, value in zip(training.objects().values(), state, strict=True):
                target.load_state_dict(copy.deepcopy(value))
            hvd.barrier()
        torch.testing.assert_close(training.state(), state, rtol=0, atol=0)
        training.steps(3, 6)
        return training.state()

    for size in (1, 2, 4):
        for loaded in ("whole", "sharded"):
            expected = run(size, go_on, loaded, False)[0]
            for found in run(size, go_on, loaded, True):
                torch.testing.assert_close(found[1:], expected[1:], rtol=0, atol=0)
        torch.testing.assert_close(
            run(size, go_on, "whole", True)[0], run(size, go_on, "whole", False)[0], rtol=0, atol=0
        )


def test_errors_of_compression_on_other_numbers_of_ranks(tmp_path: Path) -> None:
    """The mean of what the ranks have not sent yet stays what it was."""

    def errors(training: Training) -> Any:
        told = hvd.allgather_object(training.optimizer.state_dict()["aggregator"]["errors"])
        numbers = sorted({number for each in told for number in each})
        zero = torch.zeros(())
        return {n: sum((each.get(n, zero) for each in told), zero).double() / len(told) for n in numbers}

    def begin() -> Any:
        training = Training(options="powersgd")
        training.steps(0, 3)
        hvd.checkpoint.save(tmp_path, **training.objects())
        return errors(training)

    expected = run(3, begin)[0]
    assert any(each.abs().max() > 1e-4 for each in expected.values())

    def go_on() -> Any:
        training = Training(options="powersgd")
        hvd.checkpoint.load(tmp_path, **training.objects())
        found = errors(training)
        training.steps(3, 4)
        return found

    for size in (1, 2, 5):
        for found in run(size, go_on):
            torch.testing.assert_close(found, expected)


def test_the_files_are_safetensors(tmp_path: Path) -> None:
    tensors = {
        "t.half": torch.randn(3, 1).bfloat16(),
        "flag": torch.tensor([True, False, True]),
        "number": torch.tensor(7),
        "none": torch.empty(0, 4),
        "wide": torch.randn(5, dtype=torch.float64),
        "across": torch.randn(4, 6).t(),
        "complex": torch.randn(2, dtype=torch.complex64),
    }
    path = run(2, lambda: hvd.checkpoint.save(tmp_path, tensors=tensors))[0]
    found = safetensors.torch.load_file(path / "tensors.other-values.safetensors")
    torch.testing.assert_close(found, tensors, rtol=0, atol=0)


def test_their_files_are_read(tmp_path: Path) -> None:
    from hvdlite.checkpoint.tensor_file import tensors_in

    arrays = {
        "a": np.arange(6, dtype=np.int16).reshape(2, 3),
        "b": np.random.default_rng(0).normal(size=3),
        "c": np.ones(()),
    }
    content = np.frombuffer(safetensors.numpy.save(arrays, {"made": "elsewhere"}), np.uint8)
    found = tensors_in(content)
    assert set(found) == set(arrays)
    for name, array in arrays.items():
        np.testing.assert_array_equal(found[name].array, array, strict=True)
