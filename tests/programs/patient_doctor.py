"""``hvdlite doctor`` with time limits for a busy machine."""

import sys

from hvdlite.tools.cli import main
from hvdlite.tools.doctor import command, install, job

LIMIT = 60.0
command.START_SECONDS = job.SILENCE_SECONDS = install.MPI_SECONDS = LIMIT
sys.exit(main(["doctor", *sys.argv[1:]]))
