"""What would let the ranks' parameters come apart is found in the same step, and told with each rank's value."""

from __future__ import annotations

import copy
import dataclasses
import warnings
from typing import Any

import pytest
import torch
from torch import nn

import hvdlite
import hvdlite_torch as hvd
from hvdlite.api import world
from hvdlite.errors import MismatchError
from tests.conftest import UNDER_MPI

WAYS: list[dict[str, Any]] = [{}, {"shard": True}, {"overlap": True}]


MODEL = nn.Sequential(nn.Linear(6, 1000), nn.Tanh(), nn.Linear(1000, 2))
for _parameter in MODEL.parameters():
    nn.init.uniform_(_parameter, -0.1, 0.1, generator=torch.Generator().manual_seed(0))


def a_model() -> nn.Module:
    return copy.deepcopy(MODEL)


def a_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.full((4, 6), 1.0 + hvd.rank())).square().mean().backward()
    optimizer.step()


def last() -> bool:
    return hvd.rank() == hvd.size() - 1


@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.ranks(at_least=2)
def test_optimizers_of_different_classes_or_settings(ranks: Any, way: dict[str, Any]) -> None:
    def check() -> None:
        model = a_model()
        other = torch.optim.Adam if last() else torch.optim.SGD
        with pytest.raises(MismatchError, match="optimizer='(SGD|Adam)'(.|\n)*optimizer='(SGD|Adam)'"):
            hvd.DistributedOptimizer(other(model.parameters(), lr=0.1), **way)
        with pytest.raises(MismatchError, match="the optimizer is a (SGD|Adam)(.|\n)*the optimizer is a (SGD|Adam)"):
            hvd.broadcast_optimizer_state(other(model.parameters(), lr=0.1))
        for mine, text in (
            ({"momentum": 0.5 if last() else 0.9}, "momentum of group 0 is 0.(5|9)"),
            ({"momentum": 0.9, "nesterov": last()}, "nesterov of group 0 is (True|False)"),
        ):
            optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1, **mine), **way)
            with pytest.raises(MismatchError, match=f"{text}(.|\n)*{text}"):
                a_step(model, optimizer)
            hvd.broadcast_optimizer_state(optimizer)  # they are the root's
            a_step(model, optimizer)
            assert optimizer.param_groups[0]["momentum"] == 0.9 and not optimizer.param_groups[0]["nesterov"]
        hvd.assert_in_sync(model)

    ranks(check)


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_learning_rates_that_drift_apart(ranks: Any, way: dict[str, Any]) -> None:
    def check() -> None:
        model = a_model()
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), **way)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
        for _ in range(4):
            a_step(model, optimizer)
            scheduler.step(1.0)  # the same everywhere
            before = optimizer.param_groups[0]["lr"]
        scheduler.step(2.0 if last() else 0.5)  # as each rank's own validation loss would be
        rate = optimizer.param_groups[0]["lr"]
        if hvd.size() == 1:
            a_step(model, optimizer)
            return
        assert (rate == before / 2) is last()
        with pytest.raises(MismatchError, match="learning rate of group 0") as caught:
            a_step(model, optimizer)
        rates = hvd.allgather_object(rate)
        for each in rates:
            assert str(each) in str(caught.value)
        assert f"rank {hvd.size() - 1}: " in str(caught.value)
        optimizer.param_groups[0]["lr"] = min(rates)  # mended, training goes on
        a_step(model, optimizer)
        hvd.assert_in_sync(model)

    ranks(check)


def test_a_rank_that_resumes_alone(ranks: Any) -> None:
    """Rank 0 loads a checkpoint, and only the parameters are broadcast."""

    def check() -> None:
        model = a_model()
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
        if hvd.rank() == 0:
            for _ in range(3):
                a_step(model, optimizer)
        hvd.broadcast_parameters(model.state_dict())
        optimizer = hvd.DistributedOptimizer(optimizer)
        if hvd.size() > 1:
            with pytest.raises(MismatchError, match=r"(?s)rank 0: the optimizer's state is of step 3.*no state yet"):
                a_step(model, optimizer)
        hvd.broadcast_optimizer_state(optimizer, 0)
        a_step(model, optimizer)
        hvd.assert_in_sync(model)

    ranks(check)


@pytest.mark.ranks(at_least=2)
def test_a_step_that_one_rank_leaves_out_after_synchronize(ranks: Any) -> None:
    def check() -> None:
        model = a_model()
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        a_step(model, optimizer)
        model(torch.ones(1, 6)).sum().backward()
        optimizer.synchronize()
        if not last():
            optimizer.step()
        with pytest.raises(MismatchError, match=r"(?s)made 2 steps.*made 1 steps"):
            a_step(model, optimizer)

    ranks(check)


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_steps_are_counted_anew_after_a_join(ranks: Any, way: dict[str, Any]) -> None:
    def check() -> None:
        model = a_model()
        optimizer = hvd.DistributedOptimizer(torch.optim.Adam(model.parameters(), lr=1e-3), **way)
        for _ in range(2):
            for _ in range(2 + hvd.rank()):
                a_step(model, optimizer)
            hvd.join()
        a_step(model, optimizer)
        hvd.assert_in_sync(model)

    ranks(check)


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_a_weight_on_some_ranks_only(ranks: Any, way: dict[str, Any]) -> None:
    def check() -> None:
        model = a_model()
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), **way)
        for _ in range(3):
            a_step(model, optimizer)
        if last():
            optimizer.set_batch_weight(32)
        if hvd.size() > 1:
            with pytest.raises(
                MismatchError, match=r"(?s)ranks? 0.*: no set_batch_weight\(\).*: set_batch_weight\(32\)"
            ):
                a_step(model, optimizer)
        a_step(model, optimizer)
        # Shares of one batch, and none, may be said by those whom it concerns.
        optimizer.set_batch_weight(0 if last() and hvd.size() > 1 else 1)
        a_step(model, optimizer)
        if last() and hvd.size() > 1:
            optimizer.set_batch_weight(0)
        a_step(model, optimizer)
        hvd.assert_in_sync(model)

    ranks(check)


def test_numbers_that_are_not_equal_are_found_whatever_they_are() -> None:
    from hypothesis import given
    from hypothesis import strategies as st

    from hvdlite.gradients.header import Header, read, words

    @given(
        st.lists(st.tuples(st.integers(0, 2**32 - 1), st.integers(0, 2**20)), min_size=1, max_size=50), st.booleans()
    )
    def check(said: list[tuple[int, int]], equal: bool) -> None:
        if equal:
            said = said[:1] * len(said)
        headers = [words(Header(state=state, passes=passes)) for state, passes in said]
        told = read([], [sum(column) for column in zip(*headers, strict=True)])
        assert told.odd_states == (len({state for state, _ in said}) > 1)
        assert told.odd_passes == (len({min(passes, 2**16 - 1) for _, passes in said if passes}) > 1)

    check()


def warnings_of(ranks: Any, check: Any) -> list[str]:
    def with_advice() -> None:
        here = world()
        here.config, config = dataclasses.replace(here.config, advice=True), here.config
        check()
        here.config = config

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ranks(with_advice)
    return [str(each.message) for each in caught if str(each.message).startswith("hvdlite:")]


@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize("wide", [5, 5000])
def test_a_rank_that_leaves_out_a_step_is_told_at_once(ranks: Any, way: dict[str, Any], wide: int) -> None:
    spoken = []

    def check() -> None:
        model = nn.Linear(wide, 2)
        hvd.broadcast_parameters(model.state_dict())
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1e-5), **way)
        for number in range(4):
            optimizer.zero_grad()
            model(torch.full((4, wide), 1.0 + hvd.rank())).square().mean().backward()
            if number == 1 and last():
                continue  # an infinite loss, say
            optimizer.step()
            spoken.append(number)
        hvd.join()

    texts = warnings_of(ranks, check)
    size = hvdlite.size() if UNDER_MPI else max(1, sum(number == 0 for number in spoken))
    if size > 1 and (not UNDER_MPI or hvdlite.rank() == 0):
        (text,) = texts
        assert "different numbers of backward passes" in text
        assert f"rank {size - 1}: 2" in text
    else:
        assert texts == []


def test_a_weight_that_is_said_after_the_step(ranks: Any) -> None:
    def train(late: bool) -> None:
        model = a_model()
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        for _ in range(3):
            if not late:
                optimizer.set_batch_weight(4)
            a_step(model, optimizer)
            if late:
                optimizer.set_batch_weight(4)

    assert warnings_of(ranks, lambda: train(False)) == []
    texts = warnings_of(ranks, lambda: train(True))
    speaks = not UNDER_MPI or hvdlite.rank() == 0
    assert [("weight of the next step" in text) for text in texts] == [True] * speaks


def test_copies_and_pickles_keep_no_count(ranks: Any) -> None:
    def check() -> None:
        model = a_model()
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        a_step(model, optimizer)
        copied = copy.deepcopy(model)
        again = hvd.DistributedOptimizer(torch.optim.SGD(copied.parameters(), lr=0.1))
        a_step(copied, again)
        a_step(model, optimizer)
        hvd.assert_in_sync(model)

    ranks(check)
