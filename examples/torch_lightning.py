"""Train a convolutional network on handwritten digits with Lightning, on any number of processes.

    pip install -c constraints.txt '.[frameworks]'
    hvdliterun -np 2 python examples/torch_lightning.py
    hvdliterun -np 2 python examples/torch_lightning.py --check --plot loss.png

The data are the handwritten digits of scikit-learn: 1797 images of 8 × 8 pixels. At the end, rank 0 prints the accuracy on the
test images, and whether all ranks have identical weights. --check computes in float64, trains the same model in one process
on the batches of all ranks joined, and compares the weights. --plot draws the loss. The comment "hvd" marks the lines that
hvdlite adds to an ordinary program.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import lightning
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import hvdlite_torch as hvd
import hvdlite_torch.lightning  # hvd

TRAIN = 1437
CLOSE = 1e-10


class Digits(lightning.LightningModule):
    """A small network, and how it is trained and tested."""

    def __init__(self, lr: float) -> None:
        super().__init__()
        self.lr = lr
        self.losses: list[float] = []
        self.network = nn.Sequential(
            *(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(512, 10)),
        )

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        x, y = batch
        loss = F.cross_entropy(self.network(x), y)
        self.losses.append(loss.item())
        self.log("loss", loss, prog_bar=True)
        return loss

    def test_step(self, batch: tuple[torch.Tensor, torch.Tensor]) -> None:
        x, y = batch
        right = (self.network(x).argmax(1) == y).to(x.dtype).mean()
        self.log("accuracy", right, batch_size=len(y), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=self.lr)


def load() -> tuple[TensorDataset, TensorDataset]:
    """Return the images (N, 1, 8, 8) from 0 to 1 with their labels (N,): those to train with, and those to test."""
    images, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    x, y = (
        torch.tensor(images / 16, dtype=torch.get_default_dtype()).reshape(-1, 1, 8, 8)[order],
        torch.tensor(labels)[order],
    )
    return TensorDataset(x[:TRAIN], y[:TRAIN]), TensorDataset(x[TRAIN:], y[TRAIN:])


def train_alone(model: Digits, data: TensorDataset, epochs: int, batch_size: int) -> None:
    """Train in this process, with what all ranks have taken in a step as one batch."""
    samplers = [DistributedSampler(data, hvd.size(), rank, shuffle=True, seed=0) for rank in range(hvd.size())]
    optimizer = model.configure_optimizers()
    for epoch in range(epochs):
        for sampler in samplers:
            sampler.set_epoch(epoch)
        shares = [torch.tensor(list(sampler)).split(batch_size) for sampler in samplers]
        for parts in zip(*shares, strict=True):
            x, y = data[torch.cat(parts)]
            optimizer.zero_grad()
            F.cross_entropy(model.network(x), y).backward()
            optimizer.step()


def draw(losses: list[float], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    picture, axes = plt.subplots(layout="constrained")
    axes.plot(range(1, len(losses) + 1), losses)
    axes.set_xlabel("steps")
    axes.set_ylabel("loss, nats per image")
    axes.set_title(f"Lightning on {hvd.size()} ranks")
    picture.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--batch-size", type=int, default=32, help="of each rank")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--check", action="store_true", help="train in one process too, and compare the weights")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the loss")
    arguments = parser.parse_args()
    if arguments.plot and not arguments.plot.absolute().parent.is_dir():
        parser.error(f"--plot {arguments.plot}: there is no folder {arguments.plot.absolute().parent}")

    strategy = hvdlite_torch.lightning.strategy()  # hvd: joins the job
    torch.set_num_threads(max(1, torch.get_num_threads() // hvd.local_size()))  # hvd: the ranks share the cores
    if arguments.check:
        torch.set_default_dtype(torch.float64)
    training, test = load()
    torch.manual_seed(0)
    model, alone = Digits(arguments.lr), Digits(arguments.lr)
    alone.load_state_dict(model.state_dict())
    trainer = lightning.Trainer(
        strategy=strategy,  # hvd
        max_epochs=arguments.epochs,
        precision="64-true" if arguments.check else "32-true",
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
    )
    trainer.fit(model, DataLoader(training, arguments.batch_size, shuffle=True))
    (result,) = trainer.test(model, DataLoader(test, 64), verbose=False)
    hvd.assert_in_sync(model)
    if hvd.rank() == 0:
        print(f"test accuracy: {100 * result['accuracy']:.2f} % of {len(test)} images")
        print(
            f"weights: identical on {hvd.size()} rank{'s' if hvd.size() > 1 else ''} after {trainer.global_step} steps"
        )
    if arguments.plot and hvd.rank() == 0:
        draw(model.losses, arguments.plot)
    if arguments.check:
        train_alone(alone, training, arguments.epochs, arguments.batch_size)
        away = max((a - b).abs().max().item() for a, b in zip(model.parameters(), alone.parameters(), strict=True))
        if hvd.rank() == 0:
            print(f"one process: weights differ by {away:.2g} at most")
        if not away < CLOSE:
            sys.exit(f"--check: the weights of rank {hvd.rank()} are not those of one process")


if __name__ == "__main__":
    main()
