"""Gives the page of a job to who has its token, on the loopback interface only."""

from __future__ import annotations

import contextlib
import functools
import hmac
import os
import secrets
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

from hvdlite.errors import LaunchError
from hvdlite.launch.dashboard.board import Board, View
from hvdlite.launch.dashboard.page import page, text
from hvdlite.launch.worker.shared_memory import name_in_memory

HOST = "127.0.0.1"
NAME = "hvdlite.top."
"""So begins the name of the file in which `hvdlite top` finds the page; then come the user and the process of hvdliterun."""
_AT_ONCE = 16
_POLL_SECONDS = 0.1
_REQUEST_SECONDS = 5.0
_LAST_SECONDS = 2.5
"""So long the page of a job that has ended is still there for who has looked at it so shortly before."""


class Dashboard:
    """The page of one job.

    Args:
        title: What the job runs.
        port: The port; 0 for any that is free.

    Attributes:
        board: What is known of the job.
        url: The address of the page, with its token.

    Raises:
        LaunchError: The port cannot be used.
    """

    def __init__(self, title: str, port: int) -> None:
        self.board = Board(title)
        self.token = secrets.token_urlsafe(24)
        self._seen_at = float("-inf")
        self._has_shown_end = threading.Event()
        try:
            self._server = _Server((HOST, port), _handler(self))
        except OSError as error:
            raise LaunchError(
                f"--dashboard {port}: port {port} of {HOST} cannot be used ({error.strerror}). Give another port, or none "
                "for any that is free."
            ) from error
        self.url = f"http://{HOST}:{self._server.server_address[1]}/?token={self.token}"
        self._path = ""
        with contextlib.suppress(OSError):  # then `hvdlite top` finds nothing, and the page is there all the same
            self._path = _publish(self.url)
        serve = functools.partial(self._server.serve_forever, _POLL_SECONDS)
        threading.Thread(target=serve, name="hvdlite-dashboard", daemon=True).start()

    def show_end(self, words: str, failed: bool) -> None:
        """Show that the job has ended. If somebody has just looked, this waits for a moment until he looks again.

        Args:
            words: The last words of hvdliterun.
            failed: Whether the job has failed.
        """
        self.board.end(words, failed)
        with contextlib.suppress(KeyboardInterrupt):
            if time.monotonic() < self._seen_at + _LAST_SECONDS:
                self._has_shown_end.wait(_LAST_SECONDS)

    def close(self) -> None:
        """Close the page."""
        with contextlib.suppress(OSError):
            os.unlink(self._path)
        self._server.shutdown()
        self._server.server_close()

    def has_shown(self, view: View) -> None:
        """Note that somebody has seen this."""
        self._seen_at = time.monotonic()
        if view.ended:
            self._has_shown_end.set()

    def answer(self, view: View, address: str, hosts: list[str], nonce: str) -> tuple[int, str, str]:
        """Return the status, the type and the body of the answer to a request.

        Args:
            view: What there is to see.
            address: The path of the request, with its query.
            hosts: What the request says whom it is for: a page of another site, whose name means this machine, says its own.
            nonce: See `page`.
        """
        parts = urlsplit(address)
        given = parse_qs(parts.query).get("token", [""])[0]
        port = str(self._server.server_address[1])
        if hosts not in ([f"{name}:{port}"] for name in (HOST, "localhost")):
            return 403, "text/plain", "This page is for 127.0.0.1 only.\n"
        if not hmac.compare_digest(given.encode(), self.token.encode()):
            return (
                403,
                "text/plain",
                "Open the whole address that hvdliterun has printed: its token is missing or wrong.\n",
            )
        if parts.path not in ("/", "/text"):
            return 404, "text/plain", "There is nothing here.\n"
        if parts.path == "/text":
            return 410 if view.ended else 200, "text/plain", text(view)
        return 200, "text/html", page(view, nonce)


class _Server(ThreadingHTTPServer):
    """Serves so many requests at once at most, for anybody on this machine may connect."""

    daemon_threads = True
    block_on_close = False
    allow_reuse_address = True

    def __init__(self, *arguments: Any) -> None:
        self._free = threading.BoundedSemaphore(_AT_ONCE)
        super().__init__(*arguments)

    def verify_request(self, *_: Any) -> bool:
        return self._free.acquire(blocking=False)

    def process_request_thread(self, *arguments: Any) -> None:
        try:
            super().process_request_thread(*arguments)
        finally:
            self._free.release()

    def handle_error(self, *_: Any) -> None:
        """Say nothing: who has asked is gone."""


def _handler(dashboard: Dashboard) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        timeout = _REQUEST_SECONDS

        def do_GET(self) -> None:
            nonce = secrets.token_urlsafe(12)
            view = dashboard.board.view
            status, kind, body = dashboard.answer(view, self.path, self.headers.get_all("Host", []), nonce)
            data = body.encode()
            self.send_response(status)
            for name, value in {
                "Content-Type": f"{kind}; charset=utf-8",
                "Content-Length": str(len(data)),
                "Cache-Control": "no-store",
                "Content-Security-Policy": f"default-src 'none'; script-src 'nonce-{nonce}'; style-src 'unsafe-inline'; "
                "connect-src 'self'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'",
                "Referrer-Policy": "no-referrer",
                "X-Content-Type-Options": "nosniff",
            }.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(data)
            if status in (200, 410):
                dashboard.has_shown(view)

        def log_message(self, *_: Any) -> None:
            """Write nothing: stderr is the job's, and the address has the token."""

        def version_string(self) -> str:
            return "hvdlite"

    return Handler


def _publish(url: str) -> str:
    """Write the address where only this user can read it, and return the path."""
    path = name_in_memory(f"{NAME}{os.getuid()}.")
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600), "w") as file:
        file.write(url)
    return path
