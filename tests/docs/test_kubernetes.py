"""The files in examples/kubernetes fit together, and fit hvdliterun. The ssh set-up of the image is tried on namespaces.

No Kubernetes runs here: that the cluster takes the files is not tested.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from hvdlite.launch.parser import make_parser
from hvdlite.serving import command as serve_command
from hvdlite.serving.options import seconds
from tests.support import hosts as lab
from tests.support.jobs import LIMIT, ROOT

yaml = pytest.importorskip("yaml", reason="there is no pyyaml, which reads the files")
HEALTH = pytest.importorskip("hvdlite.serving.http.connections", reason="the extra serve is not installed").HEALTH

FOLDER = ROOT / "examples" / "kubernetes"
DOCKERFILE = (FOLDER / "Dockerfile").read_text()
SSHD = shutil.which("sshd", path=f"{os.environ.get('PATH', '')}:/usr/sbin")


def parts(name: str) -> dict[str, Any]:
    """Return what both kinds of job have: pods and command of the launcher, pods of the workers, and three numbers."""
    documents = list(yaml.safe_load_all((FOLDER / name).read_text()))
    if name == "mpijob.yaml":
        (job,) = documents
        assert (job["apiVersion"], job["kind"]) == ("kubeflow.org/v2beta1", "MPIJob")
        spec, replicas = job["spec"], job["spec"]["mpiReplicaSpecs"]
        launcher, worker = (replicas[role]["template"]["spec"] for role in ("Launcher", "Worker"))
        assert spec["launcherCreationPolicy"] == "WaitForWorkersReady"
        command = launcher["containers"][0]["command"]
        counts = replicas["Worker"]["replicas"], spec["slotsPerWorker"]
        mpi = spec
    else:
        runtime, job = documents
        assert [each["kind"] for each in documents] == ["TrainingRuntime", "TrainJob"]
        assert {each["apiVersion"] for each in documents} == {"trainer.kubeflow.org/v1alpha1"}
        assert job["spec"]["runtimeRef"] == {"kind": runtime["kind"], "name": runtime["metadata"]["name"]}
        mpi, jobs = runtime["spec"]["mlPolicy"]["mpi"], runtime["spec"]["template"]["spec"]["replicatedJobs"]
        assert [each["name"] for each in jobs] == ["node", "launcher"]
        assert jobs[1]["dependsOn"] == [{"name": "node", "status": "Ready"}]
        assert "trainer.kubeflow.org/trainjob-ancestor-step" in jobs[1]["template"]["metadata"]["labels"]
        worker, launcher = (each["template"]["spec"]["template"]["spec"] for each in jobs)
        command = job["spec"]["trainer"]["command"]
        counts = job["spec"]["trainer"]["numNodes"], job["spec"]["trainer"]["numProcPerNode"]
        assert counts == (runtime["spec"]["mlPolicy"]["numNodes"], mpi["numProcPerNode"])
    return {"launcher": launcher, "worker": worker, "command": command, "counts": counts, "mpi": mpi}


@pytest.mark.parametrize("name", ["mpijob.yaml", "trainjob.yaml"])
def test_a_job_fits_hvdliterun_and_the_image(name: str) -> None:
    job = parts(name)
    program, *words = job["command"]
    assert program == "hvdliterun"
    options = make_parser().parse_args(words)
    workers, slots = job["counts"]
    assert options.num_proc == workers * slots
    assert options.hosts is None and options.hostfile is None  # the operator's hostfile is found by its variable
    interpreter, script = options.command
    assert interpreter == "python" and (ROOT / Path(script).relative_to("/opt/hvdlite")).exists()
    assert "WORKDIR /opt/hvdlite\n" in DOCKERFILE and "COPY examples examples\n" in DOCKERFILE

    assert job["mpi"]["mpiImplementation"] == "OpenMPI"
    keys = job["mpi"]["sshAuthMountPath"]
    (port,) = re.findall(r"^Port (\d+)$", (FOLDER / "ssh/sshd_config").read_text(), re.M)
    assert f"HostKey {keys}/id_rsa\n" in (FOLDER / "ssh/sshd_config").read_text()
    assert f"    Port {port}\n" in (FOLDER / "ssh/ssh_config").read_text()
    (worker,), (launcher,) = job["worker"]["containers"], job["launcher"]["containers"]
    assert worker["image"] == launcher["image"] == "REGISTRY/hvdlite"
    assert str(worker["command"]).replace("'", '"') in DOCKERFILE  # the image's own command
    assert worker["readinessProbe"]["tcpSocket"]["port"] == worker["ports"][0]["containerPort"] == int(port)
    assert worker["volumeMounts"] == [{"name": "shm", "mountPath": "/dev/shm"}]
    for pod in (job["worker"], job["launcher"]):
        assert pod["securityContext"]["runAsNonRoot"] and f"--uid {pod['securityContext']['runAsUser']} " in DOCKERFILE


def test_a_server_fits_its_probes_and_its_service() -> None:
    deployment, service = yaml.safe_load_all((FOLDER / "serve.yaml").read_text())
    assert (deployment["apiVersion"], deployment["kind"], service["kind"]) == ("apps/v1", "Deployment", "Service")
    template, labels = deployment["spec"]["template"], deployment["spec"]["selector"]["matchLabels"]
    assert template["metadata"]["labels"] == labels == service["spec"]["selector"]
    pod, (container,) = template["spec"], template["spec"]["containers"]
    assert pod["securityContext"]["runAsNonRoot"] and f"--uid {pod['securityContext']['runAsUser']} " in DOCKERFILE
    parser = argparse.ArgumentParser()
    serve_command.add_command(parser.add_subparsers())
    program, *words = container["command"]
    options = parser.parse_args(words)
    assert program == "hvdlite" and options.predict == "my_model:predict" and options.host == "0.0.0.0"
    (port,), (shown,) = container["ports"], service["spec"]["ports"]
    assert port["containerPort"] == options.port and shown["targetPort"] == port["name"]
    ready, live = (container[probe] for probe in ("readinessProbe", "livenessProbe"))
    probes = (ready["httpGet"], live["httpGet"])
    assert probes == ({"path": "/readyz", "port": port["name"]}, {"path": "/healthz", "port": port["name"]})
    assert {probe["path"].encode() for probe in probes} <= set(
        HEALTH
    )  # they are answered with too many connections too
    # No request comes any more when the port closes, and the server ends before it is killed.
    lame_duck, drain = seconds(options.lame_duck), seconds(options.drain)
    assert ready["periodSeconds"] * ready["failureThreshold"] < lame_duck
    assert lame_duck + drain + 2 < pod["terminationGracePeriodSeconds"]
    assert options.api_key_env == container["env"][0]["name"]


def test_what_the_image_copies_is_there_and_no_secret() -> None:
    for words in re.findall(r"^COPY (?:--\S+ )?(.*) \S+$", DOCKERFILE, re.M):
        for word in words.split():
            assert (ROOT / word).exists(), word
    assert DOCKERFILE.index("USER mpiuser") < DOCKERFILE.index("CMD")
    for path in (path for path in FOLDER.rglob("*") if path.is_file()):
        assert "PRIVATE KEY" not in path.read_text() and "kind: Secret" not in path.read_text()


def test_ssh_set_up_of_the_image() -> None:
    """A user who is not root logs in with the job's key; a worker with another key is refused."""
    if reason := lab.why_not():
        pytest.skip(reason)
    programs = {"ssh": shutil.which("ssh"), "ssh-keygen": shutil.which("ssh-keygen"), "sshd": SSHD}
    if missing := [program for program, path in programs.items() if path is None]:
        pytest.skip(f"there is no {', '.join(missing)} (Debian: openssh-server, openssh-client)")
    assert SSHD is not None
    with lab.hosts(3) as found:
        folder = found.directory
        folder.chmod(0o755)
        for name in ("job", "other"):
            subprocess.run(
                ["ssh-keygen", "-q", "-t", "ecdsa", "-N", "", "-f", folder / name], check=True, timeout=LIMIT
            )
        users = ("root:x:0:0::/root:/bin/sh", "mpiuser:x:1000:1000::/home/mpiuser:/bin/sh")
        (folder / "passwd").write_text("\n".join(users) + "\n")
        shutil.copy(FOLDER / "ssh/known-hosts", folder / "known-hosts")
        shutil.copy(FOLDER / "ssh/sshd_config", folder / "sshd_config")
        config = (FOLDER / "ssh/ssh_config").read_text().replace("/usr/local/bin", str(folder))
        (folder / "ssh_config").write_text(config)
        as_user = ["setpriv", "--reuid=1000", "--regid=1000", "--groups=1000", "env", "HOME=/home/mpiuser"]

        def on(host: str, *words: str) -> subprocess.CompletedProcess[str]:
            return found.run(host, *words, timeout=LIMIT)

        for host, key in (("node1", "job"), ("node2", "job"), ("node3", "other")):
            steps = (
                f"mount --bind {folder}/passwd /etc/passwd",
                "mount -t tmpfs tmpfs /home",
                "mkdir -p /home/mpiuser/.ssh && cd /home/mpiuser/.ssh",
                f"cp {folder}/{key} id_rsa && cp {folder}/{key}.pub id_rsa.pub && cp {folder}/job.pub authorized_keys",
                "chgrp 1000 * && chmod 640 *",
            )
            done = on(host, "sh", "-c", " && ".join(steps))
            assert done.returncode == 0, done.stderr
        for host in ("node2", "node3"):
            done = on(host, *as_user, SSHD, "-e", "-f", str(folder / "sshd_config"))
            assert done.returncode == 0, done.stderr
        ssh = [*as_user, str(programs["ssh"]), "-F", str(folder / "ssh_config"), "-o", "BatchMode=yes"]
        done = on("node1", *ssh, "node2", "hostname; id -u")
        assert (done.returncode, done.stdout) == (0, "node2\n1000\n"), done.stderr
        done = on("node1", *ssh, "node3", "true")
        assert done.returncode == 255 and "Host key verification failed" in done.stderr
