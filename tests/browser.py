"""A headless Chromium, driven over its DevTools protocol through two pipes, so that a test can type,
click and wait for a server's answers."""

import base64
import fcntl
import itertools
import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

_SECONDS = 30.0


class Browser:
    """A browser with one tab, in a `with` block. The test is skipped if Chromium is not installed.

    Args:
        folder: the browser's files.
    """

    def __init__(self, folder: Path):
        program = shutil.which("chromium") or shutil.which("google-chrome")
        if program is None:
            pytest.skip("chromium is not installed (Debian: apt-get install chromium)")
        read_end, self._out = os.pipe()
        self._in, write_end = os.pipe()
        # The browser reads from 3 and writes to 4; higher numbers are not in the way of these.
        ends = [fcntl.fcntl(end, fcntl.F_DUPFD, 10) for end in (read_end, write_end)]
        command = ["bash", "-c", f'exec "$@" 3<&{ends[0]} 4>&{ends[1]}', "bash", program]
        command += ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
        command += ["--disable-background-networking", "--no-first-run", "--hide-scrollbars"]
        command += ["--remote-debugging-pipe", f"--user-data-dir={folder}"]
        self._process = subprocess.Popen(
            command, pass_fds=ends, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        for end in (read_end, write_end, *ends):
            os.close(end)
        self._numbers = itertools.count(1)
        self._buffer = b""
        self._session: dict[str, str] = {}
        self.problems: list[str] = []
        """Errors and warnings on the console, such as those of the Content-Security-Policy. Failed
        requests are left out: a page may show them."""

    def __enter__(self) -> "Browser":
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self._session = {"sessionId": session}
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")
        return self

    def __exit__(self, *exception: object) -> None:
        self._process.terminate()
        self._process.wait()
        os.close(self._in)
        os.close(self._out)

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Return the result of a method of the protocol."""
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": params, **self._session}
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return dict(answer["result"])
            self._note(answer)

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            assert select.select([self._in], [], [], _SECONDS)[0], "the browser does not answer"
            received = os.read(self._in, 2**16)
            assert received, "the browser has ended"
            self._buffer += received
        message, _, self._buffer = self._buffer.partition(b"\0")
        return dict(json.loads(message))

    def _note(self, event: dict[str, Any]) -> None:
        params = event.get("params", {})
        if event.get("method") == "Runtime.exceptionThrown":
            self.problems.append(json.dumps(params["exceptionDetails"]))
        elif event.get("method") == "Runtime.consoleAPICalled":
            self.problems.append(json.dumps(params["args"]))
        elif event.get("method") == "Log.entryAdded" and params["entry"]["source"] != "network":
            self.problems.append(params["entry"]["text"])

    def run(self, expression: str) -> Any:
        """Return the value of a JavaScript expression in the page."""
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    def wait(self, expression: str) -> None:
        """Wait until an expression is true."""
        deadline = time.monotonic() + _SECONDS
        while not self.run(f"Boolean({expression})"):
            assert time.monotonic() < deadline, (
                f"{expression}: {self.run('document.body.innerText')}"
            )
            time.sleep(0.02)

    def open(self, url: str, *, width: int = 1280, height: int = 800) -> None:
        """Open a page in a window of a size, in pixels."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )
        self.call("Page.navigate", url=url)
        self.wait(f"location.href === {json.dumps(url)} && document.readyState === 'complete'")

    def type(self, text: str) -> None:
        """Type a text into the element with the focus."""
        self.call("Input.insertText", text=text)

    def press_enter(self) -> None:
        """Press the Enter key."""
        key = {"key": "Enter", "code": "Enter", "windowsVirtualKeyCode": 13, "text": "\r"}
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, **key)

    def prefer(self, scheme: str) -> None:
        """Set the preferred color scheme: light or dark."""
        feature = {"name": "prefers-color-scheme", "value": scheme}
        self.call("Emulation.setEmulatedMedia", features=[feature])

    def save_picture(self, file: Path) -> None:
        """Write what the window shows as a PNG file."""
        file.write_bytes(base64.b64decode(self.call("Page.captureScreenshot")["data"]))
