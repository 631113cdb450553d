"""Measure the images per second of training on random images: Horovod's well-known benchmark.

    hvdliterun -np 2 python examples/torch_synthetic_benchmark.py
    hvdliterun -np 2 python examples/torch_synthetic_benchmark.py --model resnet50 --shard

The model is a classifier of torchvision (`pip install torchvision`), or "small", a network of four convolutions in this file.
Every rank has a batch of its own. The program prints the images per second of each rank and of all ranks together. Compare
"Img/sec per CPU" on one rank and on several ranks: the difference is the cost of the exchange, and of the memory and cores that
the ranks share. Each rank uses one GPU if the machine has any, or the CPU with --no-cuda.
"""

from __future__ import annotations

import argparse
import importlib.util
import statistics
import time
from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional as F

import hvdlite_torch as hvd

CLASSES = 1000
IMAGE_SIZE = 224


def small() -> nn.Module:
    """Return a network that turns images (n, 3, height, width) into logits (n, 1000)."""
    return nn.Sequential(
        *(nn.Conv2d(3, 32, 7, stride=4, padding=3), nn.ReLU()),
        *(nn.Conv2d(32, 64, 3, stride=2, padding=1), nn.ReLU()),
        *(nn.Conv2d(64, 128, 3, stride=2, padding=1), nn.ReLU()),
        *(nn.Conv2d(128, 256, 3, stride=2, padding=1), nn.ReLU()),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(256, CLASSES)),
    )


def builder(name: str) -> Callable[[], nn.Module]:
    """Return the function that makes the model of this name. Raise ValueError if there is no such model."""
    if name == "small":
        return small
    if importlib.util.find_spec("torchvision") is None:
        raise ValueError(f"{name} is not small, and torchvision, which may have it, is not installed")
    import torchvision

    known = torchvision.models.list_models(module=torchvision.models)
    if name not in known:
        raise ValueError(f"{name} is none of small, {', '.join(known)}")
    return torchvision.models.get_model_builder(name)


def summary(values: list[float], scale: float = 1) -> str:
    """Return the mean and 1.96 standard deviations as text: 95 % of normally distributed values are in this range."""
    return f"{scale * statistics.fmean(values):.1f} +-{scale * 1.96 * statistics.pstdev(values):.1f}"


def parse_arguments() -> argparse.Namespace:
    """Parse the command line. It has the options of Horovod's benchmark and some more."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)

    def whole_number(text: str) -> int:
        if (value := int(text)) < 1:
            raise argparse.ArgumentTypeError(f"{text} is below 1")
        return value

    parser.add_argument("--model", default="small", help='"small", or a classifier of torchvision, such as resnet50')
    parser.add_argument("--batch-size", type=whole_number, default=32, help="images in a step, of each rank")
    parser.add_argument("--num-warmup-batches", type=whole_number, default=10, help="steps before the clock starts")
    parser.add_argument("--num-batches-per-iter", type=whole_number, default=10, help="steps that are timed together")
    parser.add_argument("--num-iters", type=whole_number, default=10, help="how often that is done")
    parser.add_argument("--fp16-allreduce", action="store_true", help="exchange gradients as float16")
    parser.add_argument("--use-adasum", action="store_true", help="combine the ranks' steps by Adasum")
    parser.add_argument("--shard", action="store_true", help="each rank steps its share of the parameters only")
    parser.add_argument("--no-cuda", action="store_true", help="stay on the CPU where there is a GPU")
    arguments = parser.parse_args()
    try:
        arguments.builder = builder(arguments.model)
    except ValueError as error:
        parser.error(f"argument --model: {error}")
    return arguments


def main() -> None:
    """Train on the same random images again and again, and print the speed."""
    arguments = parse_arguments()
    hvd.init()
    if hvd.rank() == 0:
        print(hvd.describe(), flush=True)
    cuda = torch.cuda.is_available() and not arguments.no_cuda
    if cuda:
        torch.cuda.set_device(hvd.local_rank())
    device, place = ("cuda", "GPU") if cuda else ("cpu", "CPU")

    torch.manual_seed(hvd.rank())  # different images on every rank
    images = torch.randn(arguments.batch_size, 3, IMAGE_SIZE, IMAGE_SIZE, device=device)
    labels = torch.randint(CLASSES, (arguments.batch_size,), device=device)
    model = arguments.builder().to(device)
    hvd.broadcast_parameters(model.state_dict())
    lr = 0.01 if arguments.use_adasum else hvd.scale_lr(0.01)  # Adasum needs no larger rate for more ranks
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=lr),
        model.named_parameters(),
        compression=hvd.Compression.fp16 if arguments.fp16_allreduce else hvd.Compression.none,
        op=hvd.Adasum if arguments.use_adasum else hvd.Average,
        shard=arguments.shard,
    )

    def train(steps: int) -> float:
        """Make some steps, and return their seconds."""
        if cuda:
            torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(steps):
            optimizer.zero_grad()
            F.cross_entropy(model(images), labels).backward()
            optimizer.step()
        if cuda:
            torch.cuda.synchronize()
        return time.perf_counter() - begin

    @hvd.rank_zero_only
    def say(text: str) -> None:
        print(text, flush=True)

    say(f"Model: {arguments.model}")
    say(f"Batch size: {arguments.batch_size}")
    say(f"Number of {place}s: {hvd.size()}")
    say("Running warmup...")
    train(arguments.num_warmup_batches)
    say("Running benchmark...")
    rates: list[float] = []
    for number in range(arguments.num_iters):
        rate = arguments.batch_size * arguments.num_batches_per_iter / train(arguments.num_batches_per_iter)
        rates.append(float(hvd.allreduce(torch.tensor(rate, dtype=torch.float64))))  # the mean over the ranks
        say(f"Iter #{number}: {rates[-1]:.1f} img/sec per {place}")
    say(f"Img/sec per {place}: {summary(rates)}")
    say(f"Total img/sec on {hvd.size()} {place}(s): {summary(rates, hvd.size())}")


if __name__ == "__main__":
    main()
