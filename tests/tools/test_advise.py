"""``hvdlite advise``: the cost of strategies against closed forms, simulated networks and real ranks; and the command."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import hvdlite_torch as hvd
from hvdlite.algorithms.slices import split
from hvdlite.api import world
from hvdlite.comm.local import LocalTransport, Network
from hvdlite.comm.point_to_point import PointToPointCollectives
from hvdlite.config import Config
from hvdlite.errors import ArgumentError, HvdliteError
from hvdlite.gradients.aggregator import Aggregator, FlatBucket, Weights
from hvdlite.gradients.lossy.powersgd import PowerSGD
from hvdlite.gradients.lossy.topk import TopK
from hvdlite.operations import Agreement
from hvdlite.protocols import ReduceOp, TensorInfo, numpy_combine
from hvdlite.testing import on_ranks
from hvdlite.tools.advise import CostModel, NetworkLink, parse_link, parse_strategy, report
from hvdlite.tools.advise.command import read
from hvdlite.tools.advise.exchanges import KINDS, EqualRanks, ExchangeCost
from hvdlite.tools.advise.plot import crossings
from hvdlite.tools.advise.profile import MeasuredStep, Profile
from hvdlite.tools.advise.recorder import MeasuringRequest, Recorder
from hvdlite.tools.advise.strategies import USUAL
from hvdlite.tools.advise.trial import try_aggregator, try_halves, try_sharded, try_whole
from hvdlite.tools.cli import main
from tests.support.jobs import PROGRAMS
from tests.support.simulated import run_counting

MATRIX, VECTOR = TensorInfo("float32", (96, 64)), TensorInfo("float32", (64,))
LAYOUT = (MATRIX, VECTOR, MATRIX)
N = 4 * (2 * 96 * 64 + 64)
"""The bytes of `LAYOUT`. Its sizes are multiples of 16 elements, so there are no gaps."""
COPY, UPDATE = 1e-10, 2e-3


def profile(computes: tuple[float, ...], **changes: Any) -> Profile:
    """What might have been measured of ranks on one host that compute for so long, in each of three steps."""
    ranks = len(computes)
    compressed = {
        "gradients": try_whole(LAYOUT, ranks),
        "sharded": try_sharded(LAYOUT, ranks),
        "fp16": try_halves(LAYOUT, ranks),
        "powersgd:4": try_aggregator("powersgd", 4, LAYOUT, ranks),
        "powersgd:8": try_aggregator("powersgd", 8, LAYOUT, ranks),
        "topk:0.01": try_aggregator("topk", 0.01, LAYOUT, ranks),
    }
    found = Profile(
        hosts=(0,) * ranks,
        strategy="whole gradients",
        layout=LAYOUT,
        steps=tuple((MeasuredStep(each, 0.01, UPDATE),) * 3 for each in computes),
        ready=(0.0, 0.004, 0.008),
        compressed={name: replace(each, seconds=0.0) for name, each in compressed.items()},
        copy=COPY,
        meeting=0.0,
        link=None,
        spare_core=True,
        whole_update=True,
    )
    return replace(found, **changes)


FOUR = profile((0.01,) * 4)
links = st.builds(NetworkLink, st.floats(1e-6, 1e-2), st.floats(1e-11, 1e-6))


def cost(name: str, link: NetworkLink, of: Profile = FOUR, per_host: int | None = None) -> tuple[float, float]:
    """The seconds and bytes of a strategy."""
    found = CostModel(of, link, per_host).estimate(parse_strategy(name))
    return found.seconds, found.nbytes


# What operations cost


@pytest.mark.parametrize("kind", KINDS)
@given(st.integers(1, 9), st.integers(1, 6), st.floats(1e-6, 1e-2), st.floats(1e-9, 1e-6), st.floats(0, 1e-7))
@settings(max_examples=25)
def test_an_exchange_takes_as_long_as_on_a_simulated_network(
    kind: str, size: int, parts: int, latency: float, per_byte: float, reduction: float
) -> None:
    count = size * size * parts * 8  # any number of slices is equal, also those of the largest power of two
    counts = split(count, size)

    def on_rank(transport: LocalTransport) -> None:
        ranks = PointToPointCollectives(transport, lambda op: transport.timed(numpy_combine(op)))
        data, out = np.zeros(count, np.float32), np.zeros(count, np.float32)
        if kind == "allreduce":
            ranks.allreduce(data, ReduceOp.SUM)
        elif kind == "reduce_scatter":
            ranks.reduce_scatter(data, out[: counts[0]], counts, ReduceOp.SUM)
        elif kind == "allgather":
            ranks.allgather(data[: counts[0]], out, counts)
        else:
            ranks.alltoall(data, counts, out, counts)

    network = Network(latency, 1 / per_byte, 1 / reduction if reduction else math.inf)
    seconds, sent = run_counting(size, network, on_rank)
    exchange = ExchangeCost(kind, 4 * count)
    assert exchange.seconds(size, NetworkLink(latency, per_byte, reduction)) == pytest.approx(seconds, rel=1e-9)
    assert exchange.sent(size) == pytest.approx(sent / size, rel=1e-12)


@pytest.mark.parametrize("make", [lambda: PowerSGD(2), lambda: TopK(0.05)], ids=["powersgd", "topk"])
def test_one_rank_computes_what_equal_ranks_would(make: Callable[[], Aggregator]) -> None:
    def combined(ranks: Any) -> np.ndarray[Any, Any]:
        made = make()
        for step in range(3):
            flat = np.random.default_rng(step).standard_normal(96 * 64 + 2048)
            tensors = {0: flat[: 96 * 64].reshape(96, 64), 1: flat[96 * 64 :]}
            made.aggregate(FlatBucket([flat], tensors), Weights(1.0, 3.0), ranks)
        return flat

    def on_rank() -> np.ndarray[Any, Any]:
        return combined(world().groups.everybody.engine.run(Agreement("test", [], lambda found: found.duplicate())))

    alone = combined(EqualRanks(3))
    for found in on_ranks(3, on_rank):
        np.testing.assert_allclose(alone, found, rtol=0, atol=1e-12)


@given(st.lists(st.tuples(st.integers(40, 90), st.integers(40, 90)), min_size=1, max_size=3), st.integers(1, 4))
@settings(max_examples=20)
def test_powersgd_and_topk_send_what_their_papers_say(shapes: list[tuple[int, int]], rank: int) -> None:
    infos = [*(TensorInfo("float32", shape) for shape in shapes), TensorInfo("float32", (50,))]
    first, second = try_aggregator("powersgd", rank, infos, 3).exchanges
    assert first == ExchangeCost(
        "allreduce", 4 * (rank * sum(n for n, _ in shapes) + 50 + 2)
    )  # with a checksum of the state
    assert second == ExchangeCost("allreduce", 4 * rank * sum(m for _, m in shapes))
    small, largest = try_aggregator("topk", 0.1, infos, 3).exchanges
    assert small == ExchangeCost("allreduce", 4 * 50)
    assert largest == ExchangeCost(
        "allgather", 3 * (4 + 4) * sum(round(0.1 * n * m) for n, m in shapes)
    )  # place and value


# What strategies cost


@given(links)
def test_closed_forms_on_four_hosts_of_one_rank(link: NetworkLink) -> None:
    alpha, beta = link.latency, link.seconds_per_byte
    header = 2 * (alpha + 8 * (3 + 16) * (beta + COPY))  # a butterfly
    ring = 4 * alpha + 1.5 * N * beta + 0.75 * N * COPY  # Rabenseifner's algorithm
    base = 0.01 + UPDATE
    small = 2 * 8 * (3 + 16)
    expected = {
        "gradients": (base + N * COPY + header + ring, 1.5 * N + small),
        "sharded": (base - 0.75 * UPDATE + 2 * N * COPY + header + ring + 2 * alpha, 1.5 * N + small),
        "fp16": (base + header + 6 * alpha + 0.75 * N * beta, 0.75 * N + small),
        "localsgd:8": (base + (4 * N * COPY + ring + 10 * alpha + 2 * 40 * (beta + COPY)) / 8, (1.5 * N + 80) / 8),
    }
    for name, (seconds, nbytes) in expected.items():
        found = cost(name, link)
        assert found == (pytest.approx(seconds, rel=1e-9), pytest.approx(nbytes, rel=1e-9)), name


@given(links, st.integers(1, 3))
def test_closed_forms_of_a_parameter_server(link: NetworkLink, servers: int) -> None:
    matrices = (TensorInfo("float32", (64, 64)),) * 12  # they are dealt out equally, to 1, 2, 3 and 4 servers
    n, beta = 12 * 4 * 64 * 64, link.seconds_per_byte
    of = replace(FOUR, layout=matrices)
    seconds, nbytes = cost("sync", link, of)
    assert nbytes == pytest.approx(1.5 * n)
    assert seconds == pytest.approx(0.01 + UPDATE / 4 + 2 * (link.latency + 1.5 * n * beta) + 4.5 * n * COPY)
    seconds, nbytes = cost(f"sync:{servers}", link, of)
    workers = 4 - servers
    assert nbytes == pytest.approx(2 * n * workers / 4)
    busiest = max(n, workers * n / servers)
    assert seconds == pytest.approx(0.01 + UPDATE / servers + 2 * (link.latency + busiest * beta) + 4 * n * COPY)


def test_a_server_has_the_link_that_was_measured_and_not_that_of_the_exchanges() -> None:
    """The exchanges of the program take longer than the link explains. Messages to a server need not."""
    link = NetworkLink(1e-4, 1e-7)
    of = profile((0.01,) * 2, hosts=(0, 1), link=link, steps=((MeasuredStep(0.01, 0.05, UPDATE),) * 3,) * 2)
    model = CostModel(of)
    assert model.estimate(parse_strategy("gradients")).seconds == pytest.approx(0.01 + 0.05 + UPDATE)
    expected = 0.01 + UPDATE + 2 * (link.latency + N * link.seconds_per_byte) + 4 * N * COPY
    assert model.estimate(parse_strategy("sync:1")).seconds == pytest.approx(expected)


@given(links, st.floats(1.1, 10))
def test_what_must_hold_on_every_link(link: NetworkLink, factor: float) -> None:
    slower = replace(link, seconds_per_byte=factor * link.seconds_per_byte)
    for strategy in map(str, USUAL):
        (seconds, nbytes), (more, same) = cost(strategy, link), cost(strategy, slower)
        assert seconds <= more
        assert strategy == "overlapped" or same == nbytes  # its buckets depend on the link
    assert cost("overlapped", link)[0] <= cost("gradients", link)[0] + 2 * N * COPY + 9 * 2 * link.latency
    assert cost("gradients", link, per_host=2)[1] == pytest.approx(
        (N + 8 * 19) / 2
    )  # two hosts share the bytes of each


def test_a_slow_rank_stops_those_who_wait_for_it() -> None:
    link, of = NetworkLink(0.0, 0.0 + 1e-12), profile((0.01, 0.01, 0.01, 0.05), copy=0.0)
    model = CostModel(of, link)
    rates = {name: model.estimate(parse_strategy(name)).rate for name in ("gradients", "sync", "async")}
    assert rates["gradients"] == pytest.approx(4 / (0.05 + UPDATE), rel=1e-3)
    assert rates["async"] == pytest.approx(3 / (0.01 + UPDATE) + 1 / (0.05 + UPDATE), rel=1e-3)
    assert rates["sync"] < rates["async"]


@pytest.mark.parametrize("exchange", [0.05, 1e-9])
def test_the_programs_own_exchange_says_how_fast_a_measured_link_is(exchange: float) -> None:
    link = NetworkLink(1e-5, 1e-8)
    of = profile((0.01,) * 4, hosts=(0, 1, 2, 3), link=link)
    of = replace(
        of, steps=tuple((MeasuredStep(0.01, exchange + 0.01 * rank, UPDATE),) * 3 for rank in range(4))
    )  # with waits
    found = CostModel(of).estimate(parse_strategy("gradients")).seconds
    assert found == pytest.approx(max(0.01 + exchange + UPDATE, cost("gradients", link)[0]))


def test_memory_counts_on_one_host() -> None:
    model = CostModel(FOUR)
    found = {name: model.estimate(parse_strategy(name)) for name in ("gradients", "sharded", "localsgd:8")}
    assert {each.nbytes for each in found.values()} == {0.0}
    assert found["gradients"].seconds == pytest.approx(0.01 + UPDATE + 3 * 0.75 * N * COPY)
    assert found["sharded"].seconds == pytest.approx(0.01 + UPDATE / 4 + 2 * 0.75 * N * COPY)


def test_the_recommendation_changes_least_among_the_fast() -> None:
    def chosen(link: NetworkLink) -> str:
        model = CostModel(FOUR, link)
        return report.choose([model.estimate(each) for each in USUAL]).strategy.kind

    assert chosen(parse_link("100gbit,1us")) in ("gradients", "sharded", "overlapped", "sync")
    assert chosen(parse_link("1mbit,1us")) not in ("gradients", "sharded", "overlapped", "sync", "fp16")


def test_the_fastest_changes_where_the_crossings_are() -> None:
    model = CostModel(FOUR, parse_link("1gbit,10us"))
    found = crossings(model, USUAL)
    assert found
    for bits, before, after in found:
        at = model.with_link(NetworkLink(1e-5, 8 / bits))
        assert at.estimate(before).rate == pytest.approx(at.estimate(after).rate, rel=1e-6)


# Bad input


@pytest.mark.parametrize(
    "text", ["", "fast", "100", "0mbit", "100mbit,", "100mbit,fast", "-1gbit", "1e3mbit", "100mbit 5ms"]
)
def test_wrong_links(text: str) -> None:
    with pytest.raises(ArgumentError, match='"100mbit"'):
        parse_link(text)


def test_links() -> None:
    assert parse_link("100mbit").bits_per_second == pytest.approx(100e6)
    for text, latency, rate in (("10 GBit, 20us", 2e-5, 10e9), ("12.5MB/s,1ms", 1e-3, 100e6)):
        found = parse_link(text)
        assert (found.latency, found.bits_per_second) == (pytest.approx(latency), pytest.approx(rate))


@pytest.mark.parametrize(
    "text", ["", "fast", "fp16:2", "powersgd:0", "powersgd:x", "localsgd:1.5", "topk:0", "topk:2", "async:-1"]
)
def test_wrong_strategies(text: str) -> None:
    with pytest.raises(ArgumentError, match=f"strategy '{text}'"):
        parse_strategy(text)


def test_names_of_strategies_are_read_as_they_are_written() -> None:
    for strategy in USUAL:
        assert parse_strategy(str(strategy)) == strategy
        assert "{" not in strategy.how


def test_models_that_cannot_be() -> None:
    with pytest.raises(ArgumentError, match="one rank has nobody"):
        CostModel(profile((0.01,)))
    with pytest.raises(ArgumentError, match="cannot be dealt out"):
        CostModel(FOUR, parse_link("1gbit"), per_host=3)
    with pytest.raises(ArgumentError, match="4 hosts: say what is between them"):
        CostModel(FOUR, per_host=1)
    with pytest.raises(ArgumentError, match="none is left to train"):
        CostModel(FOUR, parse_link("1gbit")).estimate(parse_strategy("async:4"))
    with pytest.raises(ArgumentError, match="powersgd:5 was not tried out"):
        CostModel(FOUR, parse_link("1gbit")).estimate(parse_strategy("powersgd:5"))


def test_of_one_kind_what_keeps_most_is_recommended() -> None:
    model = CostModel(FOUR, parse_link("1gbit"))
    like = model.estimate(parse_strategy("powersgd:4"))
    alike = [
        dataclasses.replace(like, strategy=parse_strategy(name)) for name in ("powersgd:4", "powersgd:8", "powersgd:2")
    ]
    assert str(report.choose(alike).strategy) == "powersgd:8"


def test_a_program_that_waits_more_than_predicted() -> None:
    """The report says what its table leaves out of the program's own step."""
    model = CostModel(FOUR)
    estimates = [model.estimate(parse_strategy(name)) for name in ("gradients", "sharded")]
    said = report.text(model, estimates)
    assert "The program as it is (whole gradients) takes 22.0 ms" in said
    assert "Of the same, gradients, the table says 12.0 ms: it leaves out the 10.0 ms in which ranks waited" in said
    quiet = CostModel(profile((0.01,) * 4, steps=((MeasuredStep(0.01, 0.001, UPDATE),) * 3,) * 4))
    assert "leaves out" not in report.text(quiet, estimates)
    assert "leaves out" not in report.text(
        CostModel(FOUR, NetworkLink(1e-3, 1e-8)), estimates
    )  # another link than the program had


# The measurement


class _Nobody(NamedTuple):
    rank: int = 1


def test_the_time_of_a_step_is_divided() -> None:
    now = [0.0]
    request = MeasuringRequest("unused", warm_up=1, steps=3, strategies=())
    recorder = Recorder(_Nobody(), request, LAYOUT, "", True, lambda: now[0])  # type: ignore[arg-type]

    def spend(seconds: float, then: Callable[..., None], *args: Any) -> None:
        now[0] += seconds
        then(*args)

    for _ in range(3):
        spend(0.5, recorder.ready, 1)
        spend(0.25, recorder.exchange_begins)
        spend(2.0, recorder.exchange_ends)
        spend(0.125, recorder.update_begins)  # clipping, say
        spend(4.0, recorder.update_ends)
        recorder.exchange_begins()
        spend(8.0, recorder.exchange_ends)
        recorder.step_ends()
    assert recorder._steps == [MeasuredStep(0.875, 10.0, 4.0)] * 2  # without the first one, which warms up
    assert recorder._mean_ready() == [0.0, 0.25, 0.0]


def _train(options: dict[str, Any]) -> None:
    model = torch.nn.Linear(64, 100)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model, **options)
    for number in range(6):
        optimizer.zero_grad()
        model(torch.ones(2, 64)).sum().backward()
        if number < 5:
            optimizer.step()
    with pytest.raises(SystemExit) as end:  # after 2 steps to warm up, and 4 that are measured
        optimizer.step()
    assert end.value.code == 0


@pytest.mark.parametrize(
    "options", [{}, {"shard": True}, {"local_steps": hvd.LocalSGD(2)}], ids=["whole", "shard", "local"]
)
def test_a_training_is_measured_and_ended(tmp_path: Path, options: dict[str, Any]) -> None:
    request = MeasuringRequest(str(tmp_path / "profile.json"), 2, 4, ("powersgd:4", "fp16"))
    config = Config(advise=request.pack(), overlap="off", advice=False)
    on_ranks(4, _train, options, hosts=[0, 0, 1, 1], config=config)
    found = Profile.read(Path(request.path))
    assert found.hosts == (0, 0, 1, 1)
    assert found.layout == (TensorInfo("float32", (100, 64)), TensorInfo("float32", (100,)))
    assert [len(own) for own in found.steps] == [4] * 4
    assert all(step.compute > 0 and step.exchange > 0 and step.update > 0 for own in found.steps for step in own)
    assert found.compressed.keys() == {"gradients", "sharded", "fp16", "powersgd:4"}
    assert found.compressed["gradients"].exchanges == (
        ExchangeCost("allreduce", 4 * (6400 + 112)),
    )  # 100 are padded to 112
    assert found.link is not None and min(found.link.latency, found.link.seconds_per_byte, found.copy) > 0
    assert found.whole_update is not options.get("shard", False)
    assert min(found.ready) > 0
    model = CostModel(found)
    assert (model.cluster.hosts, model.cluster.per_host) == (2, 2)
    assert all(model.estimate(each).seconds > 0 for each in map(parse_strategy, ("gradients", "powersgd:4", "async")))


def test_a_program_that_ends_too_early_says_how_far_it_came(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    request = MeasuringRequest(str(tmp_path / "profile.json"), 5, 20, ())
    at_the_end: list[Callable[[], None]] = []
    monkeypatch.setattr("hvdlite.tools.advise.recorder.atexit", SimpleNamespace(register=at_the_end.append))

    def train() -> None:
        parameter = torch.nn.Parameter(torch.ones(3))
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([parameter], lr=0.1))
        for _ in range(7):
            parameter.sum().backward()
            optimizer.step()

    on_ranks(2, train, config=Config(advise=request.pack(), advice=False))
    for call in at_the_end:
        call()
    with pytest.raises(
        HvdliteError, match=r"train.py has ended after 7 steps; 5 to warm up and 20 to measure were asked"
    ):
        read(request, "train.py")


def test_a_second_optimizer_is_refused(tmp_path: Path) -> None:
    def train() -> None:
        parameters = [torch.nn.Parameter(torch.ones(3)) for _ in range(2)]
        first = hvd.DistributedOptimizer(torch.optim.SGD(parameters[:1], lr=0.1))
        with pytest.raises(ArgumentError, match="makes another one"):
            hvd.DistributedOptimizer(torch.optim.SGD(parameters[1:], lr=0.1))
        parameters[0].sum().backward()
        first.step()  # warms up
        parameters[0].sum().backward()
        with pytest.raises(SystemExit):  # the first one is measured
            first.step()

    on_ranks(
        2, train, config=Config(advise=MeasuringRequest(str(tmp_path / "profile.json"), 1, 1, ()).pack(), advice=False)
    )


# The command


def advise(capfd: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    """The exit code of ``hvdlite advise``, and what it and the program have printed."""
    code = main(["advise", *words])
    out, err = capfd.readouterr()
    return code, out, err


@pytest.mark.slow
def test_the_command(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    words = [str(PROGRAMS / "advised.py"), "-np", "2", "--link", "100mbit", "--plot", str(tmp_path / "link.png")]
    code, out, err = advise(capfd, *words, "--json", str(tmp_path / "advice.json"), "--", "1000")
    assert code == 0, err
    assert "20 steps were measured. The program ends here." in err
    assert "trained to the end" not in out
    assert "2 ranks, 1 on each of 2 hosts, between which there is 100 Mbit/s, 0.1 ms (as given)." in out
    assert "4 parameters with 9,352 values: 36.5 KiB of gradients." in out
    assert "\nTake " in out
    said = json.loads((tmp_path / "advice.json").read_text())
    assert [each["strategy"] for each in said["estimates"]] == list(map(str, USUAL))
    assert (tmp_path / "link.png").read_bytes().startswith(b"\x89PNG")


def test_programs_that_cannot_be_measured(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    plain, fails = tmp_path / "plain.py", tmp_path / "fails.py"
    plain.write_text("print('done')")
    fails.write_text("raise ValueError('out of apples')")
    code, out, err = advise(capfd, str(plain), "-np", "2")
    assert code == 2 and "done" in out
    assert "plain.py has ended, and has not wrapped an optimizer in hvdlite_torch.DistributedOptimizer" in err
    code, _, err = advise(capfd, str(fails), "-np", "2")
    assert code == 2
    assert "ValueError: out of apples" in err and "fails.py has failed with exit code 1" in err


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["-np", "1"], "-np 1: one rank has nobody to exchange gradients with"),
        (["-np", "2", "--link", "fast"], "a link of 'fast'"),
        (["-np", "2", "--strategies", "fast"], "strategy 'fast'"),
        (["-np", "2", "--steps", "0"], "steps=0, warm_up=5: expected 1 or more"),
        (["-np", "2", "--json", "/no/such/folder/x"], "there is no folder /no/such/folder"),
    ],
)
def test_wrong_arguments(capfd: pytest.CaptureFixture[str], words: list[str], text: str) -> None:
    code, _, err = advise(capfd, str(PROGRAMS / "advised.py"), *words)
    assert code == 2 and text in err


def test_a_program_that_is_not_there(capfd: pytest.CaptureFixture[str]) -> None:
    code, _, err = advise(capfd, "/no/such/train.py", "-np", "2")
    assert code == 2 and "/no/such/train.py: there is no such file" in err
