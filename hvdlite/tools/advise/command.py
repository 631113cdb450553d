"""``hvdlite advise``: runs a training program for some steps, and says what each strategy would cost."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hvdlite.errors import ArgumentError, HvdliteError
from hvdlite.tools.advise import report
from hvdlite.tools.advise.link import NetworkLink, parse_link
from hvdlite.tools.advise.model import CostModel, Estimate
from hvdlite.tools.advise.profile import Profile
from hvdlite.tools.advise.recorder import MeasuringRequest
from hvdlite.tools.advise.strategies import USUAL, TrainingStrategy, parse_strategy


@dataclass(frozen=True)
class Advice:
    """What each strategy would cost. `str` gives the table, and the recommendation with its reason.

    Attributes:
        model: Has made the estimates, and can make others.
        estimates: One for each strategy.
    """

    model: CostModel
    estimates: tuple[Estimate, ...]

    @property
    def chosen(self) -> Estimate:
        """The recommendation (`hvdlite.tools.advise.report.choose`)."""
        return report.choose(self.estimates)

    def __str__(self) -> str:
        return report.text(self.model, self.estimates)

    def figures(self) -> dict[str, Any]:
        """Return the figures as JSON objects, in seconds and bytes."""
        cluster = self.model.cluster
        link = cluster.link
        estimates = [
            {"strategy": str(each.strategy), "seconds": each.seconds, "bytes": each.nbytes, "workers": each.workers}
            for each in self.estimates
        ]
        return {
            "hosts": cluster.hosts,
            "ranks_per_host": cluster.per_host,
            "link": None if link is None else {"latency": link.latency, "bits_per_second": link.bits_per_second},
            "estimates": estimates,
            "chosen": str(self.chosen.strategy),
        }

    def plot(self, path: Path) -> None:
        """Draw the time of a step of each strategy by the bandwidth between the hosts (`hvdlite.tools.advise.plot`)."""
        from hvdlite.tools.advise.plot import plot

        plot(self.model, [each.strategy for each in self.estimates], path)


def advise(
    program: str | os.PathLike[str],
    arguments: Sequence[str] = (),
    num_proc: int = 2,
    *,
    link: str | NetworkLink | None = None,
    per_host: int | None = None,
    strategies: Sequence[str] = (),
    steps: int = 20,
    warm_up: int = 5,
    launch: Sequence[str] = (),
    environ: Mapping[str, str] | None = None,
) -> Advice:
    """Run a training program for some steps, and predict what a step would cost with each strategy.

    The program is any that wraps one optimizer of torch in `DistributedOptimizer`, and trains in host memory. It runs as it is,
    on the ranks that are asked for, and ends after the last measured step. No other strategy is run.

    Args:
        program: The path of a Python file.
        arguments: Its arguments.
        num_proc: The number of ranks, 2 or more.
        link: What is between the hosts, such as "100mbit" or "10gbit,50us"; None for what the ranks measure.
        per_host: The number of ranks on each host; None for the hosts that the ranks have. If they have one, and there is a
            `link`, None means that each rank is pretended to be on a host of its own.
        strategies: Names such as "powersgd:8" (see `hvdlite.tools.advise.strategies`); the usual ones if empty.
        steps: How many steps are measured.
        warm_up: How many steps go by before these.
        launch: More arguments of hvdliterun, such as ``["-H", "node1:2,node2:2"]``. The first host must be this machine, or
            share the folder for temporary files with it.
        environ: The environment of the program; that of this process by default.

    Returns:
        The estimates and the recommendation.

    Raises:
        ArgumentError: An argument is wrong.
        HvdliteError: The program has failed, or ended before enough steps, or has no such optimizer.
    """
    asked = [parse_strategy(name) for name in strategies] or _usual(num_proc)
    given = parse_link(link) if isinstance(link, str) else link
    profile = measure(program, arguments, num_proc, asked, steps, warm_up, launch, environ)
    model = CostModel(profile, given, per_host)
    return Advice(model, tuple(model.estimate(strategy) for strategy in asked))


def measure(
    program: str | os.PathLike[str],
    arguments: Sequence[str],
    num_proc: int,
    strategies: Sequence[TrainingStrategy],
    steps: int,
    warm_up: int,
    launch: Sequence[str] = (),
    environ: Mapping[str, str] | None = None,
) -> Profile:
    """Run a training program for some steps, and return what the ranks have measured. The arguments are those of `advise`.

    Raises:
        ArgumentError, HvdliteError: See `advise`.
    """
    if num_proc < 2:
        raise ArgumentError(f"-np {num_proc}: one rank has nobody to exchange gradients with. Ask for 2 ranks or more.")
    if steps < 1 or warm_up < 1:
        raise ArgumentError(f"steps={steps}, warm_up={warm_up}: expected 1 or more.")
    if not Path(program).is_file():
        raise ArgumentError(f"{os.fspath(program)}: there is no such file. Name the Python file of a training program.")
    with tempfile.TemporaryDirectory(prefix="hvdlite-advise.") as folder:
        path = Path(folder) / "profile.json"
        request = MeasuringRequest(str(path), warm_up, steps, tuple(map(str, strategies)))
        words = ["-np", str(num_proc), *launch, sys.executable, os.fspath(program), *arguments]
        # Gradients that travel during the backward pass would make it seem longer.
        settings = {"HVDLITE_ADVISE": request.pack(), "HVDLITE_OVERLAP": "off"}
        done = subprocess.run(
            [sys.executable, "-m", "hvdlite.launch", *words],
            env={**(os.environ if environ is None else environ), **settings},
            stdin=subprocess.DEVNULL,
        )
        if done.returncode:
            raise HvdliteError(
                f"{os.fspath(program)} has failed with exit code {done.returncode}, so its steps cannot be measured. Its own "
                "messages are above."
            )
        return read(request, os.fspath(program))


def _usual(ranks: int) -> list[TrainingStrategy]:
    """Return the usual strategies, without those that need more ranks."""
    return [each for each in USUAL if each.about.number != 0 or each.number < ranks]


def read(request: MeasuringRequest, program: str) -> Profile:
    """Return what the ranks have measured.

    Args:
        request: What they were asked for.
        program: The program's name, for messages.

    Raises:
        HvdliteError: They have not measured enough.
    """
    if Path(request.path).exists():
        return Profile.read(Path(request.path))
    if request.steps_file.exists():
        raise HvdliteError(
            f"{program} has ended after {request.steps_file.read_text()} steps; {request.warm_up} to warm up and "
            f"{request.steps} to measure were asked for. Let it train longer, or give smaller --steps and --warm-up."
        )
    raise HvdliteError(
        f"{program} has ended, and has not wrapped an optimizer in hvdlite_torch.DistributedOptimizer, whose steps are "
        "measured. (With several hosts, rank 0 must run on this machine.)"
    )
