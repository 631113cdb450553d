"""The HTTP application of a server: its paths."""

from __future__ import annotations

from pathlib import Path

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from hvdlite.serving.http.page import openapi, page
from hvdlite.serving.http.predict_endpoint import PredictEndpoint, Receive, Scope, Send, check_key
from hvdlite.serving.metrics import Metrics
from hvdlite.serving.options import Options
from hvdlite.serving.service import RefusedError, Service

_SAFE = {
    "content-security-policy": "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'",
    "x-content-type-options": "nosniff",
}


class App:
    """The ASGI application of a server. Starlette has all its paths; what is busy does not go through it.

    Args:
        service: Computes.
        options: The settings.
        metrics: What was counted.
    """

    def __init__(self, service: Service, options: Options, metrics: Metrics) -> None:
        self.predict = PredictEndpoint(service, options, metrics)
        self._all = _all_paths(_Pages(service, options, metrics), self.predict)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        is_busy = scope["type"] == "http" and scope["path"] == "/v1/predict" and scope["method"] == "POST"
        await (self.predict if is_busy else self._all)(scope, receive, send)


def _all_paths(pages: _Pages, predict: PredictEndpoint) -> Starlette:
    return Starlette(
        routes=[
            Route("/v1/predict", predict, methods=["POST"]),
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

    def __init__(self, service: Service, options: Options, metrics: Metrics) -> None:
        self._service, self._options, self._metrics = service, options, metrics
        self._page = Path(options.page).read_text() if options.page else None

    async def healthz(self, request: Request) -> Response:
        return PlainTextResponse("ok\n")

    async def readyz(self, request: Request) -> Response:
        there, is_draining = self._service.ready_replicas, self._service.is_draining
        is_ready = there > 0 and not is_draining
        state = {"ready": is_ready, "replicas": there, "wanted": self._options.replicas, "draining": is_draining}
        return JSONResponse(state, 200 if is_ready else 503)

    async def metrics(self, request: Request) -> Response:
        self._check_key(request)
        return Response(self._metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def explain(self, request: Request) -> Response:
        self._check_key(request)
        return PlainTextResponse(self._service.explanation.rstrip() + "\n")

    async def openapi(self, request: Request) -> Response:
        return JSONResponse(openapi(self._service.spec, self._options))

    async def start(self, request: Request) -> Response:
        return HTMLResponse(self._page or page(self._service.spec, self._options), headers=_SAFE)

    def _check_key(self, request: Request) -> None:
        check_key(dict(request.headers.raw), self._options.api_key)


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, RefusedError)
    return JSONResponse({"error": str(error)}, error.status, error.headers)


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    text = f"{request.method} {request.url.path}: {error.detail}. /openapi.json describes all paths."
    return JSONResponse({"error": text}, error.status_code, error.headers)
