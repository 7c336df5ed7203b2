"""Drives a headless Chromium over a pipe with its DevTools protocol: no port, no other package."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
_FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-sync",
    "--no-first-run",
    "--hide-scrollbars",
    "--remote-debugging-pipe",
)


def browser_path() -> str | None:
    """Return the path of an installed Chromium, None where there is none."""
    return next((path for path in map(shutil.which, _NAMES) if path), None)


@contextmanager
def running_browser(path: str, user_data: Path) -> Iterator[Tab]:
    """Start Chromium and yield its one tab; it is gone when the block ends."""
    commands_read, commands_write = os.pipe()
    answers_read, answers_write = os.pipe()
    # Chromium reads commands from descriptor 3 and writes answers to 4; bash puts the pipes there. Other shells take
    # no descriptors above 9.
    script = f'exec "$0" "$@" 3<&{commands_read} 4>&{answers_write}'
    process = subprocess.Popen(
        ["bash", "-c", script, path, *_FLAGS, f"--user-data-dir={user_data}", "about:blank"],
        pass_fds=(commands_read, answers_write),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(commands_read)
    os.close(answers_write)
    with os.fdopen(commands_write, "wb", buffering=0) as commands, os.fdopen(answers_read, "rb") as answers:
        connection = _Connection(commands, answers)
        try:
            yield Tab(connection)
            connection.send("Browser.close")
            process.wait(timeout=20)
        finally:
            if process.poll() is None:
                process.kill()
            process.wait()


class _Connection:
    """Messages are JSON, each ended by a zero byte."""

    def __init__(self, commands: Any, answers: Any) -> None:
        self._commands = commands
        self._answers = answers
        self._unread = b""
        self._last_id = 0
        self.events: list[dict[str, Any]] = []

    def send(self, method: str, session: str | None = None, **params: Any) -> dict[str, Any]:
        """Send a command and return its result; events that come before it are kept in ``events``."""
        self._last_id += 1
        message = {"id": self._last_id, "method": method, "params": params}
        if session is not None:
            message["sessionId"] = session
        self._commands.write(json.dumps(message).encode() + b"\0")
        while True:
            answer = self.receive()
            if answer.get("id") == self._last_id:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                return dict(answer["result"])

    def receive(self) -> dict[str, Any]:
        while b"\0" not in self._unread:
            chunk = os.read(self._answers.fileno(), 2**20)
            if not chunk:
                raise RuntimeError("Chromium closed its pipe; it may have crashed")
            self._unread += chunk
        text, _, self._unread = self._unread.partition(b"\0")
        answer = dict(json.loads(text))
        if "id" not in answer:
            self.events.append(answer)
        return answer


class Tab:
    """One page. ``problems`` are its errors and console messages, ``requests`` the addresses it asked for."""

    def __init__(self, connection: _Connection) -> None:
        self._connection = connection
        target = connection.send("Target.createTarget", url="about:blank")["targetId"]
        self._session = connection.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self._send(f"{domain}.enable")
        self._send("Page.setLifecycleEventsEnabled", enabled=True)

    def _send(self, method: str, **params: Any) -> dict[str, Any]:
        return self._connection.send(method, session=self._session, **params)

    def open(self, address: str, *, width: int = 1280, height: int = 900, dark: bool = False) -> None:
        """Load ``address`` at the given size and wait until it has loaded."""
        self._send("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._send("Emulation.setEmulatedMedia", features=[scheme])
        # A new address that differs in its fragment alone would not load anew.
        self._load("about:blank")
        self._connection.events.clear()
        self._load(address)

    def _load(self, address: str) -> None:
        loader = self._send("Page.navigate", url=address)["loaderId"]
        while not any(
            event["params"]["name"] == "load" and event["params"]["loaderId"] == loader
            for event in self._events("Page.lifecycleEvent")
        ):
            self._connection.receive()

    def evaluate(self, expression: str) -> Any:
        """Return the value of a JavaScript expression in the page."""
        answer = self._send("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(f"{expression}: {answer['exceptionDetails']}")
        return answer["result"].get("value")

    def press(self, key: str, code: int) -> None:
        """Press and let go of a key, as a person would."""
        for kind in ("keyDown", "keyUp"):
            self._send("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code)

    def screenshot(self, path: Path, *, whole_page: bool = False) -> None:
        """Write a PNG of what is seen, or of the whole page."""
        picture = self._send("Page.captureScreenshot", format="png", captureBeyondViewport=whole_page)
        path.write_bytes(base64.b64decode(picture["data"]))

    @property
    def requests(self) -> list[str]:
        self.evaluate("new Promise(requestAnimationFrame)")
        sent = self._events("Network.requestWillBeSent")
        return [event["params"]["request"]["url"] for event in sent]

    @property
    def problems(self) -> list[dict[str, Any]]:
        self.evaluate("new Promise(requestAnimationFrame)")
        methods = ("Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded")
        return self._events(*methods)

    def _events(self, *methods: str) -> list[dict[str, Any]]:
        return [event for event in self._connection.events if event["method"] in methods]
