"""Rank 0 ends without init(). The others call it. "first": rank 0 ends first; "last": the others are in there by then."""

import os
import sys
from pathlib import Path

import hvdlite as hvd

order, folder = sys.argv[1], Path(sys.argv[2])
rank, size = int(os.environ["OMPI_COMM_WORLD_RANK"]), int(os.environ["OMPI_COMM_WORLD_SIZE"])
(folder / f"{os.getpid()}.{rank}").touch()
if rank == 0:
    while order == "last" and len(list(folder.glob("*.starts"))) < size - 1:
        pass
    sys.exit(0)
while order == "first" and all(Path(f"/proc/{path.stem}").exists() for path in folder.glob("*.0")):
    pass
(folder / f"{rank}.starts").touch()
hvd.init()
