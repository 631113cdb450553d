"""Elastic training with torch on other numbers of ranks: the state, and the samples of an epoch."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import hvdlite_torch as hvd
from hvdlite.config import Config
from hvdlite.testing import on_ranks
from hvdlite_torch import elastic
from tests.spmd.test_torch_elastic import as_sent, made


@pytest.mark.parametrize("options", ["whole", "sharded"])
def test_on_other_numbers_of_ranks(options: str) -> None:
    def begin() -> tuple[dict[str, Any], list[Any]]:
        training, state = made(options)
        training.steps(0, 3)
        state.commit()
        return as_sent(state.saved()), training.state()

    saved, expected = on_ranks(4, begin, config=Config(advice=False))[0]

    def go_on() -> None:
        training, state = made(options)
        if hvd.rank() == 0:
            state.set_saved(copy.deepcopy(saved))
            state.restore()
        state.sync()
        torch.testing.assert_close(training.state(), expected, rtol=0, atol=0)
        training.steps(3, 4)

    for size in (1, 2, 5):
        on_ranks(size, go_on, config=Config(advice=False))


@given(data=st.data())
def test_each_sample_of_an_epoch_is_seen_once(data: st.DataObject) -> None:
    """Ranks come and go. What was not committed when they do is not seen."""
    length, batch = data.draw(st.integers(0, 60)), data.draw(st.integers(1, 5))
    shuffle, pad = data.draw(st.booleans()), data.draw(st.booleans())
    committed: dict[str, Any] = {"epoch": 2, "processed_indices": []}
    seen: list[int] = []
    sizes = [data.draw(st.integers(1, 5)) for _ in range(data.draw(st.integers(0, 3)))]

    def part(batches: int | None) -> tuple[list[int], dict[str, Any]]:
        sampler = elastic.ElasticSampler(range(length), shuffle, seed=1, pad=pad)
        sampler.load_state_dict(committed)
        loader = torch.utils.data.DataLoader(range(length), batch, sampler=sampler)  # type: ignore[arg-type]
        mine: list[int] = []
        for number, rows in enumerate(loader):
            if number == batches:
                break
            sampler.record_batch(number, batch)
            mine += rows.tolist()
            assert set(mine) <= sampler.processed_indices
        assert len(sampler) == len(list(sampler)) and len(loader) == -(-len(sampler) // batch)
        lengths = hvd.allgather_object(len(sampler))
        assert max(lengths) - min(lengths) <= (0 if pad else 1)
        return mine, sampler.gathered()

    for size in sizes:
        told = on_ranks(size, part, data.draw(st.integers(0, 4)))
        committed = told[0][1]
        seen += [each for mine, _ in told for each in mine]
    told = on_ranks(3, part, None)
    seen += [each for mine, _ in told for each in mine]
    assert set(seen) == set(range(length))
    twice = len(seen) - length
    # Those that fill up come last. Before, a small dataset may end in a batch of one of these parts.
    assert twice == 0 if not pad else twice <= 2 + sum(size - 1 for size in sizes)
    assert set(told[0][1]["processed_indices"].tolist()) == set(range(length))
