"""What the doctor says: what there is, the links as a matrix, the findings with the worst first, and the prediction."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from hvdlite.tools.advise.link import NetworkLink
from hvdlite.tools.advise.report import ms
from hvdlite.tools.doctor.facts import HostFacts, InstallFacts
from hvdlite.tools.doctor.finding import Finding, Severity, sort
from hvdlite.tools.doctor.heard import Heard
from hvdlite.tools.doctor.links import Pair
from hvdlite.tools.doctor.predict import Prediction
from hvdlite.tools.doctor.rules import size

CLOSE = 0.25
"""A prediction is good if it is within so much of what is measured."""


def overview(install: InstallFacts | None, here: HostFacts | None, heard: Heard) -> str:
    """Return what there is: the installation, the hosts, and what the ranks have done."""
    lines = []
    hosts = [heard.hosts[rank] for rank in sorted(heard.hosts)] or ([here] if here is not None else [])
    if hosts:
        known = hosts[0].packages
        installed = [f"{name} {found}" for name, found in known.items() if found]
        lines.append(f"installed   Python {hosts[0].python}, {', '.join(installed)}")
    if install is not None:
        library = f"{install.library} (threads: {install.threads})" if install.library else "no library that works"
        lines.append(f"MPI         {library}, started by {install.launcher or 'no launcher that works'}")
    elif heard.mpi:
        mpi = heard.mpi[min(heard.mpi)]
        lines.append(f"MPI         {mpi.library} (threads: {mpi.threads}), {mpi.size} ranks")
    if install is not None and install.scheduler:
        offers = "" if install.srun is None else f", whose srun offers {', '.join(install.srun)}"
        lines.append(f"scheduler   {install.scheduler}{offers}")
    for name in dict.fromkeys(each.host for each in hosts):
        own = [each for each in hosts if each.host == name]
        cores = len({core for each in own for core in each.cores})
        shm = "no /dev/shm" if own[0].shm is None else f"{size(own[0].shm[1])} free in /dev/shm"
        gpus = f", {own[0].gpus} GPUs" if own[0].gpus else ""
        ranks = f"{len(own)} rank{'s' * (len(own) > 1)}, " if heard.hosts else ""
        quota = "" if own[0].quota is None else f" (cgroup: {own[0].quota:g})"
        lines.append(f"{name:<12}{ranks}{cores} cores{quota}, {size(own[0].memory)} of memory left, {shm}{gpus}")
    shared = {each.node: not each.unshared for each in heard.ranks.values()}
    if shared:
        clocks = max(abs(each.clock) for each in heard.ranks.values())
        said = "share memory" if all(shared.values()) else "do not share memory everywhere"
        lines.append(f"ranks       those of a host {said}; clocks differ by {ms(clocks)} at most")
    if heard.tried:
        bad = sum(map(len, heard.failed.values()))
        lines.append(
            f"operations  {len(heard.tried)} were run: {'all results are right' if not bad else f'{bad} faults'}"
        )
    return "\n".join(lines)


def matrix(links: Mapping[Pair, NetworkLink], hosts: Sequence[str]) -> str:
    """Return the links as two tables: from the rank of the row to that of the column.

    Args:
        links: The links between ranks.
        hosts: For each rank, its host.
    """
    ranks = sorted({rank for pair in links for rank in pair})
    blocks = []
    shown: dict[str, Callable[[NetworkLink], float]] = {
        "latency, µs": lambda link: 1e6 * link.latency,
        "bandwidth, Gbit/s": lambda link: link.bits_per_second / 1e9,
    }
    for title, value in shown.items():
        rows = [[title, *map(str, ranks)]]
        for one in ranks:
            cells = [f"{value(links[one, other]):.3g}" if (one, other) in links else "-" for other in ranks]
            rows.append([f"rank {one} ({hosts[one]})", *cells])
        widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
        blocks.append(
            "\n".join(
                "  ".join(f"{cell:{'<' if column == 0 else '>'}{widths[column]}}" for column, cell in enumerate(row))
                for row in rows
            )
        )
    return "\n\n".join(blocks)


def prediction(found: Prediction, ranks: int) -> str:
    """Return the prediction as a table, with its check."""
    lines = [f"Predicted step with whole gradients; {found.link} between hosts ({found.source})."]
    lines.append(f"{'ranks':>7}{'hosts':>7}{'step':>12}{'exchange':>12}{'efficiency':>12}")
    for row in found.rows:
        lines.append(f"{row.ranks:>7}{row.hosts:>7}{ms(row.seconds):>12}{ms(row.exchange):>12}{row.efficiency:>12.0%}")
    if found.measured is not None:
        off = found.predicted / found.measured - 1
        how = "close enough" if abs(off) <= CLOSE else "not close: other programs may run, or ranks wait for a slow one"
        what = "" if found.checked is None else f", with {found.checked:,} parameters"
        lines.append(
            f"On the {ranks} ranks that there are{what}: predicted {ms(found.predicted)}, measured {ms(found.measured)}, "
            f"{off:+.0%} ({how})."
        )
    return "\n".join(lines)


def findings(found: Sequence[Finding], whole: bool = True) -> str:
    """Return the findings, one in a line, the worst first, and how many there are.

    Args:
        found: The findings.
        whole: Whether everything was examined.
    """
    ordered = sort(found)
    if not ordered:
        return "Nothing is wrong." if whole else "Nothing is known to be wrong yet."
    counts = []
    for severity in sorted(Severity, reverse=True):
        number = sum(each.severity is severity for each in ordered)
        if number:
            counts.append(f"{number} {severity.name.lower()}{'s' * (number > 1)}")
    return "\n".join([f"Found: {', '.join(counts)}.", *map(str, ordered)])
