"""A job in which the last ranks only serve parameters (``hvdliterun --servers N``), with ranks as threads."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any, BinaryIO

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import hvdlite_torch as hvd
from hvdlite import api
from hvdlite.async_sgd.training.failures import check_path
from hvdlite.config import Config
from hvdlite.errors import LaunchError
from hvdlite.launch.cli import job_spec
from hvdlite.launch.parser import make_parser
from hvdlite.launcher_link.whole_file import write_whole
from hvdlite.testing import on_ranks
from hvdlite_torch.async_sgd.part import TorchPart

ONE = Config(servers=1)


def optimizer_of(*values: float, **arguments: Any) -> tuple[torch.nn.Parameter, Any]:
    p = torch.nn.Parameter(torch.tensor(values, dtype=torch.float64))
    return p, hvd.AsyncDistributedOptimizer(torch.optim.SGD([p], lr=1.0, momentum=0.5), **arguments)


def test_the_last_ranks_serve_all_that_a_program_trains() -> None:
    def program() -> Any:
        (p, first), (q, second) = optimizer_of(1.0, 2.0, mode="sync"), optimizer_of(3.0, mode="sync")
        assert first.workers == second.workers == (0, 1)
        assert hvd.is_server() == first.is_server == (hvd.rank() == 2)
        if hvd.is_server():
            hvd.serve_parameters()
            return p.tolist(), q.tolist()
        q.grad = torch.full_like(q, hvd.rank() + 1.0)
        second.step()
        state = second.state_dict()["state"][0]["momentum_buffer"]
        second.finish()  # not in the order in which they were made
        p.grad = torch.full_like(p, hvd.rank() + 1.0)
        first.step()
        first.finish()
        return p.tolist(), q.tolist(), state.tolist()

    found = on_ranks(3, program, config=ONE)
    assert found == [([-0.5, 0.5], [1.5], [1.5]), ([-0.5, 0.5], [1.5], [1.5]), ([-0.5, 0.5], [1.5])]


@given(
    st.lists(st.lists(st.sampled_from([0, 0, 1, 4]), min_size=3, max_size=14), min_size=2, max_size=4),
    st.integers(0, 3),
    st.booleans(),
)
@settings(max_examples=15, deadline=None)
def test_the_gap_between_ranks_of_random_speeds(delays: list[list[int]], staleness: int, overlap_pull: bool) -> None:
    """Each rank makes as many steps as it has delays (in fifths of a millisecond), and then finishes."""
    made: list[float] = [0.0] * len(delays)
    """How many pushes each rank has begun. The ranks are threads, so all see it."""
    widest = []

    def program() -> None:
        me, model = hvd.rank(), torch.nn.Linear(2, 1)
        optimizer = hvd.AsyncDistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=1e-3),
            model,
            mode="ssp",
            staleness=staleness,
            overlap_pull=overlap_pull,
        )
        for step, delay in enumerate(delays[me]):
            loss = model(torch.ones(2)).sum()  # waits for its values
            gap = step - min(made)
            assert gap <= staleness, f"rank {me} is on step {step}, and the ranks have made {made} pushes"
            widest.append(gap)
            time.sleep(delay / 5000)
            optimizer.zero_grad()
            loss.backward()
            made[me] += 1
            optimizer.step()
        optimizer.wait()
        made[me] = math.inf
        optimizer.finish()

    on_ranks(len(delays), program)
    assert len(widest) == sum(map(len, delays))


@pytest.mark.parametrize("servers", [2, "sharded"])
def test_servers_other_than_the_job_has(servers: Any) -> None:
    def program() -> None:
        with pytest.raises(hvd.ArgumentError, match=rf"servers={servers!r}: this job was started with --servers 1 "):
            optimizer_of(1.0, servers=servers)
        optimizer_of(1.0, servers=1)[1].finish()

    on_ranks(3, program, config=ONE)


def test_what_each_kind_of_rank_must_not_do() -> None:
    def program() -> None:
        if hvd.is_server():
            with pytest.raises(hvd.ArgumentError, match="rank 1 has no parameters to serve. Make the same Async"):
                hvd.serve_parameters()
        with pytest.raises(hvd.ArgumentError, match=r"rank 1 has not made|rank 0 has not made"):
            api._check_served(api.world())
        p, optimizer = optimizer_of(1.0)
        api._check_served(api.world())
        if hvd.is_server():
            p.grad = torch.ones_like(p)
            with pytest.raises(
                hvd.ArgumentError, match=r"rank 1 only serves parameters \(servers=1\): call hvd.serve_p"
            ):
                optimizer.step()
        else:
            with pytest.raises(hvd.ArgumentError, match=r"serve_parameters\(\): rank 0 trains"):
                hvd.serve_parameters()
        optimizer.finish()

    on_ranks(2, program, config=ONE)


@pytest.mark.parametrize("shard", [False, True])
def test_gradients_are_not_exchanged_with_ranks_that_only_serve(shard: bool) -> None:
    def program() -> None:
        p = torch.nn.Parameter(torch.ones(3))
        p.grad = torch.ones(3)
        with pytest.raises(
            hvd.ArgumentError, match="has --servers 1 .* rank 1 only serves parameters, and cannot exch"
        ):
            hvd.DistributedOptimizer(torch.optim.SGD([p], lr=1.0), shard=shard).step()

    on_ranks(2, program, config=ONE)


def test_as_many_servers_as_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    options = make_parser().parse_args(["-np", "2", "--servers", "2", "train.py"])
    with pytest.raises(LaunchError, match=r"--servers 2: 2 ranks \(-np\) leave no rank to train"):
        job_spec(options, {})
    monkeypatch.setenv("HVDLITE_SERVERS", "-1")
    with pytest.raises(hvd.ArgumentError, match="HVDLITE_SERVERS=-1: expected how many ranks only serve, 0 or more"):
        Config.from_env()


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"on_worker_loss": "stop"}, "on_worker_loss='stop': expected 'end' or 'go on'"),
        ({"on_worker_loss": "go on"}, 'on_worker_loss="go on" needs hvdliterun'),
        ({"checkpoint": "values.pt"}, "checkpoint= needs hvdliterun"),
    ],
)
def test_what_is_to_happen_if_ranks_fail(arguments: dict[str, str], text: str) -> None:
    def program() -> None:
        with pytest.raises(hvd.ArgumentError, match=text):
            optimizer_of(1.0, **arguments)

    on_ranks(2, program, config=ONE)


@pytest.mark.parametrize(
    ("arguments", "config", "text"),
    [
        ({}, {}, r'on_worker_loss="go on" with servers="sharded": each rank holds a part'),
        ({"hosts": [0, 1]}, {"servers": 1}, "needs all ranks on one host: .* on 2 hosts"),
        ({}, {"servers": 1}, "needs Open MPI"),
    ],
)
def test_where_nobody_can_go_on(
    arguments: dict[str, Any], config: dict[str, Any], text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ranks are threads, so no launcher is asked: the error comes before."""
    if not config:
        monkeypatch.setattr("hvdlite.async_sgd.training.options.check_failures", lambda *_: (True, None))

    def program() -> None:
        with pytest.raises(hvd.ArgumentError, match=text):
            optimizer_of(1.0, on_worker_loss="go on")

    on_ranks(2, program, config=Config(control="localhost:1:secret", **config), **{"hosts": [0, 0], **arguments})


def test_a_checkpoint_is_whole_or_as_before(tmp_path: Path) -> None:
    path = tmp_path / "values"
    write_whole(path, lambda file: file.write(b"first"), draft=".values")

    def fail(file: BinaryIO) -> None:
        file.write(b"sec")
        raise OSError("the disk is full")

    with pytest.raises(OSError, match="the disk is full"):
        write_whole(path, fail, draft=".values")
    assert path.read_bytes() == b"first"
    assert [*tmp_path.iterdir()] == [path]
    with pytest.raises(hvd.ArgumentError, match="there is no folder"):
        check_path(tmp_path / "missing" / "values")
    with pytest.raises(hvd.ArgumentError, match="is a folder: name a file in it"):
        check_path(tmp_path)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_service_that_fails_tells_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: TorchPart, into: Any) -> None:
        raise MemoryError("no memory for the values")

    def program() -> None:
        p, optimizer = optimizer_of(1.0)
        hvd.barrier()
        monkeypatch.setattr(TorchPart, "read", fail)
        p.grad = torch.ones_like(p)
        with pytest.raises(hvd.CommunicationError, match="(?s)a parameter server.*no memory for the values"):
            optimizer.finish() if hvd.is_server() else optimizer.step()

    on_ranks(2, program, config=ONE)
