"""Train a language model of LSTM layers that are on different ranks (a wavefront), with PyTorch.

    hvdliterun -np 2 python examples/torch_lstm_wavefront.py
    hvdliterun -np 4 python examples/torch_lstm_wavefront.py --dp 2           # two wavefronts side by side
    hvdliterun -np 2 python examples/torch_lstm_wavefront.py --check --plot chunks.png

The model guesses the next letter of Python's own documentation, which ships with Python. The text goes through the layers in
chunks: while a rank computes a chunk, the next rank computes the chunk before with its own layers. Rank 0 prints the loss, and
the share of the time in which the ranks waited for each other. --check computes in float64, trains the same model in one
process too, with whole texts, and compares the weights. --plot draws the time of a step by the number of chunks.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from pydoc_data.topics import topics

import torch
from torch import nn
from torch.nn import functional as F
from tqdm import tqdm

import hvdlite_torch as hvd


def load() -> tuple[torch.Tensor, int]:
    """Return the documentation as numbers of letters, and how many letters there are."""
    text = " ".join(topics.values())
    numbers = {letter: number for number, letter in enumerate(sorted(set(text)))}
    return torch.tensor([numbers[letter] for letter in text]), len(numbers)


def batches(text: torch.Tensor, steps: int, size: int, length: int) -> torch.Tensor:
    """Return pieces of the text, of shape (steps, size, length + 1), the same on every rank."""
    starts = torch.randint(len(text) - length, (steps, size), generator=torch.Generator().manual_seed(1))
    return text[starts[..., None] + torch.arange(length + 1)]


def network(letters: int, width: int, layers: int) -> nn.Sequential:
    """Return the model with weights that are the same on every rank."""
    torch.manual_seed(0)
    stack = nn.LSTM(width, width, num_layers=layers, batch_first=True)
    return nn.Sequential(nn.Embedding(letters, width), stack, nn.Linear(width, letters))


def loss_of(scores: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(scores.flatten(0, 1), targets.flatten())


def draw(arguments: argparse.Namespace, ranks: hvd.ProcessSet, letters: int, pieces: torch.Tensor) -> None:
    """Draw the time of a step by the number of chunks. Every rank calls this; rank 0 draws."""
    x, y = pieces[:, :-1], pieces[:, 1:]
    counts = [count for count in (1, 2, 4, 8, 16, 32) if count <= arguments.length]
    medians, reports = [], []
    for count in counts:
        model = network(letters, arguments.width, arguments.layers)
        wavefront = hvd.Wavefront(model, ranks, loss=loss_of, chunks=count, example=x)
        seconds = []
        for _ in range(6):
            begin = time.perf_counter()
            wavefront.step(x, y)
            seconds.append(time.perf_counter() - begin)
        medians.append(1e3 * statistics.median(seconds[1:]))
        reports.append(wavefront.report())
    if hvd.rank() == 0:
        for report, median in zip(reports, medians, strict=True):
            print(f"{report}; {median:.0f} ms for a step")
        import matplotlib

        matplotlib.use("Agg")
        import matplotlib.pyplot as plt

        picture, axes = plt.subplots(layout="constrained")
        axes.plot(counts, medians, marker="o")
        axes.set_xscale("log", base=2)
        axes.set_ylim(bottom=0)
        axes.set_xlabel("chunks")
        axes.set_ylabel("median of a step, ms")
        axes.set_title(f"{ranks.size()} stages, {arguments.layers} layers, {arguments.length} time steps")
        picture.savefig(arguments.plot, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--batch-size", type=int, default=16, help="pieces of text for each wavefront")
    parser.add_argument("--length", type=int, default=128, help="of a piece, in letters")
    parser.add_argument("--chunks", type=int, default=8, help="of a piece")
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4, help="of the LSTM")
    parser.add_argument("--dp", type=int, default=1, help="wavefronts side by side")
    parser.add_argument("--check", action="store_true", help="train in one process too, and compare the weights")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the time of a step by the number of chunks")
    arguments = parser.parse_args()
    if arguments.plot and not arguments.plot.absolute().parent.is_dir():
        parser.error(f"--plot {arguments.plot}: there is no folder {arguments.plot.absolute().parent}")

    hvd.init()
    torch.set_num_threads(max(1, torch.get_num_threads() // hvd.local_size()))  # the ranks share the cores
    grid = hvd.ProcessGrid(dp=arguments.dp, pp=-1)
    if hvd.rank() == 0:
        print(grid, flush=True)
    if arguments.check:
        torch.set_default_dtype(torch.float64)
    text, letters = load()
    work = batches(text, arguments.steps, arguments.batch_size * arguments.dp, arguments.length)
    wavefront = hvd.Wavefront(
        network(letters, arguments.width, arguments.layers),
        grid["pp"],
        loss=loss_of,
        chunks=arguments.chunks,
        example=work[0, :, :-1],
    )
    optimizer = torch.optim.Adam(wavefront.parameters(), lr=5e-3)
    optimizer = hvd.DistributedOptimizer(optimizer, wavefront.named_parameters(), process_set=grid["dp"])
    losses = []
    with tqdm(work, unit="batch", disable=hvd.rank() != 0, mininterval=0.5) as progress:
        for pieces in progress:
            own = pieces.chunk(arguments.dp)[grid.place["dp"]]
            loss = wavefront.step(own[:, :-1], own[:, 1:], optimizer)
            losses.append(float(hvd.allreduce(loss, process_set=grid["dp"])))
            progress.set_postfix(loss=f"{losses[-1]:.3f}", refresh=False)

    report, trained = wavefront.report(), wavefront.full_state_dict()
    if hvd.rank() == 0:
        print(f"stages begin with layers {', '.join(['0', *wavefront.cuts])}")
        print(report)
        print(f"loss {losses[0]:.3f} to {losses[-1]:.3f} nats per letter")
    if arguments.check:
        alone = network(letters, arguments.width, arguments.layers)
        embedding, stack, head = alone
        adam = torch.optim.Adam(alone.parameters(), lr=5e-3)
        for pieces in work:
            adam.zero_grad()
            loss_of(head(stack(embedding(pieces[:, :-1]))[0]), pieces[:, 1:]).backward()
            adam.step()
        away = max((trained[name] - value).abs().max() for name, value in alone.state_dict().items())
        if hvd.rank() == 0:
            print(f"one process: weights differ by {away:.2g} at most")
    if arguments.plot:
        draw(arguments, grid["pp"], letters, work[0, : arguments.batch_size])


if __name__ == "__main__":
    main()
