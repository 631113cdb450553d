"""Train on a grid of ranks: data, pipeline and tensor parallelism together, with PyTorch.

    hvdliterun -np 8 python examples/torch_hybrid.py                          # dp=2, pp=2, tp=2
    hvdliterun -np 4 python examples/torch_hybrid.py --pp 1 --shard           # dp=2, tp=2, sharded optimizer
    hvdliterun -np 8 python examples/torch_hybrid.py --check --plot memory.png

The data are the handwritten digits of scikit-learn: 1797 images of 8 × 8 pixels. Rank 0 prints the grid, what is sliced, where
the stages begin, and how much memory the weights and the optimizer's state of each rank take. --check computes in float64,
trains the same model in one process too, and compares the weights. --plot draws the memory.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from tqdm import tqdm

import hvdlite_torch as hvd

TRAIN = 1408  # whole batches of 64


def load() -> tuple[torch.Tensor, torch.Tensor]:
    """Return images (1797, 1, 8, 8) from 0 to 1, and labels (1797,), in an order that is the same on every rank."""
    images, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    pixels = torch.tensor(images / 16, dtype=torch.get_default_dtype()).reshape(-1, 1, 8, 8)
    return pixels[order], torch.tensor(labels)[order]


def network(width: int) -> nn.Sequential:
    """Return the model with weights that are the same on every rank."""
    torch.manual_seed(0)
    blocks = [layer for _ in range(3) for layer in (nn.Conv2d(width, width, 3, padding=1), nn.ReLU())]
    head = (nn.MaxPool2d(2), nn.Flatten(), nn.Linear(16 * width, 256), nn.ReLU(), nn.Linear(256, 10))
    return nn.Sequential(nn.Conv2d(1, width, 3, padding=1), nn.ReLU(), *blocks, *head)


def batches(epochs: int, size: int) -> list[torch.Tensor]:
    """Return the numbers of the images of each batch, the same on every rank."""
    shuffle = torch.Generator().manual_seed(1)
    return [batch for _ in range(epochs) for batch in torch.randperm(TRAIN, generator=shuffle).split(size)]


def held(optimizer: torch.optim.Optimizer, parameters: list[torch.Tensor]) -> int:
    """Return how many bytes of weights and of the optimizer's state this rank holds."""
    state = [value for its in optimizer.state.values() for value in its.values() if isinstance(value, torch.Tensor)]
    local = [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in [*parameters, *state]]
    return sum(tensor.nbytes for tensor in local)


def draw(held_by: list[int], alone: int, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    picture, axes = plt.subplots(layout="constrained")
    axes.bar(["one process", *(f"rank {rank}" for rank in range(len(held_by)))], [n / 1e6 for n in [alone, *held_by]])
    axes.set_ylabel("weights and optimizer state, MB")
    axes.tick_params(axis="x", rotation=45)
    picture.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=32, help="of each pipeline")
    parser.add_argument("--microbatches", type=int, default=4)
    parser.add_argument("--width", type=int, default=32, help="channels of the convolutions")
    parser.add_argument("--pp", type=int, default=2, help="stages")
    parser.add_argument("--tp", type=int, default=2, help="slices of a layer")
    parser.add_argument("--shard", action="store_true", help="each rank steps a shard of its parameters only")
    parser.add_argument("--check", action="store_true", help="train in one process too, and compare the weights")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the memory of the ranks")
    arguments = parser.parse_args()
    if arguments.plot and not arguments.plot.absolute().parent.is_dir():
        parser.error(f"--plot {arguments.plot}: there is no folder {arguments.plot.absolute().parent}")

    hvd.init()
    torch.set_num_threads(max(1, torch.get_num_threads() // hvd.local_size()))  # the ranks share the cores
    grid = hvd.ProcessGrid(dp=-1, pp=arguments.pp, tp=arguments.tp)
    dp = grid.axes["dp"]
    if hvd.rank() == 0:
        print(grid, flush=True)
    if arguments.check:
        torch.set_default_dtype(torch.float64)
    images, labels = load()

    model = network(arguments.width)
    hvd.slice_layers(model, grid["tp"], smallest=2**12)
    pipeline = hvd.Pipeline(
        model,
        grid["pp"],
        loss=F.cross_entropy,
        microbatches=arguments.microbatches,
        example=images[: max(1, arguments.batch_size // arguments.microbatches)],
    )
    optimizer = torch.optim.Adam(pipeline.parameters(), lr=2e-3)
    optimizer = hvd.DistributedOptimizer(
        optimizer, pipeline.named_parameters(), process_set=grid["dp"], shard=arguments.shard
    )
    work = batches(arguments.epochs, arguments.batch_size * dp)
    with tqdm(work, unit="batch", disable=hvd.rank() != 0, mininterval=0.5) as progress:
        for batch in progress:
            mine = batch.chunk(dp)[grid.place["dp"]]
            loss = pipeline.step(images[mine], labels[mine], optimizer)
            progress.set_postfix(loss=f"{loss.item():.3f}", refresh=False)

    held_by = hvd.allgather_object(held(optimizer, list(pipeline.parameters())))
    trained, alone = pipeline.full_state_dict(), network(arguments.width)
    of_one = 3 * sum(parameter.nbytes for parameter in alone.parameters())  # Adam's state is twice the weights
    alone.load_state_dict(trained)
    with torch.no_grad():
        right = (alone(images[TRAIN:]).argmax(1) == labels[TRAIN:]).float().mean()
    if hvd.rank() == 0:
        print(f"stages begin with layers {', '.join(['0', *pipeline.cuts])}")
        shares = ", ".join(f"{each / 1e6:.2f}" for each in held_by)
        print(f"MB of weights and optimizer state: {shares}; in one process {of_one / 1e6:.2f}")
        print(f"test accuracy: {100 * right:.2f} % of {len(labels) - TRAIN} images")
        if arguments.plot:
            draw(held_by, of_one, arguments.plot)
    if arguments.check:
        alone = network(arguments.width)
        adam = torch.optim.Adam(alone.parameters(), lr=2e-3)
        for batch in work:
            adam.zero_grad()
            F.cross_entropy(alone(images[batch]), labels[batch]).backward()
            adam.step()
        away = max((trained[name] - value).abs().max() for name, value in alone.state_dict().items())
        if hvd.rank() == 0:
            print(f"one process: weights differ by {away:.2g} at most")


if __name__ == "__main__":
    main()
