"""The paths of the Open Inference Protocol and of TensorFlow Serving that do not compute: what is there, and what is ready."""

from __future__ import annotations

import asyncio

import orjson
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response

from hvdlite.serving.http.open_inference import model_metadata, repository_index, server_metadata
from hvdlite.serving.http.predict_endpoint import check_key
from hvdlite.serving.http.tf_serving import model_status
from hvdlite.serving.models import Model, Models, Version
from hvdlite.serving.options import Options
from hvdlite.serving.service import RefusedError

_MOST_BYTES = 2**16


class ModelPages:
    """These paths. As probes have no key, those that say what is ready need none.

    Args:
        models: The models.
        options: The settings.
    """

    def __init__(self, models: Models, options: Options) -> None:
        self._models, self._options = models, options

    async def server(self, request: Request) -> Response:
        """``/v2``: what this server is."""
        return JSONResponse(server_metadata())

    async def live(self, request: Request) -> Response:
        """``/v2/health/live``: whether the server runs."""
        return JSONResponse({"live": True})

    async def ready(self, request: Request) -> Response:
        """``/v2/health/ready``: whether all models can compute."""
        return JSONResponse({"ready": self._models.are_ready}, 200 if self._models.are_ready else 503)

    async def metadata(self, request: Request) -> Response:
        """``/v2/models/NAME``: the inputs and outputs of a model."""
        return JSONResponse(model_metadata(*self._found(request)))

    async def model_ready(self, request: Request) -> Response:
        """``/v2/models/NAME/ready``: whether a model can compute."""
        model, _ = self._found(request)
        return JSONResponse({"name": model.name, "ready": model.is_ready}, 200 if model.is_ready else 503)

    async def status(self, request: Request) -> Response:
        """``/v1/models/NAME``: the state of a model."""
        return JSONResponse(model_status(*self._found(request)))

    async def names(self, request: Request) -> Response:
        """``/v1/models``: the names of the models."""
        return JSONResponse({"models": [model.name for model in self._models]})

    async def index(self, request: Request) -> Response:
        """``/v2/repository/index``: the state of all models."""
        check_key_of(request, self._options)
        return JSONResponse(repository_index(self._models))

    async def load(self, request: Request) -> Response:
        """``/v2/repository/models/NAME/load``: loads a model anew, and answers when the new version answers requests."""
        check_key_of(request, self._options)
        model = self._models.named(request.path_params["name"])
        try:
            body = await asyncio.wait_for(_small(request), self._options.read_timeout)
        except asyncio.TimeoutError:
            raise RefusedError(f"the body has not come in {self._options.read_timeout:g} s.", 408) from None
        try:
            asked = orjson.loads(body) if body else {}
        except orjson.JSONDecodeError as error:
            raise RefusedError(f"the body is no JSON: {error}. Expected nothing, or {{}}.", 400) from None
        if asked not in ({}, {"parameters": {}}):
            raise RefusedError(
                "the body has parameters, which this server does not know: expected nothing, or {}. A model is loaded from "
                "where its module finds it.",
                400,
            )
        await model.load()
        return JSONResponse({"name": model.name, "version": str(model.present.number)})

    async def unknown(self, request: Request) -> Response:
        """The paths that compute, with the name of a model that is not there."""
        raise RefusedError(f"the model {self._found(request)[0].name!r} has no such path.", 404)

    def _found(self, request: Request) -> tuple[Model, Version]:
        model = self._models.named(request.path_params["name"])
        return model, model.version(request.path_params.get("version"))


def check_key_of(request: Request, options: Options) -> None:
    """Raise unless a request shows the key of the server, if it has one.

    Raises:
        RefusedError: It shows no key, or another one.
    """
    check_key(dict(request.headers.raw), options.api_key)


async def _small(request: Request) -> bytes:
    """Return the body of a request that has little to say."""
    body = b""
    try:
        async for more in request.stream():
            body += more
            if len(body) > _MOST_BYTES:
                raise RefusedError(f"the body has more than {_MOST_BYTES} bytes.", 413)
    except ClientDisconnect:  # nobody reads the answer
        raise RefusedError("the client is gone.", 400) from None
    return body
