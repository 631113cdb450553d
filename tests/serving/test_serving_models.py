"""Several models in one server, and new weights without a gap."""

from __future__ import annotations

import asyncio
import itertools
import os
import re
import shutil
import signal
import ssl
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
import tritonclient.http as triton

import hvdlite
from hvdlite.errors import ArgumentError
from hvdlite.serving.options import Options
from hvdlite.serving.server import Server
from hvdlite.tools.cli import main
from tests.support.jobs import PYTHONPATH
from tests.support.servers import in_thread


def test_each_model_has_its_own_replicas_and_metrics() -> None:
    doubles = hvdlite.servable(lambda batch: 2 * batch, dtype="float32", shape=(2,))
    pair = hvdlite.servable(
        lambda batch: batch["a"].sum(1) + batch["b"], inputs={"a": ("int64", (None,)), "b": ("float64", ())}
    )
    with (
        in_thread({"doubles": doubles, "pair": pair}, max_wait=0.0) as server,
        httpx.Client(base_url=server.url) as client,
    ):
        assert len(server.pids) == 2
        assert client.get("/readyz").json() == {"ready": True, "replicas": 2, "wanted": 2, "draining": False}
        assert client.post("/v1/predict", json={"input": [1, 2]}).json() == {"output": [2, 4]}  # the first
        text = client.get("/metrics").text
        assert text.count("# TYPE hvdlite_serve_requests_total counter") == 1
        assert 'hvdlite_serve_requests_total{model="doubles",status="200"} 1.0' in text
        assert 'hvdlite_serve_replicas{model="pair"} 1.0' in text
        assert client.get("/explain").text.startswith("doubles: The oldest request waits up to 0 ms")
    with in_thread(pair, max_wait=0.02) as server, httpx.Client(base_url=server.url) as client:

        def ask(value: Any) -> httpx.Response:
            return client.post("/v1/predict", json={"input": value})

        assert ask({"a": [1, 2], "b": 0.5}).json() == {"output": 3.5}
        assert ask({"a": [1, 2, 3], "b": 0.5}).json() == {"output": 6.5}
        for bad, words in (
            ({"a": [1]}, "the input has 'a': expected an object with 'a', 'b'."),
            ([1, 2], "the input is a list: expected an object with 'a', 'b'."),
            ({"a": [0.5], "b": 1}, "'a': the input has numbers of float64 that int64 cannot hold"),
            ({"a": [1], "b": [1]}, "'b': the input has the shape (1,): expected an array of float64, shape ()."),
        ):
            answer = ask(bad)
            assert answer.status_code == 400 and words in answer.json()["error"], answer.text


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["m:f", "--model", "a=m:f"], "m:f and --model a=m:f: give all models by --model"),
        (["--model", "m:f"], "--model m:f: it has no name: expected NAME=MODULE:NAME"),
        (["--model", "a=m:f", "--model", "a=m:g"], "it has the name 'a' twice"),
        (["--model", "a/b=m:f"], "the names of models are 'a/b': expected letters, digits"),
        (["--model", "a=m"], "serve('m'): expected module:name"),
    ],
)
def test_bad_names_of_models(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", *arguments]) == 2
    assert words in capsys.readouterr().err


def test_bad_inputs_of_servables() -> None:
    for bad, words in (
        ({"inputs": {}}, "inputs={}: expected a dictionary of names"),
        ({"inputs": {"a": "int64"}}, "inputs has 'a': 'int64': expected a pair of a dtype and a shape"),
        ({"inputs": {"a": ("words", ())}}, "dtype='words': expected the name of a dtype"),
        ({"inputs": {"a": ("int64", ())}, "dtype": "int64"}, "inputs= has a dtype and a shape for each"),
    ):
        with pytest.raises(ArgumentError) as error:
            hvdlite.servable(lambda batch: batch, **bad)  # type: ignore[call-overload]
        assert words in str(error.value)
    with pytest.raises(ArgumentError, match="the names of models are none"):
        Server({}, Options(port=0))


def test_new_weights_without_a_gap(tmp_path: Path) -> None:
    """Numbered requests all the time: each is answered, by the old weights and then by the new ones."""
    file = tmp_path / "weights"
    file.write_text("1")
    command = [sys.executable, "-m", "hvdlite", "serve", "tests.programs.tensors:weights", "--replicas", "2"]
    environ = {**os.environ, "PYTHONPATH": PYTHONPATH, "WEIGHTS": str(file)}
    process = subprocess.Popen(
        [*command, "--port", "0", "--max-wait", "1", "--lame-duck", "0"], stderr=subprocess.PIPE, text=True, env=environ
    )
    assert process.stderr
    lines: list[str] = []

    def wait_for(words: str) -> None:
        assert process.stderr
        while not lines or words not in lines[-1]:
            lines.append(process.stderr.readline())
            assert lines[-1], lines

    seen: list[set[float]] = []

    async def ask_while(task: asyncio.Task[Any], client: httpx.AsyncClient) -> Any:
        """Send numbers until a task is done, and a few more."""
        more = 3
        while more:
            more -= task.done()
            numbers = range(1, 9)
            answers = await asyncio.gather(*[client.post("/v1/predict", json={"input": number}) for number in numbers])
            assert [each.status_code for each in answers] == [200] * 8
            seen.append({each.json()["output"] / number for each, number in zip(answers, numbers, strict=True)})
        return await task

    def check_seen(*weights: float) -> None:
        """None was answered by the old weights when another had been answered by the new ones."""
        assert set().union(*seen) == set(weights)
        assert all(max(before) <= min(after) for before, after in itertools.pairwise(seen)), seen
        seen.clear()

    async def check(url: str) -> None:
        load = "/v2/repository/models/tensors/load"
        async with httpx.AsyncClient(base_url=url, timeout=60) as client:
            while (await client.get("/readyz")).json()["replicas"] < 2:  # each has read the file
                await asyncio.sleep(0.01)
            file.write_text("2")
            answer = await ask_while(asyncio.create_task(client.post(load)), client)
            assert answer.json() == {"name": "tensors", "version": "2"}
            check_seen(1.0, 2.0)
            assert (await client.get("/v2/models/tensors/versions/1")).status_code == 404
            file.write_text("two")  # weights that do not fit
            failed = await ask_while(asyncio.create_task(client.post(load)), client)
            assert failed.status_code == 400
            assert "'tensors' cannot be loaded, and version 2 goes on" in failed.json()["error"]
            assert "could not convert string to float: 'two'" in failed.json()["error"]
            check_seen(2.0)
            refused = await client.post(load, json={"parameters": {"config": "{}"}})
            assert refused.status_code == 400 and "the body has parameters" in refused.json()["error"]
            file.write_text("3")
            process.send_signal(signal.SIGHUP)
            await ask_while(asyncio.create_task(asyncio.to_thread(wait_for, "version 3 answers now")), client)
            check_seen(2.0, 3.0)
            metrics = (await client.get("/metrics")).text
            assert "hvdlite_serve_replicas_lost_total 0.0" in metrics and "hvdlite_serve_replicas 2.0" in metrics

    try:
        wait_for("Ready")
        url = re.findall(r"http://\S+:\d+", lines[0])[0]
        asyncio.run(check(url))
        with triton.InferenceServerClient(url.removeprefix("http://")) as client:
            client.load_model("tensors")
            assert client.get_model_metadata("tensors")["versions"] == ["4"]
        process.send_signal(signal.SIGTERM)
        lines.extend(process.stderr)
        assert process.wait(30) == 0, lines
    finally:
        process.kill()
        process.wait()
        process.stderr.close()
    assert "version 3 cannot be loaded: the model 'tensors' cannot be loaded" in "".join(lines)


def test_a_server_that_ends_while_it_loads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Neither the load nor its replicas stay."""
    file = tmp_path / "weights"
    file.write_text("1")
    monkeypatch.setenv("WEIGHTS", str(file))
    with caplog.at_level("INFO"), in_thread("tests.programs.tensors:weights", max_wait=0.0) as server:
        file.write_text("wait")

        async def ask() -> httpx.Response:
            async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:
                load = asyncio.create_task(client.post("/v2/repository/models/tensors/load"))
                again = asyncio.create_task(client.post("/v2/repository/models/tensors/load"))
                while "version 2 is loaded, and version 1 answers meanwhile" not in caplog.text:
                    await asyncio.sleep(0.01)
                server.stop()
                assert (await again).status_code == 503
                return await load

        answer = asyncio.run(ask())
        assert answer.status_code == 503 and "the server ends, and loads no more" in answer.json()["error"]


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is not there, which makes the certificate")
def test_tls_and_what_is_behind_a_proxy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cert, key = str(tmp_path / "cert.pem"), str(tmp_path / "key.pem")
    command = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:prime256v1",
        "-nodes",
        "-days",
        "2",
    ]
    command += ["-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", key, "-out", cert]
    subprocess.run(command, check=True, capture_output=True)
    settings: dict[str, Any] = {"certfile": cert, "keyfile": key, "root_path": "/models", "cors": "https://example.org"}
    with in_thread(lambda batch: batch * 2, max_wait=0.0, **settings) as server:
        assert server.url.startswith("https://")
        with httpx.Client(base_url=server.url, verify=ssl.create_default_context(cafile=cert)) as client:
            for root in ("", "/models"):  # a proxy may have taken it away
                assert client.post(f"{root}/v1/predict", json={"input": [1.5] * 50_000}).json() == {
                    "output": [3.0] * 50_000
                }
                assert client.get(f"{root}/v2/health/ready").json() == {"ready": True}
            assert client.get("/modelsv1/predict").status_code == 404
            page = client.get("/models").text
            assert 'fetch("/models/v1/predict"' in page and 'href="/models/openapi.json"' in page
            assert client.get("/openapi.json").json()["servers"] == [{"url": "/models"}]
            asks = {"origin": "https://example.org", "access-control-request-method": "POST"}
            allowed = client.options(
                "/models/v1/predict", headers={**asks, "access-control-request-headers": "x-api-key"}
            )
            assert allowed.status_code == 200
            assert allowed.headers["access-control-allow-origin"] == "https://example.org"
            assert allowed.headers["access-control-allow-headers"] == "x-api-key"
            answer = client.post("/v1/predict", json={"input": [1]}, headers={"origin": "https://example.org"})
            assert answer.headers["access-control-allow-origin"] == "https://example.org"
            other = client.post("/v1/predict", json={"input": [1]}, headers={"origin": "https://other.org"})
            assert "access-control-allow-origin" not in other.headers
        host, port = server.url.removeprefix("https://").split(":")
        assert main(["serve", "--explain", "--host", host, "--port", port, "--certfile", cert]) == 0
        assert "this time was given" in capsys.readouterr().out
    for arguments, words in (
        (["--certfile", key, "--keyfile", cert], f"--certfile {key} and --keyfile {cert}: "),
        (["--certfile", str(tmp_path / "none.pem")], "No such file or directory. Expected a certificate and its key"),
        (["--keyfile", key], "without a certfile: TLS needs a certificate"),
        (["--root-path", "models/"], "root_path='models/': expected a path such as /models"),
        (["--cors", "example.org"], "cors='example.org': expected origins such as https://example.org, or *"),
        (["--explain", "--certfile", key], "expected a file with a certificate, as PEM"),
    ):
        assert main(["serve", "m:f", *arguments]) == 2
        assert words in capsys.readouterr().err
