"""``python -m hvdlite.launch``: the same as ``hvdliterun``."""

from __future__ import annotations

import sys

from hvdlite.launch.cli import main

sys.exit(main())
