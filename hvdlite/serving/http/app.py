"""The HTTP application of a server: its paths."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from hvdlite.serving.http.page import openapi, page
from hvdlite.serving.http.predict_endpoint import Endpoint, Intake, PredictEndpoint, Receive, Scope, Send, check_key
from hvdlite.serving.metrics import metrics_text
from hvdlite.serving.models import Models
from hvdlite.serving.options import Options
from hvdlite.serving.service import RefusedError

_SAFE = {
    "content-security-policy": "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'",
    "x-content-type-options": "nosniff",
}


class App:
    """The ASGI application of a server. Starlette has all its paths; what is busy does not go through it.

    Args:
        models: What computes.
        options: The settings.
    """

    def __init__(self, models: Models, options: Options) -> None:
        self.intake = Intake(options)
        self._busy: dict[str, Endpoint] = {"/v1/predict": PredictEndpoint(models.first, self.intake)}
        self._all = _all_paths(_Pages(models, options), self._busy)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        busy = self._busy.get(scope["path"]) if scope["type"] == "http" and scope["method"] == "POST" else None
        await (busy or self._all)(scope, receive, send)


def _all_paths(pages: _Pages, busy: Mapping[str, Endpoint]) -> Starlette:
    return Starlette(
        routes=[
            *[Route(path, endpoint, methods=["POST"]) for path, endpoint in busy.items()],
            Route("/healthz", pages.healthz),
            Route("/readyz", pages.readyz),
            Route("/metrics", pages.metrics),
            Route("/explain", pages.explain),
            Route("/openapi.json", pages.openapi),
            Route("/", pages.start),
        ],
        exception_handlers={RefusedError: _refused, HTTPException: _http_error},
    )


class _Pages:
    """The paths that are not busy. Those that tell of the load need the key."""

    def __init__(self, models: Models, options: Options) -> None:
        self._models, self._options = models, options
        self._page = Path(options.page).read_text() if options.page else None

    async def healthz(self, request: Request) -> Response:
        return PlainTextResponse("ok\n")

    async def readyz(self, request: Request) -> Response:
        models = self._models
        there = sum(model.service.ready_replicas for model in models)
        wanted = self._options.replicas * len(models)
        state = {"ready": models.are_ready, "replicas": there, "wanted": wanted, "draining": models.is_draining}
        return JSONResponse(state, 200 if models.are_ready else 503)

    async def metrics(self, request: Request) -> Response:
        self._check_key(request)
        text = metrics_text({model.name: model.metrics for model in self._models})
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")

    async def explain(self, request: Request) -> Response:
        self._check_key(request)
        return PlainTextResponse(self._models.text(lambda model: model.service.explanation.rstrip(), "\n\n") + "\n")

    async def openapi(self, request: Request) -> Response:
        return JSONResponse(openapi(self._models.first.service.spec, self._options))

    async def start(self, request: Request) -> Response:
        return HTMLResponse(self._page or page(self._models.first.service.spec, self._options), headers=_SAFE)

    def _check_key(self, request: Request) -> None:
        check_key(dict(request.headers.raw), self._options.api_key)


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, RefusedError)
    return JSONResponse({"error": str(error)}, error.status, error.headers)


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    text = f"{request.method} {request.url.path}: {error.detail}. /openapi.json describes all paths."
    return JSONResponse({"error": text}, error.status_code, error.headers)
