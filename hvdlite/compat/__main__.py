"""``python -m hvdlite.compat``."""

from __future__ import annotations

import sys

from hvdlite.compat.cli import main

sys.exit(main(sys.argv[1:]))
