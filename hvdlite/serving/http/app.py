"""The HTTP application of a server: its paths."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from hvdlite.serving.http.docs_page import docs_page
from hvdlite.serving.http.model_pages import ModelPages, check_key_of
from hvdlite.serving.http.open_inference import InferEndpoint
from hvdlite.serving.http.page import openapi, page
from hvdlite.serving.http.predict_endpoint import Endpoint, Intake, PredictEndpoint, Receive, Scope, Send
from hvdlite.serving.http.tf_serving import TfPredictEndpoint
from hvdlite.serving.metrics import ConnectionMetrics, metrics_text
from hvdlite.serving.models import Models
from hvdlite.serving.options import Options
from hvdlite.serving.service import RefusedError

_SAFE = {
    "content-security-policy": "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'",
    "x-content-type-options": "nosniff",
}
_EXPOSED = ["retry-after", "inference-header-content-length"]
"""Headers of answers that pages of other origins may read."""


class App:
    """The ASGI application of a server. Starlette has all its paths; what is busy does not go through it.

    Args:
        models: What computes.
        options: The settings.
    """

    def __init__(self, models: Models, options: Options) -> None:
        self.intake, self.connections = Intake(options), ConnectionMetrics()
        routes = [
            *_routes(_Pages(models, options, self.connections), models, self.intake),
            *_routes_of_models(models, options),
        ]
        self._all = Starlette(routes=routes, exception_handlers={RefusedError: _refused, HTTPException: _http_error})
        self._busy = {route.path: route.endpoint for route in routes if isinstance(route.endpoint, Endpoint)}
        self._root = options.root_path
        self._for_pages: Any = None
        if options.cors:
            about: dict[str, Any] = {
                "allow_methods": ["GET", "POST"],
                "allow_headers": ["*"],
                "expose_headers": _EXPOSED,
            }
            self._for_pages = CORSMiddleware(self._route, options.origins, **about)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        await (self._for_pages or self._route)(scope, receive, send)

    async def _route(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._root and scope["type"] == "http" and f"{scope['path']}/".startswith(f"{self._root}/"):
            # Some proxies take the root path away, and some do not.
            scope["path"] = scope["path"][len(self._root) :] or "/"
        busy = self._busy.get(scope["path"]) if scope["type"] == "http" and scope["method"] == "POST" else None
        await (busy or self._all)(scope, receive, send)


def _routes(pages: _Pages, models: Models, intake: Intake) -> list[Route]:
    routes = [
        Route("/v1/predict", PredictEndpoint(models.first, intake), methods=["POST"]),
        Route("/healthz", pages.healthz),
        Route("/readyz", pages.readyz),
        Route("/metrics", pages.metrics),
        Route("/explain", pages.explain),
        Route("/openapi.json", pages.openapi),
        Route("/docs", pages.docs),
        Route("/", pages.start),
    ]
    for model in models:
        for start, end, endpoint in (
            ("/v2/models", "/infer", InferEndpoint(model, intake)),
            ("/v1/models", ":predict", TfPredictEndpoint(model, intake)),
        ):
            for version in ("", "/versions/{version}"):
                routes.append(Route(f"{start}/{model.name}{version}{end}", endpoint, methods=["POST"]))
    return routes


def _routes_of_models(models: Models, options: Options) -> list[Route]:
    """Return the paths of other protocols that do not compute."""
    pages = ModelPages(models, options)
    routes = [
        Route("/v2", pages.server),
        Route("/v2/health/live", pages.live),
        Route("/v2/health/ready", pages.ready),
        Route("/v2/repository/index", pages.index, methods=["POST"]),
        Route("/v2/repository/models/{name}/load", pages.load, methods=["POST"]),
        Route("/v1/models", pages.names),
    ]
    for version in ("", "/versions/{version}"):
        routes += [
            Route(f"/v2/models/{{name}}{version}", pages.metadata),
            Route(f"/v2/models/{{name}}{version}/ready", pages.model_ready),
            Route(f"/v1/models/{{name}}{version}", pages.status),
            Route(f"/v2/models/{{name}}{version}/infer", pages.unknown, methods=["POST"]),
            Route(f"/v1/models/{{name}}{version}:predict", pages.unknown, methods=["POST"]),
        ]
    return routes


class _Pages:
    """The paths that are not busy. Those that tell of the load need the key."""

    def __init__(self, models: Models, options: Options, connections: ConnectionMetrics) -> None:
        self._models, self._options, self._connections = models, options, connections
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
        check_key_of(request, self._options)
        text = metrics_text({model.name: model.metrics for model in self._models}, self._connections)
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")

    async def explain(self, request: Request) -> Response:
        check_key_of(request, self._options)
        return PlainTextResponse(self._models.text(lambda model: model.service.explanation.rstrip(), "\n\n") + "\n")

    async def openapi(self, request: Request) -> Response:
        return JSONResponse(openapi(self._models.first.service.spec, self._options))

    async def docs(self, request: Request) -> Response:
        about = openapi(self._models.first.service.spec, self._options)
        return HTMLResponse(docs_page(about, self._options.root_path), headers=_SAFE)

    async def start(self, request: Request) -> Response:
        return HTMLResponse(self._page or page(self._models.first.service.spec, self._options), headers=_SAFE)


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, RefusedError)
    return JSONResponse({"error": str(error)}, error.status, error.headers)


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    text = f"{request.method} {request.url.path}: {error.detail}. /openapi.json describes all paths."
    return JSONResponse({"error": text}, error.status_code, error.headers)
