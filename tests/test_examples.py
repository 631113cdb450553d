"""The examples do what they say."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from pydoc_data.topics import topics

import numpy as np
import pytest

ROOT = Path(__file__).parent.parent
SMALL_GPT = (
    *("--steps", "200", "--batch", "8", "--context", "32"),
    *("--layers", "2", "--width", "64", "--sample", "20"),
)


def run(*command: str) -> str:
    done = subprocess.run(
        [sys.executable, *command], cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize(
    ("name", "size"),
    [("torch_digits", 1), ("torch_digits", 3), ("keras_digits", 2), ("numpy_digits", 3), ("tf_custom_loop", 2)],
)
def test_digits(name: str, size: int) -> None:
    out = run("-m", "hvdlite.launch", "-np", str(size), "python", f"examples/{name}.py")
    accuracy = re.search(r"test accuracy: ([\d.]+) % of 360 images", out)
    assert accuracy, out
    assert float(accuracy[1]) >= 97
    assert f"weights: identical on {size} rank" in out


def test_keras_strategy() -> None:
    size = 2
    out = run("-m", "hvdlite.launch", "-np", str(size), "python", "examples/keras_strategy.py")
    accuracy = re.search(r"test accuracy: ([\d.]+) % of 360 images", out)
    wrong = re.search(r"wrong guesses: (\d+)", out)
    assert accuracy and wrong, out
    assert float(accuracy[1]) >= 97
    assert float(accuracy[1]) == pytest.approx(100 * (1 - int(wrong[1]) / 360), abs=0.01)
    assert f"weights: identical on {size} ranks" in out


def test_large_batch() -> None:
    out = run("-m", "hvdlite.launch", "-np", "2", "python", "examples/torch_large_batch.py")
    accuracy = {
        (name, int(batch)): float(percent)
        for name, batch, percent in re.findall(r"(\w+) with batches of (\d+): test accuracy ([\d.]+) %", out)
    }
    assert accuracy.keys() == {("SGD", 32), ("SGD", 479), ("LARS", 479), ("LAMB", 479)}, out
    assert accuracy["SGD", 32] >= 97
    for name in ("LARS", "LAMB"):
        assert accuracy[name, 479] >= 95
        assert accuracy[name, 479] > accuracy["SGD", 479]


@pytest.fixture(scope="module")
def gpt_alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[float, float]:
    """The loss on the held-out text before and after the training of one process that knows no other."""
    picture = tmp_path_factory.mktemp("alone") / "loss.png"
    return gpt_losses(run("examples/torch_gpt_text.py", *SMALL_GPT, "--plot", str(picture)))


def gpt_losses(out: str) -> tuple[float, float]:
    losses = re.search(r"held-out text: ([\d.]+) before, ([\d.]+) after step 200$", out, re.MULTILINE)
    assert losses, out
    return float(losses[1]), float(losses[2])


def test_gpt_text(gpt_alone: tuple[float, float], tmp_path: Path) -> None:
    size, picture = 3, tmp_path / "loss.png"
    program = ("examples/torch_gpt_text.py", *SMALL_GPT, "--shard", "--plot", str(picture))
    out = run("-m", "hvdlite.launch", "-np", str(size), "python", *program)
    before, after = gpt_losses(out)
    # Batches of 8 are dealt out unevenly to 3 ranks; the steps are those of one process.
    assert before == pytest.approx(gpt_alone[0], abs=0.002)
    assert after == pytest.approx(gpt_alone[1], abs=0.02)
    text = "".join(topics.values()).encode()
    held_out = np.frombuffer(text, np.uint8)[len(text) * 19 // 20 :]
    share = np.unique(held_out, return_counts=True)[1] / len(held_out)
    entropy = -np.sum(share * np.log(share))
    assert f"unigram entropy: {entropy:.3f} nats" in out
    assert before > np.log(256) - 0.1  # knows nothing yet
    assert after < entropy - 0.3  # and this cannot be had without context
    assert re.search(rf"tokens/s: [1-9]\d* on {size} ranks, whose weights are identical", out)
    assert 'The "for" statement' in out
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("size", "option"),
    [(1, "--no-cuda"), (2, "--fp16-allreduce"), (2, "--shard"), (2, "--use-adasum")],
)
def test_synthetic_benchmark(size: int, option: str) -> None:
    few = ("--batch-size", "2", "--num-warmup-batches", "1", "--num-batches-per-iter", "2", "--num-iters", "3")
    program = ("examples/torch_synthetic_benchmark.py", *few, "--no-cuda", option)
    out = run("-m", "hvdlite.launch", "-np", str(size), "python", *program)
    iterations = re.findall(r"Iter #(\d): ([\d.]+) img/sec per CPU$", out, re.MULTILINE)
    assert [number for number, _ in iterations] == ["0", "1", "2"], out  # once, not by every rank
    rates = [float(rate) for _, rate in iterations]
    mean, deviation = np.mean(rates), 1.96 * np.std(rates)
    for text, scale in (("Img/sec per CPU", 1), (f"Total img/sec on {size} CPU\\(s\\)", size)):
        found = re.search(rf"{text}: ([\d.]+) \+-([\d.]+)$", out, re.MULTILINE)
        assert found, out
        assert float(found[1]) == pytest.approx(scale * mean, abs=0.1 * scale + 0.06)  # printed to one digit
        assert float(found[2]) == pytest.approx(scale * deviation, abs=0.2 * scale + 0.06)


WRONG = {
    "torch_gpt_text.py --width 100": "--width 100 is no multiple of 32",
    "torch_gpt_text.py --context 999999": "--context 999999: the held-out text has only",
    "torch_gpt_text.py --plot /no/such/folder/loss.png": "there is no folder /no/such/folder",
    "torch_gpt_text.py --steps 3 --lr 1e30 --context 8 --layers 1 --width 32": "the loss is nan after",
    "torch_synthetic_benchmark.py --batch-size 0": "0 is below 1",
    "torch_synthetic_benchmark.py --model nonsense": "nonsense is no",
}
RUN_EACH = """
import contextlib, io, json, runpy, sys
import hvdlite
ends = {}
for command in json.loads(sys.argv[1]):
    program, *arguments = command.split()
    sys.argv = [program, *arguments]
    said = io.StringIO()
    code = 0
    with contextlib.redirect_stderr(said):
        try:
            runpy.run_path(f"examples/{program}", run_name="__main__")
        except SystemExit as end:
            code = 0 if end.code is None else end.code
    hvdlite.shutdown()
    # As Python ends: a text is printed, and means 1.
    ends[command] = (1, said.getvalue() + code) if isinstance(code, str) else (code, said.getvalue())
print(json.dumps(ends))
"""


@pytest.fixture(scope="module")
def ends_of_wrong_commands() -> dict[str, tuple[int, str]]:
    """The exit code of each, and what it says on stderr: all in one process, which takes seconds to start."""
    ends: dict[str, tuple[int, str]] = json.loads(run("-c", RUN_EACH, json.dumps(list(WRONG))).splitlines()[-1])
    return ends


@pytest.mark.parametrize("command", WRONG)
def test_wrong_arguments(command: str, ends_of_wrong_commands: dict[str, tuple[int, str]]) -> None:
    code, said = ends_of_wrong_commands[command]
    assert code != 0
    assert WRONG[command] in said


def test_algorithms(tmp_path: Path) -> None:
    picture = tmp_path / "algorithms.png"
    out = run("examples/algorithms.py", "--ranks", "4,6", "--sizes", "1K,1M", "--plot", str(picture))
    rows = [line for line in out.splitlines() if "iB" in line]
    assert [row.split()[:3] for row in rows] == [[ranks, "1", unit] for ranks in ("4", "6") for unit in ("KiB", "MiB")]
    for row in rows:
        assert row.count("*") >= 1
        assert row.count("(") == 5  # five algorithms, each with its prediction
    assert picture.read_bytes().startswith(b"\x89PNG")
