"""The examples do what they say."""

from __future__ import annotations

import functools
import math
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics

import httpx
import numpy as np
import pytest
from sklearn.datasets import load_digits

from tests.support.browser import MISSING, Point, browser
from tests.support.jobs import PYTHONPATH, ROOT, run_each

SMALL_GPT = "--steps 200 --batch 8 --context 32 --layers 2 --width 64 --sample 20"
FEW = "--batch-size 2 --num-warmup-batches 1 --num-batches-per-iter 2 --num-iters 3 --no-cuda"
FIRST_AND_REST = ("--epochs 3", "--epochs 6 --plot FOLDER/curve.png")
"""Training that stops, and the same training that goes on."""
RECIPES = [f"cookbook/{name}.py" for name in ("vision", "text", "lora", "tabular", "gan", "rl", "kfold")]
RESUMED = "cookbook/resume.py"
WRONG = {
    "torch_gpt_text.py --width 100": "--width 100 is no multiple of 32",
    "torch_gpt_text.py --context 999999": "--context 999999: the held-out text has only",
    "torch_gpt_text.py --plot /no/such/folder/loss.png": "there is no folder /no/such/folder",
    "torch_async_digits.py --slow-rank 0": "--slow-rank 0: expected 1 or more",
    "torch_a3c.py --moves 0": "--moves 0: expected 1 or more",
    "torch_gpt_text.py --steps 3 --lr 1e30 --context 8 --layers 1 --width 32": "the loss is nan after",
    "torch_synthetic_benchmark.py --batch-size 0": "0 is below 1",
    "torch_synthetic_benchmark.py --model nonsense": "nonsense is no",
}
JOBS = {
    "alone": [
        *("torch_digits.py", f"torch_synthetic_benchmark.py {FEW}"),
        f"torch_gpt_text.py {SMALL_GPT} --plot FOLDER/loss.png",
        "serve_digits.py train --epochs 10 --weights FOLDER/digits.pt",
        *(*RECIPES[:3], f"{RESUMED} FOLDER/checkpoints 4"),
        "algorithms.py --ranks 4,6 --sizes 1K,1M --plot FOLDER/algorithms.png",
        *WRONG,
    ],
    "digits on 2": ["torch_digits.py", "numpy_digits.py"],
    "Keras on 2": ["keras_digits.py", "tf_custom_loop.py", "cookbook/vision_keras.py"],
    "torch on 2": [
        *(*RECIPES, f"{RESUMED} SHARED/checkpoints 2"),
        "torch_large_batch.py",
        *(f"torch_training.py --folder FOLDER/torch {more}" for more in FIRST_AND_REST),
        *(f"torch_synthetic_benchmark.py {FEW} {option}" for option in ("--fp16-allreduce", "--shard", "--use-adasum")),
        "torch_bert_size.py --layers 2 --width 64 --length 16 --steps 30 --batch 4 --lr 3e-3",
        # The last ones, for they change torch's default dtype.
        "torch_pipeline.py --check --epochs 4 --plot FOLDER/pipeline.png",
        "torch_tensor_parallel.py --check --steps 12 --length 32 --plot FOLDER/letters.png",
        "torch_hybrid.py --pp 1 --check --epochs 3 --plot FOLDER/memory.png",
        "torch_lstm_wavefront.py --check --steps 20 --width 32 --length 48 --plot FOLDER/chunks.png",
        "torch_siamese.py --check --steps 100 --plot FOLDER/vectors.png",
        "torch_siamese.py --check --steps 10 --exchange allgather --separate",
    ],
    "tensorflow on 2": [
        "keras_strategy.py",
        *(f"keras_training.py --folder FOLDER/keras {more}" for more in FIRST_AND_REST),
        # The last one, for it changes Keras' default dtype.
        "keras_pipeline.py --check --epochs 2 --batch-size 32 --plot FOLDER/keras.png",
    ],
    "3": [
        f"{RESUMED} SHARED/checkpoints 4",
        f"torch_gpt_text.py {SMALL_GPT} --shard --plot FOLDER/loss.png",
        "torch_async_digits.py --mode all --seconds 3 --intervals 3 --slow-rank 3 --plot FOLDER/modes.png",
        "torch_async_digits.py --mode ssp --staleness 0 --seconds 1 --intervals 1 --servers 1",
        "torch_a3c.py --goal 60 --seconds 20 --plot FOLDER/a3c.png",
    ],
}
"""The commands whose programs run in one job, one after the other. FOLDER stands for a folder of the job's own, SHARED for
one of all jobs.
"""


@dataclass
class Job:
    """A job that has run some examples.

    Attributes:
        size: The number of ranks.
        folder: Where its programs have put their pictures.
        ends: For each rank, by command: the exit code, stdout and stderr.
    """

    size: int
    folder: Path
    ends: list[dict[str, tuple[int, str, str]]]

    def out(self, program: str) -> str:
        """What all ranks together have printed in the one run of `program`, which has not failed."""
        (command,) = [each for each in self.ends[0] if each.startswith(program)]
        for end in self.ends:
            assert end[command][0] == 0, end[command]
        return "".join(end[command][1] for end in self.ends)


Run = Callable[[str], Job]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """``run(name)`` runs a job of `JOBS`, once for all tests."""
    shared = str(tmp_path_factory.mktemp("shared"))

    @functools.cache
    def run(name: str) -> Job:
        if name == "3":
            run("torch on 2")  # whose checkpoint it goes on from
        folder, size = tmp_path_factory.mktemp("job"), int(name.split()[-1]) if name != "alone" else 1
        launch = () if name == "alone" else ("-m", "hvdlite.launch", "-np", str(size), "python")
        commands = [
            f"examples/{command}".replace("FOLDER", str(folder)).replace("SHARED", shared) for command in JOBS[name]
        ]
        found = run_each(commands, folder, launch)
        assert len(found) == size
        short = {command: given for command, given in zip(commands, JOBS[name], strict=True)}
        return Job(size, folder, [{short[command]: end for command, end in each.items()} for each in found])

    return run


@pytest.mark.parametrize(
    ("name", "job"),
    [
        *[("torch_digits", "digits on 2"), ("numpy_digits", "digits on 2")],
        *(pytest.param(name, "Keras on 2", marks=pytest.mark.slow) for name in ("keras_digits", "tf_custom_loop")),
        pytest.param("torch_digits", "alone", marks=pytest.mark.slow),
    ],
)
def test_digits(run: Run, name: str, job: str) -> None:
    out = run(job).out(name)
    accuracy = re.search(r"test accuracy: ([\d.]+) % of 360 images", out)
    assert accuracy, out
    assert float(accuracy[1]) >= 97
    assert f"weights: identical on {run(job).size} rank" in out


FOUND = {
    "vision": r"(\d+) of 360 test images are right",
    "vision_keras": r"(\d+) of 360 test images are right",
    "text": r"loss on held-out text: ([\d.]+) nats",
    "lora": r"small letters: (\d+) parameters, .*\n.* capitals: (\d+) parameters, loss ([\d.]+) to ([\d.]+)",
    "tabular": r"569 rows on 2 ranks; (\d+) of 11\d held-out rows are right",
    "gan": r"points that are drawn: ([\d.]+) ± ([\d.]+);",
    "rl": r"moves to the goal: ([\d.]+) on average; the shortest way has 8",
    "kfold": r"width 8: ([\d.]+) .*\nwidth 64: ([\d.]+) ",
    "resume": r"loss ([\d.]+)$",
}


def recipe(job: Job, name: str) -> list[float]:
    """The numbers that a program of the cookbook has printed."""
    found = re.search(FOUND[name], out := job.out(f"cookbook/{name}.py"), re.MULTILINE)
    assert found, out
    return [float(number) for number in found.groups()]


@pytest.mark.slow
def test_cookbook(run: Run) -> None:
    together, alone = run("torch on 2"), run("alone")
    for name, nearly in (("vision", 2), ("text", 0.01), ("lora", 0.05)):  # on one rank they learn the same
        assert recipe(together, name) == pytest.approx(recipe(alone, name), abs=nearly)
    assert recipe(together, "vision")[0] > 335
    assert recipe(together, "text")[0] < 2.9  # 3.1 would be the entropy of single letters
    all_parameters, trained, before, after = recipe(together, "lora")
    assert trained < all_parameters / 8 and after < before / 2
    assert recipe(together, "tabular")[0] > 105
    radius, deviation = recipe(together, "gan")
    assert abs(radius - 2) < 0.4 and deviation < 0.5
    assert recipe(together, "rl")[0] < 9  # 15.9 by chance
    narrow, wide = recipe(together, "kfold")
    assert 70 < narrow < wide and wide > 93


@pytest.mark.slow
def test_cookbook_goes_on_with_other_ranks(run: Run) -> None:
    """Two epochs on 2 ranks and two on 3 are four in one process."""
    more = run("3")
    assert more.out("cookbook/resume").startswith("epochs 3 to 4 on 3 ranks: ")
    assert recipe(more, "resume") == pytest.approx(recipe(run("alone"), "resume"), abs=2e-5)


@pytest.mark.slow
def test_cookbook_with_keras(run: Run) -> None:
    assert recipe(run("Keras on 2"), "vision_keras")[0] > 335


@pytest.mark.weekly
def test_cookbook_array() -> None:
    """A task of the array, without Slurm."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environ = {**os.environ, "PYTHONPATH": PYTHONPATH, "SLURM_ARRAY_TASK_ID": "2", "PATH": path}
    command = ["bash", "examples/cookbook/array.sbatch"]
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(r"learning rate 1e-2\n3\d\d of 360 test images are right\n", done.stdout)


def test_cookbook_is_short() -> None:
    """Each program is on the page, runs in a job above, and has at most 60 lines of text."""
    page, run_here = (
        (ROOT / "docs/cookbook.md").read_text(),
        " ".join(command for job in JOBS.values() for command in job),
    )
    for path in (ROOT / "examples/cookbook").iterdir():
        assert f"(../examples/cookbook/{path.name})" in page
        assert path.suffix == ".sbatch" or f"cookbook/{path.name}" in run_here
        assert sum(line.strip() != "" for line in path.read_text().splitlines()) <= 60, path


@pytest.mark.slow
@pytest.mark.parametrize(("name", "job"), [("torch", "torch on 2"), ("keras", "tensorflow on 2")])
def test_training(run: Run, name: str, job: str) -> None:
    """A program as people write them stops and goes on from its checkpoint; one rank writes, and only once."""
    done = run(job)
    first = done.out(f"{name}_training.py --folder FOLDER/{name} --epochs 3")
    rest = done.out(f"{name}_training.py --folder FOLDER/{name} --epochs 6")
    (before,) = re.findall(r"^epoch 3: all epochs are done; loss ([\d.]+)$", first, re.MULTILINE)
    (after,) = re.findall(r"^epoch 6: all epochs are done; loss ([\d.]+)$", rest, re.MULTILINE)
    (accuracy,) = re.findall(r"^test accuracy: ([\d.]+) % of 360 images$", rest, re.MULTILINE)
    assert float(after) < float(before)
    assert float(accuracy) > 75
    assert list((done.folder / name).rglob("events.out.tfevents.*")), "TensorBoard has nothing to show"
    assert (done.folder / "curve.png").read_bytes().startswith(b"\x89PNG")


@pytest.fixture(scope="module")
def digits(run: Run) -> Iterator[str]:
    """The URL of a server for the digits that the example has learnt."""
    job = run("alone")
    accuracy = re.search(r"test accuracy: ([\d.]+) % of 360 images", job.out("serve_digits"))
    assert accuracy and float(accuracy[1]) >= 95
    command = [
        sys.executable,
        "examples/serve_digits.py",
        "serve",
        "--port",
        "0",
        "--weights",
        str(job.folder / "digits.pt"),
    ]
    environ = {**os.environ, "PYTHONPATH": PYTHONPATH}
    with subprocess.Popen(command, cwd=ROOT, env=environ, stderr=subprocess.PIPE, text=True) as server:
        assert server.stderr
        try:
            lines = [server.stderr.readline()]
            while "Ready" not in lines[-1]:
                lines.append(server.stderr.readline())
                assert lines[-1], lines
            yield re.findall(r"http://\S+:\d+", "".join(lines))[0]
            server.send_signal(signal.SIGINT)
            assert server.wait(60) == 0
        finally:
            server.kill()


@pytest.mark.slow
def test_digits_are_served(digits: str) -> None:
    page = httpx.get(digits)
    assert page.headers["content-type"].startswith("text/html")
    assert page.text == Path(ROOT, "examples/serve_digits.html").read_text()
    images, labels = load_digits(return_X_y=True)
    right = 0
    for image, label in zip(images[:50] / 16, labels, strict=False):
        answer = httpx.post(f"{digits}/v1/predict", json={"input": image.reshape(1, 8, 8).tolist()}).json()["output"]
        assert sum(answer) == pytest.approx(1)
        right += np.argmax(answer) == label
    assert right >= 45


STROKES: dict[int, list[list[Point]]] = {
    0: [[(60 * math.sin(turn / 5), -90 * math.cos(turn / 5)) for turn in range(33)]],
    2: [[(-50, -60), (-30, -90), (20, -95), (50, -60), (40, -20), (-60, 90), (60, 90)]],
    5: [[(50, -90), (-40, -90), (-45, -10), (10, -20), (50, 20), (40, 70), (-10, 90), (-50, 75)]],
}


@pytest.mark.slow
@pytest.mark.skipif(bool(MISSING), reason=f"{MISSING}: the page of the example is tried in it")
def test_digits_are_drawn_in_a_browser(digits: str, tmp_path: Path) -> None:
    with browser() as page:
        page.go(digits)
        for digit, strokes in STROKES.items():
            page.drag("#paper", strokes)
            page.wait_for(lambda digit=digit: page.text("#answer") == f"This is a {digit}.")  # type: ignore[misc]
            assert page.text("#status").startswith("Answered in ")
            chances = page.run("return [...document.querySelectorAll('#bars tr')].map(row => row.cells[2].innerText)")
            assert len(chances) == 10 and float(chances[digit].split()[0]) > 50
            page.picture(tmp_path / f"{digit}.png")
            page.click("#clear")
            assert page.text("#answer") == page.text("#status") == ""


@pytest.mark.slow
def test_keras_strategy(run: Run) -> None:
    out = run("tensorflow on 2").out("keras_strategy")
    accuracy = re.search(r"test accuracy: ([\d.]+) % of 360 images", out)
    wrong = re.search(r"wrong guesses: (\d+)", out)
    assert accuracy and wrong, out
    assert float(accuracy[1]) >= 97
    assert float(accuracy[1]) == pytest.approx(100 * (1 - int(wrong[1]) / 360), abs=0.01)
    assert "weights: identical on 2 ranks" in out


@pytest.mark.slow
def test_large_batch(run: Run) -> None:
    out = run("torch on 2").out("torch_large_batch")
    accuracy = {
        (name, int(batch)): float(percent)
        for name, batch, percent in re.findall(r"(\w+) with batches of (\d+): test accuracy ([\d.]+) %", out)
    }
    assert accuracy.keys() == {("SGD", 32), ("SGD", 479), ("LARS", 479), ("LAMB", 479)}, out
    assert accuracy["SGD", 32] >= 97
    for name in ("LARS", "LAMB"):
        assert accuracy[name, 479] >= 95
        assert accuracy[name, 479] > accuracy["SGD", 479]


def gpt_losses(out: str) -> tuple[float, float]:
    losses = re.search(r"held-out text: ([\d.]+) before, ([\d.]+) after step 200$", out, re.MULTILINE)
    assert losses, out
    return float(losses[1]), float(losses[2])


@pytest.mark.slow
def test_gpt_text(run: Run) -> None:
    alone = gpt_losses(run("alone").out("torch_gpt_text.py --steps 200"))  # one process that knows no other
    job = run("3")
    out = job.out("torch_gpt_text")
    before, after = gpt_losses(out)
    # Batches of 8 are dealt out unevenly to 3 ranks; the steps are those of one process.
    assert before == pytest.approx(alone[0], abs=0.002)
    assert after == pytest.approx(alone[1], abs=0.02)
    text = "".join(topics.values()).encode()
    held_out = np.frombuffer(text, np.uint8)[len(text) * 19 // 20 :]
    share = np.unique(held_out, return_counts=True)[1] / len(held_out)
    entropy = -np.sum(share * np.log(share))
    assert f"unigram entropy: {entropy:.3f} nats" in out
    assert before > np.log(256) - 0.1  # knows nothing yet
    assert after < entropy - 0.3  # and this cannot be had without context
    assert re.search(rf"tokens/s: [1-9]\d* on {job.size} ranks, whose weights are identical", out)
    assert 'The "for" statement' in out
    assert (job.folder / "loss.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("job", "option"),
    [("alone", ""), *[("torch on 2", option) for option in ("--fp16-allreduce", "--shard", "--use-adasum")]],
)
def test_synthetic_benchmark(run: Run, job: str, option: str) -> None:
    size, out = run(job).size, run(job).out(f"torch_synthetic_benchmark.py {FEW} {option}".strip())
    iterations = re.findall(r"Iter #(\d): ([\d.]+) img/sec per CPU$", out, re.MULTILINE)
    assert [number for number, _ in iterations] == ["0", "1", "2"], out  # once, not by every rank
    rates = [float(rate) for _, rate in iterations]
    mean, deviation = np.mean(rates), 1.96 * np.std(rates)
    for text, scale in (("Img/sec per CPU", 1), (f"Total img/sec on {size} CPU\\(s\\)", size)):
        found = re.search(rf"{text}: ([\d.]+) \+-([\d.]+)$", out, re.MULTILINE)
        assert found, out
        assert float(found[1]) == pytest.approx(scale * mean, abs=0.1 * scale + 0.06)  # printed to one digit
        assert float(found[2]) == pytest.approx(scale * deviation, abs=0.2 * scale + 0.06)


@pytest.mark.slow
def test_bert_size(run: Run) -> None:
    out = run("torch on 2").out("torch_bert_size")
    losses = re.search(r"^loss ([\d.]+) to ([\d.]+) nats for each masked word$", out, re.MULTILINE)
    assert losses, out
    assert float(losses[1]) > 9 > float(losses[2])  # it guesses among 30522 words at first
    assert re.findall(r"^rank (\d): at most [\d.]+ GB$", out, re.MULTILINE) == ["0", "1"]
    assert "hvdlite, shard=True: 2,0" in out  # parameters


@pytest.mark.slow
def test_pipeline(run: Run) -> None:
    job = run("torch on 2")
    out = job.out("torch_pipeline")
    accuracy, away = re.search(r"test accuracy: ([\d.]+) %", out), re.search(r"weights differ by (\S+) at most", out)
    assert accuracy and away, out
    assert float(accuracy[1]) >= 90
    assert float(away[1]) < 1e-9
    assert re.search(r"2 stages, 8 micro-batches, 1f1b: the ranks waited for \d+% of the time \(theory: 11%\)", out)
    assert out.startswith("ProcessGrid(dp=1, pp=2): 2 ranks on 1 host\n")
    assert (job.folder / "pipeline.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_keras_pipeline(run: Run) -> None:
    job = run("tensorflow on 2")
    out = job.out("keras_pipeline")
    accuracy, away = re.search(r"test accuracy: ([\d.]+) %", out), re.search(r"weights differ by (\S+) at most", out)
    assert accuracy and away, out
    assert float(accuracy[1]) >= 85
    assert float(away[1]) < 1e-9
    assert re.search(r"2 stages, 4 micro-batches, 1f1b: the ranks waited for \d+% of the time \(theory: 20%\)", out)
    assert (job.folder / "keras.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_tensor_parallel(run: Run) -> None:
    job = run("torch on 2")
    out = job.out("torch_tensor_parallel")
    loss = re.search(r"loss ([\d.]+) to ([\d.]+) nats per letter", out)
    away = re.search(r"one process: weights differ by (\S+) at most", out)
    assert loss and away, out
    assert float(loss[2]) < 0.9 * float(loss[1])
    assert float(away[1]) < 1e-9
    assert "attention of 8 heads, width 128    heads  (encoder.layers.0.self_attn, encoder.layers.1.self_attn)" in out
    assert (job.folder / "letters.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_hybrid(run: Run) -> None:
    job = run("torch on 2")
    out = job.out("torch_hybrid")
    away, accuracy = re.search(r"weights differ by (\S+) at most", out), re.search(r"test accuracy: ([\d.]+) %", out)
    assert away and accuracy, out
    assert float(away[1]) < 1e-9
    assert float(accuracy[1]) >= 85
    assert out.startswith("ProcessGrid(dp=1, pp=1, tp=2): 2 ranks on 1 host\n")
    assert "MB of weights and optimizer state: 1.95, 1.95; in one process 3.89" in out
    assert (job.folder / "memory.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_lstm_wavefront(run: Run) -> None:
    job = run("torch on 2")
    out = job.out("torch_lstm_wavefront")
    loss = re.search(r"loss ([\d.]+) to ([\d.]+) nats per letter", out)
    away = re.search(r"one process: weights differ by (\S+) at most", out)
    assert loss and away, out
    assert float(loss[2]) < 0.9 * float(loss[1])
    assert float(away[1]) < 1e-9
    assert re.search(r"2 stages, 8 chunks, wavefront: the ranks waited for \d+% of the time \(theory: 11%\)", out)
    assert (job.folder / "chunks.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
@pytest.mark.parametrize("option", ["--check --steps 100 --plot", "--check --steps 10 --exchange allgather --separate"])
def test_siamese(run: Run, option: str) -> None:
    job = run("torch on 2")
    out = job.out(f"torch_siamese.py {option}")
    accuracy, away = re.search(r"test accuracy: ([\d.]+) %", out), re.search(r"weights differ by (\S+) at most", out)
    assert accuracy and away, out
    assert float(away[1]) < 1e-9
    if "--plot" in option:
        assert float(accuracy[1]) >= 85
        assert (job.folder / "vectors.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_async_digits(run: Run) -> None:
    job = run("3")
    found = {
        mode: ([int(count) for count in pushes.split(", ")], float(missed), float(percent))
        for mode, pushes, missed, percent in re.findall(
            r"^(\w+): \d+ samples/s, pushes of the ranks ([\d, ]+), missed ([\d.]+) .* test accuracy: ([\d.]+) %$",
            job.out("torch_async_digits.py --mode all"),
            re.MULTILINE,
        )
    }
    assert found.keys() == {"sync", "ssp", "async"}
    assert found["sync"][1] == 0  # where all push together, nobody misses anything
    assert found["async"][1] > 0
    for pushes, _, percent in found.values():
        assert len(pushes) == 3 and min(pushes) > 0
        assert percent > 30  # of ten digits; how far it gets in 3 s depends on the machine
    assert (job.folder / "modes.png").read_bytes().startswith(b"\x89PNG")
    out = job.out("torch_async_digits.py --mode ssp")
    assert re.search(r"pushes of the ranks \d+, \d+, 0, missed", out), out  # the last one only serves


@pytest.mark.slow
def test_a3c(run: Run) -> None:
    job = run("3")
    out = job.out("torch_a3c.py --goal")
    goal = re.search(r"mean return of 100 episodes at least 60: after (\d+) s and (\d+) updates", out)
    end = re.search(r"seed 0, 3 ranks: (\d+) episodes, (\d+) moves; .* a push has missed ([\d.]+) pushes", out)
    assert goal and end, out  # a policy by chance has a mean return of about 22
    assert int(end[2]) >= 60 * 100  # as many moves as the return counts
    assert float(end[3]) > 0
    assert (job.folder / "a3c.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
@pytest.mark.parametrize("command", WRONG)
def test_wrong_arguments(run: Run, command: str) -> None:
    code, _, err = run("alone").ends[0][command]
    assert code != 0
    assert WRONG[command] in err


@pytest.mark.slow
def test_algorithms(run: Run) -> None:
    out = run("alone").out("algorithms")
    rows = [line for line in out.splitlines() if "iB" in line]
    assert [row.split()[:3] for row in rows] == [[ranks, "1", unit] for ranks in ("4", "6") for unit in ("KiB", "MiB")]
    for row in rows:
        assert row.count("*") >= 1
        assert row.count("(") == 5  # five algorithms, each with its prediction
    assert (run("alone").folder / "algorithms.png").read_bytes().startswith(b"\x89PNG")
