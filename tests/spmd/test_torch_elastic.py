"""The states of elastic training with torch: saved, brought back and shared exactly."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

import hvdlite_torch as hvd
from hvdlite.errors import ArgumentError, CommitError, HvdliteError
from hvdlite_torch import elastic
from tests.spmd.test_torch_checkpoint import OPTIONS, Training, common


def made(options: str) -> tuple[Training, elastic.TorchState]:
    training = Training(options=options)
    sampler = elastic.ElasticSampler(range(50))
    state = elastic.TorchState(
        training.model, training.optimizer, schedule=training.schedule, sampler=sampler, epoch=0, losses=[]
    )
    return training, state


def as_sent(saved: dict[str, Any]) -> dict[str, Any]:
    """What comes back in another process: the arrays travel beside the pickle."""
    buffers: list[pickle.PickleBuffer] = []
    data = pickle.dumps(saved, protocol=5, buffer_callback=buffers.append)
    assert buffers and len(data) < 40_000
    return pickle.loads(data, buffers=[bytes(buffer.raw()) for buffer in buffers])


@pytest.mark.parametrize("options", OPTIONS)
def test_save_and_restore(ranks: Any, options: str) -> None:
    def check() -> None:
        training, state = made(options)
        training.steps(0, 2)
        state.epoch, state.losses = 1, [0.5]
        state.sampler.record_indices([hvd.rank()])
        state.save()
        saved = training.state()
        training.steps(2, 4)
        further = training.state()
        state.epoch = 9
        state.losses.append(0.1)
        state.restore()
        hvd.barrier()
        torch.testing.assert_close(training.state(), saved, rtol=0, atol=0)
        assert (state.epoch, state.losses) == (1, [0.5])
        assert state.sampler.processed_indices == set(range(hvd.size()))
        training.steps(2, 4)  # what was saved is not changed by training
        torch.testing.assert_close(training.state(), further, rtol=0, atol=0)
        state.restore()
        hvd.barrier()
        torch.testing.assert_close(training.state(), saved, rtol=0, atol=0)

    ranks(check)


@pytest.mark.parametrize("options", OPTIONS)
def test_a_new_process_goes_on(ranks: Any, options: str) -> None:
    """Rank 0 gets what was committed, as `hvdlite.elastic.run` does it, and the others by `sync`."""

    def check() -> None:
        training, state = made(options)
        training.steps(0, 4)
        state.epoch = 3
        state.sampler.set_epoch(3)
        state.sampler.record_batch(0, 4)
        state.commit()
        saved = as_sent(state.saved())
        training.steps(4, 7)
        hvd.barrier()
        resumed, anew = made(options)
        if hvd.rank() == 0:
            anew.set_saved(saved)
            anew.restore()
        anew.sync()
        assert anew.epoch == anew.sampler.epoch == 3
        assert len(anew.sampler.processed_indices) == 4 * hvd.size()
        resumed.steps(4, 7)
        torch.testing.assert_close(resumed.state(), training.state(), rtol=0, atol=0)

    ranks(check)


def test_the_start_is_that_of_rank_0(ranks: Any) -> None:
    def check() -> None:
        model = torch.nn.Linear(2, 2)
        torch.nn.init.constant_(model.weight, float(hvd.rank()))
        state = elastic.TorchState(
            model, torch.optim.SGD(model.parameters(), lr=0.1 * (hvd.rank() + 1)), epoch=hvd.rank()
        )
        state.sync()
        assert (model.weight == 0).all() and state.epoch == 0
        assert state.optimizer.param_groups[0]["lr"] == 0.1
        model.weight.data.fill_(3.0)
        state.restore()
        assert (model.weight == 0).all()

    ranks(check)


def test_objects_can_be_replaced_and_handlers_added(ranks: Any) -> None:
    class Counter:
        count = 0

    class CounterHandler(elastic.StateHandler):
        def save(self) -> None:
            self._count = self.value.count

        def restore(self) -> None:
            self.value.count = self._count

        def sync(self) -> None:
            self.value.count = hvd.broadcast_object(self.value.count)

    def check() -> None:
        state = elastic.TorchState(torch.nn.Linear(2, 2), counter=Counter())
        state.counter.count = 5 + hvd.rank()
        state.sync()
        state.counter.count = 0
        state.set_saved(pickle.loads(pickle.dumps(state.saved())))
        state.restore()
        assert state.counter.count == 5
        other = torch.nn.Linear(2, 2)
        state.model = other
        with torch.no_grad():
            kept = other.weight.clone()
            other.weight.add_(1)
        state.restore()
        assert state.model is other and other.weight.equal(kept)
        with pytest.raises(ArgumentError, match=r"TorchState\(commit=…\): a state has such an attribute itself"):
            elastic.TorchState(commit=torch.nn.Linear(2, 2))
        with pytest.raises(HvdliteError, match=r"has \['counter', 'model'\], and this program's state has \['model'\]"):
            elastic.TorchState(torch.nn.Linear(2, 2)).set_saved(state.saved())
        opened = elastic.TorchState(file=open(__file__))  # noqa: SIM115
        with pytest.raises(CommitError, match="'file' of the state, of type TextIOWrapper, cannot be copied"):
            opened.save()
        opened.file.close()

    before = elastic.get_handler_registry()
    elastic.set_handler_registry([(Counter, CounterHandler), *before])
    try:
        ranks(check)
    finally:
        elastic.set_handler_registry(before)
    with pytest.raises(ArgumentError, match="pairs of a class"):
        elastic.set_handler_registry([torch.nn.Module])  # type: ignore[list-item]


# The sampler


def test_a_checkpoint_has_what_all_ranks_have_seen(ranks: Any, tmp_path: Path) -> None:
    def check() -> None:
        sampler = elastic.ElasticSampler(range(40))
        sampler.set_epoch(2)
        sampler.record_batch(0, 3)
        hvd.checkpoint.save(common(tmp_path), sampler=sampler)
        resumed = elastic.ElasticSampler(range(40))
        hvd.checkpoint.load(common(tmp_path), sampler=resumed)
        assert resumed.epoch == 2
        assert len(resumed.processed_indices) == 3 * hvd.size()

    ranks(check)


def test_epochs_of_the_sampler(ranks: Any) -> None:
    def check() -> None:
        sampler = elastic.ElasticSampler(range(40), seed=3)
        first = list(sampler)
        sampler.record_batch(0, 5)
        assert sampler.processed_indices == set(first[:5]) == set(sampler.get_indices(0, 5))
        sampler.set_epoch(0)  # a program that was started again begins the epoch in this way
        assert not set(first[:5]) & set(sampler)
        sampler.set_epoch(1)
        assert not sampler.processed_indices and list(sampler) != first
        everybody = sorted(each for rows in hvd.allgather_object(list(sampler)) for each in rows)
        assert sorted(set(everybody)) == list(range(40))
        ordered = elastic.ElasticSampler(range(40), shuffle=False)
        assert list(ordered)[:3] == [hvd.rank() + hvd.size() * step for step in range(3)]

    ranks(check)
