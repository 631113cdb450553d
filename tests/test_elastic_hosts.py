"""Elastic jobs on several hosts: namespaces of this machine, whose network is cut and comes back."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.hosts import hosts, why_not
from tests.jobs import LIMIT, PROGRAMS, wait_for


@pytest.mark.timeout(5 * LIMIT)
def test_a_host_is_cut_off_and_comes_back(tmp_path: Path) -> None:
    """4 ranks, then 2 on the host that is left, then 4. The ranks that were cut off go on nowhere: each step counts once."""
    if reason := why_not():
        pytest.skip(reason)
    out, err, end = tmp_path / "stdout", tmp_path / "stderr", tmp_path / "end"
    environ = {
        **os.environ,
        **{"COUNTER_FOLDER": str(tmp_path), "COUNTER_UNTIL": str(end), "COUNTER_TELL": "1", "OMP_NUM_THREADS": "1"},
        "OMPI_MCA_mpi_yield_when_idle": "1",  # both hosts have the same cores
    }
    options = ["-np", "4", "-H", "node1:2,node2:2", "--min-np", "2", "--blacklist-cooldown-range", "2", "4"]
    words = [sys.executable, "-m", "hvdlite.launch", *options, str(PROGRAMS / "elastic_counter.py")]

    def ran_on(sizes: list[str]) -> bool:
        assert job.poll() is None, err.read_text()
        told = re.findall(r"step \d+ of (\d) ranks", out.read_text())
        return [size for size, before in zip(told, ["", *told], strict=False) if size != before] == sizes

    with hosts(2) as two:
        command, environ = two.command("node1", words, environ)
        with out.open("wb") as stdout, err.open("wb") as stderr:
            job = subprocess.Popen(command, env=environ, stdin=subprocess.DEVNULL, stdout=stdout, stderr=stderr)
        try:
            wait_for(lambda: ran_on(["4"]), LIMIT)
            two.cut("node2")
            wait_for(lambda: ran_on(["4", "2"]), LIMIT)
            two.join("node2")
            wait_for(lambda: ran_on(["4", "2", "4"]), LIMIT)
            end.touch()
            assert job.wait(LIMIT) == 0, err.read_text()
        finally:
            job.kill()
            job.wait()
        wait_for(lambda: not two.processes(), LIMIT)
        assert [two.shared_memory(name) for name in two.names] == [[], []]
    found = re.search(r"(\d+) steps, counted \{.*\(1\)\} times and (\d+) in all, sizes (.*), resets", out.read_text())
    assert found is not None, out.read_text()
    assert (found[1], found[3]) == (found[2], "[4, 2, 4]")
    assert "node2" in err.read_text()
