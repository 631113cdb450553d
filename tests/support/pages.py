"""Reads pages of the documentation whose pieces of Python together are one program."""

from __future__ import annotations

import re
from pathlib import Path

_BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def program_of(page: Path) -> str:
    """Return the pieces of a page as one program. Each piece keeps its lines, so tracebacks show the lines of the page.

    A piece is between a line "```python" and a line "```", both without indentation.
    """
    text = page.read_text()
    lines = [""] * text.count("\n")
    for block in _BLOCK.finditer(text):
        first = text.count("\n", 0, block.start(1))
        piece = block[1].splitlines()
        lines[first : first + len(piece)] = piece
    assert any(lines), f"{page} has no Python"
    return "\n".join(lines) + "\n"
