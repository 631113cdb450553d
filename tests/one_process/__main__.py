"""`python -m tests.one_process`: draw pairs of a program and a way, run them, and print a table."""

from __future__ import annotations

import argparse
import random
import sys
import time

from tests.one_process.table import FRAMEWORKS, GOOD, Result, draw, pairs_of, picture, run


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.one_process", description=__doc__)
    parser.add_argument("--framework", choices=FRAMEWORKS, action="append", help="all by default")
    parser.add_argument("--everything", action="store_true", help="run each row with each way once")
    parser.add_argument("--seed", type=int, default=None, help="of the pairs that are drawn; a new one by default")
    parser.add_argument("--budget", type=float, default=60.0, help="seconds for each framework and number of ranks")
    parser.add_argument("--row", action="append", help="only this row (a part of its name)")
    parser.add_argument("--way", action="append", help="only this way")
    given = parser.parse_args()
    seed = random.randrange(10**6) if given.seed is None else given.seed
    print(f"seed {seed}", flush=True)
    results: list[Result] = []
    for framework in given.framework or FRAMEWORKS:
        chosen = given.everything or given.row or given.way
        jobs = pairs_of(framework).items() if chosen else draw(framework, seed)
        for ranks, pairs in jobs:
            wanted = [
                pair
                for pair in pairs
                if all(part in " + ".join(pair.program) for part in given.row or ())
                and (not given.way or pair.way in given.way)
            ]
            if not wanted:
                continue
            begin = time.monotonic()
            for result in run(wanted, ranks, 3000.0 if chosen else given.budget):
                results.append(result)
                if result.outcome not in GOOD:
                    print(f"{result.outcome}: {result.pair}\n    {result.detail.strip()[-1500:]}", flush=True)
            print(f"{framework}, {ranks} ranks: {time.monotonic() - begin:.0f} s", flush=True)
    print(picture(results) if results else "no such pair")
    return int(not results or any(result.outcome not in GOOD for result in results))


if __name__ == "__main__":
    sys.exit(main())
