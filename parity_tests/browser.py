"""A headless Chromium, driven through the two pipes of its DevTools protocol: the standard library alone."""

import base64
import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any


def chromium() -> str | None:
    """The browser's path, None where there is none."""
    return next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


class Browser:
    """One page of a fresh profile. A context manager; `messages` keeps the errors and the requests that the page caused."""

    def __init__(self, program: str, profile: Path, width: int = 1280, height: int = 1000):
        self.messages: list[dict[str, Any]] = []
        to_read, self.to = os.pipe()
        self.back, to_write = os.pipe()
        shell = 'exec 3<&"$1" 4>&"$2"; shift 2; exec "$@"'
        options = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run", "--remote-debugging-pipe")
        place = (f"--user-data-dir={profile}", f"--window-size={width},{height}", "about:blank")
        command = ["bash", "-c", shell, "bash", str(to_read), str(to_write), program, *options, *place]
        self.process = subprocess.Popen(command, pass_fds=(to_read, to_write), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        os.close(to_read)
        os.close(to_write)
        self.pending, self.number, self.session = b"", 0, ""
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.send(f"{domain}.enable")

    def send(self, method: str, **params: Any) -> Any:
        """The result of a call. Raises RuntimeError for the browser's refusal."""
        self.number += 1
        number = self.number
        call = {"id": number, "method": method, "params": params} | ({"sessionId": self.session} if self.session else {})
        os.write(self.to, json.dumps(call).encode() + b"\0")
        while (message := self._receive()).get("id") != number:
            self.messages.append(message)
        if "error" in message:
            raise RuntimeError(f"{method}: {message['error']['message']}")
        return message["result"]

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self.pending:
            part = os.read(self.back, 1 << 20)
            if not part:
                raise RuntimeError("the browser ended")
            self.pending += part
        message, _, self.pending = self.pending.partition(b"\0")
        return json.loads(message)

    def open(self, url: str) -> None:
        self.send("Page.navigate", url=url)
        while not any(message.get("method") == "Page.loadEventFired" for message in self.messages):
            self.messages.append(self._receive())

    def value(self, expression: str) -> Any:
        """Of a JavaScript expression. Raises RuntimeError where it throws."""
        found = self.send("Runtime.evaluate", expression=expression, returnByValue=True)
        if "exceptionDetails" in found:
            raise RuntimeError(json.dumps(found["exceptionDetails"]))
        return found["result"].get("value")

    def click(self, selector: str) -> None:
        """Moves the mouse to the middle of an element, which is scrolled into view, and presses and releases its button."""
        box = "(e => { e.scrollIntoView({block: 'center'}); const b = e.getBoundingClientRect(); return [b.x + b.width / 2, b.y + b.height / 2]; })"
        x, y = self.value(f"{box}(document.querySelector({json.dumps(selector)}))")
        for kind in ("mouseMoved", "mousePressed", "mouseReleased"):
            self.send("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="none" if kind == "mouseMoved" else "left", clickCount=1)

    def screenshot(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self.send("Page.captureScreenshot", format="png")["data"]))

    def __enter__(self) -> "Browser":
        return self

    def __exit__(self, *exception: object) -> None:
        self.process.terminate()
        self.process.wait(timeout=20)
        os.close(self.to)
        os.close(self.back)
