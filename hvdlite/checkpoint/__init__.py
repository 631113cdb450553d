"""Checkpoints: what a training needs to go on, saved by all ranks together, so that it is there whole or not at all.

A program calls `save` and `load`; ``hvdlite docs checkpoints`` shows how.

- `saving`, `loading`: `save` and `load`. `ranks`: what the ranks of one call agree on.
- `behind`: checkpoints that threads write while the training goes on.
- `states`: which objects have a state, and how it is read and set. `structure`: values as JSON, with the places of tensors.
  `parts`: one structure from those of all ranks.
- `tensor_file`: the format safetensors. `manifest`: what is in a checkpoint, with a checksum of each file.
- `memory`: copies of states in memory, in the same form.
- `folder`: the checkpoints in a folder, and which of them is next. `disk`: the only file that changes anything on the disk.

A checkpoint is a folder that gets its name when all of it is on the disk. What an object's state is, an adapter says. The
state becomes a tree, which is JSON, and tensors, in files of the format safetensors. If ranks have different parts of a
state, such as the shards of an optimizer, each writes its own file, and rank 0 merges the trees: a tensor in the merged
tree has the places of its pieces, so a reader needs to know nothing about shards. Every step of `save` and `load` that can
fail on one rank is followed by a meeting, after which all ranks go on or all raise.
"""

from __future__ import annotations

from hvdlite.checkpoint.behind import wait
from hvdlite.checkpoint.loading import Loaded, load
from hvdlite.checkpoint.saving import save

__all__ = ["Loaded", "load", "save", "wait"]
