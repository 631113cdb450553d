"""The REST interface of TensorFlow Serving: ``:predict`` with inputs by rows ("instances") or by columns ("inputs")."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Sequence
from typing import Any

from hvdlite.serving.http.bodies import JSON, BodyError, UnwritableError, conform, load_json, write_json
from hvdlite.serving.http.open_inference import by_name, inputs_of, submit_all
from hvdlite.serving.http.predict_endpoint import Answer, Body, Endpoint, deadline, in_thread
from hvdlite.serving.http.tensors import as_tensor
from hvdlite.serving.models import Model, Version
from hvdlite.serving.servable import Spec
from hvdlite.serving.service import RefusedError

_EXPECTED = 'Expected an object {"instances": [one input, …]}, or {"inputs": …}.'
_SIGNATURE = "serving_default"


class TfPredictEndpoint(Endpoint):
    """``/v1/models/NAME:predict``."""

    async def _answer(self, version: Version, body: Body) -> Answer:
        service = version.service
        spec = self._known(service)
        seconds = deadline(body.headers, self._options.deadline)
        await self._receive(body, self._options.max_body, spec)
        try:
            values, by_columns = await in_thread(len(body.data), _read, body.data, spec)
        except BodyError as error:
            raise RefusedError(str(error), 400) from None
        self._take_objects(body, values[0], spec)
        outputs = await submit_all(service, values, body.came + seconds, body.gone)
        try:
            return Answer(JSON, write_json({"outputs": _columns(outputs)} if by_columns else {"predictions": outputs}))
        except UnwritableError as error:
            raise RefusedError(f"{error} /v1/predict has other formats.", 406) from None


def model_status(model: Model, version: Version) -> dict[str, Any]:
    """Return the state of a model, as TensorFlow Serving and KServe's version 1 say it."""
    state = "AVAILABLE" if model.is_ready else "UNLOADING" if version.service.is_draining else "LOADING"
    status = {"version": str(version.number), "state": state, "status": {"error_code": "OK", "error_message": ""}}
    return {"name": model.name, "ready": model.is_ready, "model_version_status": [status]}


def _read(data: bytes | bytearray, spec: Spec) -> tuple[list[Any], bool]:
    """Return the inputs of a request, and whether they came by columns."""
    whole = load_json(data, spec, _EXPECTED)
    if not isinstance(whole, dict) or ("instances" in whole) == ("inputs" in whole):
        raise BodyError(f"the body has {_found(whole)}. {_EXPECTED}")
    signature = whole.get("signature_name") or _SIGNATURE
    if signature != _SIGNATURE:
        raise BodyError(f"the signature_name is {signature!r}: a model has one function, named {_SIGNATURE!r}.")
    if b'"b64"' in data:
        whole = _decoded(whole)
    by_columns = "inputs" in whole
    rows = _rows_of(whole["inputs"], spec) if by_columns else whole["instances"]
    if not isinstance(rows, list) or not rows:
        raise BodyError(f"the inputs are {_found(rows)}: expected a list of one input or more.")
    names = inputs_of(spec)
    values = []
    for place, row in enumerate(rows):
        if len(names) == 1 and isinstance(row, dict) and row.keys() == names.keys() and not spec.inputs:
            row = row[next(iter(names))]
        elif len(spec.inputs) == 1 and not isinstance(row, dict):
            row = {spec.inputs[0][0]: row}
        try:
            values.append(conform(row, spec))
        except BodyError as error:
            raise BodyError(f"input {place}: {error}") from None
    return values, by_columns


def _rows_of(columns: Any, spec: Spec) -> list[Any]:
    """Return inputs that came by columns one by one."""
    if not isinstance(columns, dict):
        if not isinstance(columns, list):
            raise BodyError(f"'inputs' is {_found(columns)}: expected a list, or an object of lists.")
        return columns
    if not columns or not all(isinstance(column, list) for column in columns.values()):
        raise BodyError("'inputs' is an object that has values which are no lists: expected a list for each name.")
    lengths = {name: len(column) for name, column in columns.items()}
    if len(set(lengths.values())) > 1:
        raise BodyError(f"'inputs' has columns of different lengths: {lengths}.")
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def _columns(outputs: Sequence[Any]) -> Any:
    columns = {name: as_tensor(values, name) for name, values in by_name(outputs).items()}
    return columns if isinstance(outputs[0], dict | tuple) else next(iter(columns.values()))


def _decoded(value: Any) -> Any:
    """Return a value in which bytes stand for each {"b64": text}."""
    if isinstance(value, list):
        return [_decoded(each) for each in value]
    if not isinstance(value, dict):
        return value
    if value.keys() != {"b64"}:
        return {name: _decoded(each) for name, each in value.items()}
    try:
        return base64.b64decode(value["b64"], validate=True)
    except (TypeError, ValueError, binascii.Error):
        raise BodyError("the body has a 'b64' that is no text in base64.") from None


def _found(value: Any) -> str:
    if isinstance(value, dict):
        return f"an object with {', '.join(map(repr, list(value)[:5])) or 'nothing in it'}"
    return "an empty list" if value == [] else f"a {type(value).__name__}"
