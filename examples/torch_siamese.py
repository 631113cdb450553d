"""Train a Siamese network whose two branches are on different ranks, with PyTorch.

    hvdliterun -np 2 python examples/torch_siamese.py
    hvdliterun -np 4 python examples/torch_siamese.py --exchange allgather     # two ranks for each branch
    hvdliterun -np 2 python examples/torch_siamese.py --separate               # each branch has weights of its own
    hvdliterun -np 2 python examples/torch_siamese.py --check --plot digits.png

The network learns to say whether two handwritten digits of scikit-learn are the same. The left images go through a network on
some ranks, the right images through its twin on the others; then the ranks exchange the vectors that come out, and gradients go
back through the exchange:

    alltoall    Each rank gets the left and the right vectors of a part of the pairs, and computes their loss.
    allgather   Each rank gets all vectors, and compares its own with all those of the other side: many more pairs.

At the end, rank 0 prints how many test images are nearest to the mean vector of the right digit. --check computes in float64,
trains the same networks in one process too, and compares the weights. --plot draws the vectors of the test images.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from tqdm import tqdm

import hvdlite_torch as hvd

TRAIN = 1400
LEFT, RIGHT = 0, 1


def load() -> tuple[torch.Tensor, torch.Tensor]:
    """Return images (1797, 1, 8, 8) from 0 to 1, and labels (1797,), in an order that is the same on every rank."""
    images, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    return torch.tensor(images / 16, dtype=torch.get_default_dtype()).reshape(-1, 1, 8, 8)[order], torch.tensor(labels)[
        order
    ]


def network(side: int, separate: bool) -> nn.Sequential:
    """Return the network of one side: images (n, 1, 8, 8) to vectors (n, 16). Twins have the same weights."""
    torch.manual_seed(side if separate else 0)
    return nn.Sequential(
        *(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.Flatten()),
        nn.Linear(512, 16),
    )


def pairs(labels: torch.Tensor, steps: int, size: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return for each step the numbers of the left and of the right images. In half of the pairs the digits are the same."""
    chance = torch.Generator().manual_seed(1)
    found = []
    for _ in range(steps):
        left, right = torch.randint(TRAIN, (2, size), generator=chance)
        for i in range(0, size, 2):
            alike = (labels[:TRAIN] == labels[left[i]]).nonzero().flatten()
            right[i] = alike[torch.randint(len(alike), (), generator=chance)]
        found.append((left, right))
    return found


def loss_of(distance: torch.Tensor, is_same: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
    """Return the contrastive loss of some pairs (Hadsell, Chopra and LeCun, 2006).

    It is the mean over pairs of the same digit, plus the mean over pairs of different digits.

    Args:
        distance: The squared distances of the vectors of the pairs.
        is_same: Whether the digits are the same; of the same shape.
        whole: Whether they are, for the pairs of all ranks: the losses of all ranks add up to the loss of these.
    """
    apart = F.relu(1 - (distance + 1e-12).sqrt()) ** 2
    return distance[is_same].sum() / whole.sum() + apart[~is_same].sum() / (~whole).sum()


def distances(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Return the squared distances of all left vectors (n, d) to all right vectors (m, d): shape (n, m)."""
    return ((left[:, None] - right[None]) ** 2).sum(2)


@dataclass
class Place:
    """Where this rank is. The first half of the ranks has the left branch, the second half the right one.

    Attributes:
        side: `LEFT` or `RIGHT`.
        number: The number of this rank in its branch.
        branch: The ranks of this branch; each has a part of the pairs.
        opposite: This rank, and that of the other branch which has the same pairs.
    """

    side: int
    number: int
    branch: hvd.ProcessSet
    opposite: hvd.ProcessSet


def find_place() -> Place:
    """Make the process sets of all ranks, and return this rank's place."""
    length = hvd.size() // 2
    branches = [hvd.new_group(range(side * length, (side + 1) * length)) for side in (LEFT, RIGHT)]
    opposites = [hvd.new_group([number, number + length]) for number in range(length)]
    side, number = divmod(hvd.rank(), length)
    return Place(side, number, branches[side], opposites[number])


def train(arguments: argparse.Namespace, own: Place, images: torch.Tensor, labels: torch.Tensor) -> nn.Sequential:
    """Train this rank's network."""
    side, parts = own.side, own.branch.size()
    model = network(side, arguments.separate)
    # Twins are one network, whose gradient is the sum of those of both branches.
    together = own.branch if arguments.separate else hvd.global_process_set
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters(), op=hvd.Sum, process_set=together)
    with tqdm(
        pairs(labels, arguments.steps, arguments.pairs), unit="batch", disable=hvd.rank() != 0, mininterval=0.5
    ) as progress:
        for both in progress:
            optimizer.zero_grad()
            vectors = model(images[both[side].chunk(parts)[own.number]])
            left, right = labels[both[LEFT]], labels[both[RIGHT]]
            if arguments.exchange == "alltoall":
                # The first half of each side's vectors goes to the rank of the left branch, the second to the other one.
                ours = hvd.alltoall(vectors, process_set=own.opposite).chunk(2)
                is_same = (left == right).chunk(parts)[own.number].chunk(2)[side]
                loss = loss_of(((ours[LEFT] - ours[RIGHT]) ** 2).sum(1), is_same, left == right)
            else:
                # Each left vector meets each right one. This rank has the rows of its own vectors, of which half count.
                theirs = hvd.allgather(vectors).reshape(2, -1, vectors.shape[1])[1 - side]
                is_same = labels[both[side].chunk(parts)[own.number]][:, None] == labels[both[1 - side]]
                loss = loss_of(distances(vectors, theirs), is_same, left[:, None] == right) / 2
            loss.backward()
            optimizer.step()
            progress.set_postfix(loss=f"{hvd.allreduce(loss.detach(), op=hvd.Sum):.3f}", refresh=False)
    return model


def train_alone(arguments: argparse.Namespace, images: torch.Tensor, labels: torch.Tensor) -> list[nn.Sequential]:
    """Train both networks in this process, and return them: the same one twice if they are twins."""
    first = network(LEFT, arguments.separate)
    models = [first, network(RIGHT, True) if arguments.separate else first]
    adam = torch.optim.Adam([p for model in models[: 1 + arguments.separate] for p in model.parameters()], lr=2e-3)
    for left, right in pairs(labels, arguments.steps, arguments.pairs):
        adam.zero_grad()
        vectors = models[LEFT](images[left]), models[RIGHT](images[right])
        if arguments.exchange == "alltoall":
            is_same, distance = labels[left] == labels[right], ((vectors[LEFT] - vectors[RIGHT]) ** 2).sum(1)
        else:
            is_same, distance = labels[left][:, None] == labels[right], distances(*vectors)
        loss_of(distance, is_same, is_same).backward()
        adam.step()
    return models


def draw(vectors: torch.Tensor, labels: torch.Tensor, path: Path) -> None:
    """Draw vectors (n, 16) in the two directions in which they differ most."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    centred = vectors - vectors.mean(0)
    points = centred @ torch.linalg.svd(centred, full_matrices=False).Vh[:2].T
    picture, axes = plt.subplots(layout="constrained")
    for digit in range(10):
        axes.scatter(*points[labels == digit].T, s=12, color=f"C{digit}", label=str(digit))
    picture.legend(title="digit", loc="outside right")
    axes.set_title("vectors of test images, in the two directions that differ most")
    axes.set_aspect("equal")
    picture.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--pairs", type=int, default=64, help="in a step; a multiple of the number of ranks")
    parser.add_argument("--exchange", default="alltoall", choices=["alltoall", "allgather"])
    parser.add_argument("--separate", action="store_true", help="each branch has weights of its own")
    parser.add_argument("--check", action="store_true", help="train in one process too, and compare the weights")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the vectors of the test images")
    arguments = parser.parse_args()
    if arguments.plot and not arguments.plot.absolute().parent.is_dir():
        parser.error(f"--plot {arguments.plot}: there is no folder {arguments.plot.absolute().parent}")

    hvd.init()
    if hvd.size() % 2:
        parser.error(f"two branches need an even number of ranks, and there are {hvd.size()}: hvdliterun -np 2")
    if arguments.pairs % hvd.size() or arguments.pairs < hvd.size():
        parser.error(f"--pairs {arguments.pairs} is no multiple of the number of ranks, {hvd.size()}")
    torch.set_num_threads(max(1, torch.get_num_threads() // hvd.local_size()))  # the ranks share the cores
    own = find_place()
    if arguments.check:
        torch.set_default_dtype(torch.float64)
    images, labels = load()
    model = train(arguments, own, images, labels)

    with torch.no_grad():
        known, vectors = model(images[:TRAIN]), model(images[TRAIN:])
        means = torch.stack([known[labels[:TRAIN] == digit].mean(0) for digit in range(10)])
        right_means = hvd.allgather(means, process_set=own.opposite).reshape(2, 10, -1)[RIGHT]
        right = (distances(vectors, right_means).argmin(1) == labels[TRAIN:]).double().mean()
    if hvd.rank() == 0:
        print(
            f"test accuracy: {100 * right:.2f} % of {len(labels) - TRAIN} images are nearest to the mean of their digit"
        )
        if arguments.plot:
            draw(vectors, labels[TRAIN:], arguments.plot)
    if arguments.check:
        alone = train_alone(arguments, images, labels)[own.side].state_dict()
        away = max((value - alone[name]).abs().max().item() for name, value in model.state_dict().items())
        away = max(hvd.allgather_object(away))
        if hvd.rank() == 0:
            print(f"one process: weights differ by {away:.2g} at most")


if __name__ == "__main__":
    main()
