"""Lightning, Accelerate and transformers over hvdlite. Each is tested where it is installed.

A loop with Accelerate is on docs/integrations.md, and tests/docs/test_pages.py compares it with one process.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from hvdlite.checks import how_to_install
from hvdlite.errors import NotYetError
from hvdlite.testing import on_ranks
from tests.support.jobs import PROGRAMS, PROMPT, ROOT, Start, seconds_since_failure
from tests.support.selection import needs

LIMIT = 120.0
"""Seconds for one job. Each imports much more than others do, which takes a busy machine long."""


def python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=LIMIT, check=True)
    return done.stdout


@pytest.mark.parametrize("package", ["lightning", "accelerate"])
@pytest.mark.slow
def test_a_missing_package_names_the_command_that_installs_it(package: str) -> None:
    out = python(f"""
import importlib.util
real = importlib.util.find_spec
importlib.util.find_spec = lambda name, *more: None if name == {package!r} else real(name, *more)
import hvdlite_torch
try:
    import hvdlite_torch.{package}
except ModuleNotFoundError as error:
    print(error)
""")
    assert (
        f"hvdlite_torch.{package} needs {package}, which is not installed here: {how_to_install('frameworks', package)}"
        in out
    )


def test_the_adapter_imports_none_of_them() -> None:
    names = ["lightning", "accelerate", "transformers"]
    assert python(f"import sys, hvdlite_torch; print([name for name in {names} if name in sys.modules])") == "[]\n"


@needs("lightning")
@pytest.mark.filterwarnings("ignore")  # Lightning's own, at import
@pytest.mark.slow
def test_lightning_learns_who_is_where() -> None:
    from hvdlite_torch import lightning

    def numbers() -> tuple[int, ...]:
        lightning.require_equal_hosts()
        here = lightning.JobEnvironment()
        here.set_world_size(77)
        here.set_global_rank(77)
        return here.world_size(), here.global_rank(), here.local_rank(), here.node_rank()

    dealt_out_in_turn = [(4, 0, 0, 0), (4, 1, 0, 1), (4, 2, 1, 0), (4, 3, 1, 1)]
    assert on_ranks(4, numbers, hosts=[0, 1, 0, 1]) == dealt_out_in_turn
    with pytest.raises(NotYetError, match=r"the same number of ranks on each host.* has \d of 3 ranks"):
        on_ranks(3, numbers, hosts=[0, 0, 1])


@pytest.mark.slow
@needs("lightning")
@pytest.mark.timeout(LIMIT + 20)
def test_lightning_refuses_trains_and_fails(start: Start) -> None:
    ended = start("-np", "2", "python", str(PROGRAMS / "lightning_fails.py")).end(LIMIT)
    assert ended.out.count("refused and trained") == 2, ended.out + ended.err
    assert seconds_since_failure(ended.out, ended.at) < PROMPT
    assert ended.code == 1
    assert ended.err.count("Traceback") == 1
    assert ended.err.endswith("ValueError: the reason of rank 1\n")


@pytest.mark.weekly
@pytest.mark.parametrize(
    ("name", "options", "result"),
    [
        pytest.param(
            *("torch_lightning", ("--epochs", "4"), r"test accuracy: 9\d\.\d\d % of 360 images"),
            marks=needs("lightning"),
        ),
        pytest.param(
            *("torch_trainer", ("--steps", "30"), r"loss on held-out text: 2\.\d+ nats per letter"),
            marks=needs("transformers"),
        ),
    ],
)
@pytest.mark.timeout(LIMIT + 20)
def test_example(start: Start, tmp_path: Path, name: str, options: tuple[str, ...], result: str) -> None:
    program, picture = str(ROOT / f"examples/{name}.py"), tmp_path / "loss.png"
    ended = start("-np", "2", "--no-tag-output", "python", program, "--check", "--plot", str(picture), *options).end(
        LIMIT
    )
    assert ended.code == 0, ended.out + ended.err
    assert re.search(result, ended.out), ended.out
    assert re.search(r"weights: identical on 2 ranks after \d+ steps", ended.out), ended.out
    away = re.search(r"one process: weights differ by (\S+) at most", ended.out)
    assert away and float(away[1]) < 1e-10, ended.out
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
@needs("accelerate")
@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("import accelerate; accelerate.Accelerator(cpu=True)", "need hvdlite_torch.accelerate.prepare() before"),
        (
            "import hvdlite_torch as hvd; hvd.init(); import accelerate; accelerate.Accelerator(cpu=True)",
            "MASTER_PORT is set and MASTER_ADDR is not. If Accelerate or transformers.Trainer starts",
        ),
        (
            "import torch; torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))",
            'torch.distributed.init_process_group("hvdlite") before',
        ),
    ],
    ids=["accelerate", "accelerate after init", "DDP"],
)
def test_a_program_for_another_launcher_is_told_what_to_call(start: Start, code: str, said: str) -> None:
    ended = start("-np", "2", "python", "-c", code).end(LIMIT)
    assert ended.code == 1
    assert said in "".join(ended.err.splitlines()[-1:]), ended.err
