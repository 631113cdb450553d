"""``shutdown()`` and ``init()`` around a distributed optimizer: it goes on, and equals training in one process.

Each life is a world of its own, with ranks as threads; `tests/programs/torch_restart.py` does the same with processes.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch.nn import functional as F

import hvdlite.gradients.bucket
import hvdlite.gradients.device.make
import hvdlite_torch as hvd
import hvdlite_torch.sync.device
from hvdlite.api import world
from hvdlite.config import Config
from hvdlite.errors import ArgumentError, HvdliteError, MismatchError, NotInitializedError
from hvdlite.gradients.planner import plan_buckets
from hvdlite.runtime.world import World
from hvdlite.testing import on_ranks
from tests.spmd.test_torch_training import MODEL, OPTIMIZERS, X, Y, distance, flat
from tests.support.fake_device import fake_gpu
from tests.support.jobs import PROGRAMS, Start

CONFIG = Config(deadlock_time_seconds=0.3, advice=False)
WAYS: dict[str, dict[str, Any]] = {
    "whole": {"overlap": False},
    "sharded": {"shard": True},
    "overlapped": {"overlap": True},
    "compressed": {"compression": hvd.Compression.bf16},
}
every_way = pytest.mark.parametrize(
    "options", [WAYS[way] for way in ("whole", "sharded", "overlapped")], ids=list(WAYS)[:3]
)
Life = Callable[[Any], Any]


@pytest.fixture(autouse=True)
def most_gradients_are_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hvdlite.gradients.bucket, "LARGE_BYTES", 100)


def live(*lives: tuple[Sequence[int | None], Life], on_gpu: bool = False) -> list[Any]:
    """Ranks live several lives, each in a world of its own.

    Args:
        lives: Of each: for each rank, which rank it was in the life before (None: it is new); and what it does, which is given
            what it returned then (None at first).
        on_gpu: Each rank has a pretended GPU.

    Returns:
        What each rank returned last.
    """
    before: list[tuple[Any, World]] = []
    for ranks, do in lives:
        before = on_ranks(len(ranks), functools.partial(_begin, before, ranks, do, on_gpu), config=CONFIG)
        gc.collect()  # what is dropped is gone on all ranks before the next life
    return [kept for kept, _ in before]


def _begin(
    before: Sequence[tuple[Any, World]], ranks: Sequence[int | None], do: Life, on_gpu: bool
) -> tuple[Any, World]:
    earlier, kept = ranks[hvd.rank()], None
    with fake_gpu() if on_gpu else contextlib.nullcontext():
        if before and earlier is not None:
            kept, left = before[earlier]
            world().groups.adopt([exchange for exchange in left.groups.left() if not exchange.dropped])
        return do(kept), world()


TWO = [0, 1]


def share() -> slice:
    """This rank's rows: uneven shares."""
    half = 48 // hvd.size()
    start = hvd.rank() * half
    return slice(start, 48 if hvd.rank() == hvd.size() - 1 else start + half)


def step(model: torch.nn.Module, optimizer: Any, rows: slice | None = None, weighted: bool = True) -> None:
    rows = share() if rows is None else rows
    optimizer.zero_grad()
    if hasattr(optimizer, "set_batch_weight") and weighted:
        optimizer.set_batch_weight(len(X[rows]))
    F.cross_entropy(model(X[rows]), Y[rows]).backward()
    optimizer.step()


def alone(steps: int, kind: str = "adam") -> torch.Tensor:
    """The weights after so many steps in one process."""
    model = copy.deepcopy(MODEL)
    optimizer = OPTIMIZERS[kind](model.parameters())
    for _ in range(steps):
        step(model, optimizer, slice(None))
    return flat(model)


def make(_: Any = None, steps: int = 3, kind: str = "adam", **options: Any) -> tuple[torch.nn.Module, Any]:
    model = copy.deepcopy(MODEL)
    optimizer = hvd.DistributedOptimizer(OPTIMIZERS[kind](model.parameters()), **options)
    for _step in range(steps):
        step(model, optimizer)
    return model, optimizer


def go_on(kept: tuple[torch.nn.Module, Any], steps: int = 3) -> tuple[torch.nn.Module, Any]:
    for _ in range(steps):
        step(*kept)
    return kept


@pytest.mark.parametrize(
    ("way", "kind"), [(w, k) for w in WAYS for k in OPTIMIZERS if (w, k) != ("compressed", "adam")]
)
def test_goes_on_as_in_one_process(way: str, kind: str) -> None:
    for model, _ in live((TWO, functools.partial(make, kind=kind, **WAYS[way])), (TWO, go_on), (TWO, go_on)):
        assert distance(flat(model), alone(9, kind)) <= (5e-3 if way == "compressed" else 1e-5)


@every_way
def test_restart_after_restart_with_no_step_between(options: dict[str, Any]) -> None:
    for model, _ in live((TWO, functools.partial(make, **options)), (TWO, lambda kept: kept), (TWO, go_on)):
        assert distance(flat(model), alone(6)) <= 1e-5


@every_way
def test_restart_between_a_backward_pass_and_its_step(options: dict[str, Any]) -> None:
    def stop_in_between(kept: Any) -> Any:
        model, optimizer = kept
        optimizer.zero_grad()
        F.cross_entropy(model(X[share()]), Y[share()]).backward()
        return kept

    def finish(kept: Any) -> Any:
        _, optimizer = kept
        optimizer.set_batch_weight(len(X[share()]))
        optimizer.step()
        return go_on(kept, 2)

    lives = (TWO, functools.partial(make, **options)), (TWO, stop_in_between), (TWO, finish)
    for model, _ in live(*lives):
        assert distance(flat(model), alone(6)) <= 1e-5


@every_way
def test_passes_are_still_counted(options: dict[str, Any]) -> None:
    def first(_: Any) -> Any:
        model, optimizer = make(steps=1, backward_passes_per_step=2, **options)
        optimizer.zero_grad()
        half = share().start, (share().start + share().stop) // 2
        (F.cross_entropy(model(X[slice(*half)]), Y[slice(*half)]) / 2).backward()
        return model, optimizer

    def second(kept: Any) -> Any:
        model, optimizer = kept
        half = (share().start + share().stop) // 2, share().stop
        loss = F.cross_entropy(model(X[slice(*half)]), Y[slice(*half)]) / 2
        loss.backward(retain_graph=True)
        before = [parameter.grad.clone() for parameter in model.parameters()]
        with pytest.raises(ArgumentError, match="3 backward passes without a step"):
            loss.backward()
        for parameter, gradient in zip(model.parameters(), before, strict=True):
            parameter.grad = gradient
        optimizer.set_batch_weight(len(X[share()]))
        optimizer.step()
        return kept

    for model, _ in live((TWO, first), (TWO, second)):
        assert distance(flat(model), alone(2)) <= 1e-5


def test_what_the_program_holds_of_gradients_stays_as_it_is() -> None:
    def first(_: Any) -> Any:
        model, optimizer = make(overlap=False)
        held = [parameter.grad for parameter in model.parameters()]
        return model, optimizer, held, [gradient.clone() for gradient in held]

    def second(kept: Any) -> Any:
        model, optimizer, held, copies = kept
        go_on((model, optimizer))
        assert all(map(torch.equal, held, copies))
        return kept

    live((TWO, first), (TWO, second))


@pytest.mark.parametrize("options", [WAYS["whole"], WAYS["overlapped"]], ids=["whole", "overlapped"])
@pytest.mark.parametrize("who", [[0], [1], [1, 0]], ids=["the first stays", "the second stays", "they change places"])
def test_another_number_of_ranks(who: list[int], options: dict[str, Any]) -> None:
    for model, _ in live((TWO, functools.partial(make, **options)), (who, go_on)):
        assert distance(flat(model), alone(6)) <= 1e-5


def test_new_ranks_make_theirs_meanwhile() -> None:
    def join(kept: Any) -> Any:
        model, optimizer = make(steps=0, overlap=False) if kept is None else kept
        hvd.broadcast_parameters(model.state_dict())
        hvd.broadcast_optimizer_state(optimizer)
        return go_on((model, optimizer))

    for model, _ in live((TWO, functools.partial(make, overlap=False)), ([0, None, 1], join)):
        assert distance(flat(model), alone(6)) <= 1e-5


def test_new_ranks_without_the_state_of_the_others_are_refused() -> None:
    def join(kept: Any) -> Any:
        model, optimizer = make(steps=0, overlap=False) if kept is None else kept
        with pytest.raises(MismatchError, match="not in the same state"):
            step(model, optimizer)

    live((TWO, functools.partial(make, overlap=False)), ([0, 1, None], join))


class TestSharded:
    @pytest.mark.parametrize("who", [[1, 0], [0, None, 1]], ids=["they change places", "a new one comes"])
    def test_state_is_dealt_out_anew(self, who: list[int | None]) -> None:
        def join(kept: Any) -> Any:
            model, optimizer = make(steps=0, shard=True) if kept is None else kept
            hvd.broadcast_parameters(model.state_dict())
            hvd.broadcast_optimizer_state(optimizer)
            return go_on((model, optimizer))

        for model, _ in live((TWO, functools.partial(make, shard=True)), (who, join)):
            assert distance(flat(model), alone(6)) <= 1e-5

    @pytest.mark.parametrize("who", [[0], [1, None]], ids=["one goes", "one is another"])
    def test_state_that_is_gone(self, who: list[int | None]) -> None:
        def save(_: Any) -> Any:
            model, optimizer = make(shard=True)
            return model, optimizer, optimizer.state_dict()

        def join(kept: Any) -> Any:
            model, optimizer, saved = (*make(steps=0, shard=True), None) if kept is None else kept
            text = r"of the 2 ranks that had shares .* only rank.* \d of that time"
            with pytest.raises(MismatchError if None in who else ArgumentError):
                step(model, optimizer)
            with pytest.raises(ArgumentError, match=text):
                optimizer.state_dict()
            root = who.index(1) if 1 in who else 0
            hvd.broadcast_parameters(model.state_dict(), root)
            if hvd.rank() == root:
                optimizer.load_state_dict(saved)
            hvd.broadcast_optimizer_state(optimizer, root)
            return go_on((model, optimizer))

        for model, _ in live((TWO, save), (who, join)):
            assert distance(flat(model), alone(6)) <= 1e-5

    def test_no_state_is_no_loss(self) -> None:
        def plain(parameters: Any) -> torch.optim.Optimizer:
            return torch.optim.SGD(parameters, lr=0.1)

        def first(_: Any) -> Any:
            model = copy.deepcopy(MODEL)
            return go_on((model, hvd.DistributedOptimizer(plain(model.parameters()), shard=True)))

        single = copy.deepcopy(MODEL)
        optimizer = plain(single.parameters())
        for _ in range(6):
            step(single, optimizer, slice(None))
        for model, _ in live((TWO, first), ([1], go_on)):
            assert distance(flat(model), flat(single)) <= 1e-5

    def test_parameters_are_each_ranks_own_after_the_end(self) -> None:
        met = threading.Barrier(2)

        def change(kept: Any) -> None:
            model, _ = kept
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.fill_(hvd.rank())
            met.wait()
            assert all(bool((parameter == hvd.rank()).all()) for parameter in model.parameters())

        kept = live((TWO, functools.partial(make, shard=True)))
        on_ranks(2, lambda: change(kept[hvd.rank()]), config=CONFIG)

    def test_a_plain_optimizer_takes_over(self) -> None:
        def whole(model: Any) -> Any:
            optimizer = hvd.DistributedOptimizer(OPTIMIZERS["sgd"](model.parameters()))
            return go_on((model, optimizer))

        def first(_: Any) -> Any:
            return make(shard=True, kind="sgd", steps=0)[0]

        for model, _ in live((TWO, first), (TWO, whole)):
            assert distance(flat(model), alone(3, "sgd")) <= 1e-5


def test_adasum_goes_on() -> None:
    def train(kept: Any) -> Any:
        model, optimizer = kept or make(op=hvd.Adasum, kind="sgd", steps=0)
        for _ in range(steps):
            step(model, optimizer, weighted=False)
        return model, optimizer

    steps = 6
    (straight, _), _ = live((TWO, train))
    steps = 3
    for model, _ in live((TWO, train), (TWO, train)):
        assert torch.equal(flat(model), flat(straight))


def test_sparse_gradients_go_on() -> None:
    rows = torch.tensor([[0, 1, 1, 4], [4, 5, 2, 2]])

    def first(_: Any) -> Any:
        torch.manual_seed(3)
        table = torch.nn.Embedding(8, 3, sparse=True)
        table.weight.data = torch.arange(24.0).view(8, 3) / 24
        dense = torch.nn.Parameter(torch.ones(3))
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([table.weight, dense], lr=0.1))
        return second((table, dense, optimizer))

    def second(kept: Any) -> Any:
        table, dense, optimizer = kept
        for _ in range(2):
            optimizer.zero_grad()
            ((table(rows[hvd.rank()]) * dense) ** 2).mean().backward()
            optimizer.step()
        return kept

    weights, factors = (torch.arange(24.0).view(8, 3) / 24).requires_grad_(), torch.ones(3, requires_grad=True)
    single = torch.optim.SGD([weights, factors], lr=0.1)
    for _ in range(4):
        single.zero_grad()
        ((weights[rows.view(-1)] * factors) ** 2).mean().backward()
        single.step()
    for table, dense, _ in live((TWO, first), (TWO, second)):
        torch.testing.assert_close(table.weight, weights)
        torch.testing.assert_close(dense, factors)


@every_way
def test_join_after_a_restart(options: dict[str, Any]) -> None:
    """Rank 1 has one step less: the last is on rank 0's rows alone."""

    def end(kept: Any) -> Any:
        go_on(kept, 2)
        if hvd.rank() == 0:
            step(*kept)
        hvd.join()
        return kept

    single = copy.deepcopy(MODEL)
    optimizer = OPTIMIZERS["adam"](single.parameters())
    for number in range(6):
        step(single, optimizer, slice(0, 24) if number == 5 else slice(None))
    for model, _ in live((TWO, functools.partial(make, **options)), (TWO, end)):
        assert distance(flat(model), flat(single)) <= 1e-5


@every_way
def test_process_sets_go_on_when_they_are_in_effect_again(options: dict[str, Any]) -> None:
    def first(_: Any) -> Any:
        both = hvd.add_process_set([0, 1])
        if hvd.rank() == 2:
            return None, both
        model = copy.deepcopy(MODEL)
        optimizer = hvd.DistributedOptimizer(OPTIMIZERS["adam"](model.parameters()), process_set=both, **options)
        for _step in range(3):
            step(model, optimizer, slice(0, 24) if hvd.rank() == 0 else slice(24, 48))
        return (model, optimizer), both

    def second(kept: Any) -> Any:
        pair, both = kept
        if pair is not None:
            with pytest.raises(
                ArgumentError, match=r"is not in effect after the restart .* this very ProcessSet object"
            ):
                step(*pair, rows=slice(0, 24))
        hvd.add_process_set(both)
        if pair is not None:
            for _ in range(3):
                step(*pair, rows=slice(0, 24) if hvd.rank() == 0 else slice(24, 48))
            assert distance(flat(pair[0]), alone(6)) <= 1e-5

    live(([0, 1, 2], first), ([0, 1, 2], second))


def test_a_rank_that_is_not_in_the_process_set_any_more() -> None:
    """Ranks 0 and 1 change their numbers, and the set is of rank 0."""

    def first(_: Any) -> Any:
        one = hvd.add_process_set([0])
        if hvd.rank() == 1:
            return None, one
        model = copy.deepcopy(MODEL)
        return (model, hvd.DistributedOptimizer(OPTIMIZERS["sgd"](model.parameters()), process_set=one)), one

    def second(kept: Any) -> None:
        pair, one = kept
        hvd.add_process_set(one)
        assert (pair is None) == (hvd.rank() == 0)
        if pair is not None:
            with pytest.raises(ArgumentError, match="rank 1 is not in"):
                step(*pair, rows=slice(None))

    live((TWO, first), ([1, 0], second))


def test_a_step_between_the_worlds() -> None:
    [(model, optimizer)] = live(([0], functools.partial(make, shard=True)))
    with pytest.raises(NotInitializedError, match=r"optimizer\.step\(\)"):
        step(model, optimizer, slice(None))


def test_what_is_dropped_is_not_kept() -> None:
    def first(_: Any) -> Any:
        model, optimizer = make(overlap=True)
        return weakref.ref(optimizer), len(model[0].weight._post_accumulate_grad_hooks or ())

    def second(kept: Any) -> None:
        hvd.barrier()
        gc.collect()
        hvd.barrier()
        assert kept[0]() is None

    kept = live((TWO, first))
    gc.collect()
    assert all(reference() is None for reference, _ in kept)
    live((TWO, first), (TWO, second))


@every_way
def test_memory_of_the_earlier_world_is_given_back(options: dict[str, Any]) -> None:
    def first(_: Any) -> Any:
        model, optimizer = make(**options)
        return model, optimizer, weakref.ref(optimizer._hvdlite_driver.lease.reducer)

    for model, optimizer, reducer in live((TWO, first)):
        gc.collect()
        assert reducer() is None
        assert not model[0].weight._post_accumulate_grad_hooks
        assert optimizer._hvdlite_driver.lease.overlap is None
    assert not [thread for thread in threading.enumerate() if thread.name == "hvdlite-overlap" and thread.is_alive()]


class TestOnAGpu:
    @pytest.fixture(autouse=True)
    def several_buckets(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(
            hvdlite.gradients.device.make, "plan_buckets", lambda *args: plan_buckets(*args[:2], 256, 64)
        )
        monkeypatch.setattr(hvdlite_torch.sync.device, "SPARE_ONE_RANK", False)

    @pytest.mark.parametrize("options", [{}, {"overlap": False}, {"shard": True}], ids=["whole", "late", "sharded"])
    def test_goes_on_as_in_one_process(self, options: dict[str, Any]) -> None:
        for model, _ in live((TWO, functools.partial(make, **options)), (TWO, go_on), ([1, 0], go_on), on_gpu=True):
            assert distance(flat(model), alone(9)) <= 1e-5

    def test_fewer_ranks(self) -> None:
        for model, _ in live((TWO, make), ([1], go_on), on_gpu=True):
            assert distance(flat(model), alone(6)) <= 1e-5

    @pytest.mark.parametrize("options", [{}, {"shard": True}], ids=["whole", "sharded"])
    def test_buckets_of_the_earlier_world_are_given_back(self, options: dict[str, Any]) -> None:
        def first(_: Any) -> Any:
            model, optimizer = make(**options)
            return model, optimizer, weakref.ref(optimizer._hvdlite_driver.sync._reducer)

        for _, _, reducer in live((TWO, first), on_gpu=True):
            gc.collect()
            assert reducer() is None

    def test_gradients_that_were_sent_already(self) -> None:
        def stop_in_between(kept: Any) -> Any:
            model, optimizer = go_on(kept)
            optimizer.zero_grad()
            optimizer.set_batch_weight(24)
            F.cross_entropy(model(X[share()]), Y[share()]).backward()
            assert optimizer._hvdlite_driver.sync._reducer.launched
            return kept

        def finish(kept: Any) -> Any:
            with pytest.raises(ArgumentError, match=r"shutdown\(\) and init\(\) came between"):
                kept[1].step()
            return kept

        live((TWO, make), (TWO, stop_in_between), (TWO, finish), on_gpu=True)
        for model, _ in live((TWO, make), (TWO, stop_in_between), (TWO, go_on), on_gpu=True):
            assert distance(flat(model), alone(9)) <= 1e-5


@pytest.mark.slow
def test_processes(start: Start) -> None:
    ended = start("-np", "2", str(PROGRAMS / "torch_restart.py")).end()
    assert ended.code == 0, ended.err
    assert ended.out.count("ok") == 2


def test_an_optimizer_that_a_rank_does_not_have() -> None:
    """The rank that has one waits for the others in init(). They do something else, and all are told what who waits for."""

    def something_else(_: Any) -> None:
        hvd.allreduce(torch.ones(2), name="something else")

    with pytest.raises(HvdliteError, match=r"(?s)something else.*optimizer\.plan|optimizer\.plan.*something else"):
        live((TWO, make), ([0, None], something_else))
