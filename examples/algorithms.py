"""Show which allreduce algorithm is the fastest, by message size and number of ranks.

    python examples/algorithms.py
    python examples/algorithms.py --ranks 8,100 --sizes 1K,1M,1G --latency 2e-6 --bandwidth 1e10
    python examples/algorithms.py --plot algorithms.png

The algorithms really run, each rank in a thread, on a network with simulated clocks. The program prints a table of the measured
times and of the times that the α-β-γ model predicts. A star marks the fastest algorithm of each row. ``--plot`` draws the
times, too. The program needs the extra ``examples``: ``pip install -c constraints.txt ".[examples]"``.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from tqdm import tqdm

from hvdlite.algorithms import ALGORITHMS
from hvdlite.algorithms.cost import predict
from hvdlite.algorithms.fold import Core
from hvdlite.comm.local import LocalFabric, LocalTransport, Network
from hvdlite.protocols import ReduceOp, numpy_combine

Measure = Callable[[str, int, int], float]
"""``measure(algorithm, ranks, nbytes)`` returns the seconds that an allreduce takes."""

MAX_ELEMENTS = 16 * 1024
"""The largest number of float32 elements that a simulated rank really holds."""

LABELS = {
    "ring": "ring",
    "tree": "tree",
    "butterfly": "butterfly",
    "rabenseifner": "Rabenseifner",
    "parameter_server": "parameter server",
}


class Cost(NamedTuple):
    """The time of one allreduce, in seconds."""

    measured: float
    predicted: float


Costs = dict[tuple[int, int, str], Cost]
"""The costs by number of ranks, bytes and algorithm."""


def simulated(network: Network) -> Measure:
    """Return a function that measures costs by the clocks of a simulated network."""

    def measure(algorithm: str, ranks: int, nbytes: int) -> float:
        # A gigabyte for each of 256 ranks does not fit in memory. The time is linear in the bytes, so a short vector
        # replaces a long one, on a network that is slower by the same factor. The length of the short vector gives
        # equal slices. The slices of the long vector are (nearly) equal, too.
        even = math.lcm(ranks, Core(ranks).size)
        elements = max(1, min(nbytes // 4, MAX_ELEMENTS) // even) * even
        scale = nbytes / (4 * elements)
        fabric = LocalFabric(
            ranks, Network(network.latency, network.bandwidth / scale, network.reduce_bandwidth / scale)
        )

        def allreduce(transport: LocalTransport) -> None:
            data = np.full(elements, transport.rank, np.float32)
            ALGORITHMS[algorithm](transport, data, transport.timed(numpy_combine(ReduceOp.SUM)))
            if not np.all(data == ranks * (ranks - 1) // 2):
                raise AssertionError(f"{algorithm} gives a wrong sum on {ranks} ranks")

        fabric.run(allreduce)
        return fabric.elapsed()

    return measure


def collect(measure: Measure, network: Network, ranks: Iterable[int], sizes: Iterable[int]) -> Costs:
    """Measure and predict the cost of every algorithm in every case. A terminal shows the progress."""
    cases = [(r, nbytes, algorithm) for r in ranks for nbytes in sizes for algorithm in ALGORITHMS]
    progress = tqdm(cases, desc="allreduce", unit="case", leave=False, disable=None)
    return {
        (r, nbytes, algorithm): Cost(measure(algorithm, r, nbytes), predicted(network, algorithm, r, nbytes))
        for r, nbytes, algorithm in progress
    }


def predicted(network: Network, algorithm: str, ranks: int, nbytes: float) -> float:
    """Return the cost by the α-β-γ model, in seconds."""
    return predict(algorithm, ranks, nbytes, network.latency, 1 / network.bandwidth, 1 / network.reduce_bandwidth)


def table(costs: Costs) -> str:
    """Return the costs as text: measured and, in brackets, predicted. A star marks the fastest of each row."""
    header = "ranks     size" + "".join(f"{LABELS[name]:>20} " for name in ALGORITHMS)
    lines = [header, "─" * len(header)]
    ranks = 0
    for r, nbytes in dict.fromkeys((r, nbytes) for r, nbytes, _ in costs):
        row = {name: costs[r, nbytes, name] for name in ALGORITHMS}
        best = min(cost.measured for cost in row.values())
        cells = (
            f"{format_seconds(cost.measured)} ({format_seconds(cost.predicted).strip()})".rjust(20)
            + ("*" if cost.measured <= best * (1 + 1e-9) else " ")
            for cost in row.values()
        )
        if ranks not in (0, r):
            lines.append("")
        lines.append(f"{r:5} {format_bytes(nbytes):>8}" + "".join(cells))
        ranks = r
    return "\n".join(lines)


def plot(costs: Costs, network: Network, path: Path) -> None:
    """Draw cost over message size in a panel for each number of ranks: points are measured, lines predicted."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    ranks = sorted({r for r, _, _ in costs})
    sizes = sorted({nbytes for _, nbytes, _ in costs})
    dense = np.geomspace(sizes[0], sizes[-1], 200)
    colors = dict(zip(ALGORITHMS, ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00"), strict=True))
    markers = dict(zip(ALGORITHMS, "osD^v", strict=True))
    figure, panels = plt.subplots(
        1, len(ranks), figsize=(1.5 + 3.8 * len(ranks), 4.6), sharey=True, squeeze=False, layout="constrained"
    )
    for axes, r in zip(panels[0], ranks, strict=True):
        for name in ALGORITHMS:
            line = [predicted(network, name, r, nbytes) for nbytes in dense]
            axes.plot(dense, line, color=colors[name], linewidth=1.6, alpha=0.8)
            points = [costs[r, nbytes, name].measured for nbytes in sizes]
            axes.plot(sizes, points, markers[name], color=colors[name], markersize=6, label=LABELS[name])
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_title(f"{r} ranks")
        axes.set_xlabel("message size")
        ticks = sizes if len(sizes) <= 6 else sizes[:: math.ceil(len(sizes) / 6)]
        axes.set_xticks(ticks, [format_bytes(nbytes) for nbytes in ticks])
        axes.minorticks_off()
        axes.grid(True, color="#dddddd", linewidth=0.6)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0][0].set_ylabel("time of an allreduce (seconds)")
    handles, labels = panels[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False)
    figure.suptitle(
        f"Allreduce on a network of {network.latency * 1e6:g} µs and {network.bandwidth / 1e9:g} GB/s: "
        "measured (points) and predicted (lines)",
        fontsize=11,
    )
    figure.savefig(path, dpi=150)
    plt.close(figure)


def format_seconds(seconds: float) -> str:
    """Return seconds as text, with three digits and a fitting unit."""
    for factor, unit in ((1e6, "µs"), (1e3, "ms")):
        if seconds * factor < 999.5:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds:.3g} s"


def format_bytes(nbytes: int) -> str:
    """Return a number of bytes as text, with a fitting binary unit."""
    value: float = nbytes
    for unit in ("B", "KiB", "MiB"):
        if value < 1024:
            return f"{value:.4g} {unit}"
        value /= 1024
    return f"{value:.4g} GiB"


def parse_bytes(text: str) -> int:
    """Parse ``"16K"``, ``"4M"``, ``"1G"`` or a plain number of bytes."""
    suffixes = {"K": 1024, "M": 1024**2, "G": 1024**3}
    number, factor = (text[:-1], suffixes[text[-1].upper()]) if text[-1:].upper() in suffixes else (text, 1)
    return int(float(number) * factor)


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        description="Which allreduce algorithm is the fastest, by message size and number of ranks.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )

    def several(kind: Callable[[str], int]) -> Callable[[str], list[int]]:
        def parse(text: str) -> list[int]:
            try:
                values = [kind(item) for item in text.split(",")]
            except ValueError:
                raise argparse.ArgumentTypeError(f"{text!r} is not a list of numbers such as 8,64") from None
            if min(values) < 1:
                raise argparse.ArgumentTypeError(f"{text!r} has numbers below 1")
            return values

        return parse

    def positive(text: str) -> float:
        value = float(text)
        if not value > 0:
            raise argparse.ArgumentTypeError(f"{text} is not above 0")
        return value

    parser.add_argument("--ranks", type=several(int), default="8,64,256", help="numbers of ranks")
    parser.add_argument("--sizes", type=several(parse_bytes), default="1K,16K,256K,4M,64M", help="bytes; K, M, G")
    parser.add_argument("--latency", type=positive, default=10e-6, help="of a message, in seconds")
    parser.add_argument("--bandwidth", type=positive, default=1.25e9, help="of a rank, in bytes per second")
    parser.add_argument("--reduce-bandwidth", type=positive, default=5e9, help="of adding, in bytes per second")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the costs into this file (.png, .svg, .pdf)")
    return parser.parse_args(arguments)


def main() -> None:
    """Measure, print and draw."""
    options = parse_arguments()
    network = Network(options.latency, options.bandwidth, options.reduce_bandwidth)
    costs = collect(simulated(network), network, options.ranks, options.sizes)
    print(table(costs))
    print("\nmeasured on the simulated network (predicted by the α-β-γ model); * the fastest of the row")
    if options.plot:
        plot(costs, network, options.plot)
        print(f"drawn in {options.plot}", file=sys.stderr)


if __name__ == "__main__":
    main()
