"""What the server says of itself: an OpenAPI description, and a page on which one can try it."""

from __future__ import annotations

import html
import json
import re
from typing import Any

from hvdlite.serving.http.bodies import JSON, MSGPACK, NPY
from hvdlite.serving.options import Options
from hvdlite.serving.servable import Spec

_ERRORS = {
    400: "the body is not as expected; the text says what was found and what was expected",
    401: "the key is wrong or missing",
    406: "the output cannot be written in the format that was asked for",
    408: "the body came too slowly",
    413: "the body is too long",
    415: "the Content-Type is none of those that the server reads",
    422: "the replicas that computed the same input before have ended",
    429: "too many requests wait; Retry-After says when to try again",
    500: "predict raised, or returned no answer",
    503: "no replica is ready, or the request lost two replicas",
    504: "no replica was free before the deadline of the request",
}
_NAME = {
    "name": "name",
    "in": "path",
    "required": True,
    "schema": {"type": "string"},
    "description": "the name of a model",
}
_OBJECT: dict[str, Any] = {"type": "object"}
_INFER = {"type": "object", "required": ["inputs"], "properties": {"inputs": {"type": "array", "items": _OBJECT}}}
_TF = {"type": "object", "properties": {"instances": {"type": "array", "items": {}}, "inputs": {}}}
_MODEL_PATHS: tuple[tuple[str, str, str, dict[str, Any] | None], ...] = (
    ("post", "/v2/models/{name}/infer", "The Open Inference Protocol: compute a batch of named tensors.", _INFER),
    ("get", "/v2/models/{name}", "The inputs and outputs of a model.", None),
    ("get", "/v2/models/{name}/ready", "Whether a model can compute.", None),
    ("get", "/v2", "What the server is.", None),
    ("get", "/v2/health/live", "The server is running.", None),
    ("get", "/v2/health/ready", "Whether all models can compute.", None),
    ("post", "/v2/repository/index", "The state of all models.", None),
    ("post", "/v2/repository/models/{name}/load", "Load new weights while the server serves.", None),
    ("post", "/v1/models/{name}:predict", "TensorFlow Serving: compute inputs by rows or by columns.", _TF),
    ("get", "/v1/models/{name}", "The state of a model.", None),
    ("get", "/v1/models", "The names of the models.", None),
)


def openapi(spec: Spec | None, options: Options) -> dict[str, Any]:
    """Return the OpenAPI description of a server.

    Args:
        spec: What its inputs must be; None if that is not known yet.
        options: Its settings.
    """
    text = {"type": "object", "required": ["error"], "properties": {"error": {"type": "string"}}}
    binary = {"schema": {"type": "string", "format": "binary"}}
    whole = {"type": "object", "required": ["input"], "properties": {"input": _schema(spec)}}
    answer = {"type": "object", "required": ["output"], "properties": {"output": {}}}
    responses: dict[str, Any] = {
        "200": {"description": "the output", "content": {JSON: {"schema": answer}, NPY: binary, MSGPACK: binary}}
    }
    for status, why in _ERRORS.items():
        responses[str(status)] = {"description": why, "content": {JSON: {"schema": text}}}
    takes = spec or "not known before a replica is ready"
    predict: dict[str, Any] = {
        "summary": "Compute the output of one input.",
        "description": f"The input is {takes}. Requests that come together are computed together.",
        "parameters": [
            {
                "name": "X-Timeout-Ms",
                "in": "header",
                "description": f"the time of this request, instead of {options.deadline * 1000:g}",
                "schema": {"type": "number", "exclusiveMinimum": 0},
            }
        ],
        "requestBody": {"required": True, "content": {JSON: {"schema": whole}, NPY: binary, MSGPACK: binary}},
        "responses": responses,
    }
    about: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {"title": "hvdlite serve", "version": "1"},
        "paths": {"/v1/predict": {"post": predict}},
    }
    for path, what in (
        ("/healthz", "The server is running."),
        ("/readyz", "A replica can compute."),
        ("/metrics", "Metrics for Prometheus."),
        ("/explain", "How long batches wait, and why."),
    ):
        about["paths"][path] = {"get": {"summary": what, "responses": {"200": {"description": what}}}}
    about["paths"]["/readyz"]["get"]["responses"]["503"] = {
        "description": "No replica can compute, or the server ends."
    }
    for method, path, what, schema in _MODEL_PATHS:
        operation: dict[str, Any] = {"summary": what, "responses": {"200": {"description": "the answer"}}}
        if "{name}" in path:
            operation["parameters"] = [_NAME]
            operation["responses"]["404"] = {"description": "there is no such model"}
        if schema is not None:
            operation["requestBody"] = {"required": True, "content": {JSON: {"schema": schema}}}
        about["paths"].setdefault(path, {})[method] = operation
    if options.root_path:
        about["servers"] = [{"url": options.root_path}]
    if options.api_key:
        about["components"] = {"securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}}
        for path in about["paths"]:
            if path.endswith(("predict", "/metrics", "/explain", "/infer", "/load", "/index")):
                for operation in about["paths"][path].values():
                    operation["security"] = [{"key": []}]
    return about


def page(spec: Spec | None, options: Options) -> str:
    """Return the page of a server, as HTML. The arguments are those of `openapi`."""
    example = json.dumps({"input": _example(spec)})
    key = '<p><label>Key: <input id="key" type="password"></label></p>' if options.api_key else ""
    texts = {
        "EXAMPLE": html.escape(example),
        "ROOT": options.root_path,
        "KEY": key,
        "SPEC": html.escape(str(spec or "not known yet")),
    }
    return re.sub("|".join(texts), lambda found: texts[found[0]], _PAGE)


def _schema(spec: Spec | None) -> dict[str, Any]:
    if spec is None or spec.shape is None:
        return {}
    schema: dict[str, Any] = {"type": "number"}
    for size in reversed(spec.shape):
        schema = {"type": "array", "items": schema}
        if size is not None:
            schema |= {"minItems": size, "maxItems": size}
    return schema


def _example(spec: Spec | None) -> Any:
    value: Any = 0
    for size in reversed(spec.shape or () if spec else ()):
        value = [value] * min(1 if size is None else size, 64)
    return value


_PAGE = """<!doctype html>
<html lang="en">
<meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>hvdlite serve</title>
<style>
body { font: 16px/1.5 system-ui, sans-serif; max-width: 44em; margin: 2em auto; padding: 0 1em; }
textarea { width: 100%; height: 8em; font-family: monospace; } pre { white-space: pre-wrap; overflow-wrap: anywhere; }
</style>
<h1>hvdlite serve</h1>
<p>An input is SPEC. Send it to <code>POST /v1/predict</code> as JSON, as <code>application/x-npy</code> or as
<code>application/msgpack</code>; the answer has the same format. <a href="ROOT/openapi.json">/openapi.json</a> has the paths,
<a href="ROOT/docs">/docs</a> shows them.
<a href="ROOT/metrics">/metrics</a> is for Prometheus, <a href="ROOT/explain">/explain</a> says how long batches wait, and why.
<a href="ROOT/readyz">/readyz</a> says whether the server is ready.</p>
KEY
<textarea id="body" aria-label="body">EXAMPLE</textarea>
<p><button id="send">Send</button></p>
<pre id="answer"></pre>
<script>
const get = id => document.getElementById(id);
get("send").onclick = async () => {
  const headers = {"content-type": "application/json"};
  if (get("key")) headers["authorization"] = "Bearer " + get("key").value;
  const begin = performance.now();
  try {
    const answer = await fetch("ROOT/v1/predict", {method: "POST", headers, body: get("body").value});
    const text = await answer.text();
    get("answer").textContent = `${answer.status}, ${(performance.now() - begin).toFixed(1)} ms\\n${text}`;
  } catch (error) {
    get("answer").textContent = String(error);
  }
};
</script>
"""
