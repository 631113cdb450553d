"""The Open Inference Protocol over HTTP: inputs and outputs are named tensors, whose first axis is the batch.

A request may have several inputs at once. Each of them is a request of its own for the `Service`, so those of different clients
share batches as they do elsewhere.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import orjson

from hvdlite.protocols import Array
from hvdlite.serving.http.bodies import JSON, BodyError, UnwritableError, check_finite
from hvdlite.serving.http.predict_endpoint import Answer, Body, Endpoint, deadline, in_thread
from hvdlite.serving.http.tensors import (
    BF16,
    DATATYPES,
    as_tensor,
    datatype_of,
    from_bytes,
    from_json,
    to_bytes,
    to_json,
)
from hvdlite.serving.models import Model, Models, Version
from hvdlite.serving.servable import Spec
from hvdlite.serving.service import RefusedError, Service

INPUT, OUTPUT = "input", "output"
"""The names of a tensor that the model gives no name."""
_LENGTH = b"inference-header-content-length"
_BINARY = "application/octet-stream"


class InferEndpoint(Endpoint):
    """``/v2/models/NAME/infer``."""

    async def _answer(self, version: Version, body: Body) -> Answer:
        service = version.service
        spec = self._known(service)
        await self._receive(body, self._options.max_body, spec)
        length = _json_length(body)
        try:
            request = await in_thread(length, _read, body.data, length, spec)
        except BodyError as error:
            raise RefusedError(str(error), 400) from None
        seconds = deadline(body.headers, self._options.deadline) if request.seconds is None else request.seconds
        outputs = await submit_all(service, request.values, body.came + seconds, body.gone)
        about = {"model_name": self._model.name, "model_version": str(version.number)}
        try:
            return _write(by_name(outputs), about, request)
        except BodyError as error:
            raise RefusedError(str(error), 400) from None
        except UnwritableError as error:
            raise RefusedError(str(error), 406) from None


async def submit_all(
    service: Service, values: Sequence[Any], until: float, gone: asyncio.Future[None] | None
) -> list[Any]:
    """Let several inputs be computed, and return their outputs.

    Args:
        service: Computes.
        values: The inputs.
        until: When the outputs are of no use any more, on the clock `time.monotonic`.
        gone: Done when the client is gone.

    Raises:
        ClientGoneError: The client is gone.
        RefusedError: One of them has no output. The others are not computed any more.
    """
    service.check_room(len(values))
    if len(values) == 1:
        return [await service.submit(values[0], until, gone)]
    group = object()
    tasks = [asyncio.ensure_future(service.submit(value, until, gone, group)) for value in values]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()


def by_name(outputs: Sequence[Any]) -> dict[str, list[Any]]:
    """Return the outputs of several inputs by the names of the model's outputs.

    Dictionaries have names. The elements of tuples are "output_0", "output_1" and so on. Other outputs are one, named "output".

    Raises:
        UnwritableError: The outputs have different names.
    """
    first = outputs[0]
    if isinstance(first, tuple):
        outputs = [{f"{OUTPUT}_{place}": each for place, each in enumerate(output)} for output in outputs]
    elif not isinstance(first, dict):
        return {OUTPUT: list(outputs)}
    names = list(outputs[0])
    if not all(isinstance(output, dict) and list(output) == names for output in outputs):
        raise UnwritableError(
            "the outputs of the inputs have different names: send these inputs in requests of their own."
        )
    return {name: [output[name] for output in outputs] for name in names}


def inputs_of(spec: Spec) -> dict[str, Spec]:
    """Return what the tensors of a request are, by name; nothing if any will do."""
    if spec.inputs:
        return dict(spec.inputs)
    return {INPUT: spec} if spec.dtype is not None or spec.shape is not None else {}


def server_metadata() -> dict[str, Any]:
    """Return what the server says of itself."""
    return {"name": "hvdlite", "version": importlib.metadata.version("hvdlite"), "extensions": ["binary_tensor_data"]}


def model_metadata(model: Model, version: Version) -> dict[str, Any]:
    """Return what a model says of its inputs and outputs. What is not known is left out.

    Raises:
        RefusedError: No replica is ready.
    """
    service = version.service
    if service.spec is None:
        raise RefusedError("no replica is ready yet.", 503, retry_after=1)
    inputs = []
    for name, spec in inputs_of(service.spec).items():
        datatype = spec.dtype and datatype_of(np.dtype(spec.dtype))
        if datatype:
            inputs.append({"name": name, "datatype": datatype, "shape": _batch_shape(spec)})
    outputs = []
    if service.sample is not None:
        try:
            for name, values in by_name([service.sample]).items():
                array = as_tensor(values, name)
                outputs.append({"name": name, "datatype": datatype_of(array.dtype), "shape": [-1, *array.shape[1:]]})
        except UnwritableError:  # it answers other protocols
            outputs = []
    about: dict[str, Any] = {"name": model.name, "versions": [str(version.number)], "platform": "hvdlite"}
    return about | {"inputs": inputs, "outputs": outputs}


def repository_index(models: Models) -> list[dict[str, str]]:
    """Return the state of each model."""
    return [
        {
            "name": model.name,
            "version": str(model.present.number),
            "state": "READY" if model.is_ready else "UNAVAILABLE",
            "reason": "" if model.is_ready else "no replica can compute, or the server ends",
        }
        for model in models
    ]


class _Request(NamedTuple):
    """What a request asks.

    Attributes:
        values: Its inputs, one by one.
        name: Its id; None if it has none.
        outputs: The outputs that it asks for, and whether each is wanted as bytes; None for all.
        binary: Whether outputs that it does not name are wanted as bytes.
        seconds: Its time; None if it does not say it.
    """

    values: list[Any]
    name: str | None
    outputs: dict[str, bool] | None
    binary: bool
    seconds: float | None


def _json_length(body: Body) -> int:
    said = body.headers.get(_LENGTH)
    if said is None:
        return len(body.data)
    if not said.isdigit() or int(said) > len(body.data):
        raise RefusedError(
            f"Inference-Header-Content-Length is {said.decode('latin-1')!r}: expected the number of bytes of the JSON text, "
            f"and the body has {len(body.data)}.",
            400,
        )
    return int(said)


def _read(data: bytes | bytearray, length: int, spec: Spec) -> _Request:
    try:
        whole = orjson.loads(memoryview(data)[:length])
    except orjson.JSONDecodeError as error:
        raise BodyError(f"the body is no JSON: {error}.") from None
    if not isinstance(whole, dict) or not isinstance(whole.get("inputs"), list) or not whole["inputs"]:
        raise BodyError('the body has no inputs: expected an object {"inputs": [{"name": …}, …]}.')
    name = whole.get("id")
    if not isinstance(name, str | None):
        raise BodyError(f"the id is {name!r}: expected a text.")
    about = _parameters(whole, "the request", ("binary_data_output", "timeout"))
    binary, timeout = about.get("binary_data_output", False), about.get("timeout")
    if timeout is not None and not (isinstance(timeout, int) and timeout > 0):
        raise BodyError(f"the parameter 'timeout' is {timeout!r}: expected a number of microseconds above 0.")
    tensors = _tensors(whole["inputs"], memoryview(data)[length:])
    seconds = None if timeout is None else timeout / 1e6
    return _Request(_values(tensors, spec), name, _wanted(whole, bool(binary)), bool(binary), seconds)


def _parameters(of: dict[str, Any], what: str, known: Sequence[str]) -> dict[str, Any]:
    """Return the parameters of something. An unknown one is refused, for the client wants something by it."""
    found = of.get("parameters", {})
    if not isinstance(found, dict):
        raise BodyError(f"{what}: 'parameters' is a {type(found).__name__}: expected an object.")
    if unknown := [name for name in found if name not in known]:
        raise BodyError(
            f"{what} has the parameter {unknown[0]!r}, which this server does not know: it knows {', '.join(known)}."
        )
    return found


def _tensors(inputs: list[Any], rest: memoryview) -> dict[str, tuple[str, Array]]:
    """Return the datatype and the array of each tensor by name."""
    tensors: dict[str, tuple[str, Array]] = {}
    place = 0
    for each in inputs:
        if not isinstance(each, dict) or not isinstance(name := each.get("name"), str):
            raise BodyError("an input has no name: expected an object with name, datatype, shape and data.")
        where = f"the input {name!r}"
        datatype, shape = each.get("datatype"), each.get("shape")
        if name in tensors:
            raise BodyError(f"{where} is there twice: expected each tensor once.")
        if datatype not in DATATYPES:
            raise BodyError(f"{where} has the datatype {datatype!r}: expected one of {', '.join(DATATYPES)}.")
        if not isinstance(shape, list) or not all(type(size) is int and size >= 0 for size in shape):
            raise BodyError(f"{where} has the shape {shape!r}: expected a list of lengths from 0 on.")
        size = _parameters(each, where, ("binary_data_size",)).get("binary_data_size")
        if size is None:
            if "data" not in each:
                raise BodyError(f"{where} has no data: expected 'data', or the parameter 'binary_data_size' and bytes.")
            if datatype == BF16:
                raise BodyError(f"{where} has BF16 in JSON: expected its data as bytes, for JSON has no such numbers.")
            tensors[name] = datatype, from_json(each["data"], datatype, shape, where)
            continue
        if "data" in each:
            raise BodyError(f"{where} has both 'data' and 'binary_data_size': expected one of them.")
        if type(size) is not int or size < 0 or place + size > len(rest):
            raise BodyError(
                f"{where} has 'binary_data_size' {size!r}: behind the JSON text and the tensors before it, there are "
                f"{len(rest) - place} bytes."
            )
        tensors[name] = datatype, from_bytes(rest[place : place + size], datatype, shape, where)
        place += size
    if place != len(rest):
        raise BodyError(f"behind the JSON text there are {len(rest)} bytes: the tensors say that they have {place}.")
    return tensors


def _values(tensors: dict[str, tuple[str, Array]], spec: Spec) -> list[Any]:
    """Return the inputs of a batch, after a look at whether they are what the model takes."""
    expected = inputs_of(spec)
    if expected and tensors.keys() != expected.keys():
        found, wanted = (", ".join(map(repr, names)) for names in (tensors, expected))
        raise BodyError(f"the tensors are {found}: expected {wanted}.")
    counts = set()
    for name, (datatype, array) in tensors.items():
        _check(name, datatype, array, expected.get(name, spec))
        counts.add(array.shape[0])
    if len(counts) != 1 or counts == {0}:
        raise BodyError(
            f"the first axes of the tensors have the lengths {', '.join(map(str, sorted(counts)))}: expected one length for "
            "all, from 1 on, for it is the batch."
        )
    rows = {name: _rows(array) for name, (_, array) in tensors.items()}
    if not spec.inputs and rows.keys() == {INPUT}:
        return rows[INPUT]
    names = list(expected) or list(rows)
    return [dict(zip(names, row, strict=True)) for row in zip(*(rows[name] for name in names), strict=True)]


def _check(name: str, datatype: str, array: Array, spec: Spec) -> None:
    wanted = spec.dtype and datatype_of(np.dtype(spec.dtype))
    if spec.dtype is not None and wanted is None:
        raise BodyError(f"the model takes {spec.dtype}, for which the protocol has no datatype: ask /v1/predict.")
    fits = wanted is None or datatype == wanted or (datatype, wanted) == (BF16, "FP32")
    shape = spec.shape
    if shape is not None:
        fits = fits and array.ndim == 1 + len(shape)
        fits = fits and all(size in (None, found) for size, found in zip(shape, array.shape[1:], strict=True))
    if not fits or not array.ndim:
        takes = f"{wanted or 'any datatype'} of {'any shape' if shape is None else f'the shape {_batch_shape(spec)}'}"
        raise BodyError(
            f"the input {name!r} is {datatype} of the shape {list(array.shape)}: expected {takes}, where the first axis is "
            "the batch."
        )
    try:
        check_finite(array, spec)
    except BodyError as error:
        raise BodyError(f"{name!r}: {error}") from None


def _batch_shape(spec: Spec) -> list[int]:
    return [-1, *(-1 if size is None else size for size in spec.shape or ())]


def _rows(array: Array) -> list[Any]:
    return array.tolist() if array.dtype.kind == "O" else list(map(np.asarray, array))


def _wanted(whole: dict[str, Any], binary: bool) -> dict[str, bool] | None:
    wanted = whole.get("outputs") or None
    if wanted is None:
        return None
    names: dict[str, bool] = {}
    if not isinstance(wanted, list):
        raise BodyError(f"'outputs' is a {type(wanted).__name__}: expected a list of objects with names.")
    for each in wanted:
        if not isinstance(each, dict) or not isinstance(name := each.get("name"), str) or name in names:
            raise BodyError("an output has no name, or that of another one: expected each output once.")
        names[name] = bool(_parameters(each, f"the output {name!r}", ("binary_data",)).get("binary_data", binary))
    return names


def _write(outputs: dict[str, list[Any]], about: dict[str, Any], request: _Request) -> Answer:
    wanted = dict.fromkeys(outputs, request.binary) if request.outputs is None else request.outputs
    if unknown := [name for name in wanted if name not in outputs]:
        raise BodyError(f"there is no output {unknown[0]!r}: there are {', '.join(map(repr, outputs))}.")
    if request.name is not None:
        about["id"] = request.name
    about["outputs"], parts = [], []
    for name, is_binary in wanted.items():
        array = as_tensor(outputs[name], name)
        tensor: dict[str, Any] = {"name": name, "datatype": datatype_of(array.dtype), "shape": list(array.shape)}
        if is_binary:
            parts.append(to_bytes(array))
            tensor["parameters"] = {"binary_data_size": len(parts[-1])}
        else:
            tensor["data"] = to_json(array, name)
        about["outputs"].append(tensor)
    text = orjson.dumps(about)
    if not parts:
        return Answer(JSON, text)
    return Answer(_BINARY, b"".join([text, *parts]), [(_LENGTH, str(len(text)).encode())])
