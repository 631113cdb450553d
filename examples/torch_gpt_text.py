"""Train a small GPT on Python's own documentation, byte by byte, and let the GPT write a text.

    pip install -c constraints.txt ".[torch,examples]"
    hvdliterun -np 2 python examples/torch_gpt_text.py

The text ships with Python (0.4 MB; `help("for")` shows a part), so nothing is downloaded. In each step every rank draws the
same batch, and the ranks divide the batch among them. More ranks make the training faster and change only the rounding, so
the learning rate is not scaled.

The last twentieth of the text is held out for tests. A model that knows only the frequency of each byte cannot have a loss
below the unigram entropy of the held-out text. A model with a lower loss has learned from context. The program prints the
unigram entropy, the loss on the held-out text before and after training, the tokens per second and a text that the model
writes, and draws the loss curve.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import LambdaLR
from tqdm import tqdm

import hvdlite_torch as hvd

BYTES = 256
HEAD_WIDTH = 32
EVALUATIONS = 10
PROMPT = 'The "for" statement'


SENDS: dict[str, Callable[..., dict[str, Any]]] = {
    "gradients": lambda: {},
    "fp16": lambda: {"compression": hvd.Compression.fp16},
    "powersgd": lambda rank=4, bits=0: {"compression": hvd.Compression.powersgd(int(rank), bits=int(bits) or None)},
    "topk": lambda ratio=0.01: {"compression": hvd.Compression.topk(ratio)},
    "localsgd": lambda every=8: {"local_steps": hvd.LocalSGD(int(every))},
    "diloco": lambda every=64, lr=0.7, momentum=0.9: {
        "local_steps": hvd.DiLoCo(int(every), partial(outer_optimizer, lr=lr, momentum=momentum)),
        "compression": hvd.Compression.fp16,
    },
}
"""What the ranks send each other: arguments of `DistributedOptimizer`."""


def outer_optimizer(parameters: list[nn.Parameter], lr: float, momentum: float) -> torch.optim.Optimizer:
    """Return the optimizer that steps with what the ranks have learned between two meetings."""
    return torch.optim.SGD(parameters, lr=lr, momentum=momentum, nesterov=momentum > 0)


class Trained(NamedTuple):
    """The results of a training.

    Attributes:
        losses: The loss of each batch, in nats per byte.
        tests: The loss on the held-out text, in nats per byte, by the number of steps before the test.
        speed: The tokens per second of all ranks together.
    """

    losses: list[float]
    tests: dict[int, float]
    speed: float


class Block(nn.Module):
    """A transformer layer with normalisation before attention and before the MLP, as in GPT-2."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads = width // HEAD_WIDTH
        self.before_attention, self.before_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query_key_value, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Turn (batch, time, width) into the same shape. Each position sees itself and the positions before it."""
        heads = self.query_key_value(self.before_attention(x)).unflatten(2, (3, self.heads, HEAD_WIDTH))
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).flatten(2))
        return x + self.mlp(self.before_mlp(x))


class GPT(nn.Module):
    """Turns bytes (batch, time) into logits (batch, time, 256) of the byte that follows each of these bytes."""

    def __init__(self, layers: int, width: int, context: int) -> None:
        super().__init__()
        self.context = context
        self.embedding, self.positions = nn.Embedding(BYTES, width), nn.Parameter(torch.empty(context, width))
        for weights in (self.embedding.weight, self.positions):
            nn.init.normal_(weights, std=0.02)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(layers)))
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, BYTES))

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.embedding(text) + self.positions[: text.shape[1]]))


def load() -> tuple[torch.Tensor, torch.Tensor]:
    """Return the training text, and the last twentieth of the text for tests, as bytes in int64."""
    text = torch.frombuffer(bytearray("".join(topics.values()).encode()), dtype=torch.uint8).long()
    cut = len(text) * 19 // 20
    return text[:cut], text[cut:]


def unigram_entropy(text: torch.Tensor) -> float:
    """Return the entropy of the byte frequencies in nats: the smallest loss per byte that is possible without context."""
    frequencies = torch.bincount(text).double() / len(text)
    return float(torch.special.entr(frequencies).sum())


def summed_loss(model: GPT, windows: torch.Tensor) -> torch.Tensor:
    """Return the sum of the losses in nats of all predictions in windows (n, context + 1)."""
    logits = model(windows[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten(), reduction="sum")


@torch.no_grad()
def evaluate(model: GPT, text: torch.Tensor) -> float:
    """Return the mean loss over a text in nats per byte, on every rank. Each rank reads its share of the text."""
    windows = text.unfold(0, model.context + 1, model.context)
    mine, at_once = windows[hvd.rank() :: hvd.size()], max(1, 4096 // model.context)
    total = sum(
        (summed_loss(model, part).double() for part in mine.split(at_once)), torch.zeros((), dtype=torch.float64)
    )
    return float(hvd.allreduce(total, op=hvd.Sum)) / (len(windows) * model.context)


@torch.no_grad()
def write(model: GPT, length: int, seed: int) -> str:
    """Return `PROMPT` and the next `length` bytes, drawn from the model's predictions at temperature 0.8."""
    text, chance = torch.tensor([[*PROMPT.encode()]]), torch.Generator().manual_seed(seed)
    for _ in range(length):
        logits = model(text[:, -model.context :])[:, -1] / 0.8
        text = torch.cat([text, torch.multinomial(logits.softmax(1), 1, generator=chance)], 1)
    return bytes(text[0].tolist()).decode(errors="replace")


def plot(losses: list[float], tests: dict[int, float], entropy: float, path: Path) -> None:
    """Draw the loss of each batch, and the loss on the held-out text, by step."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4.4), layout="constrained")
    axes.plot(range(1, len(losses) + 1), losses, color="#0072B2", linewidth=0.9, alpha=0.7, label="batches")
    axes.plot(list(tests), list(tests.values()), "o-", color="#D55E00", markersize=4, label="held-out text")
    axes.axhline(entropy, color="#777777", linestyle="--", linewidth=1, label="unigram entropy")
    axes.set(xlabel="step", ylabel="loss (nats per byte)", title="A small GPT on Python's documentation")
    axes.grid(True, color="#dddddd", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def learning_rate(step: int, steps: int) -> float:
    """Return the learning rate at a step relative to the highest: up in a tenth of the steps, then down half a cosine to 0."""
    return min((step + 1) / max(1, steps // 10), (1 + math.cos(math.pi * step / steps)) / 2)


def train(model: GPT, text: torch.Tensor, test: torch.Tensor, arguments: argparse.Namespace) -> Trained:
    """Train a model on `text`. Every rank gets the same losses."""
    hvd.broadcast_parameters(model.state_dict())
    optimizer = torch.optim.AdamW(model.parameters(), lr=arguments.lr)
    sends = arguments.send
    by_itself = "local_steps" in sends  # then each rank steps with its own gradients, and clips them
    clip = {} if by_itself else {"max_grad_norm": arguments.max_grad_norm}
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters(), shard=arguments.shard, **sends, **clip)
    schedule = LambdaLR(optimizer, lambda step: learning_rate(step, arguments.steps))

    draw = torch.Generator().manual_seed(arguments.seed)  # the same windows on every rank …
    window = torch.arange(model.context + 1)
    losses: list[float] = []
    tests = {0: evaluate(model, test)}
    seconds = 0.0
    tokens = arguments.batch * model.context
    total = arguments.steps * tokens
    with tqdm(total=total, unit=" tokens", unit_scale=True, disable=hvd.rank() != 0, mininterval=0.5) as progress:
        for step in range(1, arguments.steps + 1):
            begin = time.perf_counter()
            starts = torch.randint(len(text) - model.context, (arguments.batch,), generator=draw)
            mine = starts[hvd.rank() :: hvd.size()]  # … and each rank takes its share
            loss = summed_loss(model, text[mine[:, None] + window])
            optimizer.zero_grad()
            optimizer.set_batch_weight(len(mine))  # shares may differ in size, and may be empty
            (loss / max(1, len(mine) * model.context)).backward()
            if by_itself:
                torch.nn.utils.clip_grad_norm_(model.parameters(), arguments.max_grad_norm)
            optimizer.step()
            if by_itself and step == arguments.steps:
                optimizer.average_parameters()
            schedule.step()
            losses.append(float(hvd.allreduce(loss.detach(), op=hvd.Sum)) / tokens)
            if not math.isfinite(losses[-1]):  # the same on every rank
                raise SystemExit(f"the loss is {losses[-1]} after {step} steps: try an --lr below {arguments.lr:g}.")
            seconds += time.perf_counter() - begin
            if step == arguments.steps or step % math.ceil(arguments.steps / EVALUATIONS) == 0:
                tests[step] = evaluate(model, test)
            progress.set_postfix(loss=f"{losses[-1]:.3f}", test=f"{[*tests.values()][-1]:.3f}", refresh=False)
            progress.update(tokens)
    return Trained(losses, tests, total / seconds)


def parse_arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)

    def whole_number(text: str) -> int:
        if (value := int(text)) < 1:
            raise argparse.ArgumentTypeError(f"{text} is below 1")
        return value

    def positive(text: str) -> float:
        if not 0 < (value := float(text)) < math.inf:
            raise argparse.ArgumentTypeError(f"{text} is not a number above 0")
        return value

    def sends(text: str) -> dict[str, Any]:
        name, _, numbers = text.partition(":")
        if name not in SENDS:
            raise argparse.ArgumentTypeError(f"{name} is none of {', '.join(SENDS)}")
        try:
            return SENDS[name](*map(float, filter(None, numbers.split(","))))
        except (TypeError, ValueError) as error:  # too many numbers, or a word
            raise argparse.ArgumentTypeError(f"{text}: {error}") from error

    def file(text: str) -> Path:  # an error comes now, not after the training
        if not (path := Path(text)).parent.is_dir():
            raise argparse.ArgumentTypeError(f"there is no folder {path.parent}")
        return path

    parser.add_argument("--steps", type=whole_number, default=800)
    parser.add_argument("--batch", type=whole_number, default=16, help="windows in a step, of all ranks together")
    parser.add_argument("--context", type=whole_number, default=64, help="bytes that the model sees")
    parser.add_argument("--layers", type=whole_number, default=4)
    parser.add_argument(
        "--width", type=whole_number, default=128, help=f"a multiple of {HEAD_WIDTH}, the width of a head"
    )
    parser.add_argument("--lr", type=positive, default=3e-3, help="the highest; a tenth of the steps lead up to it")
    parser.add_argument("--max-grad-norm", type=positive, default=1.0)
    parser.add_argument("--shard", action="store_true", help="each rank steps its share of the parameters only")
    parser.add_argument(
        "--send",
        type=sends,
        default="gradients",
        metavar="WHAT",
        help=f"what the ranks send each other: {', '.join(SENDS)}; or with numbers: powersgd:RANK,BITS, topk:RATIO, "
        "localsgd:EVERY, diloco:EVERY,LR,MOMENTUM",
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--sample", type=whole_number, default=400, help="bytes to write in the end")
    parser.add_argument("--plot", type=file, default="gpt_text_loss.png", metavar="FILE", help="the loss curve")
    arguments = parser.parse_args()
    if arguments.width % HEAD_WIDTH:
        parser.error(f"--width {arguments.width} is no multiple of {HEAD_WIDTH}")
    return arguments


def main() -> None:
    """Train, and show the results."""
    arguments = parse_arguments()
    text, test = load()
    if arguments.context >= len(test):
        raise SystemExit(f"--context {arguments.context}: the held-out text has only {len(test)} bytes.")
    hvd.init()
    if hvd.rank() == 0:
        print(hvd.describe(), flush=True)
    torch.manual_seed(arguments.seed)
    model = GPT(arguments.layers, arguments.width, arguments.context)
    losses, tests, speed = train(model, text, test, arguments)
    hvd.assert_in_sync(model)
    if hvd.rank() == 0:
        entropy = unigram_entropy(test)
        print(f"unigram entropy: {entropy:.3f} nats per byte")
        print(f"loss on held-out text: {tests[0]:.3f} before, {tests[len(losses)]:.3f} after step {len(losses)}")
        print(f"tokens/s: {speed:.0f} on {hvd.size()} rank{'s' if hvd.size() > 1 else ''}, whose weights are identical")
        print(write(model, arguments.sample, arguments.seed))
        plot(losses, tests, entropy, arguments.plot)
        print(f"the loss curve is in {arguments.plot}")


if __name__ == "__main__":
    main()
