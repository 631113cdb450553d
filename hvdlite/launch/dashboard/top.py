"""``hvdlite top``: what a running job does, in a terminal."""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

from hvdlite.errors import LaunchError
from hvdlite.launch.dashboard.server import NAME
from hvdlite.launch.worker.shared_memory import name_in_memory

_EVERY_SECONDS = 1.0
_ANSWER_SECONDS = 5.0
_BEGIN_ANEW = "\x1b[H\x1b[2J"


def top(job: int | None, once: bool) -> None:
    """Show a job of this user until it has ended; once, if stdout is no terminal.

    Args:
        job: The process id of its hvdliterun; None for the job that has begun last.
        once: Show it once on a terminal too.

    Raises:
        LaunchError: There is no such job, or it has ended.
    """
    path = _find(job)
    url = path.read_text().replace("/?", "/text?", 1)
    on_screen = sys.stdout.isatty() and not once
    said = False
    with contextlib.suppress(KeyboardInterrupt):
        while (found := _ask(url)) is not None:
            text, has_ended = found
            _show(text, on_screen)
            if has_ended or not on_screen:
                return
            said = True
            time.sleep(_EVERY_SECONDS)
        if not said:
            with contextlib.suppress(OSError):
                path.unlink()  # its hvdliterun was killed
            raise LaunchError("the job has ended: its hvdliterun does not answer.")
        print("hvdlite: the job has ended.")


def _find(job: int | None) -> Path:
    """Return the file with the address of a job's page. Nobody else can have written it."""
    folder = Path(name_in_memory("")).parent
    found = []
    for path in folder.glob(f"{NAME}{os.getuid()}.*"):
        with contextlib.suppress(OSError):
            about = path.lstat()
            if stat.S_ISREG(about.st_mode) and about.st_uid == os.getuid() and job in (None, _process_of(path)):
                found.append((about.st_mtime_ns, path))
    if not found:
        which = "no job" if job is None else f"no job of process {job}"
        raise LaunchError(f"{which} with a dashboard runs here: begin it with hvdliterun --dashboard, or it has ended.")
    return max(found)[1]


def _process_of(path: Path) -> int | None:
    number = path.name.removeprefix(f"{NAME}{os.getuid()}.").partition(".")[0]
    return int(number) if number.isdecimal() else None


def _ask(url: str) -> tuple[str, bool] | None:
    """Return the text of a page, and whether its job has ended; None if it is not there any more."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # nothing leaves this machine
    try:
        with opener.open(url, timeout=_ANSWER_SECONDS) as answer:
            return answer.read().decode(), False
    except urllib.error.HTTPError as error:
        return (error.read().decode(), True) if error.code == 410 else None
    except OSError:
        return None


def _show(text: str, on_screen: bool) -> None:
    if on_screen:
        size = shutil.get_terminal_size()
        lines = [line[: size.columns] for line in text.splitlines()[: size.lines - 1]]
        text = _BEGIN_ANEW + "\n".join(lines) + "\n"
    print(text, end="", flush=True)
