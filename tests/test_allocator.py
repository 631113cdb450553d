"""The C library is told to keep freed memory, unless the user says not to."""

from __future__ import annotations

import pytest
import torch

import hvdlite_torch as hvd
from hvdlite.config import Config
from hvdlite.testing import on_ranks
from hvdlite_torch.sync import host


@pytest.mark.parametrize(
    ("setting", "told"), [({}, 1), ({"HVDLITE_KEEP_MEMORY": "1"}, 1), ({"HVDLITE_KEEP_MEMORY": "0"}, 0)]
)
def test_switch(monkeypatch: pytest.MonkeyPatch, setting: dict[str, str], told: int) -> None:
    calls: list[str] = []
    monkeypatch.setattr(host, "keep_freed_memory", lambda: calls.append("told"))
    config = Config.from_env(setting)

    def wrap() -> None:
        hvd.DistributedOptimizer(torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1))

    on_ranks(1, wrap, config=config)
    assert len(calls) == told
