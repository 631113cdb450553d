"""Train a network on handwritten digits, and serve it with a web page on which one draws digits.

    hvdliterun -np 2 python examples/serve_digits.py train
    python examples/serve_digits.py serve
    curl -s http://127.0.0.1:8000/explain

The data comes with scikit-learn: 1797 images of 8 × 8 pixels. Training takes seconds, and writes digits.pt. The server then has
a page at http://127.0.0.1:8000. What is drawn there is brought to the form of the training images and sent to /v1/predict,
which answers with the probability of each digit. The server chooses how long a batch waits for others, so that 99 % of the
answers take 50 ms at most. The comment "hvd" marks the lines that hvdlite adds to an ordinary program.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from tqdm import tqdm

import hvdlite_torch as hvd

TRAIN = 1437
PAGE = Path(__file__).with_suffix(".html")


def load() -> tuple[torch.Tensor, torch.Tensor]:
    """Return images (1797, 1, 8, 8) from 0 to 1, and labels (1797,), in an order that is the same on every rank."""
    images, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    return torch.tensor(images / 16, dtype=torch.float32).reshape(-1, 1, 8, 8)[order], torch.tensor(labels)[order]


def network() -> nn.Module:
    """Return a network that gives scores (n, 10) for images (n, 1, 8, 8)."""
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Dropout(0.3), nn.Linear(256, 64), nn.ReLU(), nn.Linear(64, 10)),
    )


def moved(images: torch.Tensor) -> torch.Tensor:
    """Move each image by up to one pixel, for nobody draws exactly in the middle."""
    rows, columns = torch.arange(8) + torch.randint(0, 3, (2, len(images), 1))
    padded = F.pad(images, (1, 1, 1, 1))[
        torch.arange(len(images))[:, None, None], 0, rows[:, :, None], columns[:, None]
    ]
    return padded[:, None]


def train(arguments: argparse.Namespace) -> None:
    hvd.init()  # hvd
    torch.set_num_threads(max(1, torch.get_num_threads() // hvd.local_size()))  # hvd: the ranks share the cores
    images, labels = load()
    model = network()
    hvd.broadcast_parameters(model.state_dict())  # hvd: equal initial weights on all ranks
    optimizer = torch.optim.Adam(model.parameters(), lr=arguments.lr)
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())  # hvd: the one line
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, arguments.epochs)
    shuffle = torch.Generator().manual_seed(1)  # the same batches on every rank …
    torch.manual_seed(2 + hvd.rank())
    for _ in tqdm(range(arguments.epochs), unit="epoch", disable=hvd.rank() != 0 or None, mininterval=0.5):
        for batch in torch.randperm(TRAIN, generator=shuffle).split(64):
            mine = batch[hvd.rank() :: hvd.size()]  # hvd: … and each rank takes its share
            loss = F.cross_entropy(model(moved(images[mine])), labels[mine])
            optimizer.zero_grad()
            loss.backward()
            optimizer.set_batch_weight(len(mine))  # hvd: shares may differ
            optimizer.step()
        schedule.step()
    if hvd.rank() == 0:
        model.eval()
        with torch.no_grad():
            right = (model(images[TRAIN:]).argmax(1) == labels[TRAIN:]).float().mean()
        torch.save(model.state_dict(), arguments.weights)
        print(f"test accuracy: {100 * right:.2f} % of {len(labels) - TRAIN} images; weights: {arguments.weights}")


def serve(arguments: argparse.Namespace) -> None:
    if not arguments.weights.exists():
        sys.exit(f"there is no file {arguments.weights}: first run python examples/serve_digits.py train")
    model = nn.Sequential(network(), nn.Softmax(1))
    model[0].load_state_dict(torch.load(arguments.weights, weights_only=True))
    ready = hvd.servable(model, example=torch.zeros(1, 8, 8))  # hvd: what an input is
    hvd.serve(ready, port=arguments.port, slo_p99=0.05, page=str(PAGE))  # hvd: until Ctrl-C


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["train", "serve"])
    parser.add_argument("--weights", type=Path, default=Path("digits.pt"), help="the file to write or to serve")
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--port", type=int, default=8000)
    arguments = parser.parse_args()
    (train if arguments.what == "train" else serve)(arguments)


if __name__ == "__main__":
    main()
