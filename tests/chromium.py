"""A headless Chromium, driven through its debugging pipe with the standard library alone.

How it works.  With `--remote-debugging-pipe`, Chromium reads commands of its DevTools protocol from
file descriptor 3 and writes replies and events to 4; each is JSON that ends with a NUL byte.
`browser()` starts Chromium; `Tab` opens pages, runs JavaScript, types, and takes pictures.
"""

import base64
import contextlib
import fcntl
import itertools
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from typing import Any

PROGRAM = shutil.which("chromium") or shutil.which("chromium-browser")
_PATIENCE = 180.0  # seconds
_OPTIONS = (
    "--headless",
    "--no-sandbox",  # CI runs as root
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--no-first-run",
    "--hide-scrollbars",
    "--remote-debugging-pipe",
)


class Tab:
    """A page of the browser."""

    def __init__(self, commands: int, replies: int, width: int, height: int) -> None:
        self._commands, self._replies = commands, replies
        self._numbers = itertools.count(1)
        self._read = b""
        self._session: str | None = None
        target = self.call("Target.createTarget", url="about:blank")
        attached = self.call("Target.attachToTarget", targetId=target["targetId"], flatten=True)
        self._session = attached["sessionId"]
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width, height=height, deviceScaleFactor=1, mobile=False,
        )  # fmt: skip

    def call(self, method: str, **parameters: Any) -> Any:
        """Run a command of the DevTools protocol, and return its result."""
        number = next(self._numbers)
        command: dict[str, Any] = {"id": number, "method": method, "params": parameters}
        if self._session is not None:
            command["sessionId"] = self._session
        os.write(self._commands, json.dumps(command).encode() + b"\0")
        while True:
            reply = self._receive()
            if reply.get("id") == number:
                assert "error" not in reply, f"{method}: {reply['error']}"
                return reply["result"]

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._read:
            ready, _, _ = select.select([self._replies], [], [], _PATIENCE)
            assert ready, "Chromium does not answer"
            read = os.read(self._replies, 1 << 20)
            assert read, "Chromium ended"
            self._read += read
        reply, _, self._read = self._read.partition(b"\0")
        received: dict[str, Any] = json.loads(reply)
        return received

    def open(self, url: str) -> None:
        self.call("Page.navigate", url=url)

    def evaluate(self, expression: str) -> Any:
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def text(self) -> str:
        """The text that the page shows."""
        return str(self.evaluate("document.body ? document.body.innerText : ''"))

    def wait_for(self, text: str) -> None:
        """Wait until the page shows *text*."""
        self.wait_until(
            f"Boolean(document.body) && document.body.innerText.includes({json.dumps(text)})"
        )

    def wait_until(self, expression: str) -> None:
        deadline = time.monotonic() + _PATIENCE
        while not self.evaluate(expression):
            assert time.monotonic() < deadline, f"not {expression} on the page: {self.text()}"
            time.sleep(0.05)

    def send(self, selector: str, text: str) -> None:
        """Type *text* in the field that *selector* finds, and press Enter; wait until it was sent.

        A page that has not loaded everything yet may ignore the key.
        """
        shown = f"document.body.innerText.includes({json.dumps(text)})"
        field = f"document.querySelector({json.dumps(selector)})"
        self.wait_until(f"Boolean({field}) && !{field}.disabled")
        deadline = time.monotonic() + _PATIENCE
        is_sent = False
        while not is_sent:
            assert time.monotonic() < deadline, f"the page ignores Enter: {self.text()}"
            self.evaluate(f"{field}.focus(); {field}.select()")
            self.call("Input.insertText", text=text)
            for kind in ("keyDown", "keyUp"):
                self.call(
                    "Input.dispatchKeyEvent",
                    type=kind, key="Enter", code="Enter", windowsVirtualKeyCode=13, text="\r",
                )  # fmt: skip
            until = time.monotonic() + 15
            while time.monotonic() < until and not is_sent:
                is_sent = self.evaluate(f"!{field}.value.trim() || {shown}")
                time.sleep(0.05)

    def picture(self) -> bytes:
        """Return what the page shows, as PNG."""
        return base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"])


def _pipe() -> tuple[int, int]:
    """Return a pipe whose descriptors are above 9, so that none is 3 or 4."""
    ends = os.pipe()
    above = [fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in ends]
    for end in ends:
        os.close(end)
    return above[0], above[1]


@contextlib.contextmanager
def browser(width: int = 1280, height: int = 800) -> Iterator[Tab]:
    """Start Chromium with an empty profile, and yield its only page."""
    assert PROGRAM is not None, "chromium is not installed"
    their_commands, commands = _pipe()
    replies, their_replies = _pipe()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        arguments = [PROGRAM, *_OPTIONS, f"--user-data-dir={profile}", "about:blank"]
        # The shell gives Chromium the pipes as 3 and 4, whatever their numbers are here.
        redirected = f'exec "$@" 3<&{their_commands} 4>&{their_replies}'
        process = subprocess.Popen(
            ["bash", "-c", redirected, "bash", *arguments],
            pass_fds=[their_commands, their_replies],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "HOME": profile},
        )
        os.close(their_commands)
        os.close(their_replies)
        try:
            yield Tab(commands, replies, width, height)
        finally:
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            os.close(commands)
            os.close(replies)
