"""The Open Inference Protocol and TensorFlow Serving's REST: their own clients, and bad input of every kind."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pytest
import tritonclient.http as triton
from tritonclient.utils import InferenceServerException, np_to_triton_dtype, triton_to_np_dtype

import hvdlite
from tests.programs.tensors import DTYPES
from tests.support.servers import in_thread

MODELS = {name: f"tests.programs.tensors:{name}" for name in ("row", "every", "anything")}
BINARY = "application/octet-stream"


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """A server with three models for all tests."""
    with in_thread(MODELS, max_wait=0.0, max_batch=4, max_queue=8) as server:
        yield server.url


@pytest.fixture
def client(url: str) -> Iterator[triton.InferenceServerClient]:
    with triton.InferenceServerClient(url.removeprefix("http://")) as found:
        yield found


@pytest.fixture
def http(url: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=url, timeout=30) as found:
        yield found


def tensor(array: Any, name: str = "input", binary: bool = True, datatype: str | None = None) -> triton.InferInput:
    found = triton.InferInput(name, list(array.shape), datatype or np_to_triton_dtype(array.dtype))
    return found.set_data_from_numpy(array, binary_data=binary)


def of_each_dtype(rows: int) -> dict[str, Any]:
    """Arrays of all dtypes, with the limits of each."""
    arrays = {}
    for dtype in DTYPES:
        array = np.random.default_rng(0).integers(0, 2, (rows, 2, 3)).astype(dtype)
        if dtype != "bool":
            limits = np.iinfo(dtype) if "int" in dtype else np.finfo(dtype)
            array[0, 0, :2] = limits.min, limits.max
        arrays[dtype] = array
    return arrays


@pytest.mark.parametrize("binary", [True, False])
def test_tensors_of_every_dtype_there_and_back(client: triton.InferenceServerClient, binary: bool) -> None:
    arrays = of_each_dtype(rows=6)  # more than a batch has
    outputs = [triton.InferRequestedOutput(name, binary_data=binary) for name in DTYPES]
    inputs = [tensor(array, name, binary) for name, array in arrays.items()]
    for answer in (
        client.infer("every", inputs, outputs=outputs, request_id="7"),
        client.infer("every", inputs[::-1], model_version="1"),
        client.async_infer("every", inputs, outputs=outputs, timeout=10**7).get_result(),
        client.infer("every", inputs, request_compression_algorithm="gzip", response_compression_algorithm="gzip"),
    ):
        for name, array in arrays.items():
            np.testing.assert_array_equal(answer.as_numpy(name), array, strict=True)
    assert client.infer("every", inputs, request_id="7").get_response()["id"] == "7"
    only = client.infer("every", inputs, outputs=[triton.InferRequestedOutput("int8", binary_data=not binary)])
    assert [each["name"] for each in only.get_response()["outputs"]] == ["int8"]


@pytest.mark.parametrize("binary", [True, False])
def test_texts_and_other_outputs(client: triton.InferenceServerClient, binary: bool) -> None:
    texts = np.array(["a", "", "grün\0", "x" * 1000], object)
    answer = client.infer("anything", [tensor(texts, binary=binary)])
    assert [each.decode() for each in answer.as_numpy("output")] == texts.tolist()
    table = texts.reshape(2, 2)
    answer = client.infer("anything", [tensor(table, binary=binary)])
    assert [[each.decode() for each in row] for row in answer.as_numpy("output")] == table.tolist()
    answer = client.infer("anything", [tensor(np.array(["bytes", "bytes"], object))])
    assert answer.as_numpy("output").tolist() == [b"\xff\0"] * 2
    answer = client.infer("anything", [tensor(np.array(["pair", "pair"], object))])
    np.testing.assert_array_equal(answer.as_numpy("output_0"), [[0, 1], [0, 1]])
    assert answer.as_numpy("output_1").tolist() == [b"two", b"two"]
    brain = np.array(
        [[1.5, -2.0, 2.0**127]], triton_to_np_dtype("BF16")
    )  # NumPy does not have it: it comes back as float32
    answer = client.infer("anything", [tensor(brain, datatype="BF16")])
    np.testing.assert_array_equal(answer.as_numpy("output"), brain.astype("f4"), strict=True)
    answer = client.infer("row", [tensor(brain / 2, datatype="BF16")])
    np.testing.assert_array_equal(answer.as_numpy("output"), brain.astype("f4"), strict=True)
    two = [tensor(np.ones((2, 1)), "a"), tensor(np.zeros(2, "i4"), "b")]
    answer = client.infer("anything", two)
    np.testing.assert_array_equal(answer.as_numpy("a"), np.ones((2, 1)), strict=True)
    np.testing.assert_array_equal(answer.as_numpy("b"), np.zeros(2, "i4"), strict=True)


def test_what_the_server_says_of_itself(client: triton.InferenceServerClient, http: httpx.Client) -> None:
    assert client.is_server_live() and client.is_server_ready() and client.is_model_ready("row", "1")
    assert client.get_server_metadata() == {
        "name": "hvdlite",
        "version": hvdlite.__version__,
        "extensions": ["binary_tensor_data"],
    }
    assert client.get_model_metadata("row") == {
        "name": "row",
        "versions": ["1"],
        "platform": "hvdlite",
        "inputs": [{"name": "input", "datatype": "FP32", "shape": [-1, 3]}],
        "outputs": [{"name": "output", "datatype": "FP32", "shape": [-1, 3]}],
    }
    assert client.get_model_metadata("every")["inputs"][2] == {
        "name": "uint16",
        "datatype": "UINT16",
        "shape": [-1, 2, -1],
    }
    assert client.get_model_metadata("anything")["inputs"] == []
    index = client.get_model_repository_index()
    assert index[1] == {"name": "every", "version": "1", "state": "READY", "reason": ""}
    assert http.get("/v1/models/row").json() == {
        "name": "row",
        "ready": True,
        "model_version_status": [
            {"version": "1", "state": "AVAILABLE", "status": {"error_code": "OK", "error_message": ""}}
        ],
    }
    assert http.get("/v1/models").json() == {"models": list(MODELS)}
    for path in ("/v2/models/rows", "/v2/models/rows/ready", "/v1/models/rows"):
        answer = http.get(path)
        assert answer.status_code == 404
        assert answer.json() == {"error": "there is no model 'rows': there are 'row', 'every', 'anything'."}
    for path in ("/v2/models/rows/infer", "/v1/models/rows:predict", "/v2/repository/models/rows/load"):
        assert "there are 'row', 'every', 'anything'" in http.post(path, json={}).json()["error"]
    for path in ("/v2/models/row/versions/2", "/v1/models/row/versions/2", "/v2/models/row/versions/x/ready"):
        assert http.get(path).status_code == 404
    for path in ("/v2/models/row/versions/2/infer", "/v1/models/row/versions/2:predict"):
        answer = http.post(path, json={"inputs": []})
        assert answer.status_code == 404 and "the model 'row' has no version '2': there is 1." in answer.json()["error"]
    with pytest.raises(InferenceServerException, match="has no version '3'"):
        client.infer("row", [tensor(np.zeros((1, 3), "f4"))], model_version="3")


ROW = {"name": "input", "datatype": "FP32", "shape": [1, 3], "data": [1, 2, 3]}
SAID = {key: value for key, value in ROW.items() if key != "data"}


def one(**changes: Any) -> bytes:
    return json.dumps({"inputs": [{**ROW, **changes}]}).encode()


def sized(size: Any, rest: bytes, **changes: Any) -> tuple[bytes, bytes]:
    return json.dumps({"inputs": [{**SAID, **changes, "parameters": {"binary_data_size": size}}]}).encode(), rest


BAD: dict[str, tuple[bytes | tuple[bytes, bytes], str]] = {
    "no JSON": (b"{1", "the body is no JSON"),
    "a list": (b"[]", "the body has no inputs"),
    "no inputs": (b'{"inputs": []}', "the body has no inputs"),
    "an id": (json.dumps({"id": 3, "inputs": [ROW]}).encode(), "the id is 3: expected a text"),
    "no name": (one(name=None), "an input has no name"),
    "another name": (one(name="x"), "the tensors are 'x': expected 'input'"),
    "one too many": (
        json.dumps({"inputs": [ROW, {**ROW, "name": "x"}]}).encode(),
        "are 'input', 'x': expected 'input'",
    ),
    "twice": (json.dumps({"inputs": [ROW, ROW]}).encode(), "the input 'input' is there twice"),
    "no datatype": (one(datatype="FLOAT"), "the datatype 'FLOAT': expected one of BOOL, UINT8"),
    "another datatype": (one(datatype="FP64"), "is FP64 of the shape [1, 3]: expected FP32 of the shape [-1, 3]"),
    "another shape": (one(shape=[3]), "is FP32 of the shape [3]: expected FP32 of the shape [-1, 3]"),
    "a row more": (one(shape=[1, 3, 1]), "is FP32 of the shape [1, 3, 1]: expected FP32 of the shape [-1, 3]"),
    "no shape": (one(shape=None), "the shape None: expected a list of lengths"),
    "a negative shape": (one(shape=[-1, -3]), "the shape [-1, -3]: expected a list of lengths"),
    "a bool as length": (one(shape=[True, 3]), "the shape [True, 3]: expected a list of lengths"),
    "65 axes": (one(shape=[1] * 64 + [3]), "which no array has: maximum supported dimension"),
    "a length past 64 bits": (one(shape=[1, 0, 2**63], data=[]), "which no array has"),
    "a huge shape": (one(shape=[2**62, 2**62]), "it has 3 elements, and the shape [4611686018427387904"),
    "no batch": (one(shape=[0, 3], data=[]), "the first axes of the tensors have the lengths 0"),
    "too few": (one(data=[1, 2]), "it has 2 elements, and the shape [1, 3]: expected 3"),
    "no data": (json.dumps({"inputs": [SAID]}).encode(), "has no data: expected 'data', or the parameter"),
    "text as data": (one(data="123"), "'data' is a str: expected a list"),
    "texts": (one(data=["1", "2", "3"]), "elements that are no numbers: expected FP32"),
    "null": (one(data=[1, 2, None]), "elements that are no numbers"),
    "ragged": (one(data=[[1, 2], [3]]), "rows have different lengths"),
    "too large": (one(data=[1, 2, 1e39]), "elements of float64 that FP32 cannot hold"),
    "BF16 in JSON": (one(datatype="BF16"), "has BF16 in JSON: expected its data as bytes"),
    "a parameter": (
        one(parameters={"classification": 1}),
        "the parameter 'classification', which this server does not know",
    ),
    "shared memory": (one(parameters={"shared_memory_region": "x"}), "the parameter 'shared_memory_region'"),
    "parameters": (one(parameters=[1]), "'parameters' is a list"),
    "a sequence": (
        json.dumps({"inputs": [ROW], "parameters": {"sequence_id": 1}}).encode(),
        "the parameter 'sequence_id'",
    ),
    "a timeout": (json.dumps({"inputs": [ROW], "parameters": {"timeout": -1}}).encode(), "'timeout' is -1"),
    "outputs": (
        json.dumps({"inputs": [ROW], "outputs": [{"name": "y"}]}).encode(),
        "no output 'y': there are 'output'",
    ),
    "an output twice": (
        json.dumps({"inputs": [ROW], "outputs": [{"name": "y"}] * 2}).encode(),
        "expected each output once",
    ),
    "too few bytes": (
        sized(12, b"1" * 8),
        "'binary_data_size' 12: behind the JSON text and the tensors before it, there are 8",
    ),
    "too many bytes": (sized(12, b"1" * 16), "there are 16 bytes: the tensors say that they have 12"),
    "no size": (sized("x", b"1" * 12), "'binary_data_size' 'x'"),
    "an odd size": (sized(10, b"1" * 10), "'binary_data_size' is 10: expected a multiple of 4"),
    "another size": (sized(8, b"1" * 8), "it has 2 elements, and the shape [1, 3]: expected 3"),
    "NaN": (
        sized(12, np.array([1, np.nan, 3], "f4").tobytes()),
        "1 values that are NaN or infinite, the first at [0, 1]",
    ),
    "two truths": (sized(3, b"\0\1\2", datatype="BOOL"), "its bytes are not all 0 or 1"),
    "half a text": (sized(3, b"\0\1\2", datatype="BYTES"), "the bytes end in the middle of the length of a text"),
    "a short text": (sized(5, b"\5\0\0\0a", datatype="BYTES"), "a text of 5 bytes is said to come, and 1 are left"),
    "no text": (sized(5, b"\1\0\0\0\xff", datatype="BYTES"), "element 0 is no text in UTF-8"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_requests_are_told_what_was_found_and_expected(http: httpx.Client, name: str) -> None:
    body, words = BAD[name]
    headers = {}
    if isinstance(body, tuple):
        headers["inference-header-content-length"] = str(len(body[0]))
        body = b"".join(body)
    answer = http.post("/v2/models/row/infer", content=body, headers=headers)
    assert answer.status_code == 400 and words in answer.json()["error"], answer.text
    assert http.post("/v2/models/row/infer", content=one()).json()["outputs"][0]["data"] == [2, 4, 6]


def test_integers_and_truths_are_not_rounded(http: httpx.Client) -> None:
    for datatype, good, bad in (
        ("INT8", [-128, 127, 3.0], [128, -129, 0.5]),
        ("UINT64", [0, 2**64 - 1], [-1, 2**64, 1e300]),
        ("INT64", [-(2**63), 2**63 - 1], [2**63, 1e18]),
        ("BOOL", [True, False], [0, 1, "true"]),
        ("BYTES", ["", "x"], [1, None, ["x", "y"]]),
        ("FP16", [65504, 0.5], [65520]),
    ):

        def ask(data: list[Any], datatype: str = datatype) -> httpx.Response:
            each = {"name": "input", "datatype": datatype, "shape": [len(data)], "data": data}
            return http.post("/v2/models/anything/infer", json={"inputs": [each]})

        assert [ask([each]).json()["outputs"][0]["data"] for each in good] == [[each] for each in good]
        assert [ask([each]).status_code for each in bad] == [400] * len(bad), datatype


def test_headers_and_outputs_that_do_not_fit(http: httpx.Client) -> None:
    for length in ("x", "-1", "100000", "1.5"):
        answer = http.post("/v2/models/row/infer", content=one(), headers={"inference-header-content-length": length})
        assert answer.status_code == 400 and "expected the number of bytes of the JSON text" in answer.json()["error"]

    def ask(texts: list[str], binary: bool = False) -> httpx.Response:
        each = {"name": "input", "datatype": "BYTES", "shape": [len(texts)], "data": texts}
        asked = {"inputs": [each], "parameters": {"binary_data_output": binary}}
        return http.post("/v2/models/anything/infer", json=asked)

    for texts, words in (
        (["none"], "'output' is a NoneType that is no tensor of numbers or texts"),
        (["ragged"], "'output' is a list that is no tensor"),
        (["nan"], "'output' has NaN or infinity, which JSON does not have: ask for binary data"),
        (["bytes"], "bytes that are no text in UTF-8: ask for binary data"),
        (["pair", "a"], "the outputs of the inputs have different names"),
    ):
        answer = ask(texts)
        assert answer.status_code == 406 and words in answer.json()["error"], answer.text
    answer = ask(["nan"], binary=True)
    length = int(answer.headers["inference-header-content-length"])
    assert answer.headers["content-type"] == BINARY and np.isnan(np.frombuffer(answer.content[length:]))
    assert ask(["a"] * 9).status_code == 413  # of 8 that may wait
    for shapes in ([[2], [3]], [[], [1]], [[0], [0]]):
        inputs = [
            {"name": f"x{place}", "datatype": "INT32", "shape": shape, "data": [1] * int(np.prod(shape))}
            for place, shape in enumerate(shapes)
        ]
        assert http.post("/v2/models/anything/infer", json={"inputs": inputs}).status_code == 400


def test_a_large_text_is_read_in_a_thread(http: httpx.Client) -> None:
    data = np.random.default_rng(0).normal(size=(4, 20_000)).tolist()
    each = {"name": "input", "datatype": "FP64", "shape": [4, 20_000], "data": data}
    answer = http.post("/v2/models/anything/infer", json={"inputs": [each]})
    assert answer.json()["outputs"][0]["data"] == np.ravel(data).tolist()


def test_tensorflow_serving(http: httpx.Client) -> None:
    def ask(body: Any, model: str = "row") -> httpx.Response:
        return http.post(f"/v1/models/{model}:predict", json=body)

    rows, doubled = [[1, 2, 3], [4, 5, 6.5]], [[2, 4, 6], [8, 10, 13]]
    assert ask({"instances": rows}).json() == {"predictions": doubled}
    assert ask({"instances": [{"input": row} for row in rows]}).json() == {"predictions": doubled}
    assert ask({"inputs": rows, "signature_name": "serving_default"}).json() == {"outputs": doubled}
    assert ask({"inputs": {"input": rows}}).json() == {"outputs": doubled}
    assert http.post("/v1/models/row/versions/1:predict", json={"inputs": rows}).json() == {"outputs": doubled}
    columns = {dtype: np.zeros((2, 2, 1)).tolist() for dtype in DTYPES} | {"bool": [[[True], [False]]] * 2}
    assert ask({"inputs": columns}, "every").json() == {"outputs": columns}
    rows_of = [{name: column[0] for name, column in columns.items()}] * 3
    assert ask({"instances": rows_of}, "every").json() == {"predictions": rows_of}
    assert ask({"instances": ["a", {"b": [10**30]}, 3]}, "anything").json() == {
        "predictions": ["a", {"b": [10**30]}, 3]
    }
    text = {"b64": base64.b64encode(b"text").decode()}
    answer = ask({"instances": [text]}, "anything")
    assert answer.status_code == 406 and "JSON has no words for the output" in answer.json()["error"]  # bytes
    for body, words in (
        ([], "the body has an empty list. Expected an object"),
        ({"instance": rows}, "the body has an object with 'instance'"),
        ({"instances": rows, "inputs": rows}, "the body has an object with 'instances', 'inputs'"),
        ({"instances": []}, "the inputs are an empty list"),
        ({"instances": 3}, "the inputs are a int"),
        ({"inputs": 3}, "'inputs' is a int"),
        ({"inputs": {"input": 3}}, "values which are no lists"),
        ({"inputs": {"a": [1], "b": [1, 2]}}, "columns of different lengths"),
        (
            {"instances": [[1, 2, 3], [1, 2]]},
            "input 1: the input has the shape (2,): expected an array of float32, shape (3,)",
        ),
        ({"instances": [{"x": [1, 2, 3]}]}, "input 0: the input is a dict"),
        ({"instances": rows, "signature_name": "other"}, "the signature_name is 'other'"),
        ({"instances": [{"b64": "§"}]}, "a 'b64' that is no text in base64"),
    ):
        answer = ask(body)
        assert answer.status_code == 400 and words in answer.json()["error"], answer.text
    assert "the body is no JSON" in http.post("/v1/models/row:predict", content=b"{").json()["error"]


def test_kserve(url: str) -> None:
    """KServe's own client, where it is installed: it needs a protobuf that TensorFlow's does not go with."""
    kserve = pytest.importorskip("kserve")
    arrays = of_each_dtype(rows=2)

    async def ask() -> None:
        async with kserve.InferenceRESTClient(kserve.inference_client.RESTConfig(protocol="v2", timeout=30)) as client:
            assert await client.is_server_live(url) and await client.is_server_ready(url)
            assert await client.is_model_ready(url, "every") and not await client.is_model_ready(url, "nowhere")
            for binary in (True, False):
                inputs = []
                for name, array in arrays.items():
                    inputs.append(kserve.InferInput(name, list(array.shape), np_to_triton_dtype(array.dtype)))
                    # This client sends no float16 as JSON.
                    inputs[-1].set_data_from_numpy(array, binary_data=binary or name == "float16")
                about = {"binary_data_output": True} if binary else {}
                request = kserve.InferRequest("every", inputs, request_id="7", parameters=about)
                answer = await client.infer(url, request, model_name="every")
                assert answer.id == "7"
                for output in answer.outputs:
                    np.testing.assert_array_equal(output.as_numpy(), arrays[output.name], strict=True)
        async with kserve.InferenceRESTClient(kserve.inference_client.RESTConfig(protocol="v1", timeout=30)) as client:
            assert await client.is_model_ready(url, "row")
            answer = await client.infer(url, {"instances": [[1, 2, 3]]}, model_name="row")
            assert answer == {"predictions": [[2.0, 4.0, 6.0]]}

    asyncio.run(ask())
