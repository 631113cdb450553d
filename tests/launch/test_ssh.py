"""The check of the other hosts by ssh: a real sshd on each host, which is a namespace here (tests/support/hosts.py)."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from hvdlite.errors import LaunchError
from hvdlite.launch.job import ssh
from hvdlite.launch.job.hosts import Host
from tests.support import hosts as lab
from tests.support.jobs import LIMIT, PROGRAMS, ROOT

SSHD = shutil.which("sshd", path=f"{os.environ.get('PATH', '')}:/usr/sbin")
PROGRAM_NAMES = ("ssh", "ssh-keygen")
WRAPPER = '#!/bin/sh\nexec {ssh} -F {folder}/ssh_config "$@"\n'


@pytest.fixture(scope="module")
def hosts() -> Iterator[lab.Hosts]:
    """Six hosts with real ssh between them, or a skip that says why there are none.

    node2 has no sshd; the key of node3 is not known; node4 lets nobody in; node5 has another hvdlite; node6 is fit.
    """
    if reason := lab.why_not():
        pytest.skip(reason)
    if missing := [name for name in PROGRAM_NAMES if shutil.which(name) is None] + ["sshd"] * (SSHD is None):
        pytest.skip(f"there is no {', '.join(missing)} (Debian: openssh-server, openssh-client)")
    with lab.hosts(6) as found:
        folder = found.directory / "ssh"
        folder.mkdir()
        for key in ("user", "host"):
            _call("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / key))
        public = (folder / "host.pub").read_text()
        known = [f"{name} {public}" for name in found.names if name != "node3"]
        (folder / "known_hosts").write_text("".join(known))
        (folder / "ssh_config").write_text(f"IdentityFile {folder}/user\nUserKnownHostsFile {folder}/known_hosts\n")
        (folder / "ssh").write_text(WRAPPER.format(ssh=shutil.which("ssh"), folder=folder))
        (folder / "ssh").chmod(0o755)
        for name in ("node3", "node4", "node5", "node6"):
            _start_sshd(found, name, folder, "nobody" if name == "node4" else "user")
        other = folder / "other.py"
        other.write_text('__version__ = "0.0.9"\n')
        _on(found, "node5", "mount", "--bind", str(other), str(ROOT / "hvdlite/__init__.py"))
        yield found


def _call(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True, timeout=LIMIT)


def _on(found: lab.Hosts, name: str, *words: str) -> None:
    done = found.run(name, *words, timeout=LIMIT)
    assert done.returncode == 0, done.stdout + done.stderr


def _start_sshd(found: lab.Hosts, name: str, folder: Path, who: str) -> None:
    _on(found, name, "sh", "-c", "mount -t tmpfs tmpfs /run && mkdir -m 755 /run/sshd")  # of this host alone
    settings = {
        "HostKey": folder / "host",
        "AuthorizedKeysFile": folder / f"{who}.pub",
        "PidFile": folder / f"{name}.pid",
        "StrictModes": "no",
        "UsePAM": "no",
        "PermitRootLogin": "yes",
        "PasswordAuthentication": "no",
        "KbdInteractiveAuthentication": "no",
    }
    config = folder / f"sshd-{name}"
    config.write_text("".join(f"{key} {value}\n" for key, value in settings.items()))
    assert SSHD is not None
    _on(found, name, SSHD, "-f", str(config))


def hvdliterun(found: lab.Hosts, where: str, *words: str) -> subprocess.CompletedProcess[str]:
    path = f"PATH={found.directory / 'ssh'}{os.pathsep}{os.environ['PATH']}"
    command = [sys.executable, "-m", "hvdlite.launch", "-np", "2", "-H", where, *words, str(PROGRAMS / "place.py")]
    return found.run("node1", "env", path, *command, timeout=LIMIT)


def test_each_host_that_is_not_fit_is_named_with_the_reason(hosts: lab.Hosts) -> None:
    done = hvdliterun(hosts, "node1,node2,node3,node4,nosuch.invalid,node5,node6")
    assert done.returncode == 2
    assert "hvdliterun: cannot use 5 of 6 other hosts:\n" in done.stderr
    told = dict(re.findall(r"^  (\S+): (.*)$", done.stderr, re.M))
    assert list(told) == ["node2", "node3", "node4", "nosuch.invalid", "node5"]
    for name, said, advice in (
        ("node2", "Connection refused", "start sshd"),
        ("node3", "Host key verification failed", "ssh-keyscan node3"),
        ("node4", "Permission denied", "ssh-copy-id node4"),
        ("nosuch.invalid", "Could not resolve hostname", "check the spelling"),
        ("node5", "it has hvdlite 0.0.9, here it is", ""),
    ):
        assert said in told[name] and advice in told[name]


def test_a_job_over_ssh(hosts: lab.Hosts) -> None:
    done = hvdliterun(hosts, "node1,node6", "--no-tag-output")
    assert (done.returncode, sorted(done.stdout.splitlines())) == (
        0,
        ["place 0 2 0 1 0 2 node1", "place 1 2 0 1 1 2 node6"],
    )


def test_a_host_that_cannot_connect_back(hosts: lab.Hosts) -> None:
    done = hvdliterun(hosts, "node1,node6", "--network-interface", "lo")
    assert done.returncode == 2
    assert "node6: it cannot connect to this machine at 127.0.0.1" in done.stderr


def test_what_is_missing_on_a_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The stand-in for ssh runs the command here, after it was changed as if paths differed there, or not at all."""
    script = tmp_path / "ssh"
    script.write_text('#!/bin/sh\nfor last; do :; done\neval "$CHANGE"\nsh -c "$last"\n')
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(ssh, "_NOTE_SECONDS", 0.05)

    def told(change: str, launcher: str = sys.executable) -> str:
        monkeypatch.setenv("CHANGE", change)
        capfd.readouterr()
        ssh.check_hosts([Host("192.0.2.1", 1)], [], launcher, "127.0.0.1", print)
        return capfd.readouterr().out

    told("")
    with pytest.raises(LaunchError, match="there is no MPI launcher /nowhere/mpirun"):
        told("", "/nowhere/mpirun")
    with pytest.raises(LaunchError, match="but .* does not run there"):
        told(f'last=$(echo "$last" | sed s,{sys.executable},/nowhere/python,)')
    with pytest.raises(LaunchError, match="192.0.2.1: there is no folder /nowhere"):
        told(f'last=$(echo "$last" | sed s,{tmp_path},/nowhere,g)')
    assert told("sleep 0.3") == "hvdliterun: waits for ssh to 192.0.2.1, up to 20 s.\n\n"
    monkeypatch.setattr(ssh, "_SSH_SECONDS", 0.1)
    with pytest.raises(LaunchError, match=r"no answer in 0.2 s. Is it up"):
        told("exec sleep 30")
