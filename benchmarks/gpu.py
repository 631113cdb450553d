"""Measures the time that hvdlite and torch's DDP add to a training step on a GPU: ``python -m benchmarks.gpu``.

One rank on one GPU trains a GPT of 124 million parameters and a ResNet-50 (torchvision's, or ours). Four variants take turns:

    no exchange        the optimizer alone
    DDP                torch's DistributedDataParallel with NCCL and one rank
    hvdlite            one rank, for which hvdlite has nothing to exchange
    hvdlite, buckets   hooks, packing, launching and dividing as with many ranks, and an NCCL communicator of one rank

Then two ranks train the GPT on the same GPU, if NCCL accepts that (`benchmarks.gpu_pair`). The program takes a few minutes.
`--json` writes all figures, `--trace` writes a trace of some steps for chrome://tracing. The parts are independent: the program
writes the figures after each part, shows failures at the end, and then ends with code 1. Without a GPU it ends with code 2.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import functools
import gc
import gzip
import importlib
import json
import shutil
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import hvdlite_torch
import hvdlite_torch.sync.device
from benchmarks.checks import WrongResult, check_weights
from benchmarks.figures import in_turn
from benchmarks.models import Gpt, GptSize, ResNet, parameters_of
from hvdlite.api import world
from hvdlite.comm.gpu import nccl
from hvdlite.comm.gpu.collectives import DeviceCollectives
from hvdlite.comm.gpu.nccl_collectives import NcclCollectives
from hvdlite.config import Config
from hvdlite.protocols import Device, ReduceOp
from hvdlite.testing import on_ranks
from hvdlite_torch.tensors.adapter import ADAPTER

NOTHING, DDP, SPARED, BUCKETS = "no exchange", "DDP", "hvdlite", "hvdlite, buckets"
VARIANTS = (NOTHING, DDP, SPARED, BUCKETS)
WARM_UP = 3
TRACED = 2  # steps in a trace
LOSS_TOLERANCE = 0.1  # relative, in bfloat16 after some steps: attention and cuDNN sum gradients in any order
PAIR_SECONDS = 75.0
WAITS = {
    *("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cudaMemcpy", "cudaFree"),
    *("cuStreamSynchronize", "cuCtxSynchronize", "cuEventSynchronize"),
}
"""The calls in which the host waits for the GPU, by their names in the profiler."""


@dataclass(frozen=True)
class Task:
    """A model to train.

    Attributes:
        model: Makes the model.
        batch: Makes inputs and labels from a generator, in host memory.
    """

    model: Callable[[], nn.Module]
    batch: Callable[[torch.Generator], tuple[torch.Tensor, torch.Tensor]]


def gpt(tiny: bool) -> Task:
    """Return the task of the smallest GPT-2: 124 million parameters. The embedding and the last layer share their weights."""
    size = GptSize(64, 16, 32, 2, 2) if tiny else GptSize(50257, 1024, 768, 12, 12)
    rows = 2 if tiny else 8

    def batch(generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        text = torch.randint(size.words, (rows, size.context + 1), generator=generator)
        return text[:, :-1], text[:, 1:].flatten()

    return Task(lambda: Gpt(size, tied=True), batch)


def resnet(tiny: bool) -> Task:
    """Return the task of a ResNet-50: torchvision's, if torchvision can be imported, else that of `benchmarks.models`."""
    make: Callable[[], nn.Module] = functools.partial(ResNet, (1, 1, 1, 1), 8) if tiny else ResNet
    if not tiny:
        with contextlib.suppress(Exception):  # torchvision may be for another torch
            make = importlib.import_module("torchvision.models").resnet50
    rows, side = (2, 32) if tiny else (64, 224)

    def batch(generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.randn(rows, 3, side, side, generator=generator), torch.randint(1000, (rows,), generator=generator)

    return Task(make, batch)


TASKS: dict[str, Callable[[bool], Task]] = {"GPT, 124 M": gpt, "ResNet-50": resnet}


class Training:
    """Trains a model by one variant.

    Args:
        variant: A name in `VARIANTS`.
        initial: The model with the initial weights. A copy of the model is trained.
        device: The device to train on.
        half: Whether to compute in bfloat16.
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
        """Make one step. The call may return before the device has finished the step."""
        inputs, labels = batch
        self.optimizer.zero_grad()
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.half):
            loss = F.cross_entropy(self.module(inputs), labels)
        loss.backward()
        self.optimizer.step()
        self.losses.append(loss.detach())


@contextlib.contextmanager
def unspared() -> Iterator[list[DeviceCollectives]]:
    """Make optimizers that are made in the body exchange gradients although there is one rank, by NCCL if it can be loaded.

    Yields:
        A list to which the collectives of each optimizer are added.
    """
    here, module = world(), hvdlite_torch.sync.device
    made: list[DeviceCollectives] = []

    def connect(device: Device) -> DeviceCollectives:
        library = nccl.load() if torch.cuda.is_available() else None
        if library is None:
            made.append(DeviceCollectives(device))
        else:
            communicator = library.connect(library.unique_id(), 1, 0)
            made.append(NcclCollectives(device, 0, 1, communicator, library.version))
        return made[-1]

    module.SPARE_ONE_RANK = False
    here.group().device_collectives = connect  # type: ignore[method-assign]
    try:
        yield made
    finally:
        module.SPARE_ONE_RANK = True
        del here.group().device_collectives


def wait(device: torch.device) -> None:
    """Wait until the device has finished its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def start_ddp(device: torch.device) -> None:
    """Make torch's process group of one rank, if there is none."""
    if not torch.distributed.is_initialized():
        backend = "nccl" if device.type == "cuda" else "gloo"
        store = torch.distributed.HashStore()  # type: ignore[attr-defined]  # torch does not say that it exports this
        torch.distributed.init_process_group(backend, store=store, rank=0, world_size=1)


def measure_steps(device: torch.device, name: str, rounds: int, steps: int, tiny: bool) -> list[dict[str, Any]]:
    """Train all variants in turn on this rank.

    Args:
        device: The device to train on.
        name: A name in `TASKS`.
        rounds: The number of timed turns of each variant.
        steps: The number of steps in a turn, which are timed together.
        tiny: Whether to train a small model.

    Returns:
        One entry for each variant: the seconds of a step, the ratios to no exchange and to DDP, the seconds after which the
        host has launched a step, and the last loss.
    """
    start_ddp(device)
    task = TASKS[name](tiny)
    torch.manual_seed(0)
    initial = task.model()
    trainings = {variant: Training(variant, initial, device) for variant in VARIANTS}
    seconds, host = _interleaved(trainings, task, device, rounds, steps)
    medians = {variant: statistics.median(each) for variant, each in seconds.items()}
    return [
        {
            **{"task": name, "parameters": parameters_of(initial), "variant": variant},
            **{"median": medians[variant], "minimum": min(each), "samples": len(each)},
            **{"to_nothing": medians[variant] / medians[NOTHING], "to_ddp": medians[variant] / medians[DDP]},
            # A machine may be slow for some time: ratios of neighbouring turns are more exact than ratios of medians.
            "to_ddp_paired": statistics.median(mine / theirs for mine, theirs in zip(each, seconds[DDP], strict=True)),
            "host": statistics.median(host[variant]),
            "loss": float(trainings[variant].losses[-1]),
        }
        for variant, each in seconds.items()
    ]


def _interleaved(
    trainings: dict[str, Training], task: Task, device: torch.device, rounds: int, steps: int
) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Let the variants take turns. Return the seconds of a step in each timed turn by variant, and those of the host."""
    seconds: dict[str, list[float]] = {variant: [] for variant in trainings}
    host: dict[str, list[float]] = {variant: [] for variant in trainings}
    order = list(trainings)
    generator = torch.Generator().manual_seed(1)
    for turn in range(WARM_UP + rounds):
        inputs, labels = task.batch(generator)
        batch = inputs.to(device), labels.to(device)
        for variant in in_turn(order, turn):
            wait(device)
            begin = time.perf_counter()
            for _ in range(steps):
                trainings[variant].step(batch)
            launched = time.perf_counter()
            wait(device)
            if turn >= WARM_UP:
                seconds[variant].append((time.perf_counter() - begin) / steps)
                host[variant].append((launched - begin) / steps)
    return seconds, host


def check_losses(figures: Sequence[dict[str, Any]]) -> None:
    """Compare the last losses of a task's variants.

    Raises:
        WrongResult: A loss differs from the loss without an exchange.
    """
    true = next(each["loss"] for each in figures if each["variant"] == NOTHING)
    for each in figures:
        if not abs(each["loss"] - true) <= LOSS_TOLERANCE * abs(true):
            raise WrongResult(
                f"{each['task']}: {each['variant']}'s loss is {each['loss']:.4f}, and {true:.4f} without an exchange."
            )


def check_results(device: torch.device) -> dict[str, float]:
    """Check that all variants get the same weights. The model is small and in float32, so rounding errors are small.

    Returns:
        The distance of each variant's weights from the weights without an exchange, relative to the change of the latter.

    Raises:
        WrongResult: A variant gets other weights.
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
    deviations = {variant: float((way - true).norm() / true.norm()) for variant, way in ways.items()}
    check_weights(deviations)
    return deviations


def _weights(model: nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().cpu().flatten().double() for parameter in model.parameters()])


def measure_memory(device: torch.device, mebibytes: int, rounds: int = 10) -> dict[str, float]:
    """Return the bytes per second, read and written, of a copy on the device and of NCCL's allreduce of one rank (a copy).

    Args:
        device: The device to measure.
        mebibytes: The size of one buffer in MiB.
        rounds: The number of repetitions. The fastest one counts.
    """
    source = torch.rand(mebibytes * 2**18, device=device)
    into = torch.empty_like(source)
    with unspared():
        collectives = world().group().device_collectives(ADAPTER.device(source))
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


def record_trace(training: Training, batch: tuple[torch.Tensor, torch.Tensor], file: Path) -> dict[str, Any]:
    """Record one step and then `TRACED` steps, and write a compressed trace for chrome://tracing.

    Args:
        training: The training to trace, after some steps.
        batch: The batch of the steps.
        file: The file to write.

    Returns:
        ``waits``: the calls in which the host waited for the GPU during the `TRACED` steps; the figures of `overlap`;
        ``file``: the path of the file.
    """
    activities = [torch.profiler.ProfilerActivity.CPU]
    if training.device.type == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    wait(training.device)
    with torch.profiler.profile(activities=activities) as profiler:
        training.step(batch)  # the profiler may miss the first kernels
        wait(training.device)
        with torch.profiler.record_function("steps"):
            for _ in range(TRACED):
                training.step(batch)
        wait(training.device)
    with tempfile.TemporaryDirectory() as folder:
        plain = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(plain))
        events = [event for event in json.loads(plain.read_text())["traceEvents"] if event.get("ph") == "X"]
        with plain.open("rb") as source, gzip.open(file, "wb") as packed:
            shutil.copyfileobj(source, packed)
    waits, launches = waits_in("steps", events), launches_in("steps", events) / TRACED
    return {"waits": waits, "launches": launches, **overlap(events), "file": str(file)}


def waits_in(annotation: str, events: Sequence[dict[str, Any]]) -> list[str]:
    """Return the names of the calls in which the host waited for the GPU, from a profiler's complete events.

    Args:
        annotation: The name of the recorded range to search.
        events: The events of a trace for Chrome.
    """
    # A copy from or to memory that is not page-locked makes the host wait, whichever call starts the copy.
    waits = [event for event in events if event["name"] in WAITS]
    waits += [event for event in events if event.get("cat") == "gpu_memcpy" and "Pageable" in event["name"]]
    return [event["name"] for event in _within(annotation, events, waits)]


def launches_in(annotation: str, events: Sequence[dict[str, Any]]) -> int:
    """Return how many kernels, copies and fills the host launched in a recorded range. See `waits_in` for the arguments."""
    calls = [event for event in events if event.get("cat") in ("cuda_runtime", "cuda_driver")]
    launches = [event for event in calls if any(word in event["name"] for word in ("Launch", "Memcpy", "Memset"))]
    return len(_within(annotation, events, launches))


def _within(
    annotation: str, events: Sequence[dict[str, Any]], chosen: Sequence[dict[str, Any]]
) -> list[dict[str, Any]]:
    """Return those of the `chosen` events that begin in a recorded range."""
    spans = [
        (event["ts"], event["ts"] + event["dur"])
        for event in events
        if event["name"] == annotation and event.get("cat") == "user_annotation"
    ]
    return [event for event in chosen if any(begin <= event["ts"] <= end for begin, end in spans)]


def overlap(events: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return how much of the work on other streams was done while the busiest stream was busy.

    Args:
        events: A profiler's complete events, from a trace for Chrome.

    Returns:
        ``kernels_by_stream``: the number of kernels, copies and fills by stream; ``beside``: the microseconds of work on all
        streams but the busiest; ``overlapped``: the part of ``beside`` during which the busiest stream was busy.
    """
    spans: dict[str, list[tuple[float, float]]] = {}
    kernels: dict[str, int] = {}
    for event in events:
        if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset"):
            stream = str(event["args"]["stream"])
            spans.setdefault(stream, []).append((event["ts"], event["ts"] + event["dur"]))
            kernels[stream] = kernels.get(stream, 0) + 1
    busiest = max(spans, key=lambda stream: sum(stop - start for start, stop in spans[stream]), default="")
    busy = spans.pop(busiest, [])
    others = [span for each in spans.values() for span in each]
    return {
        "kernels_by_stream": kernels,
        "beside": sum(stop - start for start, stop in others),
        "overlapped": sum(max(0.0, min(a[1], b[1]) - max(a[0], b[0])) for a in others for b in busy),
    }


def trace_buckets(device: torch.device, file: Path, tiny: bool) -> dict[str, Any]:
    """Record the trace of the variant `BUCKETS`."""
    task = gpt(tiny)
    torch.manual_seed(0)
    training = Training(BUCKETS, task.model(), device)
    inputs, labels = task.batch(torch.Generator().manual_seed(1))
    batch = inputs.to(device), labels.to(device)
    for _ in range(5):
        training.step(batch)
    return record_trace(training, batch, file)


class Parts:
    """Collects the results of the parts. A part may fail without an effect on the others.

    Args:
        keep: A function that is called with all results after each part.
    """

    def __init__(self, keep: Callable[[dict[str, Any]], None]) -> None:
        self.results: dict[str, Any] = {"figures": [], "failures": {}}
        self._keep = keep

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Run one part in a with statement, whose body adds to `results`. An error in the body only goes to ``failures``."""
        try:
            yield
        except Exception as error:
            traceback.print_exc()
            self.results["failures"][name] = f"{type(error).__name__}: {error}"
        gc.collect()  # models and their hooks refer to each other
        self._keep(self.results)


def measure(device: torch.device, rounds: int, steps: int, tiny: bool, trace: Path | None, parts: Parts) -> None:
    """Measure everything that needs one rank. The rank is a thread of `on_ranks`, so MPI is not needed."""
    results = parts.results
    with parts.part("weights"):
        results["weights"] = check_results(device)
    for name in TASKS:
        with parts.part(name):
            figures = measure_steps(device, name, rounds, steps, tiny)
            results["figures"] += figures
            check_losses(figures)
    with parts.part("memory"):
        results["memory"] = measure_memory(device, 1 if tiny else 1024)
    if trace is not None:
        with parts.part("trace"):
            results["trace"] = trace_buckets(device, trace, tiny)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def report(results: dict[str, Any]) -> str:
    """Return the figures as text."""
    lines = [f"{'':12} {'':18} {'ms a step':>10} {'least':>8} {'to none':>8} {'to DDP':>8} {'paired':>8} {'host':>8}"]
    for each in results["figures"]:
        lines.append(
            f"{each['task']:12} {each['variant']:18} {1e3 * each['median']:10.3f} {1e3 * each['minimum']:8.3f} "
            f"{each['to_nothing']:8.4f} {each['to_ddp']:8.4f} {each['to_ddp_paired']:8.4f} {1e3 * each['host']:8.3f}"
        )
    if "weights" in results:
        way = ", ".join(f"{variant} {each:.1e}" for variant, each in results["weights"].items())
        lines.append(f"weights' distance from training without an exchange, of the way they have gone: {way}")
    if "memory" in results:
        memory = results["memory"]
        lines.append(
            f"GB/s, read and written: a copy on the GPU {memory['copy'] / 1e9:.0f}, NCCL's allreduce of one rank "
            f"{memory['allreduce'] / 1e9:.0f} ({memory['allreduce'] / memory['copy']:.2f} of it)"
        )
    if "trace" in results:
        lines.append(_of_trace("trace", results["trace"]))
    if "pair" in results:
        pair = results["pair"]
        for each in pair["steps"]:
            lines.append(
                f"two ranks, {each['variant']:18} {1e3 * each['median']:10.3f} ms a step, at least {1e3 * each['minimum']:.3f}"
            )
        for each in pair["allreduce"]:
            lines.append(
                f"two ranks, allreduce of {each['bytes'] / 2**20:g} MiB: {each['bytes_per_second'] / 1e9:.2f} GB/s"
            )
        if pair["trace"]:
            lines.append(_of_trace("two ranks, trace", pair["trace"]))
    lines += [f"{name} FAILED: {reason}" for name, reason in results["failures"].items()]
    return "\n".join(lines)


def _of_trace(title: str, trace: dict[str, Any]) -> str:
    return (
        f"{title}: {trace['file']}; the host waited {len(trace['waits'])} times in {TRACED} steps {trace['waits']}, "
        f"and launched {trace['launches']:g} kernels, copies and fills in a step; "
        f"{trace['overlapped']:.0f} of {trace['beside']:.0f} µs beside the computing stream were while that was busy"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the program, and return its exit code."""
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

    def keep(results: dict[str, Any]) -> None:
        if chosen.json is not None:
            chosen.json.write_text(json.dumps(results, indent=1))

    device = torch.device("cuda", 0)
    parts = Parts(keep)
    results = parts.results
    with parts.part("machine"):
        results["machine"] = {**machine(), "gpu": torch.cuda.get_device_name(0)}
    with parts.part("one rank"):
        options = chosen.rounds, chosen.steps, chosen.tiny, chosen.trace, parts
        on_ranks(1, measure, device, *options, config=Config(advice=False), timeout=420)
    if not chosen.no_pair:
        torch.cuda.empty_cache()
        with parts.part("two ranks"):
            traced = None
            if chosen.trace is not None and "trace" in results:
                traced = str(chosen.trace.resolve().with_name(f"pair_{chosen.trace.name}"))
            settings = {"tiny": chosen.tiny, "trace": traced}
            results["pair"] = job.run("gpu_pair", 2, settings, {"HVDLITE_SHARE_GPU": "1"}, PAIR_SECONDS)
    print(report(results))
    return 1 if results["failures"] else 0


if __name__ == "__main__":
    sys.exit(main())
