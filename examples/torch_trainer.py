"""Train a small GPT-2 on Python's own documentation with `transformers.Trainer`, on any number of processes.

    pip install -c constraints.txt '.[frameworks]'
    hvdliterun -np 2 python examples/torch_trainer.py
    hvdliterun -np 2 python examples/torch_trainer.py --check --plot loss.png

The model guesses the next letter of the documentation, which ships with Python; it begins with random weights, so nothing is
downloaded. At the end, rank 0 prints the loss on held-out text, and whether all ranks have identical weights. --check computes
in float64, trains the same model in one process on the batches of all ranks joined, and compares the weights. --plot draws the
loss. The comment "hvd" marks the lines that hvdlite adds to an ordinary program.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
from torch.nn import functional as F
from torch.utils.data import TensorDataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

import hvdlite_torch as hvd
import hvdlite_torch.accelerate  # hvd

CLOSE = 1e-10


def load(length: int) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Return pieces of the text (N, length) as numbers, those to train with and held-out ones; and the number of letters."""
    text = " ".join(topics.values())
    numbers = {letter: number for number, letter in enumerate(sorted(set(text)))}
    letters = torch.tensor([numbers[letter] for letter in text])
    pieces = letters[: len(letters) // length * length].reshape(-1, length)
    pieces = pieces[torch.randperm(len(pieces), generator=torch.Generator().manual_seed(0))]
    return pieces[:-120], pieces[-120:], len(numbers)


def collate(rows: list[tuple[torch.Tensor]]) -> dict[str, torch.Tensor]:
    pieces = torch.stack([piece for (piece,) in rows])
    labels = pieces.clone()
    labels[:, 0] = -100  # nobody guesses the first letter, and the Trainer does not count it
    return {"input_ids": pieces, "labels": labels}


def loss_of(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
    """Return the loss of this rank's letters, divided by the number of letters of all ranks, which the Trainer counts.

    The model's own loss does the same, but always in float32.
    """
    total = F.cross_entropy(outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="sum")
    return total / (labels[:, 1:].numel() if num_items_in_batch is None else num_items_in_batch)


def network(letters: int, length: int, width: int) -> GPT2LMHeadModel:
    """Return the model with weights that are the same on every rank."""
    torch.manual_seed(0)
    sizes = {"vocab_size": letters, "n_positions": length, "n_embd": width, "n_layer": 2, "n_head": 4}
    none = {"embd_pdrop": 0.0, "attn_pdrop": 0.0, "resid_pdrop": 0.0, "bos_token_id": None, "eos_token_id": None}
    return GPT2LMHeadModel(GPT2Config(**sizes, **none)).to(torch.get_default_dtype())


def train_alone(model: GPT2LMHeadModel, pieces: torch.Tensor, steps: int, lr: float) -> None:
    """Train in this process; `pieces` are those of a step of all ranks together, step after step."""
    adam = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.0)
    for batch in pieces.chunk(steps):
        adam.zero_grad()
        loss_of(model(batch), batch).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # as the Trainer does
        adam.step()


def draw(losses: list[float], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    picture, axes = plt.subplots(layout="constrained")
    axes.plot(range(1, len(losses) + 1), losses)
    axes.set_xlabel("steps")
    axes.set_ylabel("loss, nats per letter")
    axes.set_title(f"transformers.Trainer on {hvd.size()} ranks")
    picture.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--batch-size", type=int, default=8, help="pieces of text for each rank")
    parser.add_argument("--length", type=int, default=64, help="of a piece, in letters")
    parser.add_argument("--width", type=int, default=64, help="a multiple of 4")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--check", action="store_true", help="train in one process too, and compare the weights")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the loss")
    arguments = parser.parse_args()
    if arguments.plot and not arguments.plot.absolute().parent.is_dir():
        parser.error(f"--plot {arguments.plot}: there is no folder {arguments.plot.absolute().parent}")

    hvdlite_torch.accelerate.prepare()  # hvd: joins the job
    torch.set_num_threads(max(1, torch.get_num_threads() // hvd.local_size()))  # hvd: the ranks share the cores
    if arguments.check:
        torch.set_default_dtype(torch.float64)
    pieces, held_out, letters = load(arguments.length)
    used = arguments.steps * arguments.batch_size * hvd.size()
    if used > len(pieces):
        parser.error(f"{used} pieces in {arguments.steps} steps: the text has only {len(pieces)}. Make fewer --steps.")
    model = network(letters, arguments.length, arguments.width)
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            model,
            TrainingArguments(
                folder,
                max_steps=arguments.steps,
                per_device_train_batch_size=arguments.batch_size,
                learning_rate=arguments.lr,
                lr_scheduler_type="constant",
                optim="adamw_torch",
                train_sampling_strategy="sequential",  # the pieces are in random order already
                save_strategy="no",
                logging_steps=1,
                report_to="none",
                dataloader_pin_memory=False,
                ddp_find_unused_parameters=False,
                disable_tqdm=hvd.rank() != 0,
            ),
            data_collator=collate,
            train_dataset=TensorDataset(pieces),
            eval_dataset=TensorDataset(held_out),
            compute_loss_func=loss_of,
        )
        trainer.train()  # before any evaluate(), which Accelerate 1.15 takes for a model without gradients to exchange
        held_out_loss = trainer.evaluate()["eval_loss"]
    hvd.assert_in_sync(model)
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    if hvd.rank() == 0:
        print(f"loss on held-out text: {held_out_loss:.3f} nats per letter")
        print(f"weights: identical on {hvd.size()} rank{'s' if hvd.size() > 1 else ''} after {arguments.steps} steps")
        if arguments.plot:
            draw(losses, arguments.plot)
    if arguments.check:
        alone = network(letters, arguments.length, arguments.width)
        train_alone(alone, pieces[:used], arguments.steps, arguments.lr)
        away = max((a - b).abs().max().item() for a, b in zip(model.parameters(), alone.parameters(), strict=True))
        if hvd.rank() == 0:
            print(f"one process: weights differ by {away:.2g} at most")
        if not away < CLOSE:
            sys.exit(f"--check: the weights of rank {hvd.rank()} are not those of one process")


if __name__ == "__main__":
    main()
