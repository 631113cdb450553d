"""What agreement costs does not grow with the ranks, and hardly with the work."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

import hvdlite as hvd
from benchmarks import scaling
from hvdlite.api import world
from hvdlite.config import Config
from hvdlite.operations.negotiation.controller import FANOUT
from hvdlite.protocols import TensorInfo
from hvdlite.testing import on_ranks


@pytest.mark.parametrize("size", [2, 8, 64])
def test_a_step_of_gradients_needs_no_agreement(size: int) -> None:
    for tensors in (10, 200):
        sent = scaling.gradients(size, tensors)
        assert sent.control_messages == [0] * size
        assert sent.messages is not None and min(sent.messages) > 0


@pytest.mark.parametrize("shared_memory", [True, False])
def test_nor_does_one_in_a_whole_world(shared_memory: bool) -> None:
    def control_messages() -> int:
        return int(world()._transport.fabric.traffic(hvd.rank()).control_messages)  # type: ignore[attr-defined]

    def check() -> None:
        reducer = world().group().reducers.make([TensorInfo("float32", (3,))] * 5)
        reducer.exchange([True] * 5)  # all ranks are through with their agreement on the reducer
        before = control_messages()
        for _ in range(5):
            reducer.exchange([True] * 5)
        assert control_messages() == before

    on_ranks(3, check, config=Config(shared_memory=shared_memory))


@pytest.mark.parametrize("size", [2, 8, 64])
def test_a_step_of_named_operations_is_one_short_letter_up_and_one_to_each_child(size: int) -> None:
    """The same batch as last time is a run of ids or, cut for fusion, one for each exchange."""
    for tensors in (10, 1000):
        sent = scaling.operations(size, tensors)
        children = [0] * size
        for rank in range(1, size):
            children[(rank - 1) // FANOUT] += 1
        assert sent.control_messages == [(rank > 0) + children[rank] for rank in range(size)]
        exchanges = -(-tensors // 500)
        for count, nbytes in zip(sent.control_messages, sent.control_bytes, strict=True):
            assert nbytes <= count * 32 * exchanges


def test_the_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "figures.json"
    monkeypatch.setattr(sys, "argv", ["scaling", "--ranks", "2", "--tensors", "10", "--json", str(path)])
    scaling.main()
    assert "control messages" in capsys.readouterr().out
    results = json.loads(path.read_text())
    assert [(figure["what"], figure["control_messages"]["max"]) for figure in results["sent"]] == [
        ("gradients", 0),
        ("operations", 1),
    ]
    (memory,) = results["memory"]
    assert memory["reducer_arrays"] >= memory["gradient_bytes"] == 10 * 4 * 16
    assert 0 < memory["controller"] < 100_000
