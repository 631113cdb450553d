"""``hvdlite doctor``: looks at the installation, starts ranks that examine, and reports."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hvdlite.config import environment
from hvdlite.errors import ArgumentError, HvdliteError, LaunchError
from hvdlite.launch.allocation import Hosts, choose_hosts
from hvdlite.launch.job.ssh import options as ssh_options
from hvdlite.launch.where import Where
from hvdlite.tools.advise.command import measure
from hvdlite.tools.advise.link import NetworkLink, parse_link
from hvdlite.tools.advise.profile import Profile
from hvdlite.tools.doctor import inside, job, report, rules
from hvdlite.tools.doctor.facts import HostFacts, InstallFacts
from hvdlite.tools.doctor.finding import Finding, Severity, sort, warning
from hvdlite.tools.doctor.heard import Heard
from hvdlite.tools.doctor.install import look
from hvdlite.tools.doctor.plot import check_plot, plot
from hvdlite.tools.doctor.predict import Prediction, held_out, made_up, predict
from hvdlite.tools.doctor.probe import ProbeRequest

START_SECONDS = 22.0
"""The ranks must have said something so many seconds after the beginning."""
STEPS, WARM_UP = 20, 5
_ARRAYS = 8
"""So many times its parameters a rank takes to check the step of a model, and to leave some room."""
_LAST_LINES = 30
_INTERRUPTED = 130


@dataclass(frozen=True)
class DoctorOptions:
    """What the user asks for.

    Attributes:
        where: The ranks and their hosts.
        program: A training program whose step is predicted; None for none.
        arguments: Its arguments.
        parameters: The number of parameters of a model, in place of a program; None for none.
        step_seconds: The seconds of its step on one rank.
        link: The link between hosts for the prediction; None for the one that is measured.
        skip: What is left out, of "imports", "links" and "operations".
        json: The file for all figures.
        plot: The file for the picture of the links.
    """

    where: Where
    program: str | None = None
    arguments: Sequence[str] = ()
    parameters: float | None = None
    step_seconds: float | None = None
    link: str | None = None
    skip: Sequence[str] = ()
    json: Path | None = None
    plot: Path | None = None


def doctor(options: DoctorOptions) -> int:
    """Examine, print what is found, and return the exit code: 1 if training cannot run, 130 after Ctrl-C, else 0.

    Raises:
        ArgumentError: The options do not fit together.
    """
    link = _checked(options)
    request = ProbeRequest(
        imports="imports" not in options.skip,
        links="links" not in options.skip,
        operations="operations" not in options.skip,
        parameters=round(options.parameters or 0),
        step_seconds=options.step_seconds or 0.0,
    )
    examination = Examination(options, link)
    if inside.is_rank():
        if options.program is not None:
            raise ArgumentError(
                "a program cannot be measured inside of a job: call hvdlite doctor -np N PROGRAM outside."
            )
        return inside.examine_here(request, examination.progress, examination.finish)
    return examination.run(request)


def _checked(options: DoctorOptions) -> NetworkLink | None:
    if (options.parameters is None) != (options.step_seconds is None):
        raise ArgumentError("--parameters and --step-seconds describe a model together: give both, or a program.")
    if options.program is not None and options.parameters is not None:
        raise ArgumentError("a program and --parameters: both describe the model, give one.")
    if options.parameters is not None and not 1 <= options.parameters <= 1e12:
        raise ArgumentError(f"--parameters {options.parameters:g}: expected 1 or more, such as 110e6.")
    if options.program is not None and not Path(options.program).is_file():
        raise ArgumentError(f"{options.program}: there is no such file. Name the Python file of a training program.")
    for name in ("json", "plot"):  # an error comes now, not after the measurement
        path = getattr(options, name)
        if path is not None and not path.absolute().parent.is_dir():
            raise ArgumentError(f"--{name} {path}: there is no folder {path.absolute().parent}.")
    if options.plot is not None:
        check_plot()
    return None if options.link is None else parse_link(options.link)


class Examination:
    """One run of the doctor.

    Args:
        options: What the user asks for.
        link: The link that the user has named; None if there is none.

    Attributes:
        progress: Says what is being done.
    """

    def __init__(self, options: DoctorOptions, link: NetworkLink | None) -> None:
        self._options, self._link = options, link
        self._began = time.monotonic()
        self.progress = Progress()
        self._heard = Heard()
        self._install: InstallFacts | None = None
        self._here: HostFacts | None = None
        self._findings: list[Finding] = []
        self._size = self._most_here = 1
        self._prediction: Prediction | None = None

    def run(self, request: ProbeRequest) -> int:
        """Examine by a job that is started for it, and report; also if the user presses Ctrl-C."""
        try:
            self._examine(request)
        except KeyboardInterrupt:
            self.progress.end()
            print("interrupted; this was found before:", flush=True)
            self.finish(self._heard, self._findings, whole=False)
            return _INTERRUPTED
        return self.finish(self._heard, self._findings)

    def _examine(self, request: ProbeRequest) -> None:
        where = self._options.where
        self.progress("looking what is installed")
        hosts = self._hosts()
        self._install, self._here = look(
            where.mpi,
            hosts.hosts if hosts.by_ssh else (),
            ssh_options(where.ssh_port, where.ssh_identity_file),
            hosts.scheduler,
            environment(),
            request.imports,
        )
        self._findings += rules.installation(self._install)
        left = [host for host in hosts.hosts if host.name not in self._install.unreachable]
        if not job.can_start(self._install) or (hosts.hosts and not left):
            return
        if len(left) < len(hosts.hosts):  # those that answer are examined
            where = replace(where, hosts=",".join(map(str, left)), hostfile=None)
            self._size = min(self._size, sum(host.slots for host in left))
        request = self._fitting(replace(request, here=self._here.host))
        launch = where.words()
        self._findings += job.run(launch, self._size, request, self._heard, self._began + START_SECONDS, self.progress)
        bad = any(each.severity is Severity.ERROR for each in self._findings)
        if self._options.program is not None and not bad and self._heard.done == self._size:
            self._predict_program(launch)

    def _hosts(self) -> Hosts:
        """Find the hosts, and how many ranks there are if the user has not said: one for each slot, or two here."""
        where = self._options.where
        try:
            found = choose_hosts(where.hosts, where.hostfile, where.num_proc or 1, environment())
        except LaunchError as problem:
            raise ArgumentError(str(problem)) from None
        self._size = where.num_proc or sum(host.slots for host in found.hosts) or 2
        self._most_here = min(self._size, max((host.slots for host in found.hosts), default=self._size))
        return found

    def _fitting(self, request: ProbeRequest) -> ProbeRequest:
        """Return the request, without a model that does not fit into the memory of this host."""
        assert self._here is not None
        if request.parameters * 4 * _ARRAYS * self._most_here <= self._here.memory:
            return request
        self._findings.append(
            warning(
                "memory",
                f"a model of {request.parameters:,} parameters does not fit {self._most_here} times into the "
                f"{rules.size(self._here.memory)} that {self._here.host} has left, so its step is not checked",
                "memory for parameters, gradients and their exchange on each rank",
                "name more hosts (-H), or give the container more memory",
            )
        )
        return replace(request, parameters=0)

    def _predict_program(self, launch: Sequence[str]) -> None:
        assert self._options.program is not None
        self.progress("measuring the program")
        self.progress.end()
        try:
            profile = measure(
                self._options.program, self._options.arguments, max(2, self._size), [], STEPS, WARM_UP, launch
            )
        except HvdliteError as problem:
            self._findings.append(
                warning(
                    "program",
                    str(problem),
                    f"{STEPS + WARM_UP} steps of it",
                    "repair it, or give --parameters and --step-seconds",
                )
            )
            return
        profile, measured = held_out(profile)
        self._predict(profile, measured)

    def _predict_made_up(self, heard: Heard, parameters: int, seconds: float) -> None:
        said, numbers = heard.step, _numbers(heard)
        profile, part = made_up(parameters, seconds, numbers, said), None
        if said is not None and said["parameters"] < parameters:
            part = made_up(said["parameters"], seconds, numbers, said)
        self._predict(profile, None if said is None else said["seconds"], part)

    def _predict(self, profile: Profile, measured: float | None, part: Profile | None = None) -> None:
        heard = self._heard
        seen = [*rules.between_hosts(heard.links, heard.names).values()] or [*heard.links.values()]
        usual = rules.usual(seen) if seen else None
        self._prediction = predict(profile, measured, self._link, usual, part)

    def finish(self, heard: Heard, problems: Sequence[Finding], whole: bool = True) -> int:
        """Print and write what was found, and return the exit code.

        Args:
            heard: What the ranks have said.
            problems: What was found apart from that.
            whole: Whether everything was examined.
        """
        self._heard = heard
        self.progress.end()
        parameters = self._options.parameters or 0
        if self._options.step_seconds is not None and heard.nodes:
            self._predict_made_up(heard, round(parameters), self._options.step_seconds)
        size = max(self._size, len(heard.mpi))
        found = sort([*problems, *heard.findings(self._here, size, parameters)])
        parts = [report.overview(self._install, self._here, heard)]
        if heard.links:
            parts.append(report.matrix(heard.links, heard.names))
        if self._prediction is not None:
            parts.append(report.prediction(self._prediction, len(heard.ranks)))
        if heard.printed and any(each.name in ("failed job", "hanging job") for each in found):
            parts.append("\n".join(["The job's last messages:", *heard.printed.strip().splitlines()[-_LAST_LINES:]]))
        parts.append(report.findings(found, whole))
        print("\n\n".join(part for part in parts if part), flush=True)
        self._write(heard, found)
        return int(any(each.severity is Severity.ERROR for each in found))

    def _write(self, heard: Heard, found: Sequence[Finding]) -> None:
        if self._options.json is not None:
            self._options.json.write_text(json.dumps(self._figures(heard, found), indent=2) + "\n")
        if self._options.plot is not None:
            if heard.links:
                plot(heard.links, heard.names, self._options.plot)
                print(f"the picture is in {self._options.plot}")
            else:
                print("there is no picture: no links were measured", file=sys.stderr)

    def _figures(self, heard: Heard, found: Sequence[Finding]) -> dict[str, Any]:
        return {
            "findings": [each.figures() for each in found],
            "installation": None if self._install is None else self._install.pack(),
            "hosts": [heard.hosts[rank].pack() for rank in sorted(heard.hosts)],
            "mpi": [heard.mpi[rank].pack() for rank in sorted(heard.mpi)],
            "ranks": [heard.ranks[rank].pack() for rank in sorted(heard.ranks)],
            "links": [
                {"from": one, "to": other, "latency": link.latency, "bits_per_second": link.bits_per_second}
                for (one, other), link in heard.links.items()
            ],
            "operations": {"tried": heard.tried, "failed": heard.failed},
            "prediction": None if self._prediction is None else self._prediction.figures(),
        }


def _numbers(heard: Heard) -> list[int]:
    """Return for each rank the number of its host. A rank that shares memory with nobody is a host of its own."""
    return [rank if heard.ranks[rank].unshared else heard.ranks[rank].node for rank in sorted(heard.ranks)]


class Progress:
    """Says what is being done: in one line that changes on a terminal, else in a line for each thing."""

    def __init__(self, write: Callable[[str], Any] = sys.stderr.write, terminal: bool | None = None) -> None:
        self._write = write
        self._terminal = sys.stderr.isatty() if terminal is None else terminal
        self._last = ""
        self._said: set[str] = set()

    def __call__(self, text: str) -> None:
        """Say that this is done now."""
        shown = text if self._terminal else text.partition("(")[0].partition(" between ranks")[0].strip()
        if shown and shown != self._last and (self._terminal or shown not in self._said):
            self._last = shown
            self._said.add(shown)
            self._write(f"\r\x1b[K{shown} …" if self._terminal else f"hvdlite doctor: {shown}\n")
            sys.stderr.flush()

    def end(self) -> None:
        """Take the line away."""
        if self._terminal and self._last:
            self._write("\r\x1b[K")
            sys.stderr.flush()
        self._last = ""
