"""Where torch's tensors lie: in memory that the C library keeps and in huge pages, unless the user says not to."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.distributed.constants import default_pg_timeout

import hvdlite_torch as hvd
from hvdlite.config import Config
from hvdlite.ranks import memory_ways
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


PROGRAM = """
import torch, hvdlite_torch
tensor = torch.ones(2**24)
print(open("/proc/self/smaps_rollup").read())
"""


def huge_bytes(**settings: str) -> int:
    """Return how many bytes of a process lie in huge pages, which has a tensor of 64 MiB."""
    environ = {name: value for name, value in os.environ.items() if name != "THP_MEM_ALLOC_ENABLE"}
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, env={**environ, **settings}, capture_output=True, text=True, timeout=120, check=True)
    found = re.search(r"AnonHugePages: *(\d+) kB", done.stdout)
    assert found is not None
    return 1024 * int(found[1])


@pytest.mark.skipif(
    not memory_ways.HUGE_PAGES.exists() or "[madvise]" not in memory_ways.HUGE_PAGES.read_text(),
    reason="Linux gives no huge pages for madvise",
)
@pytest.mark.costly
@pytest.mark.parametrize(
    ("settings", "huge"),
    [
        ({}, True),
        ({"HVDLITE_HUGE_PAGES": "0"}, False),
        ({"THP_MEM_ALLOC_ENABLE": "0"}, False),  # what the user has set stays
        ({"HVDLITE_OVERLAP": "perhaps"}, False),  # `init` says what is wrong, and not the import
    ],
    ids=str,
)
def test_large_tensors_lie_in_huge_pages(settings: dict[str, str], huge: bool) -> None:
    assert (huge_bytes(**settings) >= 2**25) == huge


@pytest.mark.parametrize(
    ("text", "best", "words"),
    [
        ("always [madvise] never\n", True, "huge ones (madvise)"),
        ("[always] madvise never\n", True, "huge ones (always)"),
        ("always madvise [never]\n", False, "says 'never'. With madvise they are huge"),
        (None, False, "this kernel has no"),
    ],
)
def test_huge_pages_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str | None, best: bool, words: str
) -> None:
    path = tmp_path / "enabled"
    if text is not None:
        path.write_text(text)
    monkeypatch.setattr(memory_ways, "HUGE_PAGES", path)
    (way,) = (way for way in memory_ways.memory_ways() if way.name.startswith("pages"))
    assert way.best is best and words in way.found


def test_what_is_not_allowed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(name: str) -> int:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "memfd_create", refused)
    monkeypatch.setattr(memory_ways, "ORDERED", False)
    monkeypatch.setattr(memory_ways.platform, "libc_ver", lambda: ("", ""))
    shared, meetings, _, kept = memory_ways.memory_ways()
    assert not (shared.best or meetings.best or kept.best)
    assert "by messages" in shared.found and "Operation not permitted" in shared.found
    assert "by messages" in meetings.found and "only glibc" in kept.found
