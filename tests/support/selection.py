"""Which tests a run has, and in which order its processes take them: what took longest comes first.

| command | tests |
|---|---|
| ``pytest -n 2`` | the quick ones: every feature, in minutes |
| ``pytest -n 2 --rest`` | what else `.ci/run` runs |
| ``pytest -n 2 --everything`` | all, and each on every number of ranks, as threads and as processes |
| ``pytest tests/runtime/test_world.py`` | the quick ones and the rest, of what is named |

``@pytest.mark.slow`` leaves a test to the rest, and ``@pytest.mark.costly`` all its cases but the first.
``@pytest.mark.weekly`` leaves it to ``--everything``: what it shows is shown by another test, on fewer ranks or in fewer steps.
tests/durations.json has the seconds that each file took; ``--renew-durations`` writes it anew.
"""

from __future__ import annotations

import importlib.util
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
DURATIONS = ROOT / "tests/durations.json"
JOBS = ("tests/project/test_under_mpirun.py", "tests/launch/test_two_hosts.py")
"""Each of their tests is a job of its own: they share no imports and no fixtures, so each can go to another process."""
PARTS = {"quick": ("quick",), "rest": ("rest",), "both": ("quick", "rest"), "everything": ("quick", "rest", "weekly")}
"""What each run takes."""


def needs_tensorflow(path: Path) -> bool:
    """Whether a file of tests/spmd is about TensorFlow or Keras, where each rank traces functions, which takes long."""
    return path.name.startswith(("test_tf_", "test_keras_"))


def needs(package: str) -> pytest.MarkDecorator:
    """Return the mark of a test that is skipped where one of the frameworks above torch is not installed."""
    reason = f"{package} is not installed: pip install -c constraints.txt -e '.[frameworks]'"
    return pytest.mark.skipif(importlib.util.find_spec(package) is None, reason=reason)


def add_options(parser: pytest.Parser) -> None:
    """Add the options that choose tests."""
    group = parser.getgroup("which tests")
    group.addoption("--quick", dest="part", action="store_const", const="quick", help="the default if none is named")
    group.addoption("--rest", dest="part", action="store_const", const="rest", help="run those that are not quick")
    group.addoption("--everything", action="store_true", help="run all, on every number of ranks: takes long")
    group.addoption("--renew-durations", action="store_true", help=f"write {DURATIONS.name}, which orders the tests")


def settle(config: pytest.Config) -> None:
    """Say which part a run without such an option has. The processes of pytest-xdist are told by the one that starts them."""
    if config.option.everything:
        config.option.part = "everything"
    elif config.option.part is None:
        named = config.args_source is pytest.Config.ArgsSource.ARGS
        config.option.part = "both" if named else "quick"


def unit_of(test: str) -> str:
    """What goes to one process as a whole: the file of a test, or the test itself where it is a job."""
    file = test.partition("::")[0]
    return test if file in JOBS else file


def choose(config: pytest.Config, items: list[pytest.Item], in_order: bool) -> None:
    """Leave the tests of this run, and put them into their order.

    Args:
        config: pytest's.
        items: All tests; changed in place.
        in_order: Leave the order as it is.
    """
    _mark_further_cases(items)
    parts = PARTS[config.option.part]
    left = [item for item in items if _part_of(item) not in parts]
    if left:
        config.hook.pytest_deselected(items=left)
        items[:] = [item for item in items if _part_of(item) in parts]
    if not in_order:
        table = json.loads(DURATIONS.read_text())
        seconds = sum((Counter(took) for name, took in table.items() if name in parts), Counter())
        known = set().union(*table.values())
        # A new file may take long.
        items.sort(key=lambda item: -seconds[unit] if (unit := unit_of(item.nodeid)) in known else float("-inf"))


def _part_of(item: pytest.Item) -> str:
    return "weekly" if item.get_closest_marker("weekly") else "rest" if item.get_closest_marker("slow") else "quick"


def _mark_further_cases(items: list[pytest.Item]) -> None:
    """Of a costly test only the first case is quick."""
    seen: set[str] = set()
    for item in items:
        test = item.nodeid.partition("[")[0]
        if item.get_closest_marker("costly") and test in seen:
            item.add_marker("slow")
        if _part_of(item) == "quick":
            seen.add(test)


class Durations:
    """A plugin of the process that hears of all tests: it writes durations.json when they have ended."""

    def __init__(self) -> None:
        self._seconds: dict[str, Counter[str]] = {part: Counter() for part in PARTS["everything"]}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        marks = report.keywords
        part = self._seconds["weekly" if "weekly" in marks else "rest" if "slow" in marks else "quick"]
        part[unit_of(report.nodeid)] += report.duration

    def pytest_sessionfinish(self) -> None:
        table = json.loads(DURATIONS.read_text())
        for part, seconds in self._seconds.items():
            known = {**table.get(part, {}), **{unit: round(took) for unit, took in seconds.items()}}
            table[part] = {unit: known[unit] for unit in sorted(known) if (ROOT / unit.partition("::")[0]).exists()}
        DURATIONS.write_text(json.dumps(table, indent=1) + "\n")


def scheduler(config: pytest.Config, log: Any) -> Any:
    """What gives the units to the processes of ``pytest -n 2``, in the order that `choose` has left."""
    from xdist.scheduler.loadfile import LoadFileScheduling

    class ByUnit(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return unit_of(nodeid)

    return ByUnit(config, log)
