"""``python -m hvdlite``: the same as ``hvdlite``."""

from __future__ import annotations

import sys

from hvdlite.tools.cli import main

sys.exit(main())
