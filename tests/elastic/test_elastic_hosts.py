"""Elastic jobs on several hosts: namespaces of this machine, which are cut off, lose power, come and go."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.hosts import Hosts, hosts, why_not
from tests.support.jobs import LIMIT, PROGRAMS, wait_for


@pytest.fixture
def two() -> Iterator[Hosts]:
    if reason := why_not():
        pytest.skip(reason)
    with hosts(2) as found:
        yield found


class Training:
    """A training that hvdliterun has started on node1. It counts how often each step was made.

    Args:
        two: The hosts.
        folder: A folder for its files.
        options: The options of hvdliterun that say on which hosts it runs.
    """

    def __init__(self, two: Hosts, folder: Path, *options: str) -> None:
        self._two, self._end = two, folder / "end"
        self._out, self._err = folder / "stdout", folder / "stderr"
        environ = {
            **os.environ,
            **{"COUNTER_FOLDER": str(folder), "COUNTER_UNTIL": str(self._end), "COUNTER_TELL": "1"},
            **{"OMP_NUM_THREADS": "1", "OMPI_MCA_mpi_yield_when_idle": "1"},  # both hosts have the same cores
        }
        cooldown = ["--blacklist-cooldown-range", "2", "4"]
        command = [sys.executable, "-m", "hvdlite.launch", *options, *cooldown, str(PROGRAMS / "elastic_counter.py")]
        words, environ = two.command("node1", command, environ)
        with self._out.open("wb") as stdout, self._err.open("wb") as stderr:
            self.job = subprocess.Popen(words, env=environ, stdin=subprocess.DEVNULL, stdout=stdout, stderr=stderr)

    def wait_for(self, *sizes: int) -> None:
        """Wait until it has made steps with these numbers of ranks, one after the other, and with no others."""
        wait_for(lambda: self._sizes() == list(sizes), LIMIT)

    def _sizes(self) -> list[int]:
        assert self.job.poll() is None, self._err.read_text()
        told = [int(size) for size in re.findall(r"step \d+ of (\d) ranks", self._out.read_text())]
        return [size for size, before in zip(told, [0, *told], strict=False) if size != before]

    def end(self, *sizes: int) -> str:
        """Let it end, and check that each step was made once. Return what hvdliterun has said."""
        self._end.touch()
        assert self.job.wait(LIMIT) == 0, self._err.read_text()
        wait_for(lambda: not self._two.processes(), LIMIT)
        assert self._two.temporary() == []
        assert [self._two.shared_memory(name) for name in self._two.names] == [[], []]
        counted = r"(\d+) steps, counted \{.*\(1\)\} times and (\d+) in all, sizes (.*), resets"
        found = re.search(counted, self._out.read_text())
        assert found is not None, self._out.read_text()
        assert (found[1], found[3]) == (found[2], str(list(sizes)))
        return self._err.read_text()


def cut_off(two: Hosts) -> None:
    two.cut("node2")


def cut_at_the_launcher(two: Hosts) -> None:
    two.cut("node1")


def power_off(two: Hosts) -> None:
    two.power_off("node2")


@pytest.mark.weekly
@pytest.mark.timeout(5 * LIMIT)
@pytest.mark.parametrize("happens", [cut_off, cut_at_the_launcher, power_off])
def test_a_host_is_lost_and_comes_back(happens: Callable[[Hosts], None], two: Hosts, tmp_path: Path) -> None:
    """4 ranks, then 2 on the launcher's host, then 4. The ranks that were cut off go on nowhere: each step counts once."""
    training = Training(two, tmp_path, "-np", "4", "-H", "node1:2,node2:2", "--min-np", "2")
    try:
        training.wait_for(4)
        happens(two)
        training.wait_for(4, 2)
        wait_for(lambda: not any("elastic_counter" in line for line in two.processes("node2")), LIMIT)
        for name in two.names:
            two.join(name)
        training.wait_for(4, 2, 4)
        assert "node2" in training.end(4, 2, 4)
    finally:
        training.job.kill()
        training.job.wait()


@pytest.mark.slow
@pytest.mark.timeout(5 * LIMIT)
def test_a_host_is_cut_off_while_its_output_is_on_the_way(two: Hosts, tmp_path: Path) -> None:
    """The host that was cut off is blamed, although MPI ends the healthy one's rank first. It has nothing of MPI's left."""
    training = Training(two, tmp_path, "-np", "2", "-H", "node2:1,node1:1", "--min-np", "1")
    try:
        training.wait_for(2)
        two.cut("node2")
        training.wait_for(2, 1)
        wait_for(lambda: not two.processes("node2"), LIMIT)
        two.join("node2")
        training.wait_for(2, 1, 2)
        said = training.end(2, 1, 2)
        assert "rank 0 on host node2 failed" in said
        assert "start again (number 1) with 1 ranks on node1:1" in said
    finally:
        training.job.kill()
        training.job.wait()


@pytest.mark.slow
@pytest.mark.timeout(5 * LIMIT)
def test_a_script_names_a_host_and_another_one_later(two: Hosts, tmp_path: Path) -> None:
    """2 ranks on the one, 4 on both, 2 on the other: the state goes from the first host to the second."""
    listed = tmp_path / "hosts"
    listed.write_text("node1:2\n")
    training = Training(two, tmp_path, "--min-np", "2", "--host-discovery-script", f"cat {listed}")
    try:
        training.wait_for(2)
        listed.write_text("node1:2\nnode2:2\n")
        training.wait_for(2, 4)
        listed.write_text("node2:2\n")
        training.wait_for(2, 4, 2)
        assert "node2" in training.end(2, 4, 2)
    finally:
        training.job.kill()
        training.job.wait()
