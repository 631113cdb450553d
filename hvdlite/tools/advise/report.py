"""Says what the strategies cost, and which one to take, as text."""

from __future__ import annotations

from collections.abc import Sequence

from hvdlite.tools.advise.model import CostModel, Estimate
from hvdlite.tools.advise.profile import WHOLE
from hvdlite.tools.advise.strategies import KINDS

_FAST_ENOUGH = 0.5
"""Of the strategies that are at least so fast as the fastest, one that changes the training least is recommended."""
_AS_FAST = 0.9
"""Of those, the simplest that is at least so fast as the fastest of them. `KINDS` has the simple ones first. Of one
kind it is the one that keeps most."""
_FAR_OFF = 1.3
"""If the program as it is takes so many times as long as the table says of the same, the report says why."""


def choose(estimates: Sequence[Estimate]) -> Estimate:
    """Return the estimate to recommend: a simple strategy of those that change least, of those that are fast enough."""

    def fast(among: Sequence[Estimate], enough: float) -> list[Estimate]:
        return [each for each in among if each.rate >= enough * max(one.rate for one in among)]

    found = fast(estimates, _FAST_ENOUGH)
    least = min(each.strategy.about.changes for each in found)
    found = fast([each for each in found if each.strategy.about.changes == least], _AS_FAST)
    return min(found, key=lambda each: (list(KINDS).index(each.strategy.kind), -each.strategy.kept))


def text(model: CostModel, estimates: Sequence[Estimate]) -> str:
    """Return the table and the recommendation.

    Args:
        model: The model that has made the estimates.
        estimates: The estimates, in any order.
    """
    heading = _heading(model) + _left_out(model, estimates)
    return f"{heading}\n\n{_table(model, estimates)}\n\n{_recommendation(model, estimates)}\n"


def _heading(model: CostModel) -> str:
    profile, cluster = model.profile, model.cluster
    where = "which share memory"
    if cluster.link is not None:
        source = "measured" if model.is_measured else "as given"
        where = f"{cluster.per_host} on each of {cluster.hosts} hosts, between which there is {cluster.link} ({source})"
    return (
        f"{profile.ranks} ranks, {where}.\n"
        f"{len(profile.layout)} parameters with {profile.elements:,} values: {size(profile.nbytes)} of gradients.\n"
        f"The program as it is ({profile.strategy}) takes {ms(profile.measured)} for a step, as the mean of "
        f"{len(profile.steps[0])}.\nOf this, the slowest rank computes for {ms(profile.compute_together)}. An optimizer's step "
        f"with all parameters takes {ms(profile.update)}."
    )


def _left_out(model: CostModel, estimates: Sequence[Estimate]) -> str:
    """What the program's own step has more than the table's row of the same strategy, for the link that was measured."""
    measured = model.profile.measured
    same = next((each.seconds for each in estimates if each.strategy.kind == "gradients"), measured)
    if not model.is_measured or model.profile.strategy != WHOLE or measured <= _FAR_OFF * same:
        return ""
    return (
        f"\nOf the same, gradients, the table says {ms(same)}: it leaves out the {ms(measured - same)} in which ranks waited "
        "for a core, or for other programs. Compare its rows with each other, and not with the program."
    )


def _table(model: CostModel, estimates: Sequence[Estimate]) -> str:
    plain = next((each for each in estimates if each.strategy.kind == "gradients"), estimates[0])
    rows = [["", "step", "sent per step and rank", "speed", "lost in an update"]]
    for each in sorted(estimates, key=lambda each: -each.rate):
        rows.append(
            [
                str(each.strategy),
                ms(each.seconds),
                size(each.nbytes) if model.cluster.link is not None else "-",
                f"{each.rate / plain.rate:.2f} ×",
                each.strategy.about.lost,
            ]
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [f"{cell:{'<' if column in (0, 4) else '>'}{widths[column]}}" for column, cell in enumerate(row)]
        lines.append("  " + "  ".join(cells).rstrip())
    return "\n".join(lines)


def _recommendation(model: CostModel, estimates: Sequence[Estimate]) -> str:
    chosen, fastest = choose(estimates), max(estimates, key=lambda each: each.rate)
    plain = next((each for each in estimates if each.strategy.kind == "gradients"), chosen)
    waits = plain.exchange / plain.seconds
    if model.cluster.link is None:
        why = "the ranks share memory, where nothing is gained by sending less"
    else:
        why = f"with whole gradients the link takes {waits:.0%} of a step"
    said = f"Take {chosen.strategy}, {chosen.strategy.how}: {why}"
    if chosen is not plain:
        said += f", and it is {chosen.rate / plain.rate:.1f} times as fast"
    if fastest is not chosen:
        said += f". {fastest.strategy} is {fastest.rate / chosen.rate:.1f} times as fast as that, but loses more in an update"
    if max(chosen.strategy.about.changes, fastest.strategy.about.changes) > 1:
        said += ". Where accuracy is lost, compare the loss after the same time, with your model"
    return said + "."


def ms(seconds: float) -> str:
    """Return a time as text."""
    value = 1e3 * seconds
    return f"{value:.0f} ms" if value >= 100 else f"{value:.1f} ms" if value >= 1 else f"{value:.2f} ms"


def size(nbytes: float) -> str:
    """Return a number of bytes as text."""
    for unit, factor in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if nbytes >= factor:
            return f"{nbytes / factor:.3g} {unit}" if nbytes < 1000 * factor else f"{nbytes / factor:.0f} {unit}"
    return f"{nbytes:.0f} B"
