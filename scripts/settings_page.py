"""Write docs/settings.md, which is made of the docstring of hvdlite.config.Config.

python scripts/settings_page.py
"""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path
from textwrap import dedent

from hvdlite.config import Config

PAGE = Path(__file__).parent.parent / "docs" / "settings.md"
OPTIONS = {
    "autotune": "--autotune",
    "autotune_log": "--autotune-log-file",
    "fusion_threshold": "--fusion-threshold-mb",
    "servers": "--servers",
    "stall_check_disable": "--no-stall-check",
    "stall_check_time_seconds": "--stall-check-warning-time-seconds",
    "stall_shutdown_time_seconds": "--stall-check-shutdown-time-seconds",
    "timeline": "--timeline-filename",
    "timeline_mark_cycles": "--timeline-mark-cycles",
}
"""The options of hvdliterun that set the same."""
INTERNAL = {"advise", "control", "pulse"}
"""Settings that one process of hvdlite makes for another."""

HEAD = """# Settings

<!-- Written by scripts/settings_page.py from the docstring of hvdlite.config.Config. Change it there. -->

Each setting is an environment variable. The same name with `HOROVOD_` in front works too. Under `hvdliterun` some have an
option. Switches take 1, 0, true, false, yes, no, on or off. A wrong value is an error that names the variable.

| variable | default | option of hvdliterun | meaning |
|---|---|---|---|
"""


def page() -> str:
    """The text of the page."""
    attributes = dedent((Config.__doc__ or "").partition("Attributes:\n")[2].partition("\n    Raises:")[0])
    meanings = dict(re.findall(r"^(\w+): (.*?)(?=^\w+: |\Z)", attributes, re.DOTALL | re.MULTILINE))
    rows = []
    for field in fields(Config):
        if field.name in INTERNAL:
            continue
        default = f"{field.default:g}" if isinstance(field.default, float) else str(field.default)
        default = str(int(field.default)) if isinstance(field.default, bool) else default
        option = OPTIONS.get(field.name, "")
        cells = [f"`HVDLITE_{field.name.upper()}`", default and f"`{default}`", option and f"`{option}`"]
        meaning = re.sub(r"\s+", " ", meanings[field.name]).strip()
        rows.append(f"| {' | '.join([*cells, meaning])} |")
    return HEAD + "\n".join(rows) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page())
