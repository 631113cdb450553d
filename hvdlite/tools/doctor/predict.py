"""Predicts the step of a model with whole gradients on 1 … 1024 ranks, and compares it with the ranks that there are."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from hvdlite.protocols import TensorInfo
from hvdlite.tools.advise.exchanges import ExchangeCost
from hvdlite.tools.advise.link import NetworkLink
from hvdlite.tools.advise.model import CostModel
from hvdlite.tools.advise.profile import WHOLE, Compressed, MeasuredStep, Profile
from hvdlite.tools.advise.strategies import parse_strategy
from hvdlite.tools.doctor.probe import tensors

MOST_RANKS = 1024
_PLAIN = parse_strategy("gradients")


@dataclass(frozen=True)
class PredictedStep:
    """The prediction for some ranks.

    Attributes:
        ranks: The number of ranks.
        hosts: The number of hosts.
        seconds: The seconds of a step.
        exchange: The part of them in which gradients are combined.
        efficiency: The speed of all ranks together, as a part of that of as many single ranks.
    """

    ranks: int
    hosts: int
    seconds: float
    exchange: float
    efficiency: float


@dataclass(frozen=True)
class Prediction:
    """What is predicted.

    Attributes:
        rows: By the number of ranks.
        predicted: The seconds of a step on the ranks that there are.
        measured: The same as measured; None if it was not.
        link: The link that was assumed between hosts.
        source: Where the link is from, in words.
        checked: The parameters of the model that was measured, if it is a part of the one in `rows`; else None.
    """

    rows: tuple[PredictedStep, ...]
    predicted: float
    measured: float | None
    link: NetworkLink
    source: str
    checked: int | None = None

    def figures(self) -> dict[str, Any]:
        """Return the figures as a JSON object, in seconds."""
        return asdict(self)


def made_up(parameters: int, step_seconds: float, hosts: Sequence[int], measured: dict[str, Any] | None) -> Profile:
    """Return the profile of a model of which only the size and the time of a step without exchange are known.

    Args:
        parameters: The number of its parameters, in float32.
        step_seconds: The seconds of a step of one rank, without an exchange.
        hosts: For each rank, the number of its host.
        measured: What the ranks have said about memory and the link between them; None if nothing: both cost no time then.
    """
    said = measured or {"copy": 0.0, "meeting": 0.0, "link": None}
    counts = tensors(parameters)
    profile = Profile(
        hosts=tuple(hosts),
        strategy=WHOLE,
        layout=tuple(TensorInfo("float32", (count,)) for count in counts),
        steps=((MeasuredStep(step_seconds, 0.0, 0.0),),) * len(hosts),
        ready=(0.0,) * len(counts),
        compressed={"gradients": Compressed(0.0, (ExchangeCost("allreduce", 4 * parameters),))},
        copy=said["copy"],
        meeting=said["meeting"],
        link=None if said["link"] is None else NetworkLink(**said["link"]),
        spare_core=False,
        whole_update=True,
    )
    if profile.link is None or "smaller" not in said:
        return profile
    smaller = made_up(said["smaller"], 0.0, hosts, {**said, "link": None})
    return replace(profile, link=_fitted(smaller, profile.link, said["smaller_seconds"]))


def _fitted(profile: Profile, link: NetworkLink, seconds: float) -> NetworkLink:
    """Return the link with which the exchange of a model takes so long as it did."""

    def predicted(seconds_per_byte: float) -> float:
        return step(
            profile, profile.ranks, _per_host(profile), replace(link, seconds_per_byte=seconds_per_byte)
        ).exchange

    least = predicted(0.0)
    return replace(link, seconds_per_byte=max(1e-12, (seconds - least) / (predicted(1.0) - least)))


def _per_host(profile: Profile) -> int:
    """Return the number of ranks on each host; 1 if the hosts have different numbers."""
    there = [profile.hosts.count(host) for host in dict.fromkeys(profile.hosts)]
    return there[0] if len(set(there)) == 1 else 1


def held_out(profile: Profile) -> tuple[Profile, float]:
    """Divide the measured steps: return a profile of every other step, and the seconds of the steps in between.

    Both are medians. So a stall of the machine, which no model can know, counts in neither.
    """
    median = statistics.median
    first = [own[::2] for own in profile.steps]
    compute = median(max(each.compute for each in together) for together in zip(*first, strict=True))
    usual = tuple((MeasuredStep(compute, 0.0, median(each.update for each in own)),) for own in first)
    measured = max(median(each.compute + each.exchange + each.update for each in own[1::2]) for own in profile.steps)
    return replace(profile, steps=usual), measured


def step(profile: Profile, ranks: int, per_host: int, link: NetworkLink) -> PredictedStep:
    """Return the prediction for some ranks.

    Args:
        profile: What was measured of the program. Each rank computes as it did there.
        ranks: The number of ranks.
        per_host: How many of them are on each host, if there are as many.
        link: The link between hosts.
    """
    alone = profile.compute_together + profile.update
    if ranks == 1:
        return PredictedStep(1, 1, alone, 0.0, 1.0)
    here = min(per_host, ranks)
    shown = replace(profile, hosts=tuple(rank // here for rank in range(ranks)))
    model = CostModel(shown, link if here < ranks else None, here)
    seconds = model.estimate(_PLAIN).seconds
    return PredictedStep(ranks, ranks // here, seconds, seconds - alone, alone / seconds)


def counts(per_host: int, most: int = MOST_RANKS) -> list[int]:
    """Return the numbers of ranks for the table: powers of two on one host, then whole hosts."""
    found = [1]
    while 2 * found[-1] < per_host:
        found.append(2 * found[-1])
    if per_host > 1:
        found.append(per_host)
    while 2 * found[-1] <= most:
        found.append(2 * found[-1])
    return found


def predict(
    profile: Profile,
    measured: float | None,
    given: NetworkLink | None,
    seen: NetworkLink | None,
    part: Profile | None = None,
) -> Prediction:
    """Predict the step on 1 … 1024 ranks.

    Args:
        profile: What was measured of the program.
        measured: The seconds of a step on its ranks, from other measurements than the profile's; None if there are none.
        given: The link that the user has named; None for the one that was measured.
        seen: The link between ranks, if possible of two hosts; None if it was not measured.
        part: The profile of what was measured, if that is a part of the model; None if it is the model.
    """
    per_host, hosts = _per_host(profile), len(set(profile.hosts))
    if given is not None:
        link, source = given, "as given"
    elif profile.link is not None:
        link, source = profile.link, "measured between the hosts"
    elif seen is not None and hosts > 1:
        link, source = seen, "measured by messages between the hosts"
    elif seen is not None:
        link, source = (
            seen,
            "measured between ranks of this host, so as if the network were as fast: give --link for yours",
        )
    else:
        link, source = NetworkLink(0.0, 1e-12), "none was measured: give --link"
    if per_host * hosts != profile.ranks:
        source += "; hosts have different numbers of ranks, so each rank counts as a host"
    rows = tuple(step(profile, ranks, per_host, link) for ranks in counts(per_host))
    own, checked = part or profile, None if part is None else part.elements
    predicted = step(own, own.ranks, per_host, profile.link or link).seconds
    return Prediction(rows, predicted, measured, link, source, checked)
