"""Train on handwritten digits with large batches, by SGD, LARS and LAMB. LARS and LAMB scale the step of each layer.

    pip install -c constraints.txt ".[torch,large-batch,examples]"
    hvdliterun -np 2 python examples/torch_large_batch.py

The data comes with scikit-learn: 1797 images of 8 × 8 pixels. A large batch is a third of the training data, so an epoch has
three steps. `scale_lr` scales the learning rate for a batch of 32 to the large batch: linearly for SGD and LARS, by the square
root for LAMB. `warmup` raises the learning rate step by step to the scaled value. SGD's learning rate is good for a batch of
32, as the first line of the output shows; those of LARS and LAMB were chosen for the large batch. The ranks divide each batch
among them, so the number of ranks changes only the rounding. LARS and LAMB come from the package pytorch-optimizer.

Rank 0 prints the test accuracy of SGD with batches of 32, and then of SGD, LARS and LAMB with large batches.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable
from typing import Literal

import torch
from pytorch_optimizer import LARS, Lamb
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import CosineAnnealingLR
from tqdm import tqdm

import hvdlite_torch as hvd

BASE_BATCH = 32
Make = Callable[[Iterable[torch.Tensor]], torch.optim.Optimizer]
RECIPES: dict[str, tuple[Make, Literal["linear", "sqrt"]]] = {
    # the optimizer with its learning rate for BASE_BATCH, and the rule that scales this rate
    "SGD": (lambda weights: torch.optim.SGD(weights, lr=0.02, momentum=0.9), "linear"),
    "LARS": (lambda weights: LARS(weights, lr=0.1, momentum=0.9, trust_coefficient=0.02), "linear"),
    "LAMB": (lambda weights: Lamb(weights, lr=0.01), "sqrt"),
}


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


def train(name: str, batch_size: int, epochs: int, images: torch.Tensor, labels: torch.Tensor) -> nn.Module:
    """Return a network after `epochs` epochs of training, with batches of `batch_size` for all ranks together."""
    make, rule = RECIPES[name]
    model = network()
    hvd.broadcast_parameters(model.state_dict())
    growth = batch_size / BASE_BATCH
    optimizer = hvd.scale_lr(make(model.parameters()), rule, growth)
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
    steps = epochs * -(-len(labels) // batch_size)
    decay = CosineAnnealingLR(optimizer, steps - steps // 5)
    schedule = hvd.warmup(optimizer, steps // 5, then=decay, rule=rule, batches=growth)

    shuffle = torch.Generator().manual_seed(1)
    with tqdm(total=steps, desc=name, unit="step", disable=hvd.rank() != 0, mininterval=0.5) as progress:
        for _ in range(epochs):
            for batch in torch.randperm(len(labels), generator=shuffle).split(batch_size):
                mine = batch[hvd.rank() :: hvd.size()]
                loss = F.cross_entropy(model(images[mine]), labels[mine], reduction="sum") / max(1, len(mine))
                optimizer.zero_grad()
                loss.backward()
                optimizer.set_batch_weight(len(mine))
                optimizer.step()
                schedule.step()
                progress.update()
    hvd.assert_in_sync(model)
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=479, help="of all ranks together, at least 32")
    arguments = parser.parse_args()

    hvd.init()
    if hvd.rank() == 0:
        print(hvd.describe(), flush=True)
    torch.set_num_threads(max(1, torch.get_num_threads() // hvd.local_size()))
    images, labels = load()
    for name, batch_size in [("SGD", BASE_BATCH), *((name, arguments.batch_size) for name in RECIPES)]:
        model = train(name, batch_size, arguments.epochs, images[:1437], labels[:1437])
        with torch.no_grad():
            right = (model(images[1437:]).argmax(1) == labels[1437:]).float().mean()
        if hvd.rank() == 0:
            print(f"{name} with batches of {batch_size}: test accuracy {100 * right:.2f} %", flush=True)


if __name__ == "__main__":
    main()
