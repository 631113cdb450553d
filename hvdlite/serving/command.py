"""``hvdlite serve``: its options. What it runs is imported when it runs."""

from __future__ import annotations

import argparse
import ssl
import urllib.error
import urllib.request
from typing import Any

from hvdlite.config import environment
from hvdlite.errors import ArgumentError, LaunchError
from hvdlite.serving.options import Options, count, seconds, size


def add_command(commands: Any) -> None:
    """Add ``serve`` to the commands of a parser, which `argparse.ArgumentParser.add_subparsers` has returned."""
    parser = commands.add_parser(
        "serve",
        help="serve a function or a model over HTTP (hvdlite docs serving)",
        description="Serve a function or a model over HTTP: inputs that come together are computed together.",
        allow_abbrev=False,
    )
    parser.set_defaults(action=_run)
    default = Options()
    add = parser.add_argument
    add("predict", nargs="?", metavar="MODULE:NAME", help="the function, or what hvd.servable returned")
    add(
        "--model",
        action="append",
        default=[],
        metavar="NAME=MODULE:NAME",
        help="a model by its name; repeated: several",
    )
    add(
        "--replicas", type=int, default=default.replicas, metavar="N", help="processes that compute, for each model (1)"
    )
    add("--devices", default=default.devices, metavar="GPUS", help="auto: one for each replica; none; or 0,1,… (auto)")
    add("--threads-per-replica", default="auto", metavar="N", help="threads of each replica (auto: cores ÷ replicas)")
    add("--max-batch", type=int, default=default.max_batch, metavar="N", help="the most inputs of a batch (32)")
    add("--max-wait", default="auto", metavar="TIME", help="how long the oldest input waits for others (auto)")
    add("--slo-p99", metavar="TIME", help="auto: least compute with a p99 of at most this (least mean latency)")
    add("--host", default=default.host, help="the address to listen on (127.0.0.1: this machine only)")
    add("--port", type=int, default=default.port, help="the port to listen on (8000; 0: any free one)")
    add("--api-key-env", metavar="NAME", help="the environment variable that has the key which requests must show")
    add("--max-queue", type=int, default=default.max_queue, metavar="N", help="the most inputs that wait (1024)")
    add("--deadline", default="30s", metavar="TIME", help="an input that waits longer is given up (30s)")
    add("--timeout", default="60s", metavar="TIME", help="a replica that needs longer for a batch is replaced (60s)")
    add("--start-timeout", default="5min", metavar="TIME", help="a replica must be ready by then (5min)")
    add(
        "--lame-duck", default="5s", metavar="TIME", help="after SIGTERM, answer all for so long; /readyz says 503 (5s)"
    )
    add("--drain", default="30s", metavar="TIME", help="then answer what is there for so long (30s)")
    add("--max-body", default="8M", metavar="BYTES", help="the most bytes of a request (8M)")
    add("--max-memory", default="512M", metavar="BYTES", help="the most bytes of all requests together (512M)")
    add("--read-timeout", default="20s", metavar="TIME", help="for a request's header, and again for its body (20s)")
    add("--keep-alive", default="5s", metavar="TIME", help="a connection without a request stays so long (5s)")
    add("--max-connections", type=int, default=default.max_connections, metavar="N", help="connections (1000)")
    add("--page", default=default.page, metavar="FILE", help="the HTML page of / (one to try the model)")
    add("--certfile", default="", metavar="FILE", help="TLS: the certificate, as PEM (none: no TLS)")
    add("--keyfile", default="", metavar="FILE", help="TLS: its key (none: it is in --certfile)")
    add("--root-path", default="", metavar="PATH", help="where a proxy shows the server, such as /models")
    add(
        "--cors",
        default="",
        metavar="ORIGINS",
        help="pages of these origins may ask, such as https://example.org (none)",
    )
    add(
        "--explain",
        action="store_true",
        help="ask the server on --host and --port what it has chosen and why, and leave",
    )


def _run(found: argparse.Namespace) -> None:
    key = _key(found.api_key_env)
    if found.explain:
        scheme = "https" if found.certfile else "http"
        print(_ask(f"{scheme}://{found.host}:{found.port}/explain", key, found.certfile), end="")
        return
    predict = _models(found.predict, found.model)
    from hvdlite.serving.serve import serve

    serve(
        predict,
        api_key=key,
        max_wait=None if found.max_wait == "auto" else seconds(found.max_wait),
        threads_per_replica=None if found.threads_per_replica == "auto" else count(found.threads_per_replica),
        slo_p99=None if found.slo_p99 is None else seconds(found.slo_p99),
        **{
            name: getattr(found, name)
            for name in (
                *("replicas", "devices", "max_batch", "host", "port", "max_queue", "max_connections", "page"),
                *("certfile", "keyfile", "root_path", "cors"),
            )
        },
        **{
            name: seconds(getattr(found, name))
            for name in ("deadline", "timeout", "start_timeout", "lame_duck", "drain", "read_timeout", "keep_alive")
        },
        **{name: size(getattr(found, name)) for name in ("max_body", "max_memory")},
    )


def _models(predict: str | None, named: list[str]) -> str | dict[str, str]:
    """Return what is to be served: one model, or several by their names."""
    if not named:
        if predict is None:
            raise ArgumentError("serve: give MODULE:NAME of what is to be served, such as my_model:predict.")
        return predict
    if predict is not None:
        raise ArgumentError(
            f"serve: {predict} and --model {named[0]}: give all models by --model, for each needs a name."
        )
    models: dict[str, str] = {}
    for each in named:
        name, equals, what = each.partition("=")
        if not equals or name in models:
            found = f"the name {name!r} twice" if equals else "no name"
            raise ArgumentError(
                f"--model {each}: it has {found}: expected NAME=MODULE:NAME, with another name for each model."
            )
        models[name] = what
    return models


def _key(variable: str | None) -> str:
    if variable is None:
        return ""
    key = environment().get(variable, "")
    if not key:
        raise ArgumentError(f"--api-key-env {variable}: the environment has no such variable, or it is empty.")
    return key


def _ask(url: str, key: str, certfile: str) -> str:
    request = urllib.request.Request(url, headers={"authorization": f"Bearer {key}"} if key else {})
    try:
        with urllib.request.urlopen(request, timeout=10, context=_trusting(certfile)) as answer:
            return str(answer.read().decode())
    except urllib.error.HTTPError as error:
        raise LaunchError(f"{url} answers {error.code}: {error.read().decode(errors='replace')}") from None
    except OSError as error:
        raise LaunchError(f"no server answers at {url} ({error}): give its --host and --port.") from None


def _trusting(certfile: str) -> ssl.SSLContext | None:
    """Return a context that trusts the authorities of the system, and a certificate."""
    if not certfile:
        return None
    context = ssl.create_default_context()
    try:
        context.load_verify_locations(certfile)
    except OSError as error:
        raise ArgumentError(f"--certfile {certfile}: {error}: expected a file with a certificate, as PEM.") from None
    return context
