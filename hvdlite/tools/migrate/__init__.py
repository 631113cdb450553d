"""``hvdlite migrate``: what to change in a program, so that hvdlite trains it.

It reads a program for DistributedDataParallel, Horovod, ``tf.distribute`` or Accelerate, and runs nothing of it. The syntax
tree says what is to be changed, and the text is changed at these positions only: all else stays, character by character. (A
library that preserves sources, such as LibCST, would give no more: few expressions change, and each is replaced whole.) What
cannot be translated is named, with its line.

program.py    a program: what its names mean, and which statement a line can be put before
edits.py      changes of its text
ddp.py, roles.py, spawn.py, variables.py   programs for torch.distributed: they keep it, over the backend "hvdlite"
horovod.py, strategy.py, accelerate.py     the other three
command.py    the command
"""
