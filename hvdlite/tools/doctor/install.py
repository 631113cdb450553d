"""Asks what is installed on this machine, everything at the same time and each with a time limit."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from hvdlite.errors import LaunchError
from hvdlite.launch.check_build import MpiLibrary, ask_library
from hvdlite.launch.job.hosts import Host, is_local
from hvdlite.launch.job.mpi import find_mpi
from hvdlite.launch.job.ssh import why_silent
from hvdlite.tools.doctor.facts import HostFacts, InstallFacts
from hvdlite.tools.doctor.imports import broken_imports
from hvdlite.tools.doctor.observe import observe

MPI_SECONDS, SSH_SECONDS, SRUN_SECONDS = 12.0, 5, 8.0


def look(
    mpi: str | None,
    hosts: Sequence[Host],
    ssh: Sequence[str],
    scheduler: str,
    environ: Mapping[str, str],
    imports: bool,
) -> tuple[InstallFacts, HostFacts]:
    """Return what is installed here, and what this process sees of its host.

    Args:
        mpi: The MPI that was asked for; None for the first that works.
        hosts: The hosts that ssh must reach.
        ssh: The options of ssh.
        scheduler: "slurm", "pbs" or "lsf", if this is in a job of it; else empty.
        environ: The environment of srun.
        imports: Whether to try to import the frameworks.
    """
    remote = sorted({host.name for host in hosts if not is_local(host.name)})
    with ThreadPoolExecutor(4 + len(remote)) as pool:
        broken: Future[dict[str, str]] | None = pool.submit(broken_imports) if imports else None
        launcher = pool.submit(_launcher, mpi)
        library = pool.submit(ask_library, MPI_SECONDS)
        srun = pool.submit(_ask_srun, environ) if scheduler == "slurm" else None
        answers = {name: pool.submit(why_silent, name, ssh, SSH_SECONDS) for name in remote}
        found = library.result()
        works = isinstance(found, MpiLibrary)
        offers, fault = srun.result() if srun is not None else (None, "")
        install = InstallFacts(
            *launcher.result(),
            library=found.name if isinstance(found, MpiLibrary) else "",
            library_fault="" if works else str(found),
            threads=found.threads if isinstance(found, MpiLibrary) else "MULTIPLE",
            scheduler=scheduler,
            srun=offers,
            srun_fault=fault,
            unreachable={name: answer.result() for name, answer in answers.items() if answer.result()},
        )
        return install, observe(broken=broken.result() if broken is not None else None)


def _launcher(mpi: str | None) -> tuple[str, str]:
    try:
        found = find_mpi(mpi)
    except LaunchError as error:
        return "", str(error)
    return f"{found.flavour} {'.'.join(map(str, found.version))}, {found.program}", ""


def _ask_srun(environ: Mapping[str, str]) -> tuple[tuple[str, ...] | None, str]:
    """Return the kinds of MPI that srun offers, or why it does not say."""
    try:
        done = subprocess.run(
            ["srun", "--mpi=list"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=SRUN_SECONDS,
            env=dict(environ),
        )
    except FileNotFoundError:
        return None, "this is in a job of Slurm, and there is no srun on the PATH"
    except subprocess.TimeoutExpired:
        return None, f"srun --mpi=list did not answer within {SRUN_SECONDS:g} s"
    return parse_srun(done.stdout + done.stderr), ""


def parse_srun(text: str) -> tuple[str, ...]:
    """Read what ``srun --mpi=list`` prints: a heading, and the kinds one a line; what stands after a colon explains a kind."""
    lines = [line.strip().removeprefix("srun:").strip() for line in text.splitlines()]
    words = (
        word.strip() for line in lines if not line.lower().startswith(("mpi", "specific")) for word in line.split(",")
    )
    return tuple(word for word in words if word)
