"""A browser without a window, for tests of pages. It is driven by the WebDriver protocol (www.w3.org/TR/webdriver2)."""

from __future__ import annotations

import base64
import contextlib
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx

Point = tuple[float, float]
MISSING = " and ".join(
    f"{what} is not installed" for what in ("chromium", "chromedriver") if shutil.which(what) is None
)
"""Why there is no browser; empty if there is one."""
_OPTIONS = ["--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu", "--window-size=900,700"]
_PATIENCE = 60.0  # seconds for one command


class Browser:
    """One window."""

    def __init__(self, client: httpx.Client, session: str) -> None:
        self._client, self._session = client, session

    def go(self, url: str) -> None:
        """Open a page, and wait until it is loaded."""
        self._post("url", url=url)

    def resize(self, width: int, height: int) -> None:
        """Give pages a window of so many pixels: a window itself is not as narrow as that of a phone."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": True}
        self._post("goog/cdp/execute", cmd="Emulation.setDeviceMetricsOverride", params=size)

    def run(self, script: str, *arguments: Any) -> Any:
        """Run the body of a function in the page, and return what it returns."""
        return self._post("execute/sync", script=script, args=arguments)

    def text(self, selector: str) -> str:
        """Return the text of an element."""
        return str(self.run("return document.querySelector(arguments[0]).innerText", selector))

    def wait_for(self, what: Callable[[], Any]) -> Any:
        """Ask until something is true, and return it. pytest's limit ends it."""
        while not (found := what()):
            pass
        return found

    def click(self, selector: str) -> None:
        """Press the mouse in the middle of an element."""
        self.drag(selector, [[(0, 0)]])

    def drag(self, selector: str, strokes: Sequence[Sequence[Point]]) -> None:
        """Draw strokes with the mouse. Points are in pixels from the middle of an element."""
        (element,) = self._post("element", using="css selector", value=selector).values()
        actions: list[dict[str, Any]] = []
        for stroke in strokes:
            for number, (x, y) in enumerate(stroke):
                origin = {"element-6066-11e4-a52e-4f735466cecf": element}
                actions.append({"type": "pointerMove", "duration": 0, "origin": origin, "x": round(x), "y": round(y)})
                if number == 0:
                    actions.append({"type": "pointerDown", "button": 0})
            actions.append({"type": "pointerUp", "button": 0})
        self._post("actions", actions=[{"type": "pointer", "id": "mouse", "actions": actions}])

    def picture(self, path: Path) -> None:
        """Write what the window shows, as PNG."""
        path.write_bytes(base64.b64decode(self._asked(self._client.get(f"{self._session}/screenshot"))))

    def _post(self, command: str, **arguments: Any) -> Any:
        return self._asked(self._client.post(f"{self._session}/{command}", json=arguments))

    @staticmethod
    def _asked(answer: httpx.Response) -> Any:
        assert answer.status_code == 200, answer.text
        return answer.json()["value"]


@contextlib.contextmanager
def browser() -> Iterator[Browser]:
    """Start Chromium, and end it."""
    command = [shutil.which("chromedriver") or "chromedriver", "--port=0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as driver:
        assert driver.stdout
        try:
            port = None
            while port is None:
                line = driver.stdout.readline()
                assert line, "chromedriver has ended"
                port = re.search(r"started successfully on port (\d+)", line)
            with httpx.Client(base_url=f"http://127.0.0.1:{port[1]}", timeout=_PATIENCE) as client:
                wanted = {"goog:chromeOptions": {"args": _OPTIONS, "binary": shutil.which("chromium")}}
                started = client.post("/session", json={"capabilities": {"alwaysMatch": wanted}})
                assert started.status_code == 200, started.text
                session = f"/session/{started.json()['value']['sessionId']}"
                try:
                    yield Browser(client, session)
                finally:
                    client.delete(session)
        finally:
            driver.terminate()
