"""Take a picture of every built page, on a large and on a small screen, light and dark, and find what overflows.

    make docs
    python docs/screenshots.py [--out FOLDER] [PAGE ...]

A page is named by its path in the built folder, or by a pattern (``reference/*``); without one, all pages are taken
except for listings of source code. One headless Chromium takes them all, driven through its debugging pipe. Ends with
an error if a page is wider than the screen, so that it would have to be scrolled sideways.
"""

import argparse
import base64
import fnmatch
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
OPTIONS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update"),
    *("--disable-sync", "--no-first-run", "--hide-scrollbars", "--allow-file-access-from-files"),
)
WIDTHS = (1400, 400)
THEMES = ("light", "dark")
TALLEST = 12_000  # pixels; what is below is left out

# Elements that stick out of the page, though nothing around them scrolls: the innermost ones, by tag and text.
TOO_WIDE = """
(() => {
  const wide = document.documentElement.scrollWidth - window.innerWidth;
  if (wide <= 0) return [];
  const scrolls = e => e && e !== document.body &&
    (["auto", "scroll", "hidden"].includes(getComputedStyle(e).overflowX) || scrolls(e.parentElement));
  return [...document.querySelectorAll("article *, .content *")]
    .filter(e => e.getBoundingClientRect().right > window.innerWidth + 1 && !scrolls(e.parentElement))
    .map(e => `${e.tagName.toLowerCase()}.${e.className}: ${(e.textContent || "").trim().slice(0, 60)}`).slice(-3)
    .concat([`${wide} pixels too wide`]);
})()
"""
# Mathematics is typeset after the page has loaded.
READY = """
(async () => {
  if (window.MathJax && MathJax.startup) await MathJax.startup.promise;
  for (const image of document.images) image.loading = "eager";
  const loaded = image => image.complete || new Promise(done => image.onload = image.onerror = done);
  await Promise.all([...document.images].map(loaded));
  return document.documentElement.scrollHeight;
})()
"""


class Browser:
    """A headless Chromium behind a pipe."""

    def __init__(self, program: str) -> None:
        self._profile = tempfile.mkdtemp()
        down, self._write = os.pipe()
        self._read, up = os.pipe()
        command = f'exec "$@" 3<&{down} 4>&{up}'
        arguments = [program, *OPTIONS, f"--user-data-dir={self._profile}", "--remote-debugging-pipe", "about:blank"]
        self._process = subprocess.Popen(
            ["bash", "-c", command, "bash", *arguments], pass_fds=(down, up), stderr=subprocess.DEVNULL
        )
        os.close(down)
        os.close(up)
        self._buffer, self._number = b"", 0
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self.call("Page.enable")

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            part = os.read(self._read, 1 << 20)
            if not part:
                raise RuntimeError("The browser ended. Start it by hand to see why.")
            self._buffer += part
        message, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(message)

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Call a method of the browser, or of the page once there is one, and return its result."""
        self._number += 1
        request: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if hasattr(self, "_session"):
            request["sessionId"] = self._session
        os.write(self._write, json.dumps(request).encode() + b"\0")
        while (answer := self._next()).get("id") != self._number:
            pass
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']['message']}")
        return answer["result"]

    def value(self, script: str) -> Any:
        """Return what a script in the page evaluates to."""
        found = self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        return found["result"].get("value")

    def open(self, address: str, width: int, theme: str) -> int:
        """Open a page on a screen of some width, and return its height."""
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=width < 600
        )
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": theme}])
        self.call("Page.navigate", url=address)
        while self._next().get("method") != "Page.loadEventFired":
            pass
        return int(self.value(READY))

    def shoot(self, path: Path, width: int, height: int) -> None:
        """Write a picture of the page from its top on."""
        clip = {"x": 0, "y": 0, "width": width, "height": min(height, TALLEST), "scale": 1}
        found = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True, clip=clip)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(base64.b64decode(found["data"]))

    def close(self) -> None:
        """End the browser and delete its profile."""
        self._process.terminate()
        self._process.wait()
        shutil.rmtree(self._profile, ignore_errors=True)


def pages(built: Path, patterns: list[str]) -> list[str]:
    """Return the pages that are asked for."""
    names = sorted(path.relative_to(built).as_posix() for path in built.rglob("*.html"))
    if patterns:
        return [n for n in names if any(fnmatch.fnmatch(n, p) or n == f"{p}.html" for p in patterns)]
    return [name for name in names if not name.startswith(("_modules/", "_static/"))]


def main() -> int:
    """Take the pictures, and return the number of pages that are too wide."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("pages", nargs="*")
    parser.add_argument("--built", type=Path, default=HERE / "_build" / "html")
    parser.add_argument("--out", type=Path, default=HERE / "_build" / "screenshots")
    parser.add_argument("--browser", default=next(filter(None, map(shutil.which, BROWSERS)), None))
    given = parser.parse_args()
    if not given.browser:
        parser.error(f"none of {', '.join(BROWSERS)} is installed; name a browser with --browser")
    chosen = pages(given.built, given.pages)
    if not chosen:
        parser.error(f"{given.built} has no such page; run make docs first")
    browser, wrong = Browser(given.browser), 0
    try:
        for name in chosen:
            for width in WIDTHS:
                for theme in THEMES:
                    height = browser.open((given.built / name).resolve().as_uri(), width, theme)
                    found = browser.value(TOO_WIDE)
                    if found:
                        wrong += 1
                        print(f"{name} at {width} pixels: {'; '.join(found)}")
                    browser.shoot(given.out / f"{name.removesuffix('.html')}-{width}-{theme}.png", width, height)
    finally:
        browser.close()
    print(f"{len(chosen)} pages, {wrong} pictures too wide, in {given.out}")
    return min(wrong, 1)


if __name__ == "__main__":
    sys.exit(main())
