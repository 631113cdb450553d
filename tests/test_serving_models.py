"""Several models in one server, and new weights without a gap."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

import hvdlite
from hvdlite.errors import ArgumentError
from hvdlite.serving.options import Options
from hvdlite.serving.server import Server
from hvdlite.tools.cli import main
from tests.servers import in_thread


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
