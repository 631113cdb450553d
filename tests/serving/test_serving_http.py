"""The HTTP application in this process, with replicas that are none: what is answered to whom, and bad input of every kind."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import io
import json
import re
import threading
import warnings
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

import httpx
import msgpack
import numpy as np
import pytest

from hvdlite.serving.http import bodies
from hvdlite.serving.http.app import App
from hvdlite.serving.http.bodies import BodyError, read
from hvdlite.serving.http.negotiation import preferred
from hvdlite.serving.metrics import Metrics
from hvdlite.serving.models import Model, Models
from hvdlite.serving.options import Options
from hvdlite.serving.replicas.contract import Owner
from hvdlite.serving.replicas.replica import Ready
from hvdlite.serving.servable import Spec
from hvdlite.serving.service import Service
from hvdlite.serving.waiting import FixedWait

JSON, NPY, MSGPACK = "application/json", "application/x-npy", "application/msgpack"
VECTOR = Spec("float32", (3,))
ANY = Spec()


class InProcess:
    """One replica that computes in the event loop, or holds its batch until it is let go."""

    def __init__(self, predict: Callable[[Sequence[Any]], Sequence[Any]], spec: Spec, holds: bool) -> None:
        self._predict, self._spec, self._holds = predict, spec, holds
        self.batches: list[Sequence[Any]] = []

    def start(self, owner: Owner) -> None:
        self._owner = owner
        owner.ready(0, Ready(self._spec, ()))

    def send(self, replica: int, inputs: Sequence[Any]) -> None:
        self.batches.append(inputs)
        if not self._holds:
            asyncio.get_running_loop().call_soon(self.go)

    def go(self) -> None:
        """Compute the batch that was sent last."""
        try:
            outputs = self._predict(self.batches[-1])
        except ValueError as error:
            self._owner.raised(0, f"predict raised {error}", True)
        else:
            self._owner.computed(0, outputs)

    def die(self) -> None:
        """End, and be replaced."""
        self._owner.lost(0)
        self._owner.ready(0, Ready(self._spec, ()))

    async def stop(self) -> None:
        """Nothing is left."""


class Served:
    """A service, and a client of its application."""

    def __init__(self, client: httpx.AsyncClient, service: Service, replica: InProcess) -> None:
        self.client, self.service, self.replica = client, service, replica

    async def post(self, body: Any, kind: str = JSON, **headers: str) -> httpx.Response:
        content = json.dumps({"input": body}) if kind == JSON and not isinstance(body, bytes) else body
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return await self.client.post("/v1/predict", content=content, headers={"content-type": kind, **named})

    async def sent(self, batches: int) -> None:
        """Wait until the replica has got so many batches."""
        while len(self.replica.batches) < batches:
            await asyncio.sleep(0)


@contextlib.asynccontextmanager
async def served(
    predict: Callable[[Sequence[Any]], Sequence[Any]] = list,
    spec: Spec = VECTOR,
    holds: bool = False,
    wait: float = 0.0,
    **settings: Any,
) -> AsyncIterator[Served]:
    options, metrics = Options(**settings), Metrics()
    replica = InProcess(predict, spec, holds)
    async with Model("model", lambda: replica, options, FixedWait(wait), metrics) as model:
        app = App(Models([model]), options)
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://test") as client:
            yield Served(client, model.service, replica)


def npy(array: Any) -> bytes:
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def packed(array: np.ndarray[Any, Any]) -> dict[str, Any]:
    return {"dtype": array.dtype.str, "shape": array.shape, "data": array.tobytes()}


def test_all_formats_carry_the_same_numbers() -> None:
    row = np.array([1.5, -2.0, 3.25], np.float32)

    async def check() -> None:
        async with served(lambda inputs: np.stack(inputs) * 2) as s:
            by_json = await s.post(row.tolist())
            assert by_json.json() == {"output": [3.0, -4.0, 6.5]}
            by_npy = await s.post(npy(row.astype("f8")), NPY)
            assert by_npy.headers["content-type"] == NPY
            np.testing.assert_array_equal(np.load(io.BytesIO(by_npy.content)), row * 2, strict=True)
            for body in ({"input": packed(row)}, {"input": row.tolist()}):
                answer = msgpack.unpackb((await s.post(msgpack.packb(body), MSGPACK)).content)
                assert answer == {"output": {"dtype": "<f4", "shape": [3], "data": (row * 2).tobytes()}}
            other = await s.post(npy(row), NPY, accept="text/html, application/json;q=0.5")
            assert other.json() == {"output": [3.0, -4.0, 6.5]}
            column = await s.post(npy(np.asfortranarray(np.ones((3, 1)))[:, 0]), NPY)
            assert column.status_code == 200
        assert all(each.dtype == np.float32 for batch in s.replica.batches for each in batch)

    asyncio.run(check())


def test_without_a_spec_any_value_is_an_input() -> None:
    values: list[Any] = ["a text", {"rows": [[1], [2, 3]]}, None, True, 3, [1.5, 2.0], [[1, 2], [3, 4]], []]
    values += [10**30, {"id": 10**30, "none": None}, "null"]

    async def check() -> None:
        async with served(spec=ANY) as s:
            assert [(await s.post(value)).json()["output"] for value in values] == values
            assert isinstance(s.replica.batches[5][0], np.ndarray)
            assert s.replica.batches[6][0].dtype == np.int64

    asyncio.run(check())


def test_inputs_of_one_shape_go_together_and_outputs_go_to_whom_they_belong() -> None:
    async def check() -> None:
        async with served(lambda inputs: [each.sum() for each in inputs], ANY, wait=0.01, max_batch=16) as s:
            answers = await asyncio.gather(*[s.post([number] * (1 + number % 2)) for number in range(100)])
        assert [each.json()["output"] for each in answers] == [number * (1 + number % 2) for number in range(100)]
        assert all(len({each.shape for each in batch}) == 1 for batch in s.replica.batches)
        assert max(map(len, s.replica.batches)) == 16
        assert len(s.replica.batches) < 20

    asyncio.run(check())


def test_a_function_that_pads_gets_all_shapes() -> None:
    async def check() -> None:
        async with served(lambda inputs: [len(each) for each in inputs], Spec("float32", None, True), wait=0.01) as s:
            answers = await asyncio.gather(*[s.post([1.0] * length) for length in (1, 5, 2)])
        assert [each.json()["output"] for each in answers] == [1, 5, 2]
        assert len(s.replica.batches) == 1

    asyncio.run(check())


BAD = {
    "no JSON": (b"{1", JSON, 400, "the body is no JSON: .*Expected an object"),
    "bytes": (b"\xff\xfe\xfd", JSON, 400, "the body is no JSON"),
    "too deep": (b'{"input":' + b"[" * 60_000, JSON, 400, "the body is no JSON"),
    "no object": (b"[1, 2, 3]", JSON, 400, "the body is a list: expected an object"),
    "no input": (b'{"inputs": 1}', JSON, 400, "an object with 'inputs': expected"),
    "nothing": (b"", JSON, 400, "the body is no JSON"),
    "NaN": (b'{"input": [1, 2, NaN]}', JSON, 400, "it has NaN, which JSON does not have"),
    "infinity": (
        b'{"input": [1, 2, 1e39]}',
        JSON,
        400,
        r"numbers of float64 that float32 cannot hold \(1, the first at \[2\]\)",
    ),
    "short": (b'{"input": [1, 2]}', JSON, 400, r"the shape \(2,\): expected an array of float32, shape \(3,\)"),
    "scalar": (b'{"input": 1}', JSON, 400, r"the shape \(\): expected an array of float32, shape \(3,\)"),
    "ragged": (b'{"input": [[1, 2], [3]]}', JSON, 400, "a list of rows of different lengths: expected an array"),
    "text": (b'{"input": ["a", "b", "c"]}', JSON, 400, "a list of values that are no numbers: expected an array"),
    "null": (b'{"input": null}', JSON, 400, "a NoneType of values that are no numbers"),
    "huge": (b'{"input": [1, 2, ' + b"9" * 400 + b"]}", JSON, 400, "values that are no numbers"),
    "NaN in npy": (npy([1, np.nan, np.nan]), NPY, 400, r"2 values that are NaN or infinite, the first at \[1\]"),
    "no npy": (b"PK\x03\x04", NPY, 400, "no array in NumPy's format"),
    "half an npy": (npy(np.zeros(3))[:-1], NPY, 400, "no array in NumPy's format"),
    "liar": (npy(np.zeros(3)).replace(b"(3,)", b"(3000000000000,)"), NPY, 400, "no array in NumPy's format"),
    "objects": (npy(np.array([None, 1, "x"])), NPY, 400, "its dtype is object, and not one of booleans or numbers"),
    "no msgpack": (b"\xc1", MSGPACK, 400, "the body is no msgpack"),
    "bad array": (
        *(msgpack.packb({"input": {"dtype": "f4", "shape": [3], "data": b"123"}}), MSGPACK, 400),
        "wrong dtype, shape or data",
    ),
    "complex": (
        npy(np.array([1 + 5j, 2, 3], "c8")),
        NPY,
        400,
        r"numbers of complex64 that float32 cannot hold \(1, the first at \[0\]\)",
    ),
    "complex in msgpack": (
        *(msgpack.packb({"input": packed(np.array([1, 2j, 3]))}), MSGPACK, 400),
        r"numbers of complex128 that float32 cannot hold \(1, the first at \[1\]\)",
    ),
    "large integers": (
        npy(np.array([1, 2, 2**24 + 1])),
        NPY,
        400,
        r"int64 that float32 cannot hold \(1, the first at \[2\]\)",
    ),
    "negative length": (
        npy(np.zeros(3)).replace(b"(3,), }", b"(-3,),}"),
        NPY,
        400,
        r"the shape is \(-3,\): expected lengths",
    ),
    "negative in msgpack": (
        *(msgpack.packb({"input": {"dtype": "f4", "shape": [-1], "data": bytes(12)}}), MSGPACK, 400),
        r"wrong dtype, shape or data: the shape is \(-1,\): expected lengths",
    ),
    "too long": (npy(np.zeros(3)) + b"more", NPY, 400, r"shape \(3,\), has 24 bytes, and 28 have come"),
    "pickle": (b"", "application/octet-stream", 415, "the Content-Type is 'application/octet-stream': expected one of"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_bodies_are_told_what_was_found_and_expected(name: str) -> None:
    body, kind, status, words = BAD[name]

    async def check() -> None:
        async with served() as s:
            answer = await s.post(body, kind)
            assert answer.status_code == status
            with pytest.raises(AssertionError, match=words):
                raise AssertionError(answer.json()["error"])
            assert (await s.post([1, 2, 3])).status_code == 200
            assert len(s.replica.batches) == 1

    asyncio.run(check())


def test_integers_must_fit() -> None:
    async def check() -> None:
        async with served(spec=Spec("uint8", (2,))) as s:
            assert (await s.post([0, 255.0])).json() == {"output": [0, 255]}
            for bad in ([0, 256], [-1, 0], [0.5, 1], [10**30, 0]):
                answer = await s.post(bad)
                assert answer.status_code == 400 and "that uint8 cannot hold" in answer.json()["error"]

    asyncio.run(check())


def test_what_is_converted_keeps_its_value() -> None:
    """Against NumPy: each pair of dtypes with the values at their limits."""
    kinds = ["?", "i1", "u1", "i4", "i8", "u8", "f2", "f4", "f8", "c8", "c16"]
    values: list[Any] = [
        0,
        1,
        2,
        -1,
        255,
        2048,
        2049,
        2**24 + 1,
        2**53 + 1,
        2**63 - 1,
        2**63,
        1e39,
        0.5,
        65504,
        65520,
        1j,
    ]

    def cast(value: Any, kind: str) -> Any:
        """The array of one dtype that is this value; None if there is none."""
        with np.errstate(all="ignore"):
            try:
                array = np.array([value]).astype(kind)
            except (OverflowError, TypeError):
                return None
        return array if array[0].item() == value else None

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", np.exceptions.ComplexWarning)
        whole = [array for value in values for kind in kinds if (array := cast(value, kind)) is not None]
        expected = [[cast(array[0].item(), kind) for kind in kinds] for array in whole]
    assert len(whole) > 80
    for array, row in zip(whole, expected, strict=True):
        for kind, wanted in zip(kinds, row, strict=True):
            for allow_nan in (False, True):
                spec = Spec(np.dtype(kind).name, (1,), allow_nan=allow_nan)
                is_rounded = array.dtype.kind in "fc" and np.dtype(kind).kind in "fc" and wanted is None
                try:
                    found = read(NPY, npy(array), spec)
                except BodyError:
                    assert wanted is None, (array, kind)
                else:
                    assert found.dtype == kind
                    np.testing.assert_allclose(found, array if is_rounded else wanted, rtol=1e-3)


async def forever(first: bytes) -> AsyncIterator[bytes]:
    """The beginning of a body whose rest never comes."""
    yield first
    await asyncio.Event().wait()


async def endless() -> AsyncIterator[bytes]:
    while True:
        yield b"[" * 1000


def test_long_and_slow_bodies() -> None:
    async def check() -> None:
        async with served(max_body=5000, read_timeout=0.05) as s:
            for body in (b" " * 5001, endless()):
                answer = await s.post(body, NPY)
                assert answer.status_code == 413 and "more than 5000 bytes" in answer.json()["error"]
                assert answer.headers["connection"] == "close"
            answer = await s.post(forever(b"1234"), NPY)
            assert answer.status_code == 408 and "4 bytes have come in 0.05 s" in answer.json()["error"]

    asyncio.run(check())


def test_json_is_no_longer_than_its_numbers_need() -> None:
    async def check() -> None:
        async with served() as s:
            answer = await s.post(b" " * (2**16 + 193))
            assert answer.status_code == 413
            assert (
                "more than 65728 bytes, which is the most that JSON has for an array of float32, shape (3,)"
                in answer.text
            )
            assert (await s.post(b" " * 60000 + b'{"input": [1, 2, 3]}')).status_code == 200

    asyncio.run(check())


def test_what_lists_and_dictionaries_need_is_counted() -> None:
    async def check() -> None:
        async with served(spec=ANY, max_memory=10000) as s:
            assert (await s.post("x" * 9000)).status_code == 200
            assert (await s.post({"a": [[1], [1, 2]]})).status_code == 200
            answer = await s.post([[]] * 150 + [[1]])
            assert answer.status_code == 429 and "(--max-memory)" in answer.text
            assert s.client._transport.app.intake.memory == 0  # type: ignore[attr-defined]

    asyncio.run(check())


def test_all_bodies_together_have_a_limit() -> None:
    async def check() -> None:
        async with served(max_memory=5000) as s:
            first = asyncio.create_task(s.post(forever(b" " * 4000), NPY))
            while not s.client._transport.app.intake.memory:  # type: ignore[attr-defined]
                await asyncio.sleep(0)
            answer = await s.post(b" " * 2000, NPY)
            assert answer.status_code == 429 and answer.headers["retry-after"] == "1"
            assert (await s.post([1, 2, 3])).status_code == 200
            first.cancel()
            await asyncio.wait({first})
            assert s.client._transport.app.intake.memory == 0  # type: ignore[attr-defined]

    asyncio.run(check())


def test_too_many_requests_are_refused_and_the_others_are_answered() -> None:
    async def check() -> None:
        async with served(holds=True, max_batch=2, max_queue=3) as s:
            requests = [asyncio.create_task(s.post([number, 0, 0])) for number in range(2)]
            await s.sent(1)
            requests += [asyncio.create_task(s.post([number, 0, 0])) for number in range(2, 5)]
            while not s.service.batcher.is_full:
                await asyncio.sleep(0)
            refused = await s.post([9, 0, 0])
            assert refused.status_code == 429 and int(refused.headers["retry-after"]) >= 1
            assert "3 requests wait" in refused.json()["error"]
            for number in range(3):
                await s.sent(number + 1)
                s.replica.go()
            answers = await asyncio.gather(*requests)
            assert [each.json()["output"][0] for each in answers] == [0, 1, 2, 3, 4]

    asyncio.run(check())


def test_deadlines() -> None:
    async def check() -> None:
        async with served(holds=True) as s:
            first = asyncio.create_task(s.post([1, 0, 0]))
            await s.sent(1)
            late = await s.post([2, 0, 0], x_timeout_ms="20")
            assert late.status_code == 504 and "no replica was free" in late.json()["error"]
            s.replica.go()
            assert (await first).status_code == 200
            assert len(s.replica.batches) == 1  # the late one was never computed
            for bad in ("-1", "soon", "inf", "nan"):
                answer = await s.post([1, 2, 3], x_timeout_ms=bad)
                assert answer.status_code == 400 and "expected a number of milliseconds" in answer.json()["error"]

    asyncio.run(check())


def test_one_that_raises_takes_no_other_with_it() -> None:
    def predict(inputs: Sequence[Any]) -> Sequence[Any]:
        if any(each[0] == 7 for each in inputs):
            raise ValueError("seven")
        return inputs

    async def check() -> None:
        async with served(predict, wait=0.01) as s:
            answers = await asyncio.gather(*[s.post([number, 0, 0]) for number in range(16)])
            assert [each.status_code for each in answers] == [500 if number == 7 else 200 for number in range(16)]
            assert answers[7].json()["error"] == "predict raised seven"
            text = (await s.client.get("/metrics")).text
            assert 'hvdlite_serve_requests_total{status="500"} 1.0' in text
            assert 'hvdlite_serve_recomputed_total{reason="raised"} 24.0' in text  # 8 + 4 + 2 + 1, the rest: 8, and 7
            before = len(s.replica.batches)
            answers = await asyncio.gather(*[s.post([number, 0, 0]) for number in range(16)])
            assert [each.status_code for each in answers] == [500 if number == 7 else 200 for number in range(16)]
            assert sorted(map(len, s.replica.batches[before:])) == [1, 15]  # it is remembered, and disturbs nobody

    asyncio.run(check())


def test_a_request_that_loses_two_replicas_is_told_so() -> None:
    async def check() -> None:
        async with served(holds=True) as s:
            request = asyncio.create_task(s.post([1, 0, 0]))
            for tries in (1, 2):
                await s.sent(tries)
                s.replica.die()
            answer = await request
            assert answer.status_code == 503 and "and so has the second one" in answer.json()["error"]
            for body, kind in (([1, 0, 0], JSON), (npy(np.array([1.0, 0, 0])), NPY)):
                again = await s.post(body, kind)
                assert again.status_code == 422 and "it is not computed for another" in again.json()["error"]
                assert 0 < int(again.headers["retry-after"]) <= 300
            assert len(s.replica.batches) == 2
            assert "hvdlite_serve_replicas_lost_total 2.0" in (await s.client.get("/metrics")).text

    asyncio.run(check())


def test_large_bodies_are_read_and_written_in_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[bool] = []

    def note(function: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*arguments: Any) -> Any:
            threads.append(threading.current_thread() is threading.main_thread())
            return function(*arguments)

        return noted

    monkeypatch.setitem(bodies.READERS, JSON, note(bodies.READERS[JSON]))
    monkeypatch.setitem(bodies.WRITERS, JSON, note(bodies.WRITERS[JSON]))

    async def check() -> None:
        async with served(spec=Spec("float32", (None,))) as s:
            for count in (3, 20_000):
                values = [float(number) for number in range(count)]
                assert (await s.post(values)).json() == {"output": values}

    asyncio.run(check())
    assert threads == [True, True, False, False]


def test_gzip_both_ways() -> None:
    async def check() -> None:
        async with served(list, Spec("float32", (None,)), max_body=5000) as s:

            async def zipped(data: bytes, kind: str = JSON, **headers: str) -> httpx.Response:
                return await s.post(data, kind, content_encoding="gzip", **headers)

            values = [float(number) for number in range(600)]
            body = json.dumps({"input": values}).encode()
            answer = await zipped(gzip.compress(body), accept_encoding="br, gzip;q=0.5")
            assert answer.json() == {"output": values} and answer.headers["content-encoding"] == "gzip"
            assert int(answer.headers["content-length"]) < 2000
            answer = await zipped(gzip.compress(npy(np.float32(values))), NPY, accept_encoding="gzip;q=0", accept=JSON)
            assert answer.json() == {"output": values} and "content-encoding" not in answer.headers
            bomb = await zipped(gzip.compress(b" " * 10**7))
            assert bomb.status_code == 413 and "more than 5000 bytes" in bomb.json()["error"]
            for bad in (body[:100], gzip.compress(body)[:-5], gzip.compress(body) + b"x"):
                answer = await zipped(bad)
                assert answer.status_code == 400 and "the Content-Encoding is gzip" in answer.json()["error"]
            answer = await s.post(b"x", content_encoding="br")
            assert answer.status_code == 415 and "'br': expected gzip, or none" in answer.json()["error"]

    asyncio.run(check())


@pytest.mark.parametrize(
    ("accept", "kind"),
    [
        ("application/json;q=0.5, application/msgpack", MSGPACK),
        ("application/json;q=0.2, application/x-npy; q=0.9", NPY),
        ("application/*;q=0.5, application/json;q=0", NPY),
        ("*/*", NPY),
        ("text/html, */*;q=0.1", NPY),
        ("application/json, */*", JSON),
        ("application/json;q=0, text/html", None),
        ("application/msgpack;q=much", None),
    ],
)
def test_the_format_that_a_client_likes_best(accept: str, kind: str | None) -> None:
    assert preferred(accept, [JSON, NPY, MSGPACK], NPY) == kind


def test_the_key() -> None:
    async def check() -> None:
        async with served(api_key="secret") as s:
            wrong = await s.post([1, 2, 3], authorization="Bearer public")
            assert (wrong.status_code, wrong.headers["www-authenticate"]) == (401, "Bearer")
            assert (await s.post([1, 2, 3])).status_code == 401
            for shown, status in (
                ("Bearer secret", 200),
                ("bearer  secret", 200),
                ("Basic secret", 401),
                ("secret", 401),
            ):
                assert (await s.post([1, 2, 3], authorization=shown)).status_code == status
            assert (await s.post([1, 2, 3], x_api_key="secret")).status_code == 200
            found = {
                path: (await s.client.get(path)).status_code for path in ("/metrics", "/explain", "/healthz", "/readyz")
            }
            assert found == {"/metrics": 401, "/explain": 401, "/healthz": 200, "/readyz": 200}

    asyncio.run(check())


def test_the_other_paths() -> None:
    async def check() -> None:
        async with served() as s:
            get: Callable[[str], Awaitable[httpx.Response]] = s.client.get
            assert (await get("/readyz")).json() == {"ready": True, "replicas": 1, "wanted": 1, "draining": False}
            described = (await get("/openapi.json")).json()
            schema = described["paths"]["/v1/predict"]["post"]["requestBody"]["content"][JSON]["schema"]
            assert schema["properties"]["input"] == {
                "type": "array",
                "items": {"type": "number"},
                "minItems": 3,
                "maxItems": 3,
            }
            start = (await get("/")).text
            assert "float32, shape (3,)" in start and "{&quot;input&quot;: [0, 0, 0]}" in start
            assert "this time was given" in (await get("/explain")).text
            docs = (await get("/docs")).text
            for path, methods in described["paths"].items():
                for method in methods:
                    assert f"<b>{method.upper()}</b> <code>{path}</code>" in docs
                    if not path.endswith("/load"):
                        answer = await s.client.request(method, path.replace("{name}", "model"))
                        assert answer.status_code not in (404, 405), path
            assert "http://" not in docs and "https://" not in docs and " src=" not in docs  # nothing from elsewhere
            assert (await get("/v1/predict")).status_code == 405
            missing = await get("/v3")
            assert missing.status_code == 404 and "/openapi.json describes all paths" in missing.json()["error"]
            await s.post([1, 2, 3])
            metrics = (await get("/metrics")).text
            assert "hvdlite_serve_predicted_p99_seconds NaN" in metrics  # nothing was chosen
            line = s.service._metrics.line()
            assert re.fullmatch(
                r"[01] requests/s, p50 .* ms, p99 .* ms, 0 wait, 0 in work, 1 replicas, waits up to 0.0 ms for a batch",
                line,
            )
            s.service.drain()
            assert (await get("/readyz")).status_code == 503
            s.service.lost(0)
            assert (await get("/readyz")).json()["replicas"] == 0

    asyncio.run(check())


@pytest.mark.parametrize(
    ("output", "kind", "words"),
    [
        (np.nan, JSON, "JSON has no words"),
        (np.complex64(1 + 2j), JSON, "JSON has no words"),
        (b"x", JSON, "JSON has no words"),
        ("text", NPY, "the output is a str"),
    ],
)
def test_outputs_that_the_format_does_not_have(output: Any, kind: str, words: str) -> None:
    async def check() -> None:
        async with served(lambda inputs: [output] * len(inputs)) as s:
            answer = await s.post([1, 2, 3], accept=kind)
            assert answer.status_code == 406 and words in answer.json()["error"]
            other = await s.post([1, 2, 3], accept=MSGPACK)
            expected = packed(output) if isinstance(output, np.complex64) else output
            found = msgpack.unpackb(other.content)["output"]
            np.testing.assert_equal(found, {**expected, "shape": []} if isinstance(output, np.complex64) else expected)

    asyncio.run(check())
