"""Train on handwritten digits while the number of processes changes: 2, then 4, then 2 again.

    echo localhost:2 > hosts
    hvdliterun --min-np 2 --host-discovery-script "cat hosts" python examples/torch_elastic.py --hosts hosts --plot growth.svg

Another window may play the part of the cluster: ``echo localhost:4 > hosts`` while the program runs without --hosts. With
--hosts the program itself does that, once after a third of the training and once after two thirds, both in the middle of an
epoch. Each time hvdliterun starts the program again, and the training goes on with the next batch. A callback adjusts the batch
and the learning rate to the number of ranks. At the end rank 0 prints what became of each part, and the accuracy on the test
images; --plot draws the loss, and --log writes it as JSON.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import hvdlite_torch as hvd

SAMPLES = 1408  # for 2 ranks as many as for 4, so that no sample of an epoch comes twice
LARGEST, OF_A_RANK = 48, 16  # a batch has so many samples at most: of all ranks together, and of each
RATE = 0.1 / 32  # the learning rate for each sample of a batch of all ranks


class Step(NamedTuple):
    """One step, as the history of the training has it."""

    epoch: int
    ranks: int
    rate: float
    loss: float
    samples: list[int]
    """The numbers of the samples of all ranks."""


def load() -> tuple[TensorDataset, TensorDataset]:
    """Return images (64,) from 0 to 1, their labels and their numbers: those to train with, and those to test with."""
    images, labels = load_digits(return_X_y=True)
    x, y = torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels)
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(0))
    train, test = order[:SAMPLES], order[SAMPLES:]
    return TensorDataset(x[train], y[train], torch.arange(SAMPLES)), TensorDataset(x[test], y[test], test)


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 10))


def adjust(state: Any) -> None:
    """Choose the batch and the learning rate for the number of ranks that there are now."""
    state.batch = min(OF_A_RANK, LARGEST // hvd.size())
    for group in state.optimizer.param_groups:
        group["lr"] = RATE * state.batch * hvd.size()


@hvd.elastic.run
def train(state: Any, data: TensorDataset, epochs: int, hosts: Path | None) -> None:
    while state.epoch < epochs:
        loader = DataLoader(data, state.batch, sampler=state.sampler)
        for number, (x, y, samples) in enumerate(loader):
            state.optimizer.zero_grad()
            loss = F.cross_entropy(state.model(x), y)
            loss.backward()
            state.optimizer.step()
            state.sampler.record_batch(number, state.batch)
            rate, mean = state.optimizer.param_groups[0]["lr"], hvd.allreduce(loss.detach(), name="loss").item()
            together = hvd.allgather(samples, name="samples").tolist()
            state.history.append(Step(state.epoch, hvd.size(), rate, mean, together))
            state.commit()
            if hosts is not None and state.changes < 2 and 3 * len(state.history) > (state.changes + 1) * epochs * 43:
                change(state, hosts)
        state.epoch += 1
        state.sampler.set_epoch(state.epoch)
        state.commit()


def change(state: Any, hosts: Path) -> None:
    """Play the part of the cluster: change the hosts, and wait until hvdliterun knows them."""
    state.changes += 1
    if hvd.rank() == 0:
        new = hosts.with_name(f"{hosts.name}.new")
        new.write_text(f"localhost:{4 if state.changes == 1 else 2}\n")
        os.replace(new, hosts)
    for _ in range(600):
        state.check_host_updates()
        time.sleep(0.1)
    sys.exit(f"hvdliterun has not looked at {hosts} for a minute: give it --host-discovery-script 'cat {hosts}'.")


def parts(history: list[Step]) -> list[list[Step]]:
    """Return the parts of the training with the same number of ranks."""
    return [list(steps) for _, steps in itertools.groupby(history, lambda step: step.ranks)]


def draw(history: list[Step], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    matplotlib.rcParams["svg.hashsalt"] = "hvdlite"  # the same file each time
    seen = list(itertools.accumulate(len(step.samples) / SAMPLES for step in history))
    picture, (above, below) = plt.subplots(
        2, 1, figsize=(8, 5), sharex=True, height_ratios=(3, 1), layout="constrained"
    )
    above.plot(seen, [step.loss for step in history], color="#9fa8da", linewidth=0.8, label="of each batch")
    smooth = list(itertools.accumulate((step.loss for step in history), lambda mean, loss: 0.95 * mean + 0.05 * loss))
    above.plot(seen, smooth, color="#3949ab", label="moving average")
    below.step(seen, [step.rate for step in history], color="#00897b", where="post")
    first = 0
    for part in parts(history):
        last, ranks = first + len(part) - 1, part[0].ranks
        for axes in (above, below):
            axes.axvspan(seen[first], seen[last], color="#00897b", alpha=0.05 * ranks - 0.05, linewidth=0)
        words = f"{ranks} ranks, batches of {len(part[0].samples)}"
        above.text((seen[first] + seen[last]) / 2, 1.02, words, ha="center", transform=above.get_xaxis_transform())
        first = last + 1
    above.set(yscale="log", ylabel="training loss")
    above.legend(loc="upper right")
    below.set(ylabel="learning rate", xlabel="epoch", ylim=(0, None))
    picture.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--hosts", type=Path, metavar="FILE", help="change the hosts in this file, to 4 slots and back")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the loss into this file (.png, .svg, .pdf)")
    parser.add_argument("--log", type=Path, metavar="FILE", help="write each step into this file, as JSON")
    arguments = parser.parse_args()
    for path in (arguments.plot, arguments.log):
        if path and not path.absolute().parent.is_dir():
            parser.error(f"{path}: there is no folder {path.absolute().parent}")
    if arguments.epochs < 3:
        parser.error(f"--epochs {arguments.epochs}: expected 3 or more")

    hvd.init()
    torch.set_num_threads(1)
    data, test = load()
    model = network()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9))
    sampler = hvd.elastic.ElasticSampler(data)
    state = hvd.elastic.TorchState(model, optimizer, sampler=sampler, epoch=0, batch=0, history=[], changes=0)
    adjust(state)
    state.register_reset_callbacks([lambda: adjust(state)])
    train(state, data, arguments.epochs, arguments.hosts)

    if hvd.rank() == 0:
        for part in parts(state.history):
            first, last = part[0], part[-1]
            print(
                f"{first.ranks} ranks: {len(part)} batches of {len(first.samples)}, rate {first.rate:.3f}, "
                f"loss {first.loss:.3f} to {last.loss:.3f}"
            )
        x, y, _ = test.tensors
        print(f"test accuracy: {100 * (model(x).argmax(1) == y).float().mean():.2f} % of {len(y)} images")
        if arguments.log:
            arguments.log.write_text(json.dumps([step._asdict() for step in state.history]))
        if arguments.plot:
            draw(state.history, arguments.plot)
            print(f"the loss is in {arguments.plot}")


if __name__ == "__main__":
    main()
