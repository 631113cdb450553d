"""Process grids: places, neighbours on one host, process sets along the axes, pictures, and wrong products."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

import hvdlite as hvd
from hvdlite.errors import ArgumentError
from hvdlite.ranks.grid import Grid
from hvdlite.testing import on_ranks

Ranks = Callable[..., list[Any]]


@hypothesis.given(
    st.dictionaries(st.sampled_from(["dp", "pp", "tp", "x", "y"]), st.integers(1, 4), min_size=1), st.data()
)
def test_each_rank_has_one_place(axes: dict[str, int], data: st.DataObject) -> None:
    size = math.prod(axes.values())
    hosts = data.draw(st.lists(st.integers(0, 3), min_size=size, max_size=size))
    grid = Grid(axes, hosts)
    assert grid.ranks.shape == tuple(axes.values())
    assert sorted(grid.ranks.flat) == list(range(size))
    for name in axes:
        lines = grid.lines(name)
        assert sorted(rank for line in lines for rank in line) == list(range(size))
        for line in lines:
            places = [grid.place_of(rank) for rank in line]
            assert [place[name] for place in places] == list(range(axes[name]))
            assert len({tuple(place[other] for other in axes if other != name) for place in places}) == 1
    assert str(grid).startswith(repr(grid))


@pytest.mark.parametrize("hosts", [[0, 0, 0, 0, 1, 1, 1, 1], [0, 1, 0, 1, 0, 1, 0, 1]])
@pytest.mark.parametrize("order", [("dp", "pp", "tp"), ("tp", "pp", "dp"), ("pp", "dp", "tp")])
def test_who_talks_most_shares_a_host(hosts: list[int], order: tuple[str, ...]) -> None:
    grid = Grid(dict.fromkeys(order, 2), hosts)
    assert [name for name in ("dp", "pp", "tp") if grid.within_hosts(name)] == ["pp", "tp"]
    first_host = [rank for rank, host in enumerate(hosts) if host == 0]
    assert grid.place_of(first_host[1]) == {"dp": 0, "pp": 0, "tp": 1}
    assert grid.place_of(first_host[2]) == {"dp": 0, "pp": 1, "tp": 0}


def test_the_picture() -> None:
    assert str(Grid({"dp": 2, "tp": 2}, [0, 1, 0, 1])).splitlines() == [
        "ProcessGrid(dp=2, tp=2): 4 ranks on 2 hosts",
        "        tp 0  tp 1",
        "  dp 0     0     2  host 0",
        "  dp 1     1     3  host 1",
        "  tp within hosts; dp between hosts",
    ]
    assert str(Grid({"dp": 1}, [0])).splitlines() == ["ProcessGrid(dp=1): 1 rank on 1 host", "  dp 0", "     0"]


@pytest.mark.parametrize(
    ("axes", "text"),
    [
        ({"dp": 3, "tp": 2}, "3 × 2 = 6 places, and the job has 4 ranks"),
        ({"dp": -1, "tp": 3}, r"\? × 3, and the job has 4 ranks"),
        ({"dp": -1, "tp": -1}, "One axis may be -1"),
        ({"dp": 0}, "dp must be a number of ranks from 1 on"),
        ({"dp": 2.0, "tp": 2}, "dp must be a number of ranks"),
        ({}, "no axis, and the job has 4 ranks"),
    ],
)
def test_wrong_axes(axes: dict[str, Any], text: str) -> None:
    with pytest.raises(ArgumentError, match=text):
        Grid(axes, [0] * 4)


def test_sets_along_the_axes(ranks: Ranks) -> None:
    def check() -> None:
        size = hvd.size()
        for axes in ({"dp": size, "tp": 1}, {"tp": 1, "dp": -1}, {"pp": size}):
            grid = hvd.ProcessGrid(**axes)
            assert {name: grid[name].size() for name in grid.axes} == grid.axes
            for name in grid.axes:
                total = hvd.allreduce(np.array([1.0]), hvd.Sum, process_set=grid[name])
                assert total[0] == grid.axes[name]
            assert grid.ranks[tuple(grid.place.values())] == hvd.rank()
        with pytest.raises(ArgumentError, match="'zz' is no axis of this grid; it has pp"):
            grid["zz"]

    ranks(check)


def test_a_grid_of_two_axes() -> None:
    def check() -> list[float]:
        grid = hvd.ProcessGrid(dp=2, tp=2)
        mine = np.array([float(hvd.rank())])
        return [float(hvd.allreduce(mine, hvd.Sum, process_set=grid[name])[0]) for name in ("dp", "tp")]

    assert on_ranks(4, check) == [[2, 1], [4, 1], [2, 5], [4, 5]]
