"""Records of `logging`: which are made, who gets them, and what is printed in programs that do not configure `logging`."""

from __future__ import annotations

import subprocess
import sys

import pytest

from hvdlite.config import Config
from hvdlite.errors import ArgumentError
from tests.support.jobs import Start

SAYS = """
import logging
from hvdlite.ranks.log import set_level, tell
{first}
set_level({level!r})
tell("stalls", "a warning", 3)
tell("world", "information", 1, logging.INFO)
"""
CONFIGURES = "logging.basicConfig(format='%(name)s of %(rank)s says %(message)s', level=logging.{})"


@pytest.mark.parametrize(
    ("level", "first", "printed"),
    [
        ("", "", ["a warning"]),
        ("error", "", []),
        ("", CONFIGURES.format("WARNING"), ["hvdlite.stalls of 3 says a warning"]),
        ("", CONFIGURES.format("ERROR"), []),
        (
            "DEBUG",
            CONFIGURES.format("INFO"),
            ["hvdlite.stalls of 3 says a warning", "hvdlite.world of 1 says information"],
        ),
    ],
)
def test_who_gets_what(level: str, first: str, printed: list[str]) -> None:
    code = SAYS.format(first=first, level=level)
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert ended.stderr.splitlines() == printed


def test_a_level_prints_the_rank(start: Start) -> None:
    program = "import hvdlite as hvd; hvd.init(); hvd.barrier()"
    ended = start("-np", "2", "python", "-c", program, env={"HVDLITE_LOG_LEVEL": "info"}).end()
    assert ended.code == 0, ended.err
    for rank in range(2):
        assert f"hvdlite.world, rank {rank}, INFO: hvdlite begins: 2 ranks on 1 host" in ended.err


def test_a_level_that_is_none() -> None:
    with pytest.raises(ArgumentError, match="HVDLITE_LOG_LEVEL='loud': expected one of trace, debug, info"):
        Config(log_level="loud")
