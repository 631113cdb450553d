"""`hvd.checkpoint` with torch: training that was saved, and loaded into new objects, goes on as if nothing had happened."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

import hvdlite_torch as hvd
from hvdlite.errors import ArgumentError, CheckpointError, MismatchError

OPTIMIZERS = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=1e-2, amsgrad=True),
    "Adafactor": lambda p: torch.optim.Adafactor(p, lr=1e-2),  # its state is not elementwise
}
OPTIONS: dict[str, Any] = {
    "whole": dict,
    "sharded": lambda: {"shard": True},
    "powersgd": lambda: {"compression": hvd.Compression.powersgd(rank=1)},
    "diloco": lambda: {"local_steps": hvd.DiLoCo(every=2)},
}


class Training:
    """A model, and all that changes while it trains. Its start is the same each time."""

    def __init__(self, kind: str = "AdamW", options: str = "whole") -> None:
        generator = torch.Generator().manual_seed(0)
        self.model = torch.nn.Sequential(
            torch.nn.Linear(6, 40), hvd.SyncBatchNorm(40), torch.nn.Linear(40, 50), torch.nn.Linear(50, 3)
        )
        for parameter in self.model.parameters():
            parameter.data = torch.randn(parameter.shape, generator=generator) / 5
        self.model[0].bias.requires_grad_(False)
        self.optimizer: Any = hvd.DistributedOptimizer(OPTIMIZERS[kind](self.model.parameters()), **OPTIONS[options]())
        first = torch.optim.lr_scheduler.LinearLR(self.optimizer, 0.5, total_iters=2)
        then = torch.optim.lr_scheduler.MultiStepLR(self.optimizer, [1, 3])  # a Counter in its state
        self.schedule = torch.optim.lr_scheduler.SequentialLR(self.optimizer, [first, then], [2])

    def steps(self, first: int, last: int) -> None:
        for step in range(first, last):
            x = torch.randn(4, 6, generator=torch.Generator().manual_seed(100 * step + hvd.rank()))
            self.optimizer.zero_grad()
            F.cross_entropy(self.model(x), torch.arange(4) % 3).backward()
            self.optimizer.step()
            self.schedule.step()

    def objects(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer, "schedule": self.schedule}

    def state(self) -> list[Any]:
        return [copy.deepcopy(each.state_dict()) for each in self.objects().values()]


def common(tmp_path: Path) -> Path:
    """A folder that all ranks see; `tmp_path` is each process's own."""
    return Path(hvd.broadcast_object(str(tmp_path)))


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("SGD", "whole"),
        ("Adafactor", "whole"),
        ("SGD", "sharded"),
        ("AdamW", "sharded"),
        ("AdamW", "powersgd"),
        ("AdamW", "diloco"),
    ],
)
def test_training_goes_on_exactly(ranks: Any, tmp_path: Path, kind: str, options: str) -> None:
    def check() -> None:
        training = Training(kind, options)
        training.steps(0, 4)
        path = hvd.checkpoint.save(common(tmp_path), **training.objects(), epoch=4, best=float("inf"))
        assert path == hvd.broadcast_object(path)
        training.steps(4, 8)
        hvd.barrier()
        resumed = Training(kind, options)
        found = hvd.checkpoint.load(common(tmp_path), **resumed.objects())
        assert found == {"epoch": 4, "best": float("inf")} and found.path == path and found.ranks == hvd.size()
        resumed.steps(4, 8)
        torch.testing.assert_close(resumed.state(), training.state(), rtol=0, atol=0)

    ranks(check)


def test_each_rank_has_a_disk_of_its_own(ranks: Any, tmp_path: Path) -> None:
    def check() -> None:
        training = Training(options="sharded")
        training.steps(0, 3)
        folder = tmp_path / f"of rank {hvd.rank()}"
        hvd.checkpoint.save(folder, **training.objects())
        assert (folder / "checkpoint-00000001").exists() == (hvd.rank() == 0)
        training.steps(3, 5)
        resumed = Training(options="sharded")
        assert hvd.checkpoint.load(folder, **resumed.objects()) == {}
        resumed.steps(3, 5)
        torch.testing.assert_close(resumed.state(), training.state(), rtol=0, atol=0)

    ranks(check)


def test_values(ranks: Any, tmp_path: Path) -> None:
    dtypes = [torch.float16, torch.bfloat16, torch.float64, torch.int64, torch.uint8, torch.bool, torch.complex64]
    values: dict[str, Any] = {
        "tensors": {dtype: (torch.arange(6).reshape(2, 3) % 2).to(dtype) for dtype in dtypes}.values(),
        "nested": {"a": [1, (2.5, None)], 3: {"$odd": {4, 5}}, ("x", 1): b"\x00\xff", "z": 1 - 2j},
        "odd": [float("nan"), float("-inf"), 2**70, "ü\n", True, torch.tensor(3.0), torch.empty(0, 4)],
    }
    values["tensors"] = list(values["tensors"])

    def check() -> None:
        hvd.checkpoint.save(common(tmp_path), **values)
        found = hvd.checkpoint.load(common(tmp_path))
        assert found is not None
        assert [each.dtype for each in found["tensors"]] == dtypes
        torch.testing.assert_close(found["tensors"], values["tensors"], rtol=0, atol=0)
        assert found["nested"] == values["nested"]
        assert str(found["odd"]) == str(values["odd"])

    ranks(check)


def test_nothing_is_there(ranks: Any, tmp_path: Path) -> None:
    def check() -> None:
        training = Training()
        assert hvd.checkpoint.load(tmp_path / "nowhere", **training.objects()) is None
        assert not (tmp_path / "nowhere").exists()

    ranks(check)


def test_wrong_use(ranks: Any, tmp_path: Path) -> None:
    def check() -> None:
        folder = common(tmp_path)
        training = Training()
        with pytest.raises(
            ArgumentError, match=r"how\['x'\]\[1\] is a .*function, which a checkpoint does not hold: .*Leave it out"
        ):
            hvd.checkpoint.save(folder, how={"x": [1, check]})
        with pytest.raises(ArgumentError, match="keep=0: expected how many"):
            hvd.checkpoint.save(folder, keep=0, model=training.model)
        hvd.checkpoint.save(folder, model=training.model, epoch=1)
        with pytest.raises(
            ArgumentError, match=r"no state of optimizer. It has states of model, and the values epoch\."
        ):
            hvd.checkpoint.load(folder, optimizer=training.optimizer)
        with pytest.raises(ArgumentError, match=r"epoch= is a int, which has no state to set.*found\['epoch'\]"):
            hvd.checkpoint.load(folder, epoch=0)
        with pytest.raises(CheckpointError, match="size mismatch for 0.weight"):
            hvd.checkpoint.load(folder, model=torch.nn.Sequential(torch.nn.Linear(1, 1), *training.model[1:]))
        if hvd.rank() == 0:
            (folder / "file").write_text("")
        hvd.barrier()
        with pytest.raises(ArgumentError, match=r"file' is a file: name a folder"):
            hvd.checkpoint.save(folder / "file", model=training.model)
        with pytest.raises(ArgumentError, match=r"file' is a file: name a folder"):
            hvd.checkpoint.load(folder / "file", model=training.model)
        if hvd.size() > 1:
            with pytest.raises(MismatchError, match=r"(?s)different names:.*rank 1: \['other'\]"):
                hvd.checkpoint.save(folder, **{"other" if hvd.rank() == 1 else "model": 1})
            with pytest.raises(ArgumentError, match="rank 1: "):
                hvd.checkpoint.load(folder, model=training.model if hvd.rank() != 1 else 3)

    ranks(check)


def test_what_does_not_fit_changes_nothing(ranks: Any, tmp_path: Path) -> None:
    """Of the objects that are loaded together none is changed if one does not fit: another class, shape, group or name."""

    def check() -> None:
        folder = common(tmp_path)
        training = Training("AdamW")
        training.steps(0, 2)
        hvd.checkpoint.save(folder, **training.objects(), head=torch.nn.Linear(2, 2))
        for kind, options, said in (
            ("SGD", "whole", "no dampening, momentum, which SGD needs"),
            ("SGD", "sharded", "no dampening, momentum, which SGD needs"),
            ("Adafactor", "whole", "which Adafactor needs"),
        ):
            other = Training(kind, options)
            before = other.state()
            with pytest.raises(CheckpointError, match=said):
                hvd.checkpoint.load(folder, **other.objects())
            torch.testing.assert_close(other.state(), before, rtol=0, atol=0)
        other = Training("AdamW")
        before = other.state()
        with pytest.raises(CheckpointError, match="size mismatch for weight"):
            hvd.checkpoint.load(folder, **other.objects(), head=torch.nn.Linear(2, 3))
        with pytest.raises(CheckpointError, match="Missing key"):
            hvd.checkpoint.load(folder, **other.objects(), head=torch.nn.Sequential(torch.nn.Linear(2, 2)))
        some = torch.optim.AdamW(list(other.model.parameters())[1:])
        with pytest.raises(CheckpointError, match=r"groups have \[8\] parameters, and here are \[7\]"):
            hvd.checkpoint.load(folder, model=other.model, optimizer=some)
        torch.testing.assert_close(other.state(), before, rtol=0, atol=0)
        hvd.checkpoint.load(folder, **other.objects())
        torch.testing.assert_close(other.state(), training.state(), rtol=0, atol=0)

    ranks(check)


def test_pickled_values_need_a_word(ranks: Any, tmp_path: Path) -> None:
    def check() -> None:
        folder = common(tmp_path)
        hvd.checkpoint.save(folder, allow_pickle=True, shape=torch.Size([2, 3]), step=1)
        with pytest.raises(ArgumentError, match="has pickled objects.*allow_pickle=True"):
            hvd.checkpoint.load(folder)
        assert hvd.checkpoint.load(folder, allow_pickle=True) == {"shape": torch.Size([2, 3]), "step": 1}

    ranks(check)


def test_local_steps_between_two_meetings(ranks: Any, tmp_path: Path) -> None:
    def check() -> None:
        training = Training(options="diloco")
        training.steps(0, 3)
        with pytest.raises(ArgumentError, match="average_parameters"):
            hvd.checkpoint.save(common(tmp_path), optimizer=training.optimizer)
        training.optimizer.average_parameters()
        hvd.checkpoint.save(common(tmp_path), optimizer=training.optimizer)

    ranks(check)
