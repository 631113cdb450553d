"""The C library is told to keep freed memory, unless the user says not to."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from torch.distributed.constants import default_pg_timeout

import hvdlite_torch as hvd
from hvdlite.config import Config
from hvdlite.testing import on_ranks
from hvdlite_torch.distributed import backend
from hvdlite_torch.tensors import malloc


def wrap() -> None:
    hvd.DistributedOptimizer(torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1))


def make_torch_group() -> None:
    options = SimpleNamespace(
        global_ranks_in_group=[0], group_id="g", group_size=1, group_rank=0, store=None, timeout=default_pg_timeout
    )
    backend._create(options, None)


@pytest.mark.parametrize(
    ("setting", "told"), [({}, 1), ({"HVDLITE_KEEP_MEMORY": "1"}, 1), ({"HVDLITE_KEEP_MEMORY": "0"}, 0)]
)
@pytest.mark.parametrize("begin", [wrap, make_torch_group])
def test_switch(monkeypatch: pytest.MonkeyPatch, begin: Callable[[], None], setting: dict[str, str], told: int) -> None:
    calls: list[str] = []
    monkeypatch.setattr(malloc, "tell_malloc", lambda: calls.append("told"))
    on_ranks(1, begin, config=Config.from_env(setting))
    assert len(calls) == told
