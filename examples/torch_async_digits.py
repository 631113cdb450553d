"""Train a network on handwritten digits with a parameter server, where one rank may be slower than the others.

    hvdliterun -np 4 python examples/torch_async_digits.py --mode async --slow-rank 5
    hvdliterun -np 4 python examples/torch_async_digits.py --mode ssp --staleness 3 --slow-rank 5
    hvdliterun -np 4 python examples/torch_async_digits.py --mode hogwild
    hvdliterun -np 4 python examples/torch_async_digits.py --mode all --slow-rank 5 --plot modes.png

The data comes with scikit-learn: 1797 images of 8 × 8 pixels. All ranks train for the same time. Each draws its own batches of
all training images, and meets the others at the end of each interval only, to test the common parameters. With --slow-rank, the
last rank that trains computes each batch several times; with --sleep too, it sleeps for that time, as if it were on a slower
machine. At the end, rank 0 prints for each mode how many samples all ranks have
used in a second, how many pushes of others a push has missed on average, and the accuracy on the test images. --plot draws the
accuracy by time. The comment "hvd" marks the lines that hvdlite adds to an ordinary program.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from tqdm import tqdm

import hvdlite_torch as hvd

TRAIN = 1437


def load() -> tuple[torch.Tensor, torch.Tensor]:
    """Return images (1797, 1, 8, 8) from 0 to 1, and labels (1797,), in an order that is the same on every rank."""
    images, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    return torch.tensor(images / 16, dtype=torch.float32).reshape(-1, 1, 8, 8)[order], torch.tensor(labels)[order]


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(256, 64), nn.ReLU(), nn.Linear(64, 10)),
    )


def train(
    mode: str, arguments: argparse.Namespace, images: torch.Tensor, labels: torch.Tensor
) -> list[tuple[float, float]]:
    """Train for a while. Every rank calls this.

    Returns:
        On rank 0, after each interval: the seconds of training, and the accuracy on the test images in percent.
    """
    model = network()
    sgd = torch.optim.SGD(model.parameters(), lr=arguments.lr)
    optimizer = hvd.AsyncDistributedOptimizer(  # hvd: the one line
        *(sgd, model),
        mode="async" if mode == "hogwild" else mode,
        hogwild=mode == "hogwild",  # hvd: no servers, the ranks share the memory of the parameters
        staleness=arguments.staleness if mode == "ssp" else None,
        servers=arguments.servers,
    )
    if optimizer.is_server:  # hvd: with --servers, the last ranks hold the parameters only
        hvd.serve_parameters()
        used = 0
    else:
        slow = hvd.rank() == optimizer.workers[-1]
        draw = torch.Generator().manual_seed(1 + hvd.rank())  # hvd: each rank draws its own batches
        points, used, spent = [(0.0, accuracy(model, images, labels))], 0, 0.0
        with tqdm(
            total=arguments.intervals, desc=mode, unit="test", disable=hvd.rank() != 0, mininterval=0.5
        ) as progress:
            for _ in range(arguments.intervals):
                optimizer.synchronize()  # hvd: all ranks begin the interval together
                begin = time.perf_counter()
                while time.perf_counter() < begin + arguments.seconds / arguments.intervals:
                    batch = torch.randint(TRAIN, (arguments.batch_size,), generator=draw)
                    computed = time.perf_counter()
                    for _ in range(arguments.slow_rank if slow and not arguments.sleep else 1):
                        optimizer.zero_grad()
                        loss = F.cross_entropy(model(images[batch]), labels[batch])
                        loss.backward()
                    if slow and arguments.sleep:
                        time.sleep((arguments.slow_rank - 1) * (time.perf_counter() - computed))
                    optimizer.step()
                    used += len(batch)
                optimizer.synchronize()  # hvd: wait for the last steps of all ranks, and get the common parameters
                spent += time.perf_counter() - begin
                points.append((spent, accuracy(model, images, labels)))
                progress.set_postfix(accuracy=f"{points[-1][1]:.1f} %", refresh=False)
                progress.update()
        optimizer.finish()
    totals: list[Any] = hvd.allgather_object((used, optimizer.mean_delay, optimizer.pushes))
    if hvd.rank() != 0:
        return []
    pushes = sum(count for _, _, count in totals)
    delay = sum(mean * count for _, mean, count in totals) / pushes
    print(
        f"{mode}: {sum(each for each, _, _ in totals) / spent:.0f} samples/s, pushes of the ranks "
        f"{', '.join(str(count) for _, _, count in totals)}, missed {delay:.2f} pushes of others on average, "
        f"test accuracy: {points[-1][1]:.2f} %",
        flush=True,
    )
    return points


def accuracy(model: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> float:
    """Return the share of the test images that the model recognizes, in percent."""
    with torch.no_grad():
        return 100 * float((model(images[TRAIN:]).argmax(1) == labels[TRAIN:]).float().mean())


def draw_all(runs: dict[str, list[tuple[float, float]]], path: Path, title: str) -> None:
    """Draw the test accuracy by the time of training, a line for each mode."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    picture, axes = plt.subplots(layout="constrained")
    for mode, points in runs.items():
        axes.plot(*zip(*points, strict=True), marker=".", label=mode)
    axes.set_xlabel("seconds of training")
    axes.set_ylabel("test accuracy, %")
    axes.set_title(title)
    axes.legend()
    picture.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--mode", default="async", choices=["sync", "ssp", "async", "hogwild", "all"], help="all: the first three"
    )
    parser.add_argument(
        "--staleness", type=int, default=3, help="steps that a rank may be ahead of the slowest, for ssp"
    )
    parser.add_argument(
        "--servers", type=int, default=0, metavar="N", help="the last N ranks only serve; 0: all do both"
    )
    parser.add_argument("--slow-rank", type=int, default=1, metavar="FACTOR", help="the last rank is so much slower")
    parser.add_argument("--sleep", action="store_true", help="the slow rank sleeps, and takes no core from the others")
    parser.add_argument("--seconds", type=float, default=10.0, help="of training, for each mode")
    parser.add_argument("--intervals", type=int, default=10, help="how often the model is tested")
    parser.add_argument("--batch-size", type=int, default=32, help="of each rank")
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the test accuracy by time")
    arguments = parser.parse_args()
    if arguments.plot and not arguments.plot.absolute().parent.is_dir():
        parser.error(f"--plot {arguments.plot}: there is no folder {arguments.plot.absolute().parent}")
    for name in ("slow_rank", "intervals", "batch_size"):
        if getattr(arguments, name) < 1:
            parser.error(f"--{name.replace('_', '-')} {getattr(arguments, name)}: expected 1 or more")
    arguments.servers = arguments.servers or None

    hvd.init()  # hvd
    if hvd.rank() == 0:
        print(hvd.describe(), flush=True)
    torch.set_num_threads(max(1, torch.get_num_threads() // hvd.local_size()))  # hvd: the ranks share the cores
    images, labels = load()
    modes = ["sync", "ssp", "async"] if arguments.mode == "all" else [arguments.mode]
    runs = {mode: train(mode, arguments, images, labels) for mode in modes}
    if hvd.rank() == 0 and arguments.plot:
        slow = f", one {arguments.slow_rank} times slower" if arguments.slow_rank > 1 else ""
        draw_all(runs, arguments.plot, f"{hvd.size()} ranks{slow}")


if __name__ == "__main__":
    main()
