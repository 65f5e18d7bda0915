"""A headless Chromium driven over its debugging pipe: open a page, run JavaScript, take a screenshot.

python -m tests.server.browser http://127.0.0.1:8000/ page.png       # generates something and takes a picture
"""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

CHROMIUM = next(
    (path for name in ("chromium-headless-shell", "chromium", "google-chrome") if (path := shutil.which(name))), None
)


class Browser:
    """One page. Context manager."""

    def __init__(self, width: int = 1200, height: int = 860) -> None:
        assert CHROMIUM is not None
        self._profile = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)  # the browser still writes for a moment
        to_child, self._write = os.pipe()
        self._read, from_child = os.pipe()
        flags = (
            f"--headless --no-sandbox --disable-gpu --hide-scrollbars --window-size={width},{height} "
            f"--user-data-dir={self._profile.name} --remote-debugging-pipe about:blank"
        )
        self._process = subprocess.Popen(
            ["bash", "-c", f"exec {CHROMIUM} {flags} 3<&{to_child} 4>&{from_child}"],
            pass_fds=(to_child, from_child),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_child)
        os.close(from_child)
        self._buffer = b""
        self._last = 0
        self._session: str | None = None
        self.events: list[dict[str, Any]] = []
        target = self._call("Target.createTarget", url="about:blank", width=width, height=height)["targetId"]
        self._session = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self._call(f"{domain}.enable")

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._write)
        os.close(self._read)
        self._profile.cleanup()

    def _call(self, method: str, **params: Any) -> dict[str, Any]:
        self._last += 1
        message = {"id": self._last, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            while b"\0" not in self._buffer:
                piece = os.read(self._read, 1 << 20)
                assert piece, "the browser ended"
                self._buffer += piece
            frame, _, self._buffer = self._buffer.partition(b"\0")
            answer = json.loads(frame)
            if answer.get("id") == self._last:
                assert "error" not in answer, answer
                return answer["result"]
            self.events.append(answer)

    def open(self, url: str) -> None:
        self._call("Page.navigate", url=url)
        self.wait("document.readyState === 'complete'")

    def run(self, script: str) -> Any:
        """Value of a JavaScript expression."""
        result = self._call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def wait(self, condition: str, limit_s: float = 30.0) -> None:
        limit = time.monotonic() + limit_s
        while not self.run(condition):
            assert time.monotonic() < limit, f"never true: {condition}"
            time.sleep(0.05)

    def screenshot(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self._call("Page.captureScreenshot", format="png")["data"]))


def main(url: str, path: str) -> None:
    with Browser() as browser:
        browser.open(url)
        browser.run("document.querySelector('#max_tokens').value = 160, document.querySelector('#send').click()")
        browser.wait("document.querySelector('#output').textContent.length > 200", 120)
        browser.wait("Number(document.querySelector('#rate').textContent) > 0", 60)
        browser.screenshot(Path(path))


if __name__ == "__main__":
    main(*sys.argv[1:])
