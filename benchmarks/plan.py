"""Says what is measured, with which peers, and how. This module does not import torch or start MPI."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping


def names_in(table: Mapping[str, str]) -> Callable[[str], list[str]]:
    """Return the type of an option that takes keys of `table`, separated by commas, and gives its values in their order."""

    def parse(text: str) -> list[str]:
        typed = [name.strip() for name in text.split(",") if name.strip()]
        if unknown := [name for name in typed if name not in table]:
            raise argparse.ArgumentTypeError(f"no {', '.join(unknown)}: there are {', '.join(table)}.")
        return [shown for name, shown in table.items() if name in typed]

    return parse


# Blocking allreduce

KINDS = ("float32", "bfloat16", "float16", "float32 NumPy")
"""The kinds of tensors: torch tensors by dtype, and NumPy arrays."""

MPI_OWN = "MPI"
"""The peer whose time is the reference."""
MPI_HALF = "MPI half"
BUCKETS = "hvdlite buckets"
MEMCPY = "memcpy"
"""A copy in memory: a lower bound of the time, not a peer."""

SIZES = (4, 4 * 2**10, 64 * 2**10, 2**20, 16 * 2**20, 64 * 2**20)
QUICK_SIZES = (4, 4 * 2**10, 2**20, 16 * 2**20)
RANKS = (2, 4)
ROUNDS, QUICK_ROUNDS = 15, 3

HOW_ALLREDUCE = """\
Blocking sum over the ranks, in place, of one tensor. Every call starts after a barrier; its time is that of the rank that
took longest. The peers take turns in each round, beginning with another one each time, in the same processes. The tensor is
written anew before each call, and compared with the true sum after each round. Cells: median (minimum), and the ratio of
medians to MPI's own Allreduce of float32 with as many elements (below 1: faster). One thread for each rank."""

# Training steps

WORKLOADS = {
    **{"mlp_sgd": "MLP, SGD momentum", "mlp_adam": "MLP, Adam", "gpt": "GPT, AdamW"},
    **{"mlp_wide": "wide MLP, AdamW", "resnet18": "ResNet-18, SGD momentum", "lstm": "LSTM, Adam"},
    **{"small_layers": "300 small layers, Adam", "bert": "BERT size, AdamW"},
}
"""The workloads: by the names that are typed, the names that are shown."""
LARGE = ("BERT size, AdamW",)
"""The workloads of which memory does not hold all variants at once: the job of a variant ends before the next one starts."""

ALONE = "no exchange"
"""Training alone with the plain torch optimizer: each rank trains alone, so the weights differ between the ranks."""
ALONE_TUNED = "no exchange, tuned"
"""The variant whose time is the reference: training alone with torch's fused step, freed memory kept for the next step, and
large tensors in huge pages. hvdlite sees to all three, and any program could."""
ALONE_SMALL = "no exchange, tuned, small pages"
"""`ALONE_TUNED` with pages as torch has them if nobody asks."""
HVDLITE, SHARD, OVERLAP = "hvdlite", "hvdlite shard", "hvdlite overlap"
DDP = "torch DDP, gloo"
DDP_TUNED = "torch DDP, tuned"
"""DDP with what `ALONE_TUNED` has, and without its broadcast of buffers, which hvdlite does not do either."""
ZERO = "torch ZeRO, tuned"
"""`DDP_TUNED` with torch's ZeroRedundancyOptimizer: each rank steps its shard of the parameters."""
FLAT = "MPI, flat"
"""The variant whose weights are the reference: the exchange that a user writes by hand."""
HOROVOD = "Horovod"
VARIANTS = {
    **{
        "alone": ALONE,
        "tuned": ALONE_TUNED,
        "tuned_small": ALONE_SMALL,
        "plain": HVDLITE,
        "sharded": SHARD,
        "overlap": OVERLAP,
    },
    **{"ddp": DDP, "ddp_tuned": DDP_TUNED, "zero": ZERO, "flat": FLAT, "horovod": HOROVOD},
}
"""The variants: by the names that are typed, the names that are shown."""
SMALL_PAGES = (ALONE, ALONE_SMALL, DDP, FLAT, HOROVOD)
"""The variants whose jobs do not ask for huge pages, although they import hvdlite_torch, which does that."""

STEP_RANKS = 2
TURN_STEPS = 4
"""The number of steps that a variant makes in one turn."""
CHECK_STEPS = 3
"""The number of steps before the weights are compared with those of `FLAT`. They are not timed."""
STEP_ROUNDS, QUICK_STEP_ROUNDS = 10, 1
LARGE_ROUNDS = 2
"""The number of turns of each variant, if `LARGE`."""
LARGE_EVERY = 8
"""Every eighth weight is compared, if `LARGE`: a disk would take longer for all than training takes."""

HOW_STEPS = f"""\
Training steps (zero_grad, forward, backward, exchange, optimizer) on 2 ranks with one thread each. All variants start with
the same weights and see the same batches, each rank others. Each has processes of its own. They take turns of {TURN_STEPS}
steps, beginning with another one in each round, and sleep meanwhile; if the model is large, the processes of a variant end
with its turn. Every step starts after a barrier; its time is that of the rank that took longest. After {CHECK_STEPS} steps,
which are not timed, all variants that exchange must hold the weights of the exchange by hand, and at the end the same weights
on all ranks. ÷: ratio of medians, to the tuned step without exchange and to the tuned DDP (below 1: faster)."""

HOW_MEMORY = """\
Memory of a rank that trains, one variant in a job of its own: Pss of /proc/self/smaps_rollup, which splits what ranks share
among them, so that it counts once for the host. From all figures but the last column, what the rank had before is taken
off, with all libraries loaded and a tiny model trained. Kept: after a step, that is weights, gradients, optimizer state and
buckets. Peak: the largest during steps, with activations and temporary memory. MB (10^6 bytes), mean of the ranks."""

# Keras

KERAS_WORKLOADS = ("Keras MLP, SGD momentum", "Keras MLP, Adam")
TF_KERAS_ALONE = "tf_keras, no exchange"
MULTI_WORKER = "tf_keras, MultiWorkerMirroredStrategy"
"""TensorFlow's own strategy, which fails with Keras 3."""
KERAS_STEPS = 10
"""The number of steps in one `fit`."""
KERAS_ROUNDS, QUICK_KERAS_ROUNDS = 20, 2

HOW_KERAS = f"""\
Steps of Keras' fit (no steps_per_execution) on 2 ranks with one thread each, inside and between operations. All variants start
with the same weights and see the same batches of 64, each rank others; they take turns, {KERAS_STEPS} steps each, in the same
processes, beginning with another one in each round. Every step starts after a barrier; its time is that of the rank that took
longest, from Keras' callback before it to that after it. After the first fit, all variants that exchange must hold the weights
that one model has got from the batches of both ranks joined, and after the last the same on all ranks. Ratio: of medians, to
the step of Keras 3 without exchange."""

# The backend of torch.distributed

GLOO = "gloo"
BACKENDS = {"hvdlite": "hvdlite", GLOO: "gloo"}
BACKEND_SIZES = (4, 2**20, 64 * 2**20)

HOW_BACKEND = """\
Operations of torch.distributed, blocking, on float32 tensors, over a group of the backend hvdlite and one of gloo; then steps
of a model of 10 layers (DDP, and FSDP2 with each layer sharded) over both, on 2 ranks. The backends take turns in the same
processes, beginning with another one in each round. The first result of each operation is compared with its closed form, and
the trained weights with each other. Up to 1 MiB several calls follow each other, as in a program with many tensors. Cells:
median (minimum) of one call, and the ratio of medians to gloo (below 1: faster). One thread for each rank."""
