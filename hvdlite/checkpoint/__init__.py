"""Checkpoints: what a training needs to go on, saved by all ranks together, so that it is there whole or not at all.

A program calls `save` and `load`; docs/checkpoints.md shows how.

- `saving`, `loading`: `save` and `load`. `ranks`: what the ranks of one call agree on.
- `behind`: checkpoints that threads write while the training goes on.
- `states`: which objects have a state, and how it is read and set. `structure`: values as JSON, with the places of tensors.
  `parts`: one structure from those of all ranks.
- `tensor_file`: the format safetensors. `manifest`: what is in a checkpoint, with a checksum of each file.
- `memory`: copies of states in memory, in the same form.
- `folder`: the checkpoints in a folder, and which of them is next. `disk`: the only file that changes anything on the disk.
"""

from __future__ import annotations

from hvdlite.checkpoint.behind import wait
from hvdlite.checkpoint.loading import Loaded, load
from hvdlite.checkpoint.saving import save

__all__ = ["Loaded", "load", "save", "wait"]
