"""Ranks in virtual time: real code gives the times of the formulas, and right results."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest

from benchmarks import many_ranks
from benchmarks.virtual_ranks import Cluster, Costs, Deadlock, VirtualTransport, without_values
from hvdlite.algorithms import ALGORITHMS
from hvdlite.algorithms.cost import predict
from hvdlite.algorithms.fold import Core
from hvdlite.comm.point_to_point import PointToPointCollectives
from hvdlite.operations.negotiation.controller import FANOUT
from hvdlite.protocols import ReduceOp, numpy_combine
from hvdlite.tools.advise.link import NetworkLink

LINK = NetworkLink(1e-3, 1e-6)
REDUCTION = 3e-7
COSTS = Costs(announce=1e-6, step=2e-6, look=3e-6, take=5e-6, post=7e-6)
FREE = Costs()


@pytest.mark.parametrize("size", [1, 2, 3, 4, 8, 13, 16])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_sums_are_right_and_take_the_time_of_the_formula(algorithm: str, size: int) -> None:
    length = math.lcm(size, Core(size).size)

    def add(transport: VirtualTransport) -> np.ndarray:
        data = np.arange(length, dtype=np.float32) * (1 + transport.rank)
        ALGORITHMS[algorithm](transport, data, transport.timed(numpy_combine(ReduceOp.SUM), REDUCTION))
        return data

    seconds, sums = Cluster(size, 1, LINK, LINK).run(add)
    expected = predict(algorithm, size, 4 * length, LINK.latency, LINK.seconds_per_byte, REDUCTION)
    if algorithm == "parameter_server" or (size != Core(size).size and algorithm != "ring"):
        # A message that nobody waits for yet has entered the host already: at the latest it is there as in the formula.
        assert 0.5 * expected <= seconds <= expected * (1 + 1e-12)
    else:
        assert seconds == pytest.approx(expected, rel=1e-12)
    for data in sums:
        assert np.array_equal(data, np.arange(length) * (size * (size + 1) // 2))


@pytest.mark.parametrize("levels", [0, 1, 2, 3])
def test_an_agreement_in_a_full_tree_takes_the_time_of_the_formula(levels: int) -> None:
    ranks = (FANOUT ** (levels + 1) - 1) // (FANOUT - 1)
    assert many_ranks.depth(ranks) == levels
    link = NetworkLink(1e-4, 0.0)
    costs = COSTS
    seconds = many_ranks.agreement(Cluster(ranks, 1, link, link, costs))
    each = 2 * link.latency + 3 * costs.step + 2 * costs.look + (FANOUT + 1) * (costs.take + costs.post)
    assert seconds == pytest.approx(costs.announce + costs.step + levels * each, rel=1e-9)
    assert many_ranks.agreement_on_paper(ranks, 1, 1e-4, 1e-4, costs) == pytest.approx(seconds, rel=1e-9)


@pytest.mark.parametrize("count", [2, 3, 12, 64, 100])
def test_other_trees_take_no_longer_than_on_paper(count: int) -> None:
    link = NetworkLink(1e-4, 0.0)
    simulated = many_ranks.agreement(Cluster(count, 1, link, link, COSTS))
    paper = many_ranks.agreement_on_paper(count, 1, 1e-4, 1e-4, COSTS)
    assert 0.5 * paper < simulated <= paper * (1 + 1e-9)
    hosts = Cluster(-(-count // 4), 4, link, NetworkLink(0.0, 0.0), COSTS)
    assert many_ranks.agreement(hosts) < simulated + 1e-4


def test_messages_of_a_host_leave_one_after_the_other() -> None:
    def send(transport: VirtualTransport) -> float:
        data = without_values(1000)
        if transport.rank < 2:
            transport.send(data, transport.rank + 2)
        else:
            transport.recv(data, transport.rank - 2)
        return transport.cluster.clocks[transport.rank]

    _, times = Cluster(2, 2, LINK, LINK).run(send)
    each = 4000 * LINK.seconds_per_byte
    assert times == pytest.approx([each, 2 * each, LINK.latency + each, LINK.latency + 2 * each])
    _, alone = Cluster(4, 1, LINK, LINK).run(send)
    assert alone == pytest.approx([each, each, LINK.latency + each, LINK.latency + each])


def test_the_exchange_of_a_host_is_memory_and_two_meetings() -> None:
    costs = Costs(copy=1e-9, meeting=1e-5)
    seconds = many_ranks.exchange(Cluster(1, 4, LINK, LINK, costs, values=False), 1000, REDUCTION)
    assert seconds == pytest.approx(4000e-9 * (1 + 2 * 3 / 4) + 2e-5)


@pytest.mark.parametrize(("hosts", "per_host"), [(2, 1), (8, 1), (4, 2), (8, 4)])
def test_an_exchange_between_hosts_is_between_the_wire_and_the_paper(hosts: int, per_host: int) -> None:
    elements = 2**20
    link, costs = NetworkLink(1e-5, 1e-9), Costs(copy=1e-11, meeting=1e-6)
    seconds = many_ranks.exchange(
        Cluster(hosts, per_host, link, NetworkLink(0.0, 0.0), costs, values=False), elements, 1e-10
    )
    paper = many_ranks.exchange_on_paper(hosts, per_host, elements, link, 1e-10, costs)
    wire = 2 * (hosts - 1) / hosts * 4 * elements * link.seconds_per_byte
    assert wire < seconds < paper * 1.02
    if per_host == 1:
        assert seconds == pytest.approx(paper, rel=1e-3)  # the header's last bytes


def test_more_ranks_take_longer() -> None:
    link = NetworkLink(1e-4, 1e-9)
    times = [many_ranks.agreement(Cluster(hosts, 8, link, NetworkLink(1e-6, 0.0), COSTS)) for hosts in (1, 8, 64)]
    assert times == sorted(times) and times[0] < times[-1]


def test_ranks_that_wait_for_each_other_are_found() -> None:
    with pytest.raises(Deadlock, match="2 ranks wait for each other"):
        Cluster(2, 1, LINK, LINK).run(lambda transport: transport.recv(without_values(1), 1 - transport.rank))


def test_an_error_of_a_rank_is_raised() -> None:
    def fail(transport: VirtualTransport) -> None:
        if transport.rank == 2:
            raise KeyError("rank 2")
        transport.recv(without_values(1), 2)

    with pytest.raises(KeyError, match="rank 2"):
        Cluster(3, 1, LINK, LINK).run(fail)


def test_tags_are_not_simulated() -> None:
    with pytest.raises(NotImplementedError, match="irecv"):
        Cluster(1, 1, LINK, LINK).run(lambda transport: transport.irecv(without_values(1)))


def test_subgroups_do_not_mix() -> None:
    def add(transport: VirtualTransport) -> float:
        half = transport.subgroup([transport.rank % 2, transport.rank % 2 + 2])
        data = np.array([float(transport.rank)])
        PointToPointCollectives(half).allreduce(data, ReduceOp.SUM)
        PointToPointCollectives(transport.duplicate()).allreduce(data, ReduceOp.MAX)
        return float(data[0])

    _, sums = Cluster(2, 2, LINK, LINK).run(add)
    assert sums == [4.0] * 4


@pytest.mark.slow
def test_the_program(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Measures on two and four ranks of this machine, and simulates."""
    path, plot = tmp_path / "f.json", tmp_path / "p.svg"
    options = ["--parameters", "1e5", "--ranks", "2", "8", "16", "--per-host", "4", "--links", "1gbit,1ms"]
    many_ranks.main([*options, "--json", str(path), "--plot", str(plot)])
    text = capsys.readouterr().out
    assert "0.1 million parameters, 4 ranks on a host" in text and "1gbit,1ms, 16 ranks on 4 hosts" in text
    found = json.loads(path.read_text())
    assert [(each["ranks"], each["hosts"]) for each in found["figures"]] == [(2, 1), (8, 2), (16, 4)]
    assert all(each["measured"] > 0 and each["simulated"] > 0 for each in found["checked"])
    assert {(each["ranks"], each["what"]) for each in found["checked"]} >= {
        (2, "agreement"),
        (4, "sum of 1 MiB"),
    }
    assert all(each["agreement"] > 0 and each["exchange"] > 0 for each in found["figures"])
    assert plot.read_text().startswith("<?xml")
    many_ranks.main([*options, "--costs", str(path)])
    again = capsys.readouterr().out
    assert again == text  # virtual time is the same each time


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--ranks", "12"], "12 ranks cannot be dealt out to hosts with 8 each"),
        (["--ranks", "0"], "each at least 1"),
        (["--links", "fast"], "a link of 'fast': expected a bandwidth"),
        (["--costs", "nowhere.json"], "nowhere.json: there is no such file"),
    ],
)
def test_wrong_options(options: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        many_ranks.main(options)
    assert message in capsys.readouterr().err
