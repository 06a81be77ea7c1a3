"""Chromium over its DevTools pipe: a page is opened, scripts run in it, pictures are taken."""

import base64
import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome")


class Tab:
    """One page. `errors` holds what its console said of errors, and scripts that failed."""

    def __init__(self, write: int, read: int) -> None:
        self._write, self._read, self._rest, self._number, self._session = write, read, b"", 0, ""
        self.errors: list[str] = []
        target = self._ask("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Performance"):
            self._ask(f"{domain}.enable")

    def _ask(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            while b"\0" not in self._rest:
                data = os.read(self._read, 1 << 20)
                assert data, "Chromium has ended"
                self._rest += data
            one, _, self._rest = self._rest.partition(b"\0")
            said = json.loads(one)
            if said.get("method") == "Runtime.exceptionThrown" or (
                said.get("method") == "Log.entryAdded" and said["params"]["entry"]["level"] == "error"
            ):
                self.errors.append(json.dumps(said["params"])[:500])
            if said.get("id") == self._number:
                assert "error" not in said, said
                return said["result"]

    def another(self) -> "Tab":
        """A second tab of the same browser. One is asked at a time."""
        return Tab(self._write, self._read)

    def open(self, url: str) -> None:
        """Go there, and wait until it is loaded."""
        self._ask("Page.navigate", url=url)
        self.until("document.readyState === 'complete'")

    def run(self, script: str) -> Any:
        """The value of an expression; a promise's once it is kept."""
        found = self._ask("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def until(self, condition: str, seconds: float = 30) -> None:
        """Wait until an expression is true."""
        deadline = time.monotonic() + seconds
        while not self.run(f"Boolean({condition})"):
            assert time.monotonic() < deadline, (
                f"not within {seconds} s: {condition}\n{self.run('document.body.innerText')}"
            )
            time.sleep(0.05)

    def counts(self) -> dict[str, float]:
        """What the page has done since it was opened, as Chromium counts it: `LayoutCount` and others."""
        return {one["name"]: one["value"] for one in self._ask("Performance.getMetrics")["metrics"]}

    def look(self, width: int = 1100, height: int = 800, dark: bool = False) -> None:
        """The window's size in pixels, and the colours that the user prefers."""
        self._ask(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 500
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._ask("Emulation.setEmulatedMedia", features=[scheme])

    def picture(self, path: Path) -> None:
        """A PNG of what is seen."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(base64.b64decode(self._ask("Page.captureScreenshot")["data"]))


@contextmanager
def chromium(profile: Path, *, alone: bool = False) -> Iterator[Tab]:
    """A browser with a tab. profile: an empty folder. alone: it resolves no name, so a page that asks elsewhere gets
    nothing. Raises AssertionError where there is no Chromium."""
    program = next(filter(None, map(shutil.which, NAMES)), None)
    assert program is not None, f"none of {', '.join(NAMES)} is on the PATH: apt-get install chromium"
    theirs_in, write = os.pipe()
    read, theirs_out = os.pipe()

    def pipes() -> None:
        low, high = os.dup(theirs_in), os.dup(theirs_out)  # either might be 3 or 4 already
        os.dup2(low, 3)
        os.dup2(high, 4)

    words = ["--headless=new", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe", f"--user-data-dir={profile}"]
    words += ["--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"] if alone else []
    process = subprocess.Popen(
        [program, *words, "about:blank"], preexec_fn=pipes, close_fds=False, stderr=subprocess.DEVNULL
    )
    try:
        yield Tab(write, read)
    finally:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(10)
        process.kill()
        for end in (theirs_in, write, read, theirs_out):
            os.close(end)
