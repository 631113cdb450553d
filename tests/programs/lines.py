"""Write many long lines to stdout and stderr, each line in two pieces."""

import os
import sys

rank = os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("PMI_RANK", "?"))
for number in range(300):
    for stream in (sys.stdout, sys.stderr):
        stream.write(f"{stream.name} {number} ")
        stream.flush()
        stream.write(rank * 3000 + "\n")
