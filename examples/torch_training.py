"""Train as people do in torch: augmentation, validation, checkpoints, early stopping, TensorBoard, mixed precision.

    hvdliterun -np 2 python examples/torch_training.py --folder run --plot curve.png
    hvdliterun -np 2 python examples/torch_training.py --folder run --epochs 40    # resumes where it stopped
    tensorboard --logdir run

A convolutional network learns handwritten digits, which come with scikit-learn. Each rank reads its rows by DistributedSampler,
and moves each image at random by up to one pixel. All ranks validate together.
The forward pass runs in bfloat16 (--no-mixed: float32).
The comment "hvd" marks
the lines that hvdlite adds to an ordinary program. `docs/torch_training.md` explains such a program piece by piece.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Subset
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

import hvdlite_torch as hvd


class Digits(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Images (1, 8, 8) from 0 to 1, and labels. With `moves` an image is moved by -1, 0 or 1 pixels each way, at random."""

    def __init__(self, moves: bool) -> None:
        images, labels = load_digits(return_X_y=True)
        self.images = torch.tensor(images / 16, dtype=torch.float32).reshape(-1, 1, 8, 8)
        self.labels, self.moves = torch.tensor(labels), moves

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        image = self.images[index]
        if self.moves:
            top, left = torch.randint(3, (2,)).tolist()
            image = F.pad(image, (1, 1, 1, 1))[:, top : top + 8, left : left + 8]
        return image, self.labels[index]


def network() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Dropout(0.2), nn.Linear(256, 10)),
    )


def validate(model: nn.Module, loader: DataLoader[tuple[torch.Tensor, torch.Tensor]]) -> tuple[float, float]:
    """Return the mean loss and the accuracy over the rows of all ranks."""
    sums = torch.zeros(3, dtype=torch.float64)  # loss, right, rows
    model.eval()
    with torch.no_grad():
        for x, y in loader:
            scores = model(x)
            loss = F.cross_entropy(scores, y, reduction="sum")
            sums += torch.tensor([loss.item(), (scores.argmax(1) == y).sum().item(), len(y)])
    model.train()
    loss_sum, right, rows = hvd.allreduce(sums, op=hvd.Sum).tolist()  # hvd
    return loss_sum / rows, right / rows


def plot(history: list[dict[str, float]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, panel = plt.subplots()
    epochs = range(1, len(history) + 1)
    panel.plot(epochs, [each["train"] for each in history], label="training, moved images")
    panel.plot(epochs, [each["loss"] for each in history], label="validation, all ranks")
    panel.set(xlabel="epoch", ylabel="loss", title=f"digits on {hvd.size()} ranks")
    panel.legend()
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=64, help="of all ranks together")
    parser.add_argument("--patience", type=int, default=5, help="epochs without a better loss before training stops")
    parser.add_argument("--folder", type=Path, default=Path("run"), help="for the checkpoint and TensorBoard's files")
    parser.add_argument(
        "--no-mixed", action="store_true", help="float32 everywhere, in place of bfloat16 in the forward pass"
    )
    parser.add_argument("--plot", type=Path, help="draw the losses into this file")
    arguments = parser.parse_args()

    hvd.init()  # hvd
    everything, plain = Digits(moves=True), Digits(moves=False)
    train = Subset(everything, range(1437))
    sampler = DistributedSampler(train, hvd.size(), hvd.rank(), seed=0)  # hvd: this rank's rows
    loader = DataLoader(train, max(1, arguments.batch_size // hvd.size()), sampler=sampler)
    mine = Subset(plain, range(1437 + hvd.rank(), len(plain), hvd.size()))  # hvd: each row on one rank
    test = DataLoader(mine, 128)

    torch.manual_seed(0)
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())  # hvd: the one line
    history: list[dict[str, float]] = []
    best, waited, file = float("inf"), 0, arguments.folder / "checkpoint.pt"
    if hvd.rank() == 0 and file.exists():  # hvd: one rank reads …
        saved = torch.load(file)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        history, best, waited = saved["history"], saved["best"], saved["waited"]
    hvd.broadcast_parameters(model)  # hvd: … and gives it to all
    hvd.broadcast_optimizer_state(optimizer)  # hvd
    history, best, waited = hvd.broadcast_object((history, best, waited))  # hvd
    torch.manual_seed(1000 + hvd.rank() + hvd.size() * len(history))  # hvd: dropout and moves differ between ranks

    writer = None
    if hvd.rank() == 0:  # hvd: one rank writes and draws
        arguments.folder.mkdir(parents=True, exist_ok=True)
        writer = SummaryWriter(str(arguments.folder))
        print(hvd.describe(), flush=True)
    with tqdm(total=arguments.epochs, initial=len(history), unit="epoch", disable=hvd.rank() != 0) as progress:
        while len(history) < arguments.epochs and waited < arguments.patience:
            epoch = len(history)
            sampler.set_epoch(epoch)
            total = torch.zeros(2)
            for x, y in loader:
                optimizer.zero_grad()
                optimizer.set_batch_weight(len(x))  # hvd: the last batches may differ
                with torch.autocast("cpu", torch.bfloat16, enabled=not arguments.no_mixed):
                    loss = F.cross_entropy(model(x), y)
                loss.backward()
                optimizer.step()
                total += torch.tensor([loss.item() * len(x), len(x)])
            total = hvd.allreduce(total, op=hvd.Sum)  # hvd
            validation, accuracy = validate(model, test)
            history.append({"train": (total[0] / total[1]).item(), "loss": validation, "accuracy": accuracy})
            waited = 0 if validation < best - 1e-4 else waited + 1  # the same on all ranks, as `validation` is
            best = min(best, validation)
            progress.set_postfix(loss=f"{validation:.4f}", accuracy=f"{100 * accuracy:.1f} %")
            progress.update()
            if writer is not None:
                for name, value in history[-1].items():
                    writer.add_scalar(name, value, epoch)
                state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
                torch.save({**state, "history": history, "best": best, "waited": waited}, file.with_suffix(".tmp"))
                os.replace(file.with_suffix(".tmp"), file)  # never half a file

    hvd.assert_in_sync(model)  # hvd
    if writer is not None:
        writer.close()
        (arguments.folder / "history.json").write_text(json.dumps(history))
        why = "no better loss for a while" if waited >= arguments.patience else "all epochs are done"
        print(f"epoch {len(history)}: {why}; loss {history[-1]['loss']:.4f}")
        print(f"test accuracy: {100 * history[-1]['accuracy']:.2f} % of 360 images")
        if arguments.plot is not None:
            plot(history, arguments.plot)


if __name__ == "__main__":
    main()
