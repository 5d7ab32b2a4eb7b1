"""Headless Chromium, controlled by the DevTools protocol over a pipe.

It is the build for programs alone: that of Debian's chromium package starts with all that a person
needs, such as profiles and extensions, which takes three times the CPU time.
"""

import base64
import json
import os
import select
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from interop.tools import tool

ANSWER_S_MAX = 120
KEYS = {"Tab": 9, "Enter": 13, "Backspace": 8, "Space": 32, "ArrowDown": 40}
OPTIONS = (
    "--no-sandbox",  # needed where the tests run as root
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--hide-scrollbars",
    "--remote-debugging-pipe",
    # One process renders the pages of all servers, one after another, on the CPU.
    "--no-zygote",
    "--process-per-site",
    "--disable-site-isolation-trials",
    "--disable-software-rasterizer",
    "--force-prefers-reduced-motion",  # otherwise each frame of a transition is drawn
    "--disable-features=BackForwardCache,MediaRouter,OptimizationHints,"
    "ProactivelySwapBrowsingInstance,SpareRendererForSitePerProcess,Translate",
)


class Page:
    """The only page of a browser.

    Attributes:
        requests: URLs that the page requested.
        errors: errors that the browser logged to its console.
    """

    def __init__(self, to_browser: int, from_browser: int) -> None:
        self._to, self._from = to_browser, from_browser
        self._buffer = b""
        self._number = 0
        self._session = ""
        self.requests: list[str] = []
        self.errors: list[str] = []

    def attach(self) -> None:
        target = self.do("Target.createTarget", url="about:blank")["targetId"]
        attached = self.do("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.do(f"{domain}.enable")

    def do(self, method: str, **params: Any) -> dict[str, Any]:
        """Sends a command and returns its result. Keeps events that arrive before it."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self._number:
                assert "error" not in answer, (method, answer["error"])
                result: dict[str, Any] = answer["result"]
                return result
            self._note(answer)

    def _next(self) -> dict[str, Any]:
        end = time.monotonic() + ANSWER_S_MAX
        while b"\0" not in self._buffer:
            readable, _, _ = select.select([self._from], [], [], end - time.monotonic())
            assert readable, "the browser said nothing"
            chunk = os.read(self._from, 1 << 16)
            assert chunk, "the browser has ended"
            self._buffer += chunk
        message, _, self._buffer = self._buffer.partition(b"\0")
        answer: dict[str, Any] = json.loads(message)
        return answer

    def _note(self, event: dict[str, Any]) -> None:
        method, params = event.get("method"), event.get("params", {})
        if method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])
        elif method == "Runtime.exceptionThrown":
            self.errors.append(json.dumps(params["exceptionDetails"]))
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "assert"):
            self.errors.append(json.dumps(params["args"]))
        elif method == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.errors.append(params["entry"]["text"] + " " + params["entry"].get("url", ""))

    def open(self, url: str) -> None:
        self.do("Page.navigate", url=url)
        self.until("document.readyState === 'complete'")

    def value(self, expression: str) -> Any:
        """Returns the value of a JavaScript expression; awaits it if it is a promise."""
        done = self.do(
            "Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True
        )
        assert "exceptionDetails" not in done, done["exceptionDetails"]
        return done["result"].get("value")

    def until(self, expression: str) -> None:
        """Waits until the JavaScript expression is true."""
        end, pause_s = time.monotonic() + ANSWER_S_MAX, 0.02
        while not self.value(f"Boolean({expression})"):
            assert time.monotonic() < end, (expression, self.text("body"), self.errors)
            time.sleep(pause_s)
            pause_s = min(1.5 * pause_s, 0.2)

    def text(self, selector: str) -> str:
        """Returns the visible text of the first element that matches the selector, or ""."""
        text: str = self.value(f"document.querySelector({json.dumps(selector)})?.innerText ?? ''")
        return text

    def press(self, key: str) -> None:
        """Presses and releases a key of KEYS."""
        code = {"key": key, "code": key, "windowsVirtualKeyCode": KEYS[key]}
        if key in ("Enter", "Space"):
            code |= {"text": "\r" if key == "Enter" else " ", "key": key if key == "Enter" else " "}
        self.do("Input.dispatchKeyEvent", type="keyDown", **code)
        self.do("Input.dispatchKeyEvent", type="keyUp", **code)

    def write(self, text: str) -> None:
        """Types text into the focused element."""
        self.do("Input.insertText", text=text)

    def be(self, width: int, height: int, scheme: str = "light") -> None:
        """Sets the size of the page and the preferred colour scheme, "light" or "dark"."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.do("Emulation.setDeviceMetricsOverride", **size)
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.do("Emulation.setEmulatedMedia", features=features)

    def picture(self, path: Path) -> None:
        """Writes a PNG of the whole page."""
        screenshot = self.do("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(screenshot["data"]))


@contextmanager
def browsing(folder: Path) -> Iterator[Page]:
    """Yields the page of a browser whose profile is in ``folder``."""
    (theirs_in, ours_out), (ours_in, theirs_out) = os.pipe(), os.pipe()
    chromium = [tool("chromium-headless-shell"), *OPTIONS, f"--user-data-dir={folder}"]
    # Chromium reads commands from descriptor 3 and writes its replies to 4.
    wired = ["bash", "-c", f'exec "$@" 3<&{theirs_in} 4>&{theirs_out}', "bash", *chromium]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(wired, pass_fds=(theirs_in, theirs_out), stdout=log, stderr=log)
    os.close(theirs_in)
    os.close(theirs_out)
    try:
        page = Page(ours_out, ours_in)
        page.attach()
        yield page
    finally:
        os.close(ours_out)  # ends Chromium
        os.close(ours_in)
        process.terminate()
        process.wait(timeout=ANSWER_S_MAX)
