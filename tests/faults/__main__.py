"""Run many faults, with a progress bar and a table at the end: ``python -m tests.faults --seed N --count M``."""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
from collections import defaultdict
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.faults.harness import Outcome, choose, run
from tests.faults.kinds import ANY_FAILURE, KINDS
from tests.support.hosts import why_not

_LATE = 3.0  # seconds to the end of a job, as hvdliterun promises on an idle machine
_WIDTH = 30


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/faults", description=__doc__)
    parser.add_argument("--seed", type=int, required=True, help="the same seed gives the same faults")
    parser.add_argument("--count", type=int, required=True, help="how many")
    parser.add_argument("--kinds", help="only these, separated by commas; all if not given")
    parser.add_argument("--torch", type=float, default=0.25, help="which part of the programs trains with torch (0.25)")
    parser.add_argument("--jobs", type=int, default=1, help="how many at a time (1)")
    parser.add_argument("--only", type=int, help="of the faults of this seed, the one with this number")
    parser.add_argument("--log", type=Path, help="write what came of each fault to this file, as lines of JSON")
    options = parser.parse_args()
    names = options.kinds.split(",") if options.kinds else list(KINDS)
    if unknown := set(names) - set(KINDS):
        parser.error(f"no such kinds: {', '.join(sorted(unknown))}; there are {', '.join(KINDS)}")
    if reason := why_not():
        print(f"faults on several hosts are left out: {reason}")
        names = [name for name in names if KINDS[name].needs != "hosts"]
    # Jobs inherit these handlers. A shell that starts this program in the background has both signals ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGQUIT, signal.SIG_DFL)
    faults = choose(options.seed, options.count, names, options.torch)
    if options.only is not None:
        faults = [fault for fault in faults if fault.number == options.only]
    outcomes = []
    started = time.monotonic()
    with ThreadPoolExecutor(options.jobs) as pool:
        for outcome in pool.map(run, faults):
            outcomes.append(outcome)
            _show_progress(outcomes, len(faults), started)
            if options.log is not None:
                with open(options.log, "a") as log:
                    log.write(json.dumps(_record(outcome)) + "\n")
    print()
    print("\n".join(_table(outcomes)))
    return 1 if any(outcome.wrong for outcome in outcomes) else 0


def _show_progress(outcomes: list[Outcome], total: int, started: float) -> None:
    done, last = len(outcomes), outcomes[-1]
    if last.wrong:
        sys.stdout.write(f"\r\x1b[K{last.fault}: {'; '.join(last.wrong)}\n")
        sys.stdout.write("".join(f"    {line}\n" for line in last.last_words.splitlines()[:12]))
    bar = "#" * (_WIDTH * done // total)
    bad = sum(bool(outcome.wrong) for outcome in outcomes)
    left = (time.monotonic() - started) / done * (total - done)
    sys.stdout.write(
        f"\r\x1b[K[{bar:<{_WIDTH}}] {done}/{total}, {bad} wrong, {left:.0f} s left, {last.fault.kind.name}"
    )
    sys.stdout.flush()


def _record(outcome: Outcome) -> dict[str, object]:
    return {
        "fault": str(outcome.fault),
        "seconds": round(outcome.seconds, 2),
        "wrong": outcome.wrong,
        "last_words": outcome.last_words,
    }


def _table(outcomes: Iterable[Outcome]) -> list[str]:
    by_kind: dict[str, list[Outcome]] = defaultdict(list)
    for outcome in outcomes:
        by_kind[outcome.fault.kind.name].append(outcome)
    lines = ["| fault | jobs | as expected | code | slowest end, s | late |", "|---|---|---|---|---|---|"]
    totals = [0, 0, 0]
    for name, found in sorted(by_kind.items()):
        good = sum(not outcome.wrong for outcome in found)
        seconds = [outcome.seconds for outcome in found if outcome.seconds == outcome.seconds]
        late = sum(second > _LATE for second in seconds)
        slowest = f"{max(seconds):.1f}" if seconds else "-"
        code = KINDS[name].code
        lines.append(
            f"| {name} | {len(found)} | {good} | {'any' if code == ANY_FAILURE else code} | {slowest} | {late} |"
        )
        totals = [total + more for total, more in zip(totals, (len(found), good, late), strict=True)]
    return [*lines, f"| **all** | {totals[0]} | {totals[1]} | | | {totals[2]} |"]


if __name__ == "__main__":
    sys.exit(main())
