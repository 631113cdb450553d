"""Two ranks on one real GPU, as programs of their own, so that nothing which may hang runs in pytest's process."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.gpu.card import NO_CARD, STAND_IN
from tests.support.jobs import PROGRAMS, PYTHONPATH, mpirun

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(NO_CARD is not None, reason=str(NO_CARD))]

LIMIT = 50.0  # seconds for a job


def run(*command: str, size: int = 2, way: str = "nccl", share: bool = True, debug: Path | None = None) -> str:
    """Run a command on ranks that use one card, and return what they say. A failure shows what NCCL has said about itself."""
    said = {} if debug is None else {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_FILE": str(debug / "nccl.%p")}
    done = mpirun(
        size,
        *command,
        timeout=LIMIT,
        PYTHONPATH=PYTHONPATH,
        HVDLITE_SHARE_GPU=str(int(share)),
        HVDLITE_NCCL="1" if way == "nccl" else "0",
        HVDLITE_ADVICE="0",
        XLA_PYTHON_CLIENT_PREALLOCATE="false",  # else JAX takes most of the GPU's memory
        **said,
    )
    if done.returncode and debug is not None:
        lines = [line for path in sorted(debug.glob("nccl.*")) for line in path.read_text().splitlines()]
        pytest.fail(
            "\n".join([done.stdout, done.stderr, *(x for x in lines if " WARN " in x), *lines[-5:]]), pytrace=False
        )
    return done.stdout + done.stderr


def test_one_rank_first() -> None:
    assert "all right" in run(str(PROGRAMS / "gpu_preflight.py"), size=1)


def test_without_leave_to_share_the_card(tmp_path: Path) -> None:
    program = (
        "import torch, hvdlite_torch as hvd; hvd.init()\n"
        "from tests.gpu.card import take_card; gpu = take_card()\n"
        "try: hvd.allreduce(torch.ones(3, device=gpu))\n"
        "except hvd.HvdliteError as error: print(error, flush=True)"
    )
    said = run("-c", program, share=False)
    assert said.count("use the same GPU") == 2, said


@pytest.mark.parametrize("way", ["staged", "nccl"])
@pytest.mark.parametrize("program", ["gpu_operations.py", "gpu_training.py"])
def test_two_ranks(program: str, way: str, tmp_path: Path) -> None:
    assert run(str(PROGRAMS / program), way, way=way, debug=tmp_path).count("all right") == 2


@pytest.mark.parametrize("library", ["torch"] if STAND_IN else ["jax", "cupy"])
@pytest.mark.parametrize("way", ["staged", "nccl"])
def test_arrays(library: str, way: str, tmp_path: Path) -> None:
    if library != "torch":
        pytest.importorskip(library)
    assert run(str(PROGRAMS / "gpu_arrays.py"), library, way=way, debug=tmp_path).count("all right") == 2


def test_a_rank_that_leaves_is_named_while_the_gpu_waits_for_it() -> None:
    said = run(str(PROGRAMS / "gpu_leaves.py"))
    assert re.search(r"told after \d\.\d s: (PeerLeftError|NcclError)", said), said
