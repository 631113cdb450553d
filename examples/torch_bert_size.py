"""Train a model of the size of BERT-base (110 million parameters) on Python's own documentation, in less memory than DDP needs.

    hvdliterun -np 2 python examples/torch_bert_size.py                 # hvdlite, shard=True
    hvdliterun -np 2 python examples/torch_bert_size.py --variant ddp   # torch's DDP over gloo
    python examples/torch_bert_size.py --compare --plot memory.png      # all variants, each in a job of 2 ranks of its own

The text ships with Python, so nothing is downloaded. The model guesses words that were masked (arXiv:1810.04805). The program
prints the most memory that each rank has had, the loss, and the time of a step. Memory is Pss: what ranks share is split among
them. With shard=True each rank has the optimizer's state for its part of the parameters only, and the parameters lie once for
the host.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from tqdm import tqdm

import hvdlite_torch as hvd

VOCABULARY, MASK, UNKNOWN = 30522, 0, 1
VARIANTS = {"shard": "hvdlite, shard=True", "plain": "hvdlite", "ddp": "torch DDP, gloo"}
RESULT = "result: "


def words() -> torch.Tensor:
    """Return the documentation as numbers of words and signs."""
    found = re.findall(r"\w+|[^\w\s]", " ".join(topics.values()))
    numbers = {word: number for number, (word, _) in enumerate(Counter(found).most_common(VOCABULARY - 2), 2)}
    return torch.tensor([numbers.get(word, UNKNOWN) for word in found])


class Bert(nn.Module):
    """An encoder that guesses the masked words: 12 layers of width 768 with 12 heads by default."""

    def __init__(self, layers: int, width: int, length: int) -> None:
        super().__init__()
        self.words, self.positions = nn.Embedding(VOCABULARY, width), nn.Embedding(length, width)
        layer = nn.TransformerEncoderLayer(
            width, max(1, width // 64), 4 * width, dropout=0.0, activation="gelu", batch_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.norm, self.bias = nn.LayerNorm(width), nn.Parameter(torch.zeros(VOCABULARY))
        nn.init.normal_(self.words.weight, std=0.02)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.encoder(self.words(x) + self.positions.weight[: x.shape[1]])
        return F.linear(self.norm(hidden), self.words.weight, self.bias)


class Memory:
    """The most memory that this process has had since `begin`, in bytes: its Pss, looked at every 20 ms."""

    def __init__(self) -> None:
        self.peak = 0
        threading.Thread(target=self._look, daemon=True).start()

    def _look(self) -> None:
        while True:
            found = re.search(r"^Pss:\s+(\d+) kB$", Path("/proc/self/smaps_rollup").read_text(), re.MULTILINE)
            self.peak = max(self.peak, 1024 * int(found[1])) if found else self.peak
            time.sleep(0.02)


def train(arguments: argparse.Namespace) -> dict[str, Any]:
    """Train on this rank. Return the losses, the median time of a step, and the peak of each rank's memory."""
    hvd.init()
    torch.set_num_threads(max(1, torch.get_num_threads() // hvd.local_size()))
    torch.manual_seed(0)
    model: nn.Module = Bert(arguments.layers, arguments.width, arguments.length)
    parameters = sum(p.numel() for p in model.parameters())
    if arguments.variant == "ddp":
        torch.distributed.init_process_group("gloo")
        model = nn.parallel.DistributedDataParallel(model)
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=arguments.lr)
    if arguments.variant != "ddp":
        hvd.broadcast_parameters(model.state_dict())
        optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters(), shard=arguments.variant == "shard")
    text, draw = words(), torch.Generator().manual_seed(1)
    memory, seconds, losses = Memory(), [], []
    with tqdm(total=arguments.steps, unit="step", disable=hvd.rank() != 0, mininterval=0.5) as progress:
        for _ in range(arguments.steps):
            starts = torch.randint(len(text) - arguments.length, (hvd.size(), arguments.batch), generator=draw)
            masked = torch.rand(hvd.size(), arguments.batch, arguments.length, generator=draw) < 0.15
            masked[:, 0, 0] = True  # no batch without a masked word
            x = torch.stack([text[start : start + arguments.length] for start in starts[hvd.rank()].tolist()])
            mine = masked[hvd.rank()]
            begin = time.perf_counter()
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x.masked_fill(mine, MASK))[mine], x[mine])
            loss.backward()
            optimizer.step()
            seconds.append(time.perf_counter() - begin)
            losses.append(float(hvd.allreduce(loss.detach())))
            progress.set_postfix(loss=f"{losses[-1]:.3f}", refresh=False)
            progress.update()
    peaks = hvd.allgather_object(memory.peak)
    if arguments.variant == "ddp":
        torch.distributed.destroy_process_group()
    median = statistics.median(seconds[1:] or seconds)
    return {"losses": losses, "step": median, "peaks": peaks, "parameters": parameters}


def compare(arguments: argparse.Namespace) -> None:
    """Run each variant in a job of its own, and print its memory and time next to those of DDP."""
    results: dict[str, dict[str, Any]] = {}
    passed = [f"--{name}={getattr(arguments, name)}" for name in ("steps", "batch", "length", "layers", "width", "lr")]
    for variant in VARIANTS:
        command = [sys.executable, "-m", "hvdlite.launch", "-np", str(arguments.ranks), "--no-tag-output"]
        command += [sys.executable, __file__, "--variant", variant, "--json", *passed]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
        if done.returncode:
            sys.exit(f"{VARIANTS[variant]}: the job ended with code {done.returncode}.")
        (line,) = [line for line in done.stdout.splitlines() if line.startswith(RESULT)]
        results[variant] = json.loads(line.removeprefix(RESULT))
    base = results["ddp"]
    print(
        f"{base['parameters']:,} parameters, {arguments.ranks} ranks, {arguments.batch} × {arguments.length} words each"
    )
    for variant, name in VARIANTS.items():
        found = results[variant]
        peak, ratio = max(found["peaks"]), max(found["peaks"]) / max(base["peaks"])
        print(
            f"  {name:20} peak {peak / 1e9:.2f} GB ({ratio:.2f} of DDP)   step {found['step']:.2f} s "
            f"({found['step'] / base['step']:.2f} of DDP)   loss {found['losses'][0]:.3f} to {found['losses'][-1]:.3f}"
        )
    if arguments.plot:
        _draw(results, arguments.plot)


def _draw(results: dict[str, dict[str, Any]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    picture, (left, right) = plt.subplots(1, 2, figsize=(9, 4), layout="constrained")
    names = [VARIANTS[variant] for variant in results]
    left.bar(names, [max(found["peaks"]) / 1e9 for found in results.values()])
    left.set_ylabel("most memory of a rank, GB")
    right.bar(names, [found["step"] for found in results.values()])
    right.set_ylabel("median of a step, s")
    picture.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--variant", choices=VARIANTS, default="shard")
    parser.add_argument("--compare", action="store_true", help="all variants, each in a job of its own")
    parser.add_argument("--ranks", type=int, default=2, help="of each job of --compare")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--batch", type=int, default=1, help="texts of each rank")
    parser.add_argument("--length", type=int, default=64, help="words of a text")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--lr", type=float, default=1e-4)
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="with --compare: draw memory and time")
    arguments = parser.parse_args()
    if arguments.width % max(1, arguments.width // 64):
        parser.error(f"--width {arguments.width} is no multiple of its {arguments.width // 64} heads of width 64")
    if arguments.plot and not arguments.plot.absolute().parent.is_dir():
        parser.error(f"--plot {arguments.plot}: there is no folder {arguments.plot.absolute().parent}")
    if arguments.compare:
        compare(arguments)
        return
    found = train(arguments)
    if hvd.rank() == 0 and arguments.json:
        print(RESULT + json.dumps(found))
    elif hvd.rank() == 0:
        print(f"{VARIANTS[arguments.variant]}: {found['parameters']:,} parameters, step {found['step']:.2f} s")
        print(f"loss {found['losses'][0]:.3f} to {found['losses'][-1]:.3f} nats for each masked word")
        for rank, peak in enumerate(found["peaks"]):
            print(f"rank {rank}: at most {peak / 1e9:.2f} GB")


if __name__ == "__main__":
    main()
