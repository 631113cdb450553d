"""Train a convolutional network whose layers are on different ranks, in micro-batches, with PyTorch.

    hvdliterun -np 2 python examples/torch_pipeline.py
    hvdliterun -np 4 python examples/torch_pipeline.py --dp 2           # two pipelines side by side
    hvdliterun -np 2 python examples/torch_pipeline.py --check --plot bubble.png

The data are the handwritten digits of scikit-learn: 1797 images of 8 × 8 pixels. At the end, rank 0 prints the accuracy on the
test images, and the share of the time in which the ranks waited for each other. --check computes in float64, trains the same
model in one process too, and compares the weights. --plot draws the time of a step by the number of micro-batches.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from tqdm import tqdm

import hvdlite_torch as hvd

TRAIN = 1408  # whole batches of 64


def load() -> tuple[torch.Tensor, torch.Tensor]:
    """Return images (1797, 1, 8, 8) from 0 to 1, and labels (1797,), in an order that is the same on every rank."""
    images, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    return torch.tensor(images / 16, dtype=torch.get_default_dtype()).reshape(-1, 1, 8, 8)[order], torch.tensor(labels)[
        order
    ]


def network(width: int) -> nn.Sequential:
    """Return the model with weights that are the same on every rank."""
    torch.manual_seed(0)
    blocks = [layer for _ in range(4) for layer in (nn.Conv2d(width, width, 3, padding=1), nn.ReLU())]
    head = (nn.MaxPool2d(2), nn.Flatten(), nn.Linear(16 * width, 10))
    return nn.Sequential(nn.Conv2d(1, width, 3, padding=1), nn.ReLU(), *blocks, *head)


def batches(epochs: int, size: int) -> list[torch.Tensor]:
    """Return the numbers of the images of each batch, the same on every rank."""
    shuffle = torch.Generator().manual_seed(1)
    return [batch for _ in range(epochs) for batch in torch.randperm(TRAIN, generator=shuffle).split(size)]


def draw(arguments: argparse.Namespace, pipelines: hvd.ProcessSet, images: torch.Tensor, labels: torch.Tensor) -> None:
    """Draw the time of a step by the number of micro-batches. Every rank calls this; rank 0 draws."""
    counts = [count for count in (1, 2, 4, 8, 16) if arguments.batch_size % count == 0]
    medians, shares = [], []
    for count in counts:
        example = images[: arguments.batch_size // count]
        pipeline = hvd.Pipeline(
            network(arguments.width), pipelines, loss=F.cross_entropy, microbatches=count, example=example
        )
        seconds = []
        for _ in range(8):
            begin = time.perf_counter()
            pipeline.step(images[: arguments.batch_size], labels[: arguments.batch_size])
            seconds.append(time.perf_counter() - begin)
        medians.append(1e3 * statistics.median(seconds[2:]))
        shares.append(pipeline.report())
    if hvd.rank() == 0:
        print("\n".join(shares))
        import matplotlib

        matplotlib.use("Agg")
        import matplotlib.pyplot as plt

        picture, axes = plt.subplots(layout="constrained")
        axes.plot(counts, medians, marker="o")
        axes.set_xscale("log", base=2)
        axes.set_ylim(bottom=0)
        axes.set_xlabel("micro-batches")
        axes.set_ylabel("median of a step, ms")
        axes.set_title(f"{pipelines.size()} stages, batches of {arguments.batch_size}")
        picture.savefig(arguments.plot, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--batch-size", type=int, default=64, help="of each pipeline")
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--schedule", default="1f1b", choices=["1f1b", "gpipe", "interleaved"])
    parser.add_argument("--width", type=int, default=32, help="channels of the convolutions")
    parser.add_argument("--dp", type=int, default=1, help="pipelines side by side")
    parser.add_argument("--check", action="store_true", help="train in one process too, and compare the weights")
    parser.add_argument(
        "--plot", type=Path, metavar="FILE", help="draw the time of a step by the number of micro-batches"
    )
    arguments = parser.parse_args()
    if arguments.plot and not arguments.plot.absolute().parent.is_dir():
        parser.error(f"--plot {arguments.plot}: there is no folder {arguments.plot.absolute().parent}")

    hvd.init()
    torch.set_num_threads(max(1, torch.get_num_threads() // hvd.local_size()))  # the ranks share the cores
    grid = hvd.ProcessGrid(dp=arguments.dp, pp=-1)
    if hvd.rank() == 0:
        print(grid, flush=True)
    if arguments.check:
        torch.set_default_dtype(torch.float64)
    images, labels = load()
    pipeline = hvd.Pipeline(
        network(arguments.width),
        grid["pp"],
        loss=F.cross_entropy,
        microbatches=arguments.microbatches,
        schedule=arguments.schedule,
        example=images[: max(1, arguments.batch_size // arguments.microbatches)],
    )
    optimizer = torch.optim.Adam(pipeline.parameters(), lr=2e-3)
    optimizer = hvd.DistributedOptimizer(optimizer, pipeline.named_parameters(), process_set=grid["dp"])
    work = batches(arguments.epochs, arguments.batch_size * arguments.dp)
    with tqdm(work, unit="batch", disable=hvd.rank() != 0, mininterval=0.5) as progress:
        for batch in progress:
            mine = batch.chunk(arguments.dp)[grid.place["dp"]]
            loss = pipeline.step(images[mine], labels[mine], optimizer)
            progress.set_postfix(loss=f"{loss.item():.3f}", refresh=False)

    report, trained = pipeline.report(), pipeline.full_state_dict()
    model = network(arguments.width)
    model.load_state_dict(trained)
    with torch.no_grad():
        right = (model(images[TRAIN:]).argmax(1) == labels[TRAIN:]).float().mean()
    if hvd.rank() == 0:
        print(f"stages begin with layers {', '.join(['0', *pipeline.cuts])}")
        print(report)
        print(f"test accuracy: {100 * right:.2f} % of {len(labels) - TRAIN} images")
    if arguments.check:
        alone = network(arguments.width)
        adam = torch.optim.Adam(alone.parameters(), lr=2e-3)
        for batch in batches(arguments.epochs, arguments.batch_size * arguments.dp):
            adam.zero_grad()
            F.cross_entropy(alone(images[batch]), labels[batch]).backward()
            adam.step()
        with torch.no_grad():
            same = (alone(images[TRAIN:]).argmax(1) == model(images[TRAIN:]).argmax(1)).float().mean()
            away = max((trained[name] - value).abs().max() for name, value in alone.state_dict().items())
        if hvd.rank() == 0:
            print(f"one process: weights differ by {away:.2g} at most, {100 * same:.1f} % of the answers are the same")
    if arguments.plot:
        draw(arguments, grid["pp"], images, labels)


if __name__ == "__main__":
    main()
