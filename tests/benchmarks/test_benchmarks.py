"""The benchmarks measure everybody, and give no figures for wrong results."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import against, job, plan
from benchmarks.__main__ import main
from benchmarks.checks import WEIGHT_TOLERANCE, WrongResult, addend, check_sum, check_weights, true_sum
from benchmarks.collectives import DTYPES
from benchmarks.models import parameters_of, workloads
from benchmarks.report import allreduce_tables, size, step_table

# Horovod, sharding and MPI's own halves may be there or not.
PEERS = {"hvdlite", "hvdlite buckets", "MPI", "torch gloo", "memcpy"}
VARIANTS = {"no exchange, tuned", "hvdlite shard", "torch ZeRO, tuned"}


@pytest.mark.parametrize("dtype", list(DTYPES.values()))
def test_true_sum(dtype: torch.dtype) -> None:
    for ranks in (1, 2, 4, 5):
        summed = torch.stack([addend(rank, 50, dtype).double() for rank in range(ranks)]).sum(0)
        assert torch.equal(true_sum(ranks, 50, dtype).double(), summed)
        check_sum("right", summed.to(dtype), true_sum(ranks, 50, dtype))


def test_a_wrong_sum_is_found() -> None:
    expected = true_sum(2, 50, torch.float32)
    wrong = expected.clone()
    wrong[33] += 1
    with pytest.raises(WrongResult, match="gloo: element 33 of 50"):
        check_sum("gloo", wrong, expected)
    with pytest.raises(WrongResult):
        check_sum("does nothing", addend(0, 50, torch.float32), expected)


def test_wrong_weights_are_found() -> None:
    check_weights({"a": 0.0, "b": WEIGHT_TOLERANCE})
    for deviation in (1.1 * WEIGHT_TOLERANCE, math.nan, math.inf):
        with pytest.raises(WrongResult, match="^b: "):
            check_weights({"a": 0.0, "b": deviation})


FEW = {"small_layers": "300 small layers, Adam"}
MANY = {"gpt": "GPT, AdamW", "resnet18": "ResNet-18, SGD momentum", "lstm": "LSTM, Adam", "bert": "BERT size, AdamW"}


@pytest.mark.parametrize(
    "workloads",
    [pytest.param(FEW, marks=pytest.mark.slow), pytest.param(MANY, marks=pytest.mark.weekly)],
    ids=["few", "many"],
)
def test_all_parts(tmp_path: Path, workloads: dict[str, str]) -> None:
    command = [*(sys.executable, "-m", "benchmarks", "--quick", "--tiny"), *("--rounds", "1", "--ranks", "2")]
    command += ["--workloads", ",".join(workloads), "--variants", "sharded,zero"]
    command += ["--sizes", "4", "4096", "--json", str(tmp_path / "figures.json"), "--plot", str(tmp_path / "p.png")]
    done = subprocess.run(command, cwd=job.ROOT, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    results = json.loads((tmp_path / "figures.json").read_text())

    assert results["machine"]["cores"] > 0
    assert {"hvdlite", "torch", "mpi4py"} <= results["machine"]["versions"].keys()
    sums = results["allreduce"]["figures"]
    for kind in DTYPES:
        for nbytes in (4, 4096):
            found = {f["peer"] for f in sums if (f["kind"], f["bytes"], f["ranks"]) == (kind, nbytes, 2)}
            assert found >= (PEERS - {"hvdlite buckets"} if "NumPy" in kind else PEERS)
    steps = results["steps"]["figures"]
    assert {(f["workload"], f["variant"]) for f in steps} == {
        (name, variant) for name in workloads.values() for variant in VARIANTS
    }
    for figure in sums + steps:
        assert figure["median"] >= figure["minimum"] > 0
        assert figure["ratio"] > 0
    for figure in steps:  # who trains alone ends elsewhere: the weights that are compared are trained ones
        assert (figure["deviation"] > WEIGHT_TOLERANCE) == figure["variant"].startswith("no exchange"), figure
        assert (figure["rank_spread"] > WEIGHT_TOLERANCE) == figure["variant"].startswith("no exchange"), figure

    assert "compared with the true sum" in done.stdout
    for name in results["allreduce"]["skipped"] | results["steps"]["skipped"]:
        assert f"without {name}: " in done.stdout
    for part in ("allreduce", "steps"):
        assert (tmp_path / f"p-{part}.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.weekly
def test_the_backend_of_torch_distributed(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks", "backend", "--tiny", "--rounds", "2", "--sizes", "4", "4096"]
    command += ["--json", str(tmp_path / "figures.json"), "--plot", str(tmp_path / "p.png")]
    done = subprocess.run(command, cwd=job.ROOT, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "figures.json").read_text())["backend"]
    assert {(f["operation"], f["bytes"]) for f in found["figures"]} >= {("all_reduce", 4096), ("barrier", 4)}
    assert {f["training"] for f in found["steps"]} == {"DDP", "FSDP2"}
    for figure in found["figures"] + found["steps"]:
        assert figure["median"] >= figure["minimum"] > 0
        assert (figure["ratio"] == 1) == (figure["backend"] == "gloo")
    assert "all_reduce, hvdlite" in done.stdout
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.weekly
def test_this_tree_against_itself(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks", "against", str(job.ROOT), "--tiny", "--rounds", "3", "--sizes", "4"]
    command += ["--variants", "plain", "--workloads", "mlp_adam", "--kinds", "float32"]
    done = subprocess.run(command, cwd=job.ROOT, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    found = re.findall(r"^  (hvdlite|4 B) .* ([\d.]+)   ([\d.]+) to ([\d.]+)$", done.stdout, re.MULTILINE)
    assert [name for name, *_ in found] == ["hvdlite", "4 B"], done.stdout
    for _, middle, low, high in found:
        assert 0 < float(low) <= float(high) and float(middle) > 0


def test_no_tree_to_compare_with(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert against.main([str(tmp_path)]) == 2
    assert "has no hvdlite, hvdlite_torch, hvdlite_tf: expected a clone of hvdlite" in capsys.readouterr().err


def test_ratio_of_medians() -> None:
    low, middle, high = against.ratio_of_medians([1.0, 2.0, 3.0], [2.0, 4.0, 6.0])
    assert low < middle == 2.0 < high
    assert against.ratio_of_medians([2.0] * 5, [3.0] * 5) == (1.5, 1.5, 1.5)


@pytest.mark.weekly
def test_keras(tmp_path: Path) -> None:
    command = [*(sys.executable, "-m", "benchmarks", "keras", "--tiny", "--rounds", "1"), "--json", str(tmp_path / "f")]
    done = subprocess.run(command, cwd=job.ROOT, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    figures = json.loads((tmp_path / "f").read_text())["keras"]["figures"]
    for workload in ("Keras MLP, SGD momentum", "Keras MLP, Adam"):
        assert {f["variant"] for f in figures if f["workload"] == workload} >= {"no exchange", "hvdlite"}
    for figure in figures:
        assert figure["median"] >= figure["minimum"] > 0
        for what in ("deviation", "rank_spread"):
            assert (figure[what] > WEIGHT_TOLERANCE) == figure["variant"].endswith("no exchange"), figure


@pytest.mark.parametrize("option", ["--workloads", "--variants"])
def test_unknown_names_are_named(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["steps", option, "mlp_adam,tuned,nothing"])
    assert re.search(r"no .*nothing: there are .*, ", capsys.readouterr().err)


def test_the_models() -> None:
    found = {name: parameters_of(each.model()) for name, each in workloads(tiny=False).items()}
    assert list(found) == list(plan.WORKLOADS.values())
    assert found["ResNet-18, SGD momentum"] == 11_173_962  # of the literature, for ten classes
    assert 105e6 < found["BERT size, AdamW"] < 115e6
    assert found["wide MLP, AdamW"] == 1025 * 4096 + 4097 * 4096 + 4097 * 100


@pytest.mark.slow
def test_memory() -> None:
    result = job.run("memory", 2, {"name": "MLP, Adam", "variant": "MPI, flat", "tiny": False})
    weights = 4 * result["parameters"]
    for kept, peak, process in zip(result["kept"], result["peak"], result["process_peak"], strict=True):
        assert 3.5 * weights < kept < 6 * weights  # weights, gradients, two of Adam's
        assert kept <= 1.01 * peak < process


def test_step_table() -> None:
    figure = {"workload": "GPT", "parameters": 9, "reference": "tuned", "minimum": 0.05, "deviation": 1e-6}
    each = [("tuned", 0.1), ("hvdlite", 0.12), (plan.DDP_TUNED, 0.2)]
    rows = [
        {**figure, "variant": name, "median": time, "ratio": time / 0.1, "to_ddp": time / 0.2} for name, time in each
    ]
    text = step_table(rows, [])
    assert re.search(r"GPT: 9 parameters\n +step +÷ tuned +÷ torch DDP, tuned", text)
    assert re.search(r"hvdlite +120 \(50\.0\) ms +1\.20 +0\.60 +1e-06\n", text)
    without = [{name: value for name, value in row.items() if name != "to_ddp"} for row in rows[:2]]
    assert "DDP" not in step_table(without, [])


def test_table() -> None:
    figure = {"ranks": 2, "kind": "float32", "peer": "MPI", "ratio": 1.0, "bytes_per_second": 2.5e9}
    cells = [{**figure, "bytes": 4, "median": 1.234e-6, "minimum": 1e-6}]
    cells += [{**figure, "bytes": 2**20, "median": 0.0123, "minimum": 0.01}]
    text = allreduce_tables(cells)
    assert re.search(r"MPI\s+1\.23 \(1\.00\) µs\s+1\.00\s+12\.3 \(10\.0\) ms\s+1\.00\s+2\.50$", text)
    assert [size(n) for n in (4, 4096, 2**26)] == ["4 B", "4 KiB", "64 MiB"]
