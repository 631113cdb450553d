"""Training steps on a GPU: ``python -m benchmarks.gpu``. What hvdlite adds to a step, next to torch's DistributedDataParallel.

One rank on one GPU trains a GPT of 124 million parameters, and ResNet-50 if torchvision is there, in turn by each of

    no exchange        the optimizer alone
    DDP                torch's DistributedDataParallel, with NCCL, of one rank
    hvdlite            of one rank, which it spares all work
    hvdlite, buckets   not spared: hooks, packing, launching and dividing are what they are with many ranks; NCCL has one

and two ranks train the GPT on the one GPU, where NCCL can be made to do that (`benchmarks.gpu_pair`). Without a GPU it says so
and ends with code 2. It takes a few minutes; `--json` has all figures, `--trace` a trace of some steps for chrome://tracing.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import gzip
import importlib
import json
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import hvdlite_torch
import hvdlite_torch.device_exchange
from benchmarks.checks import WrongResult, check_weights
from benchmarks.models import Gpt, GptSize, parameters_of
from hvdlite.api import world
from hvdlite.comm import nccl
from hvdlite.comm.device import DeviceCollectives, NcclCollectives
from hvdlite.config import Config
from hvdlite.protocols import Device, ReduceOp
from hvdlite.testing import on_ranks
from hvdlite_torch.tensor import ADAPTER

NOTHING, DDP, SPARED, BUCKETS = "no exchange", "DDP", "hvdlite", "hvdlite, buckets"
VARIANTS = (NOTHING, DDP, SPARED, BUCKETS)
WARM_UP = 3
LOSS_TOLERANCE = 0.05  # of bfloat16 after some steps; sums in attention's backward pass come in any order
PAIR_SECONDS = 150.0
WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cudaMemcpy")


@dataclass(frozen=True)
class Task:
    """Something to train.

    Attributes:
        model: Makes it.
        batch: Makes inputs and labels from a generator, in host memory.
    """

    model: Callable[[], nn.Module]
    batch: Callable[[torch.Generator], tuple[torch.Tensor, torch.Tensor]]


def gpt(tiny: bool) -> Task:
    """GPT-2's smallest size: 124 million parameters, the embedding shared with the last layer."""
    size = GptSize(64, 16, 32, 2, 2) if tiny else GptSize(50257, 1024, 768, 12, 12)
    rows = 2 if tiny else 8

    def make() -> nn.Module:
        model = Gpt(size)
        nn.init.normal_(model.token.weight, std=0.02)
        model.head.weight = model.token.weight
        return model

    def batch(generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        text = torch.randint(size.words, (rows, size.context + 1), generator=generator)
        return text[:, :-1], text[:, 1:].flatten()

    return Task(make, batch)


def resnet(tiny: bool) -> Task:
    """ResNet-50, or the smallest one.

    Raises:
        ImportError: There is no torchvision.
    """
    models = importlib.import_module("torchvision.models")
    rows, side = (2, 32) if tiny else (64, 224)

    def batch(generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.randn(rows, 3, side, side, generator=generator), torch.randint(1000, (rows,), generator=generator)

    return Task(models.resnet18 if tiny else models.resnet50, batch)


TASKS: dict[str, Callable[[bool], Task]] = {"GPT, 124 M": gpt, "ResNet-50": resnet}


class Training:
    """One variant of one task.

    Args:
        variant: Of `VARIANTS`.
        initial: The model to begin with.
        device: Where.
        half: Compute in bfloat16.
    """

    def __init__(self, variant: str, initial: nn.Module, device: torch.device, half: bool = True) -> None:
        self.model = copy.deepcopy(initial).to(device)
        self.module: nn.Module = self.model
        self.device, self.half = device, half
        self.losses: list[torch.Tensor] = []
        self.optimizer = torch.optim.AdamW(self.model.parameters(), 1e-4)
        if variant == DDP:
            where = [device] if device.type == "cuda" else None
            self.module = nn.parallel.DistributedDataParallel(self.model, where, gradient_as_bucket_view=True)
        elif variant in (SPARED, BUCKETS):
            with unspared() if variant == BUCKETS else contextlib.nullcontext():
                hvdlite_torch.DistributedOptimizer(self.optimizer)

    def step(self, batch: tuple[torch.Tensor, torch.Tensor]) -> None:
        """One step. The host may go on before it is over."""
        inputs, labels = batch
        self.optimizer.zero_grad()
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.half):
            loss = F.cross_entropy(self.module(inputs), labels)
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self.losses.append(loss.detach())


@contextlib.contextmanager
def unspared() -> Iterator[None]:
    """Let an optimizer that is made inside of it exchange gradients though there is one rank, by NCCL if there is one."""
    here, module = world(), hvdlite_torch.device_exchange

    def connect(process_set: Any, device: Device) -> DeviceCollectives:
        library = nccl.load() if torch.cuda.is_available() else None
        if library is None:
            return DeviceCollectives(device)
        return NcclCollectives(device, 0, 1, library.connect(library.unique_id(), 1, 0), library.version)

    module.SPARE_ONE_RANK = False
    here.device_collectives = connect  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        module.SPARE_ONE_RANK = True
        del here.device_collectives


def wait(device: torch.device) -> None:
    """Let the host wait for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def start_ddp(device: torch.device) -> None:
    """Make torch's process group of one rank."""
    if not torch.distributed.is_initialized():
        backend = "nccl" if device.type == "cuda" else "gloo"
        torch.distributed.init_process_group(backend, store=torch.distributed.HashStore(), rank=0, world_size=1)


def measure_steps(device: torch.device, names: Sequence[str], rounds: int, steps: int, tiny: bool) -> dict[str, Any]:
    """Train all variants in turn, on this rank.

    Args:
        device: Where.
        names: Of `TASKS`.
        rounds: How often each variant has its turn.
        steps: Of a turn, which is timed as one.
        tiny: Small models.

    Returns:
        ``figures``: a list with seconds of a step, and the ratios to no exchange and to DDP; ``skipped``: reasons by task.
    """
    start_ddp(device)
    figures: list[dict[str, Any]] = []
    skipped: dict[str, str] = {}
    for name in names:
        try:
            task = TASKS[name](tiny)
        except ImportError as error:
            skipped[name] = str(error)
            continue
        torch.manual_seed(0)
        initial = task.model()
        trainings = {variant: Training(variant, initial, device) for variant in VARIANTS}
        seconds = _interleaved(trainings, task, device, rounds, steps)
        _check_losses(name, trainings)
        medians = {variant: statistics.median(each) for variant, each in seconds.items()}
        for variant, each in seconds.items():
            figures.append(
                {
                    **{"task": name, "parameters": parameters_of(initial), "variant": variant},
                    **{"median": medians[variant], "minimum": min(each), "samples": len(each)},
                    **{"to_nothing": medians[variant] / medians[NOTHING], "to_ddp": medians[variant] / medians[DDP]},
                    # Machines slow down for a while: pairs of neighbouring turns tell more than medians of all.
                    "to_ddp_paired": statistics.median(
                        mine / theirs for mine, theirs in zip(each, seconds[DDP], strict=True)
                    ),
                }
            )
    return {"figures": figures, "skipped": skipped}


def _interleaved(
    trainings: dict[str, Training], task: Task, device: torch.device, rounds: int, steps: int
) -> dict[str, list[float]]:
    """Seconds of a step, by variant."""
    seconds: dict[str, list[float]] = {variant: [] for variant in trainings}
    order = list(trainings)
    generator = torch.Generator().manual_seed(1)
    for turn in range(WARM_UP + rounds):
        inputs, labels = task.batch(generator)
        batch = inputs.to(device), labels.to(device)
        first = turn % len(order)
        for variant in order[first:] + order[:first]:
            wait(device)
            begin = time.perf_counter()
            for _ in range(steps):
                trainings[variant].step(batch)
            wait(device)
            if turn >= WARM_UP:
                seconds[variant].append((time.perf_counter() - begin) / steps)
    return seconds


def _check_losses(name: str, trainings: dict[str, Training]) -> None:
    last = {variant: float(training.losses[-1]) for variant, training in trainings.items()}
    for variant, loss in last.items():
        if not abs(loss - last[NOTHING]) <= LOSS_TOLERANCE * abs(last[NOTHING]):
            raise WrongResult(f"{name}: {variant}'s loss is {loss:.4f}, and {last[NOTHING]:.4f} without an exchange.")


def check_results(device: torch.device) -> None:
    """All variants get the same weights where rounding says little: a small model in float32.

    Raises:
        WrongResult: They do not.
    """
    start_ddp(device)
    torch.manual_seed(0)
    initial = nn.Sequential(nn.Linear(20, 50), nn.Tanh(), nn.Linear(50, 5))
    generator = torch.Generator().manual_seed(2)
    batches = [
        (torch.randn(32, 20, generator=generator), torch.randint(5, (32,), generator=generator)) for _ in range(8)
    ]
    ways: dict[str, torch.Tensor] = {}
    for variant in VARIANTS:
        training = Training(variant, initial, device, half=False)
        for inputs, labels in batches:
            training.step((inputs.to(device), labels.to(device)))
        ways[variant] = _weights(training.model) - _weights(initial)
    true = ways[NOTHING]
    check_weights({variant: float((way - true).norm() / true.norm()) for variant, way in ways.items()})


def _weights(model: nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().cpu().flatten().double() for parameter in model.parameters()])


def measure_memory(device: torch.device, mebibytes: int, rounds: int = 10) -> dict[str, float]:
    """Bytes per second of a copy on the device (read and written), and of NCCL's allreduce of one rank, which is one.

    Args:
        device: Where.
        mebibytes: Of one buffer.
        rounds: The fastest of so many.
    """
    source = torch.rand(mebibytes * 2**18, device=device)
    into = torch.empty_like(source)
    with unspared():
        collectives = world().device_collectives(None, ADAPTER.device(source))
    stream = collectives.stream

    def allreduce() -> None:
        collectives.allreduce(source, ReduceOp.SUM, stream, into)

    found = {}
    for name, work in (("copy", lambda: into.copy_(source)), ("allreduce", allreduce)):
        times = []
        for _ in range(rounds):
            into.zero_()
            wait(device)
            begin = time.perf_counter()
            work()
            wait(device)
            times.append(time.perf_counter() - begin)
        if not torch.equal(into, source):
            raise WrongResult(f"{name} of {mebibytes} MiB: not what was to be copied.")
        found[name] = 2 * source.nbytes / min(times)
    return found


def record_trace(device: torch.device, file: Path, tiny: bool) -> dict[str, Any]:
    """Record some steps of `BUCKETS` for chrome://tracing, compressed.

    Returns:
        How often the host waited for the GPU within these steps, and how many kernels were on which stream.
    """
    task = gpt(tiny)
    torch.manual_seed(0)
    training = Training(BUCKETS, task.model(), device)
    inputs, labels = task.batch(torch.Generator().manual_seed(1))
    batch = inputs.to(device), labels.to(device)
    for _ in range(5):
        training.step(batch)
    wait(device)
    activities = [torch.profiler.ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities) as profiler:
        with torch.profiler.record_function("steps"):
            for _ in range(2):
                training.step(batch)
        wait(device)
    with tempfile.TemporaryDirectory() as folder:
        plain = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(plain))
        events = [event for event in json.loads(plain.read_text())["traceEvents"] if event.get("ph") == "X"]
        with plain.open("rb") as source, gzip.open(file, "wb") as packed:
            shutil.copyfileobj(source, packed)
    steps = next(event for event in events if event["name"] == "steps" and event.get("cat") == "user_annotation")
    begin, end = steps["ts"], steps["ts"] + steps["dur"]
    streams: dict[str, int] = {}
    for event in events:
        if event.get("cat") == "kernel":
            stream = str(event["args"]["stream"])
            streams[stream] = streams.get(stream, 0) + 1
    waits = [event["name"] for event in events if event["name"] in WAITS and begin <= event["ts"] <= end]
    return {"waits": waits, "kernels_by_stream": streams, "file": str(file)}


def measure(device: torch.device, rounds: int, steps: int, tiny: bool, trace: Path | None) -> dict[str, Any]:
    """All that one rank can measure. It is a rank of `on_ranks`, so that no MPI is needed."""
    check_results(device)
    results: dict[str, Any] = measure_steps(device, list(TASKS), rounds, steps, tiny)
    results["memory"] = measure_memory(device, 1 if tiny else 1024)
    if trace is not None:
        results["trace"] = record_trace(device, trace, tiny)
    torch.distributed.destroy_process_group()
    return results


def report(results: dict[str, Any]) -> str:
    """The figures as text."""
    lines = [f"{'':12} {'':18} {'ms a step':>10} {'least':>8} {'to none':>8} {'to DDP':>8} {'paired':>8}"]
    for each in results["figures"]:
        lines.append(
            f"{each['task']:12} {each['variant']:18} {1e3 * each['median']:10.3f} {1e3 * each['minimum']:8.3f} "
            f"{each['to_nothing']:8.4f} {each['to_ddp']:8.4f} {each['to_ddp_paired']:8.4f}"
        )
    lines += [f"{name}: left out, {reason}" for name, reason in results["skipped"].items()]
    memory = results["memory"]
    lines.append(
        f"GB/s, read and written: a copy on the GPU {memory['copy'] / 1e9:.0f}, NCCL's allreduce of one rank "
        f"{memory['allreduce'] / 1e9:.0f} ({memory['allreduce'] / memory['copy']:.2f} of it)"
    )
    if "trace" in results:
        trace = results["trace"]
        lines.append(f"trace: {trace['file']}; the host waited {len(trace['waits'])} times in 2 steps {trace['waits']}")
    if "pair" in results:
        pair = results["pair"]
        for each in pair.get("steps", []):
            lines.append(f"two ranks, {each['variant']:18} {1e3 * each['median']:10.3f} ms a step")
        for each in pair.get("allreduce", []):
            lines.append(
                f"two ranks, allreduce of {each['bytes'] / 2**20:g} MiB: {each['bytes_per_second'] / 1e9:.2f} GB/s"
            )
        if "skipped" in pair:
            lines.append(f"two ranks on one GPU: left out, {pair['skipped']}")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """See the module. Returns the exit code."""
    parser = argparse.ArgumentParser("python -m benchmarks.gpu", description="Training steps on one GPU.")
    parser.add_argument("--rounds", type=int, default=16, help="turns of each variant (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=5, help="training steps in a turn (default: %(default)s)")
    parser.add_argument("--tiny", action="store_true", help="small models, to try it out")
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    parser.add_argument("--trace", type=Path, help="write a profiler's trace to this file (.json.gz)")
    parser.add_argument("--no-pair", action="store_true", help="leave out two ranks on one GPU")
    chosen = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print(f"benchmarks.gpu: torch {torch.__version__} sees no GPU here; nothing is measured.", file=sys.stderr)
        return 2
    from benchmarks import job
    from benchmarks.machine import machine

    device = torch.device("cuda", 0)
    settings = Config(advice=False)
    results: dict[str, Any] = on_ranks(
        1, measure, device, chosen.rounds, chosen.steps, chosen.tiny, chosen.trace, config=settings, timeout=420
    )[0]
    results["machine"] = {**machine(), "gpu": torch.cuda.get_device_name(0)}
    if not chosen.no_pair:
        torch.cuda.empty_cache()
        try:
            pair = job.run("gpu_pair", 2, {"tiny": chosen.tiny}, {"HVDLITE_SHARE_GPU": "1"}, PAIR_SECONDS)
        except job.JobFailed as error:
            pair = {"skipped": str(error)}
        results["pair"] = pair
    print(report(results))
    if chosen.json is not None:
        chosen.json.write_text(json.dumps(results, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
