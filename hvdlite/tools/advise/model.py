"""`CostModel`: what each strategy would cost in a step, from what was measured of the program and of the link."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from hvdlite.errors import ArgumentError
from hvdlite.gradients.header import WORDS
from hvdlite.gradients.planner import BUCKET_SECONDS, plan_buckets
from hvdlite.tensors.reduction import nbytes_of
from hvdlite.tools.advise import servers
from hvdlite.tools.advise.cluster import Cluster
from hvdlite.tools.advise.exchanges import ExchangeCost
from hvdlite.tools.advise.link import NetworkLink
from hvdlite.tools.advise.profile import WHOLE, Compressed, Profile
from hvdlite.tools.advise.strategies import TrainingStrategy

_AVERAGE, _OUTER = 4, 6
"""How many copies of the parameters an average of them takes, and how many more a step of an outer optimizer with momentum."""


@dataclass(frozen=True)
class Estimate:
    """What one strategy costs.

    Attributes:
        strategy: The strategy.
        seconds: The seconds of a step, as the mean over steps with an exchange and without.
        nbytes: The bytes that a rank sends to other hosts in a step, as the mean over ranks and steps.
        exchange: The part of `seconds` in which the ranks wait for the link.
        workers: The number of ranks that train.
    """

    strategy: TrainingStrategy
    seconds: float
    nbytes: float
    exchange: float
    workers: int

    @property
    def rate(self) -> float:
        """The steps of all ranks in a second, of which each uses one batch of one rank."""
        return self.workers / self.seconds


class CostModel:
    """Predicts the cost of strategies.

    In memory, time is counted in copies of all gradients: on a host of r ranks, a rank copies the part of its gradients that
    the others sum, (r - 1)/r, adds theirs to its own part, and writes the sums to them. Between hosts, `ExchangeCost` says what
    an operation costs.

    Args:
        profile: What was measured.
        link: The link between the hosts; None for the one that was measured, if any.
        per_host: The number of ranks of each host; None for the hosts that the ranks had, or, if they had one host and there is
            a `link`, 1.

    Attributes:
        profile: What was measured.
        cluster: The hosts.
        is_measured: Whether the link was measured, and not given.

    Raises:
        ArgumentError: There is one rank only, or the ranks cannot be dealt out to hosts like that.
    """

    def __init__(self, profile: Profile, link: NetworkLink | None = None, per_host: int | None = None) -> None:
        ranks = profile.ranks
        if ranks < 2:
            raise ArgumentError("one rank has nobody to exchange gradients with: measure with two ranks or more.")
        if per_host is None:
            there = [profile.hosts.count(host) for host in set(profile.hosts)]
            if len(set(there)) > 1:
                raise ArgumentError(f"the hosts have {', '.join(map(str, there))} ranks: give each equally many.")
            per_host = 1 if len(there) == 1 and link is not None else there[0]
        if not 1 <= per_host <= ranks or ranks % per_host:
            raise ArgumentError(f"{per_host} ranks on each host: {ranks} ranks cannot be dealt out like that.")
        self.profile, self.is_measured = profile, link is None
        between = link or profile.link
        if per_host < ranks and between is None:
            raise ArgumentError(f"{ranks // per_host} hosts: say what is between them, such as 100mbit.")
        known = None if per_host == ranks or between is None else replace(between, reduction=profile.copy)
        self.cluster = Cluster(ranks // per_host, per_host, known, known, profile.copy, profile.meeting)
        if known is not None and link is None and profile.strategy == WHOLE:
            self.cluster = replace(self.cluster, link=self._as_in_the_program(known))

    def with_link(self, link: NetworkLink) -> CostModel:
        """Return the same model with another link between the hosts."""
        return CostModel(self.profile, link, self.cluster.per_host)

    def estimate(self, strategy: TrainingStrategy) -> Estimate:
        """Return what a strategy costs.

        Raises:
            ArgumentError: The strategy needs more ranks, or was not tried out when the program was measured.
        """
        return _KINDS[strategy.kind](self, strategy)

    def _as_in_the_program(self, link: NetworkLink) -> NetworkLink:
        """Return the link with the bandwidth that the program's own exchanges had, if that is less than in the measurement."""

        def predicted(seconds_per_byte: float) -> float:
            cluster = replace(self.cluster, link=replace(link, seconds_per_byte=seconds_per_byte))
            return self._whole_local() + cluster.between(self._whole_exchanges())[0]

        least = predicted(0.0)
        seconds_per_byte = (self.profile.exchange - least) / (predicted(1.0) - least)
        return replace(link, seconds_per_byte=max(link.seconds_per_byte, seconds_per_byte))

    # What the strategies are made of

    def _copies(self, count: float, nbytes: float | None = None) -> float:
        """Return the seconds of so many copies of all gradients, or of some bytes."""
        return count * (self.profile.nbytes if nbytes is None else nbytes) * self.cluster.copy

    def _header(self, tensors: int | None = None) -> ExchangeCost:
        count = len(self.profile.layout) if tensors is None else tensors
        return ExchangeCost("allreduce", 8 * (count + WORDS + 1))

    def _tried(self, name: str) -> Compressed:
        if name not in self.profile.compressed:
            raise ArgumentError(f"{name} was not tried out: name it when the program is measured.")
        return self.profile.compressed[name]

    def _together(
        self,
        strategy: TrainingStrategy,
        local: float,
        exchanges: Iterable[ExchangeCost],
        update: float | None = None,
        every: int = 1,
    ) -> Estimate:
        """Return the estimate of a strategy in which all ranks wait for each other, in each step or each `every` steps.

        Args:
            strategy: The strategy.
            local: The seconds of a rank's work for an exchange.
            exchanges: What travels between the hosts.
            update: The seconds of the optimizer's own step; None for a step with all parameters.
            every: The steps from one exchange to the next.
        """
        profile = self.profile
        compute = profile.compute_together if every == 1 else max(profile.compute_apart)
        seconds, nbytes = self.cluster.between(exchanges)
        whole = compute + (profile.update if update is None else update) + (local + seconds) / every
        return Estimate(strategy, whole, nbytes / every, seconds / every, profile.ranks)

    # The strategies

    def _gradients(self, strategy: TrainingStrategy) -> Estimate:
        return self._together(strategy, self._whole_local(), self._whole_exchanges())

    def _whole_local(self) -> float:
        # Between hosts, all gradients go through the bucket's memory.
        others = self.cluster.others
        copies = 3 * others if self.cluster.link is None else 1 + 2 * others
        return self._copies(copies) + self.cluster.meetings(2)

    def _whole_exchanges(self) -> list[ExchangeCost]:
        return [self._header(), *self._tried("gradients").exchanges]

    def _sharded(self, strategy: TrainingStrategy) -> Estimate:
        others = self.cluster.others
        copies = 2 * others if self.cluster.link is None else 2 + others
        local = self._copies(copies) + self.cluster.meetings(3)
        update = self.profile.update / self.profile.ranks
        return self._together(strategy, local, [self._header(), *self._tried("sharded").exchanges], update)

    def _overlapped(self, strategy: TrainingStrategy) -> Estimate:
        """Buckets travel one after the other, each when the backward pass has its gradients; the last one in the step."""
        profile, cluster, plain = self.profile, self.cluster, self._gradients(strategy)
        sizes = [nbytes_of(info) for info in profile.layout]
        order = sorted(range(len(sizes)), key=lambda index: -profile.ready[index])
        whole = plain.exchange + self._copies(3 * cluster.others) + cluster.meetings(2)
        buckets = plan_buckets(order, sizes, max(1, int(profile.nbytes * BUCKET_SECONDS / max(whole, 1e-9))))
        if not buckets:
            return plain
        over, sent = -math.inf, 0.0
        """When the last bucket so far is there, in seconds from the step; and the bytes of a rank."""
        for number, bucket in enumerate(buckets):
            nbytes = sum(sizes[index] for index in bucket)
            seconds, each = cluster.between([self._header(len(bucket)), ExchangeCost("allreduce", nbytes)])
            local = self._copies(2 * cluster.others, nbytes) + cluster.meetings(2)
            ready = 0.0 if number == len(buckets) - 1 else -min(profile.ready[index] for index in bucket)
            over = max(over, ready) + seconds + local
            sent += each
        # Copies travel, and the step compares them with the gradients.
        seconds = profile.compute_together + self._copies(2) + max(0.0, over) + profile.update
        return Estimate(strategy, seconds, sent, max(0.0, over), profile.ranks)

    def _compressed(self, strategy: TrainingStrategy) -> Estimate:
        tried = self._tried(str(strategy))
        inside = sum(one.nbytes for one in tried.exchanges)
        local = tried.seconds + self._copies(1) + self._copies(3 * self.cluster.others, inside)
        return self._together(strategy, local + self.cluster.meetings(2), [self._header(), *tried.exchanges])

    def _halves(self, strategy: TrainingStrategy) -> Estimate:
        tried = self._tried("fp16")
        local = tried.seconds + self._copies(3 * self.cluster.others / 2) + self.cluster.meetings(2)
        return self._together(strategy, local, [self._header(), *tried.exchanges])

    def _local_steps(self, strategy: TrainingStrategy) -> Estimate:
        said = [ExchangeCost("allreduce", 0.0)] * 2  # of a named operation: that this rank is ready, and that all are
        mean = [*said, ExchangeCost("allreduce", 5 * 8), *said, ExchangeCost("allreduce", self.profile.nbytes)]
        copies = _AVERAGE + 3 * self.cluster.others + (_OUTER if strategy.kind == "diloco" else 0)
        local = self._copies(copies) + self.cluster.meetings(4)
        return self._together(strategy, local, mean, every=int(strategy.number))

    def _server(self, strategy: TrainingStrategy) -> Estimate:
        count = int(strategy.number)
        if count >= self.profile.ranks:
            raise ArgumentError(
                f"{strategy}: {count} of {self.profile.ranks} ranks only serve, so none is left to train."
            )
        return Estimate(strategy, *servers.cost(self.profile, self.cluster, strategy.kind == "sync", count))


_KINDS: Mapping[str, Callable[[CostModel, TrainingStrategy], Estimate]] = MappingProxyType(
    {
        "gradients": CostModel._gradients,
        "sharded": CostModel._sharded,
        "overlapped": CostModel._overlapped,
        "fp16": CostModel._halves,
        "powersgd": CostModel._compressed,
        "topk": CostModel._compressed,
        "localsgd": CostModel._local_steps,
        "diloco": CostModel._local_steps,
        "sync": CostModel._server,
        "async": CostModel._server,
    }
)
"""How a strategy of each kind is estimated."""
