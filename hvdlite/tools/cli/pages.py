"""``hvdlite docs``: the pages of the documentation, which the wheel has in ``hvdlite/pages`` and a clone in ``docs``."""

from __future__ import annotations

import argparse
import difflib
import pydoc
import sys
from pathlib import Path
from typing import Any

from hvdlite.errors import ArgumentError


def add_docs(commands: Any) -> None:
    """Add the command ``docs`` to the commands of ``hvdlite``."""
    docs = commands.add_parser(
        "docs",
        help="show a page of the documentation, or list the pages",
        description="Show a page of the documentation. Without a name, list the pages.",
        allow_abbrev=False,
    )
    docs.add_argument("page", nargs="?", metavar="NAME", help="the name of a page, such as install")
    docs.set_defaults(action=_docs)


def folder() -> Path:
    """Return the folder of the pages."""
    package = Path(__file__).parents[2]
    return package / "pages" if (package / "pages").is_dir() else package.parent / "docs"


def _docs(options: argparse.Namespace) -> None:
    pages = {path.stem: path for path in sorted(folder().glob("*.md"))}
    if options.page is None:
        width = max(map(len, pages), default=0)
        print("\n".join(f"{name:{width}}  {_title(path)}" for name, path in pages.items()))
        return
    name = Path(options.page).stem
    if name not in pages:
        near = difflib.get_close_matches(name, pages, 3)
        which = f" Did you mean {' or '.join(near)}?" if near else ""
        raise ArgumentError(f"docs: there is no page {options.page!r}.{which} hvdlite docs lists the pages.")
    text = pages[name].read_text(encoding="utf-8")
    if sys.stdout.isatty():
        pydoc.pager(text)
    else:
        print(text, end="")


def _title(path: Path) -> str:
    lines = path.read_text(encoding="utf-8").splitlines()
    return next(line[2:].replace("`", "") for line in lines if line.startswith("# "))
