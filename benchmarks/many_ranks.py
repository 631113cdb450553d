"""Simulate the agreement and the exchange of gradients on many ranks, and compare with formulas.

    python -m benchmarks.many_ranks                                     about a minute
    python -m benchmarks.many_ranks --links 25gbit,10us --per-host 4 --ranks 16 64 --parameters 25e6
    python -m benchmarks.many_ranks --json many.json --plot docs/many_ranks.svg

First it measures what messages cost the processor, and what memory and meetings cost, on two ranks of this machine. Then the
ranks run in virtual time (`virtual_ranks`): the controllers of the negotiation, and hvdlite's algorithms for collectives, are
those that run in jobs. Of the exchange inside a host, which goes through shared memory, only the time is simulated.

agreement   All ranks submit an operation that they have agreed on before, at the same time, until the last one knows the plan.
exchange    The gradients of a model, from the moment when all ranks have them until all have the sums: headers, sums of each
            host through its shared memory, and sums between hosts, where each rank exchanges its slice in messages.
flat        The same if no ranks share memory, so that each one sends all of its gradients.

The formulas take it that nothing is in the way of anything else. Two and four ranks of this machine show whether the measured
costs add up to what a whole agreement, and a whole sum by messages, take.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from benchmarks import job
from benchmarks.machine import machine
from benchmarks.report import aligned, heading, size
from benchmarks.virtual_ranks import Cluster, Costs, VirtualTransport, without_values
from hvdlite.algorithms.choose import choose
from hvdlite.algorithms.cost import predict
from hvdlite.algorithms.slices import split
from hvdlite.comm.point_to_point import PointToPointCollectives
from hvdlite.errors import ArgumentError
from hvdlite.gradients.header import WORDS
from hvdlite.operations import Signature
from hvdlite.operations.negotiation.controller import FANOUT, Controller
from hvdlite.protocols import Array, Plan, ReduceOp, TensorInfo
from hvdlite.tools.advise.link import NetworkLink, parse_link
from hvdlite.tools.doctor import predict as doctor

RANKS = (8, 64, 128, 256, 512, 1024)
LINKS = ("10gbit,50us", "100gbit,5us")
TENSORS = 200
"""The number of gradients, which makes the length of a header."""
SIGNATURE: Signature = ("allreduce", (TensorInfo("float32", (1,)),), (("op", "sum"),))
_ITEM = 4  # bytes of float32


@dataclass(frozen=True)
class Machine:
    """What was measured.

    Attributes:
        costs: Of the processors.
        control: A control message within a host.
        inside: A message with data within a host.
        reduction: The seconds to add a byte.
    """

    costs: Costs
    control: NetworkLink
    inside: NetworkLink
    reduction: float


def as_machine(found: dict[str, Any]) -> Machine:
    """Return what `benchmarks.message_costs` has measured."""
    costs = Costs(**{name: found[name] for name in Costs.__dataclass_fields__})
    (largest,) = list(found["links"])[-1:]
    inside = NetworkLink(*found["links"][largest])
    return Machine(costs, NetworkLink(found["latency"], inside.seconds_per_byte), inside, found["adds"][largest])


# What is simulated


def agreement(cluster: Cluster, rounds: int = 3) -> float:
    """Return the seconds until all ranks of a new cluster have agreed on an operation that they know from the rounds before."""

    def make(transport: VirtualTransport) -> tuple[VirtualTransport, Controller]:
        return transport, Controller(transport, lambda keys: [keys])

    _, made = cluster.run(make)
    seconds = math.nan
    for number in range(rounds):

        def agree(transport: VirtualTransport, number: int = number) -> None:
            own, controller = made[transport.rank]
            own.charge(cluster.costs.announce)
            controller.announce(number, SIGNATURE)
            own.charge(cluster.costs.step)
            while not controller.step():
                own.wait_message()
                own.charge(cluster.costs.step)

        seconds, _ = cluster.run(agree)
    return seconds


def exchange(cluster: Cluster, elements: int, reduction: float, flat: bool = False) -> float:
    """Return the seconds in which the gradients of a model become those of all ranks, as `hvdlite.gradients.bucket` does it.

    Args:
        cluster: The ranks.
        elements: The number of parameters.
        reduction: The seconds to add a byte.
        flat: Whether the ranks of a host share no memory.
    """
    per_host = 1 if flat else cluster.per_host
    copy, most = cluster.costs.copy, Plan().message_bytes // _ITEM
    hosts = cluster.size // per_host

    def step(transport: VirtualTransport) -> None:
        def by_messages(over: VirtualTransport) -> PointToPointCollectives:
            return PointToPointCollectives(over, lambda op: over.timed(_nothing, reduction))

        number = transport.rank % per_host
        everybody = by_messages(transport.duplicate())
        cross = by_messages(transport.subgroup([number + per_host * host for host in range(hosts)]))
        transport.charge(elements * _ITEM * copy)
        _meet(transport, flat)
        if hosts > 1:
            everybody.start_sum(without_values(2 * (TENSORS + WORDS + 1)))  # float64
        own = split(elements, per_host)[number]
        for start in range(0, own, most):
            chunk = without_values(min(most, own - start))
            transport.charge((per_host - 1) * chunk.nbytes * copy)  # the sum of the host
            if hosts > 1:
                cross.allreduce(chunk, ReduceOp.SUM)
            transport.charge((per_host - 1) * chunk.nbytes * copy)  # to the other ranks of the host
        _meet(transport, flat)

    return cluster.run(step)[0]


def _meet(transport: VirtualTransport, flat: bool) -> None:
    if not flat:
        transport.meet()


def _nothing(into: Array, other: Array) -> None:
    """Reduce nothing: there are no values."""


# On paper


def depth(ranks: int) -> int:
    """Return the number of levels below the root of the tree of controllers."""
    levels = 0
    while ranks > 1:
        ranks = 1 + (ranks - 2) // FANOUT  # those that have children
        levels += 1
    return levels


def agreement_on_paper(ranks: int, per_host: int, between: float, inside: float, costs: Costs) -> float:
    """Return the seconds of an agreement in which all ranks begin at once.

    On each level a rank notices reports, takes one of each child, looks for more, and reports; later it notices the plan, takes
    it, and posts it to each child. With the time to announce a, of a step s, to look l, to take t and to post p, f children
    and d levels, whose messages need no time but their latency α, that is a + s + d (2α + 3s + 2l + (f + 1)(t + p)). The
    longest way from a rank to the root counts. It is exact if the tree is full, and α the same everywhere, and larger than l.

    Args:
        ranks: The number of ranks.
        per_host: The ranks of a host.
        between: The latency of a message between two hosts.
        inside: The same within a host.
        costs: What the processors need.
    """
    children = min(FANOUT, ranks - 1)
    level = 3 * costs.step + 2 * costs.look + (children + 1) * (costs.take + costs.post)
    longest = 0.0
    for rank in range(ranks):
        way = 0.0
        while rank:
            parent = (rank - 1) // FANOUT
            way += level + 2 * (inside if rank // per_host == parent // per_host else between)
            rank = parent
        longest = max(longest, way)
    return costs.announce + costs.step + longest


def exchange_on_paper(
    hosts: int, per_host: int, elements: int, link: NetworkLink, reduction: float, costs: Costs
) -> float:
    """Return the seconds of an exchange. Each of the ranks of a host has its part of the link all the time."""
    nbytes, most = elements * _ITEM, Plan().message_bytes
    own = nbytes / per_host
    seconds = nbytes * costs.copy + 2 * (per_host - 1) * own * costs.copy + (2 * costs.meeting if per_host > 1 else 0.0)
    if hosts == 1:
        return seconds
    header = 8 * (TENSORS + WORDS + 1)
    beta = per_host * link.seconds_per_byte
    seconds += predict(choose(hosts * per_host, header), hosts, header, link.latency, beta, reduction)
    for start in range(0, math.ceil(own), most):
        chunk = min(most, own - start)
        seconds += predict(choose(hosts, int(chunk)), hosts, chunk, link.latency, beta, reduction)
    return seconds


def exchange_by_doctor(ranks: int, per_host: int, elements: int, link: NetworkLink, here: Machine) -> float:
    """Return what ``hvdlite doctor`` would predict with the same figures."""
    said = {"copy": here.costs.copy, "meeting": here.costs.meeting, "link": None}
    profile = doctor.made_up(elements, 1.0, [0] * per_host, said)
    return doctor.step(profile, ranks, per_host, link).exchange


# The program


def simulate(
    here: Machine, ranks: Sequence[int], per_host: int, links: Sequence[str], elements: int, progress: bool = True
) -> list[dict[str, Any]]:
    """Return the figures of all cases, in seconds."""
    figures = []
    cases = [(link, count) for link in links for count in ranks]
    bar = tqdm(cases, "simulating", unit="case", leave=False, disable=None if progress else True)
    for name, count in bar:
        bar.set_postfix_str(f"{count} ranks, {name}")
        link, hosts = parse_link(name), max(1, count // per_host)
        local = min(per_host, count)
        between = link if hosts > 1 else here.inside

        def cluster(inside: NetworkLink, link: NetworkLink = link, hosts: int = hosts, local: int = local) -> Cluster:
            return Cluster(hosts, local, link, inside, here.costs, values=False)

        paper = agreement_on_paper(count, local, link.latency, here.control.latency, here.costs)
        figures.append(
            {
                **{"link": name, "ranks": count, "hosts": hosts, "levels": depth(count)},
                **{"agreement": agreement(cluster(here.control))},
                **{"agreement_on_paper": paper},
                **{"exchange": exchange(cluster(here.inside), elements, here.reduction)},
                **{"exchange_on_paper": exchange_on_paper(hosts, local, elements, between, here.reduction, here.costs)},
                **{"exchange_by_doctor": exchange_by_doctor(count, local, elements, link, here)},
                **{"flat": exchange(cluster(here.inside), elements, here.reduction, flat=True)},
            }
        )
    return figures


def check(found: dict[str, Any], ranks: int, two: dict[str, Any]) -> list[dict[str, Any]]:
    """Return what was measured on some ranks of this machine, and what the simulation makes of the costs of two ranks.

    Args:
        found: The result of `message_costs.measure` on these ranks.
        ranks: Their number.
        two: The same on two ranks.
    """
    here = as_machine(two)

    def sums(nbytes: str) -> float:
        def program(transport: VirtualTransport) -> None:
            own = PointToPointCollectives(transport, lambda op: transport.timed(_nothing, two["adds"][nbytes]))
            own.allreduce(without_values(int(nbytes) // _ITEM), ReduceOp.SUM)

        # Within a host a message takes nobody else's time. But a rank takes in one after the other, so it counts as a host.
        link = NetworkLink(*two["links"][nbytes])
        return Cluster(ranks, 1, link, link, here.costs, values=False).run(program)[0]

    rows = [("agreement", found["agreement"], agreement(Cluster(1, ranks, here.control, here.control, here.costs)))]
    rows += [(f"sum of {size(int(nbytes))}", seconds, sums(nbytes)) for nbytes, seconds in found["sums"].items()]
    return [{"ranks": ranks, "what": what, "measured": real, "simulated": made} for what, real, made in rows]


def table(figures: Sequence[dict[str, Any]]) -> str:
    """Return the figures as text."""
    rows = [["", "levels", "agreement µs", "on paper", "exchange ms", "on paper", "by doctor", "flat ms"]]
    for each in figures:
        row = [f"{each['link']}, {each['ranks']} ranks on {each['hosts']} hosts", str(each["levels"])]
        row += [f"{1e6 * each[name]:.0f}" for name in ("agreement", "agreement_on_paper")]
        row += [f"{1e3 * each[name]:.0f}" for name in ("exchange", "exchange_on_paper", "exchange_by_doctor", "flat")]
        rows.append(row)
    return aligned(rows)


def check_table(rows: Sequence[dict[str, Any]]) -> str:
    """Return the comparison with this machine as text."""
    cells = [["this machine", "measured µs", "simulated µs", "ratio"]]
    for row in rows:
        real, made = row["measured"], row["simulated"]
        cells.append(
            [f"{row['ranks']} ranks, {row['what']}", f"{1e6 * real:.1f}", f"{1e6 * made:.1f}", f"{made / real:.2f}"]
        )
    return aligned(cells)


def draw(figures: Sequence[dict[str, Any]], path: Path) -> None:
    """Draw agreement and exchange by the number of ranks: points are simulated, lines are on paper."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.fonttype"] = "none"  # letters as letters: a small file
    matplotlib.rcParams["svg.hashsalt"] = "hvdlite"  # the same file each time
    import matplotlib.pyplot as plt

    picture, (left, right) = plt.subplots(1, 2, figsize=(10, 4.6), layout="constrained")
    styles = {"": ("o", "simulated"), "_on_paper": ("-", "on paper")}
    for number, link in enumerate(dict.fromkeys(each["link"] for each in figures)):
        mine, colour = [each for each in figures if each["link"] == link], f"C{number}"
        lines = [(left, f"agreement{end}", 1e6, *how) for end, how in styles.items()]
        lines += [(right, f"exchange{end}", 1e3, *how) for end, how in styles.items()]
        lines.append((right, "flat", 1e3, "x:", "simulated, no shared memory"))
        for panel, name, factor, style, label in lines:
            ranks, values = [each["ranks"] for each in mine], [factor * each[name] for each in mine]
            panel.plot(ranks, values, style, color=colour, label=f"{link}: {label}")
    left.set(title="Agreement on a known operation", ylabel="µs")
    right.set(title="Exchange of the gradients of a step", ylabel="ms")
    for panel in (left, right):
        panel.set(xlabel="ranks", xscale="log", ylim=(0, None))
        panel.set_xticks(ranks := sorted({each["ranks"] for each in figures}), [str(count) for count in ranks])
        panel.minorticks_off()
        panel.grid(alpha=0.3)
    picture.legend(*right.get_legend_handles_labels(), loc="outside lower center", ncols=2, frameon=False)
    picture.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    plt.close(picture)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, simulate, and show the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--ranks", type=int, nargs="+", default=RANKS, help=f"({' '.join(map(str, RANKS))})")
    add("--per-host", type=int, default=8, help="the ranks of a host (8)")
    add("--links", nargs="+", default=LINKS, metavar="LINK", help=f"between the hosts ({' '.join(LINKS)})")
    add("--parameters", type=float, default=110e6, help="of the model, in float32 (110e6)")
    add("--costs", type=Path, metavar="FILE", help="take the measured costs of a file that --json has written")
    add("--json", type=Path, metavar="FILE", help="write all figures there")
    add("--plot", type=Path, metavar="FILE", help="draw them")
    options = parser.parse_args(arguments)
    if min(options.ranks) < 1 or options.per_host < 1 or options.parameters < 1:
        parser.error("ranks, ranks of a host, and parameters: each at least 1.")
    for link in options.links:
        try:
            parse_link(link)
        except ArgumentError as error:
            parser.error(str(error))
    for count in options.ranks:
        if count > options.per_host and count % options.per_host:
            parser.error(f"{count} ranks cannot be dealt out to hosts with {options.per_host} each.")
    elements = int(options.parameters)
    if options.costs:
        if not options.costs.is_file():
            parser.error(f"{options.costs}: there is no such file.")
        before = json.loads(options.costs.read_text())
        described, found = before["machine"], {int(ranks): each for ranks, each in before["costs"].items()}
    else:
        described = machine()
        found = {ranks: job.run("message_costs", ranks, {"elements": elements}) for ranks in (2, 4)}
    here = as_machine(found[2])
    print(
        f"Many ranks\n==========\n{heading(described, {'library': 'The costs are those of two ranks of this machine'})}\n"
    )
    print(costs_text(here), end="\n\n", flush=True)
    checked = [row for ranks, each in found.items() for row in check(each, ranks, found[2])]
    print(check_table(checked), end="\n\n", flush=True)
    figures = simulate(here, options.ranks, options.per_host, options.links, elements)
    print(f"{elements / 1e6:g} million parameters, {options.per_host} ranks on a host\n{table(figures)}")
    if options.json:
        result = {"machine": described, "costs": found, "checked": checked, "figures": figures}
        options.json.write_text(json.dumps(result, indent=2) + "\n")
    if options.plot:
        draw(figures, options.plot)


def costs_text(here: Machine) -> str:
    """Return the measured costs as text."""
    each = [f"{name} {1e6 * value:.2f}" for name, value in asdict(here.costs).items() if name != "copy"]
    each.append(f"latency of a control message {1e6 * here.control.latency:.2f}")
    rates = {"copy": here.costs.copy, "add": here.reduction, "send within a host": here.inside.seconds_per_byte}
    speeds = ", ".join(f"{name} {1e-9 / value:.1f}" for name, value in rates.items())
    return f"µs: {', '.join(each)}\nGB/s: {speeds}"


if __name__ == "__main__":
    main()
