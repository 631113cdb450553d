"""Shows figures as text."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from benchmarks.plan import DDP_TUNED

Figure = Mapping[str, Any]


def heading(machine: Figure, mpi: Figure) -> str:
    """Return a description of the machine in a few lines."""
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    settings = ", ".join(
        f"{name.removeprefix('OMPI_MCA_')}={value}" for name, value in mpi.items() if name != "library"
    )
    return "\n".join(
        [
            f"{machine['date']}, {machine['cores']} cores ({machine['cpu']}), load {machine['load_average']:.1f} at the start",
            f"Python {machine['python']}, {versions}, commit {machine['commit'] or 'unknown'}",
            f"{mpi['library']}" + (f": {settings}" if settings else ""),
        ]
    )


def skipped(reasons: Mapping[str, str]) -> str:
    """Return a line for each peer that is missing, with the reason."""
    return "\n".join(f"without {name}: {reason}" for name, reason in reasons.items())


def allreduce_tables(figures: Sequence[Figure]) -> str:
    """Return a table of peers by size for each number of ranks and kind of tensor."""
    blocks = []
    for ranks, kind in dict.fromkeys((f["ranks"], f["kind"]) for f in figures):
        cells = {(f["peer"], f["bytes"]): f for f in figures if (f["ranks"], f["kind"]) == (ranks, kind)}
        sizes = list(dict.fromkeys(nbytes for _, nbytes in cells))
        rows = [["", *map(size, sizes), f"GB/s, {size(sizes[-1])}"]]
        for peer in dict.fromkeys(peer for peer, _ in cells):
            times = [f"{time_of(cells[peer, nbytes])}  {_ratio(cells[peer, nbytes])}" for nbytes in sizes]
            rows.append([peer, *times, f"{cells[peer, sizes[-1]]['bytes_per_second'] / 1e9:.2f}"])
        blocks.append(f"{kind}, {ranks} ranks\n{aligned(rows)}")
    return "\n\n".join(blocks)


def backend_tables(figures: Sequence[Figure], steps: Sequence[Figure]) -> str:
    """Return a table of operations by backend and size, and one of steps by backend."""
    sizes = list(dict.fromkeys(figure["bytes"] for figure in figures))
    cells = {(f["operation"], f["backend"], f["bytes"]): f for f in figures}
    rows = [["", *map(size, sizes)]]
    for operation, backend in dict.fromkeys((f["operation"], f["backend"]) for f in figures):
        found = [cells.get((operation, backend, nbytes)) for nbytes in sizes]
        row = [f"{time_of(figure)}  {_ratio(figure)}" if figure else "" for figure in found]
        rows.append([f"{operation}, {backend}", *row])
    trained = [["", "step", "ratio"]]
    trained += [[f"{f['training']}, {f['backend']}", time_of(f), _ratio(f)] for f in steps]
    return f"{aligned(rows)}\n\n{aligned(trained)}"


def step_table(figures: Sequence[Figure], memory: Sequence[Figure]) -> str:
    """Return a table for each workload: the times of the variants, and their memory if it was measured."""
    held = {(m["workload"], m["variant"]): m for m in memory}
    blocks = []
    for name in dict.fromkeys(f["workload"] for f in figures):
        mine = [f for f in figures if f["workload"] == name]
        ratios = {"ratio": f"÷ {mine[0]['reference']}"} | ({"to_ddp": f"÷ {DDP_TUNED}"} if "to_ddp" in mine[0] else {})
        rows = [["", "step", *ratios.values(), "weights off by"]]
        rows[0] += ["MB kept", "MB peak", "MB process"] if held else []
        for figure in mine:
            row = [figure["variant"], time_of(figure), *(_three_digits(figure[key]) for key in ratios)]
            row.append(f"{figure['deviation']:.1g}")
            if at := held.get((name, figure["variant"])):
                row += [f"{statistics.mean(at[what]) / 1e6:.0f}" for what in ("kept", "peak", "process_peak")]
            rows.append(row)
        blocks.append(f"{name}: {mine[0]['parameters']:,} parameters\n{aligned(rows)}")
    return "\n\n".join(blocks)


def size(nbytes: int) -> str:
    """Return a number of bytes as text, such as "4 B", "64 KiB" or "1 MiB"."""
    for unit, factor in (("MiB", 2**20), ("KiB", 2**10)):
        if nbytes >= factor:
            return f"{nbytes / factor:g} {unit}"
    return f"{nbytes} B"


def time_of(figure: Figure) -> str:
    """Return the median and the minimum of a figure as text, such as "12.3 (10.0) ms"."""
    unit, factor = ("ms", 1e3) if figure["median"] >= 1e-3 else ("µs", 1e6)
    return f"{_three_digits(factor * figure['median'])} ({_three_digits(factor * figure['minimum'])}) {unit}"


def _ratio(figure: Figure) -> str:
    return _three_digits(figure["ratio"]).rjust(4)


def _three_digits(value: float) -> str:
    """Return a number with three significant digits, or all digits before the point."""
    return f"{value:.{0 if value >= 99.95 else 1 if value >= 9.995 else 2}f}"


def aligned(rows: Iterable[Sequence[str]]) -> str:
    """Return a table as text. The first column is aligned to the left, the others to the right."""
    table = list(rows)
    widths = [max(len(row[at]) for row in table if at < len(row)) for at in range(len(table[0]))]
    lines = []
    for row in table:
        first, *others = (cell.rjust(width) for cell, width in zip(row, widths, strict=False))
        lines.append("  " + "   ".join([first.strip().ljust(widths[0]), *others]))
    return "\n".join(lines)
