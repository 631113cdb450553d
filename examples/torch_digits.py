"""Train a small convolutional network on handwritten digits with PyTorch, on any number of processes.

    hvdliterun -np 2 python examples/torch_digits.py

The data comes with scikit-learn: 1797 images of 8 × 8 pixels. The ranks divide each batch among them, also the smaller last
batch, so the result does not depend on the number of ranks. At the end, rank 0 prints the accuracy on the test images, and
whether all ranks have identical weights. The comment "hvd" marks the lines that hvdlite adds to an ordinary program.
"""

from __future__ import annotations

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from tqdm import tqdm

import hvdlite_torch as hvd


def load() -> tuple[torch.Tensor, torch.Tensor]:
    """Return images (1797, 1, 8, 8) from 0 to 1, and labels (1797,), in an order that is the same on every rank."""
    images, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    return torch.tensor(images / 16, dtype=torch.float32).reshape(-1, 1, 8, 8)[order], torch.tensor(labels)[order]


def network() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(256, 64), nn.ReLU(), nn.Linear(64, 10)),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=64, help="of all ranks together")
    parser.add_argument("--lr", type=float, default=3e-3)
    arguments = parser.parse_args()

    hvd.init()  # hvd
    if hvd.rank() == 0:
        print(hvd.describe(), flush=True)
    torch.set_num_threads(max(1, torch.get_num_threads() // hvd.local_size()))  # hvd: the ranks share the cores
    images, labels = load()
    train, test = slice(0, 1437), slice(1437, None)
    torch.manual_seed(0)
    model = network()
    hvd.broadcast_parameters(model.state_dict())  # hvd: equal initial weights on all ranks
    optimizer = torch.optim.Adam(model.parameters(), lr=arguments.lr)
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())  # hvd: the one line

    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, arguments.epochs)
    shuffle = torch.Generator().manual_seed(1)  # the same batches on every rank …
    with tqdm(total=arguments.epochs, unit="epoch", disable=hvd.rank() != 0, mininterval=0.5) as progress:
        for _ in range(arguments.epochs):
            for batch in torch.randperm(1437, generator=shuffle).split(arguments.batch_size):
                mine = batch[hvd.rank() :: hvd.size()]  # hvd: … and each rank takes its share
                loss = F.cross_entropy(model(images[train][mine]), labels[train][mine], reduction="sum") / max(
                    1, len(mine)
                )
                optimizer.zero_grad()
                loss.backward()
                optimizer.set_batch_weight(len(mine))  # hvd: shares may differ
                optimizer.step()
            schedule.step()
            progress.set_postfix(loss=f"{loss.item():.3f}")
            progress.update()

    with torch.no_grad():
        mine = torch.arange(len(labels))[test][hvd.rank() :: hvd.size()]
        right = (model(images[mine]).argmax(1) == labels[mine]).sum()
    counts = hvd.allreduce(torch.stack([right, torch.tensor(len(mine))]), op=hvd.Sum)  # hvd: over all test images
    weights = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    everybody = hvd.allgather(weights[None])  # hvd
    if hvd.rank() == 0:
        same = bool((everybody == everybody[0]).all())
        print(f"test accuracy: {100 * counts[0] / counts[1]:.2f} % of {counts[1]} images")
        print(f"weights: {'identical' if same else 'DIFFERENT'} on {hvd.size()} rank{'s' if hvd.size() > 1 else ''}")


if __name__ == "__main__":
    main()
