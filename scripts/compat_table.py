"""Write the compatibility table of this version of hvdlite into docs/from_horovod.md.

python scripts/compat_table.py
"""

from __future__ import annotations

import os
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

from hvdlite.compat.report import markdown

PAGE = Path(__file__).parent.parent / "docs" / "from_horovod.md"
BEGIN, END = "<!-- table -->\n", "\n<!-- end of table -->"

text = PAGE.read_text()
before, _, rest = text.partition(BEGIN)
_, _, after = rest.partition(END)
PAGE.write_text(f"{before}{BEGIN}\n{markdown()}\n{END}{after}")
