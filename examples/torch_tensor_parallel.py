"""Train a small language model whose layers are sliced over ranks (tensor parallelism), with PyTorch.

    hvdliterun -np 2 python examples/torch_tensor_parallel.py
    hvdliterun -np 4 python examples/torch_tensor_parallel.py --dp 2 --shard     # two sliced models side by side
    hvdliterun -np 2 python examples/torch_tensor_parallel.py --check --plot loss.png

The model guesses the next letter of Python's own documentation, which ships with Python. Rank 0 prints what is sliced, and how
many parameters are. --check computes in float64, trains the same model in one process too, and compares the weights.
--plot draws the loss.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from pydoc_data.topics import topics

import torch
from torch import nn
from torch.nn import functional as F
from tqdm import tqdm

import hvdlite_torch as hvd


class Letters(nn.Module):
    """A transformer that guesses the next letter: letters (batch, length) to scores (batch, length, letters)."""

    def __init__(self, letters: int, width: int, layers: int, length: int) -> None:
        super().__init__()
        self.letters, self.positions = nn.Embedding(letters, width), nn.Embedding(length, width)
        layer = nn.TransformerEncoderLayer(
            width, width // 16, 4 * width, dropout=0.0, batch_first=True, norm_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, layers, nn.LayerNorm(width), enable_nested_tensor=False)
        self.scores = nn.Linear(width, letters)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.letters(x) + self.positions.weight[: x.shape[1]]
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], dtype=hidden.dtype)
        return self.scores(self.encoder(hidden, mask, is_causal=True))


def load() -> tuple[torch.Tensor, int]:
    """Return the documentation as numbers of letters, and how many letters there are."""
    text = " ".join(topics.values())
    numbers = {letter: number for number, letter in enumerate(sorted(set(text)))}
    return torch.tensor([numbers[letter] for letter in text]), len(numbers)


def batches(text: torch.Tensor, steps: int, size: int, length: int) -> torch.Tensor:
    """Return pieces of the text, of shape (steps, size, length + 1), the same on every rank."""
    starts = torch.randint(len(text) - length, (steps, size), generator=torch.Generator().manual_seed(1))
    return text[starts[..., None] + torch.arange(length + 1)]


def loss_of(model: nn.Module, pieces: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(pieces[:, :-1]).flatten(0, 1), pieces[:, 1:].flatten())


def draw(losses: list[float], title: str, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    picture, axes = plt.subplots(layout="constrained")
    axes.plot(range(1, len(losses) + 1), losses)
    axes.set_xlabel("steps")
    axes.set_ylabel("loss, nats per letter")
    axes.set_title(title)
    picture.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--batch-size", type=int, default=16, help="pieces of text for each sliced model")
    parser.add_argument("--length", type=int, default=64, help="of a piece, in letters")
    parser.add_argument("--width", type=int, default=128, help="a multiple of 16")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--dp", type=int, default=1, help="sliced models side by side")
    parser.add_argument("--shard", action="store_true", help="each of them steps a shard of the parameters only")
    parser.add_argument("--check", action="store_true", help="train in one process too, and compare the weights")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the loss")
    arguments = parser.parse_args()
    if arguments.plot and not arguments.plot.absolute().parent.is_dir():
        parser.error(f"--plot {arguments.plot}: there is no folder {arguments.plot.absolute().parent}")

    hvd.init()
    torch.set_num_threads(max(1, torch.get_num_threads() // hvd.local_size()))  # the ranks share the cores
    grid = hvd.ProcessGrid(dp=arguments.dp, tp=-1)
    if hvd.rank() == 0:
        print(grid, flush=True)
    if arguments.check:
        torch.set_default_dtype(torch.float64)
    text, letters = load()
    torch.manual_seed(0)
    model, alone = (Letters(letters, arguments.width, arguments.layers, arguments.length) for _ in range(2))
    alone.load_state_dict(model.state_dict())

    plan = hvd.slice_layers(model, grid["tp"])
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    optimizer = hvd.DistributedOptimizer(optimizer, model, process_set=grid["dp"], shard=arguments.shard)
    work, losses = batches(text, arguments.steps, arguments.batch_size * arguments.dp, arguments.length), []
    with tqdm(work, unit="batch", disable=hvd.rank() != 0, mininterval=0.5) as progress:
        for pieces in progress:
            optimizer.zero_grad()
            loss = loss_of(model, pieces.chunk(arguments.dp)[grid.place["dp"]])
            loss.backward()
            optimizer.step()
            losses.append(float(hvd.allreduce(loss.detach(), process_set=grid["dp"])))
            progress.set_postfix(loss=f"{losses[-1]:.3f}", refresh=False)

    trained = plan.full_state_dict()
    if hvd.rank() == 0:
        print(f"loss {losses[0]:.3f} to {losses[-1]:.3f} nats per letter")
        if arguments.plot:
            draw(losses, f"{grid.axes['tp']} slices, {arguments.dp} side by side", arguments.plot)
    if arguments.check:
        adam = torch.optim.Adam(alone.parameters(), lr=2e-3)
        for pieces in work:
            adam.zero_grad()
            loss_of(alone, pieces).backward()
            adam.step()
        away = max((trained[name] - value).abs().max() for name, value in alone.state_dict().items())
        if hvd.rank() == 0:
            print(f"one process: weights differ by {away:.2g} at most")


if __name__ == "__main__":
    main()
