"""Write lines to stdout, of as many bytes as the first argument says.

Print on stderr how many bytes the reader took before it paused for a second.
"""

import os
import select
import sys

LINE = b"." * 1023 + b"\n"  # a pipe takes the whole line or nothing
size = int(sys.argv[1])
os.set_blocking(1, False)
written = 0
while written < size and select.select([], [1], [], 1.0)[1]:
    written += os.write(1, LINE)
print(written, file=sys.stderr, flush=True)
os.set_blocking(1, True)
while written < size:
    written += os.write(1, LINE)
