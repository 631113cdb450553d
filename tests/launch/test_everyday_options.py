"""What people type every day: how many ranks, what is shown, starting again; completion, ``env`` and ``compat``."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hvdlite.errors import LaunchError
from hvdlite.launch import where
from hvdlite.launch.parser import make_parser
from hvdlite.launch.where import Where, count_ranks
from hvdlite.tools import cli
from tests.support.jobs import Start


@pytest.mark.parametrize(
    ("devices", "visible", "expected"),
    [
        ([], None, 3),
        (["null", "nvidiactl", "nvidia0", "nvidia1"], None, 2),
        (["nvidia0", "nvidia1"], "1", 1),
        (["nvidia0", "nvidia1"], "", 3),
        (["nvidia0", "nvidia1"], "-1", 3),
    ],
)
def test_auto_counts_gpus_or_cores(
    monkeypatch: pytest.MonkeyPatch, devices: list[str], visible: str | None, expected: int
) -> None:
    monkeypatch.setattr(where.os, "listdir", lambda path: devices)
    monkeypatch.setattr(where.os, "sched_getaffinity", lambda pid: {0, 1, 5})
    environ = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert count_ranks(Where(num_proc=where.AUTO), environ) == expected


def test_auto_counts_slots_of_hosts() -> None:
    assert count_ranks(Where(num_proc=where.AUTO, hosts="a:2,b:3"), {}) == 5
    with pytest.raises(LaunchError, match="Here is an allocation of hosts: give -np N"):
        count_ranks(Where(num_proc=where.AUTO), {"SLURM_JOB_ID": "1", "SLURM_JOB_NODELIST": "n[1-2]"})
    assert make_parser().parse_args(["-np", "auto", "x"]).num_proc == where.AUTO


def test_one_rank_is_shown_and_all_are_kept(start: Start, tmp_path: Path) -> None:
    words = ["-np", "3", "--console-rank", "1", "--timestamps", "--output-filename", str(tmp_path)]
    program = "import os; print('I am', os.environ['OMPI_COMM_WORLD_RANK'])"
    ended = start(*words, "python", "-c", program).end()
    assert ended.code == 0, ended.err
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d \[1\] I am 1\n", ended.out)
    assert [(tmp_path / f"rank.{rank}" / "stdout").read_text() for rank in range(3)] == [
        f"I am {rank}\n" for rank in range(3)
    ]


FAILS_TWICE = """
import os, sys
from pathlib import Path
if os.environ["OMPI_COMM_WORLD_RANK"] == "1":
    starts = Path(sys.argv[1])
    starts.write_text(starts.read_text() + "x" if starts.exists() else "x")
    if len(starts.read_text()) < 3:
        raise ValueError(f"start {len(starts.read_text())}")
"""


@pytest.mark.parametrize(("restarts", "code", "starts"), [(5, 0, 3), (1, 1, 2)])
def test_a_job_is_started_again(start: Start, tmp_path: Path, restarts: int, code: int, starts: int) -> None:
    before = set(os.listdir("/dev/shm"))
    counted = tmp_path / "starts"
    job = start("-np", "2", "--max-restarts", str(restarts), "python", "-c", FAILS_TWICE, str(counted))
    ended = job.end()
    assert ended.code == code, ended.err
    assert counted.read_text() == starts * "x"
    assert ended.err.count("ValueError: start 1") == 1, "the reason of each start is printed once"
    assert f"hvdliterun: start again (1 of {restarts})." in ended.err
    if code:
        assert ended.err.rstrip().endswith("ValueError: start 2")
    left = set(os.listdir("/dev/shm")) - before
    assert not [name for name in left if name.startswith(f"hvdlite.{job.process.pid}.")]


CTRL_C_BETWEEN = """
import signal, sys
from hvdlite.launch import cli
of_next_start = cli.new_directory
def once(flavour):
    cli.new_directory = lambda flavour, before: signal.raise_signal(signal.SIGINT)
    return of_next_start(flavour)
cli.new_directory = once
sys.exit(cli.main(sys.argv[1:]))
"""


def test_ctrl_c_between_two_starts(tmp_path: Path) -> None:
    """The job has ended, and the next one has not begun."""
    counted = tmp_path / "starts"
    words = ["-np", "2", "--max-restarts", "5", "python", "-c", FAILS_TWICE, str(counted)]
    done = subprocess.run([sys.executable, "-c", CTRL_C_BETWEEN, *words], capture_output=True, text=True, timeout=120)
    assert done.returncode == 128 + 2, done.stderr
    assert counted.read_text() == "x"
    assert done.stderr.count("ValueError: start 1") == 1, "why it was to start again"
    assert done.stderr.endswith("hvdliterun: ended by SIGINT, while no rank was running.\n")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["-np", "2", "--console-rank", "2"], "the job has ranks 0 to 1 (-np), so nothing would be shown"),
        (["-np", "2", "--min-np", "1", "--max-restarts", "2"], "elastic ones have --reset-limit N"),
        (["-np", "2", "--max-restarts", "-1"], "'-1' is not a whole number from 0 on. See hvdliterun --help"),
        (["-np", "2", "--max-restart", "1"], "no option --max-restart; did you mean --max-restarts?"),
        (["--nproc-per-node=2"], "no option --nproc-per-node; did you mean -np? See"),
        (["--nproc_per_node", "2"], "no option --nproc_per_node; did you mean -np? See"),
        (["--n", "2"], "no option --n; did you mean -np? See"),
        (["--nnodes=2"], "no option --nnodes; did you mean -H host1:4,host2:4? See"),
        (["-np", "2", "--timeline", "x"], "no option --timeline; did you mean --timeline-filename? See"),
        (["-np", "many"], """'many' is not a whole number from 1 on, nor "auto"."""),
    ],
)
def test_bad_input(start: Start, words: list[str], said: str) -> None:
    ended = start(*words, "true").end()
    assert ended.code == 2
    assert said in ended.err and ended.err.count("\n") == 1, "one line, without a list of all options"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["doctor", "--plots", "x.png"],
            "hvdlite doctor: there is no option --plots; did you mean --plot? See hvdlite doctor",
        ),
        (["env", "--plots"], "hvdlite env: there is no option --plots. See hvdlite env --help"),
        (["timeline", "summarize"], "hvdlite timeline summarize: the following arguments are required: PATH. See"),
        (["nope"], "hvdlite: argument command: invalid choice: 'nope' (choose from"),
    ],
)
def test_bad_input_of_commands(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        cli.main(words)
    assert left.value.code == 2
    printed = capsys.readouterr().err
    assert printed.startswith(said) and printed.count("\n") == 1


@pytest.mark.parametrize("parser", [make_parser(), cli._parser()], ids=["hvdliterun", "hvdlite"])
def test_completion(parser: Any, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("shtab", reason="shtab is not installed, which writes completions")
    with pytest.raises(SystemExit) as left:
        parser.parse_args(["--print-completion", "bash"])
    script = capsys.readouterr().out
    assert left.value.code == 0
    assert ("--console-rank" if parser.prog == "hvdliterun" else "timeline") in script
    subprocess.run(["bash", "-n"], input=script, text=True, check=True, timeout=60)


def test_completion_for_a_reader_that_leaves() -> None:
    """As with ``hvdlite --print-completion zsh | head``, when head was faster."""
    pytest.importorskip("shtab", reason="shtab is not installed, which writes completions")
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "hvdlite", "--print-completion", "zsh"]
    done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    os.close(writing)
    assert (done.returncode, done.stderr) == (0, "")


def test_env_shows_settings_and_no_secret(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("HOROVOD_AUTOTUNE", "1")
    monkeypatch.setenv("HVDLITE_CONTROL", "host:1:confidential")
    assert cli.main(["env"]) == 0
    out = capsys.readouterr().out
    assert "HVDLITE_AUTOTUNE: True (from HOROVOD_AUTOTUNE)" in out
    assert "HVDLITE_BUCKET_BYTES: 26214400\n" in out and "HVDLITE_CONTROL: (set)" in out
    assert "PyTorch" in out and "confidential" not in out


def test_compat_is_a_command(tmp_path: Path) -> None:
    program = tmp_path / "train.py"
    program.write_text("import horovod\nprint(horovod.__version__)\n")
    done = subprocess.run(
        [sys.executable, "-m", "hvdlite", "compat", str(program)], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0 and re.fullmatch(r"[\d.]+\n", done.stdout), done.stderr
