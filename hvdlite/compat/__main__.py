"""``python -m hvdlite.compat`` runs this file, which calls `hvdlite.compat.cli.main`."""

from __future__ import annotations

import sys

from hvdlite.compat.cli import main

sys.exit(main(sys.argv[1:]))
