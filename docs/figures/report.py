"""Draw the main figure of a report, and the upper part of its page, of a simulated run.

    python docs/figures/report.py

The run is that of ``tests/report/runs.py``: three workers of exactly known speed, whose third has a slow loader for a
quarter of the steps. Writes ``report.png`` and, if Chromium is installed, ``report_page.png`` next to this file.
"""

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
sys.path.insert(0, str(ROOT))

from lightning_hetero.report import read_run, write_picture, write_report  # noqa: E402
from tests.report.runs import simulated, written  # noqa: E402

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
WIDTH, HEIGHT = 1200, 1500


def photograph(page: Path, picture: Path, browser: str) -> None:
    """Let a browser draw the upper part of a page."""
    command = [
        *(browser, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run"),
        *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
        *(f"--user-data-dir={page.parent / 'browser'}", f"--window-size={WIDTH},{HEIGHT}"),
        *(f"--screenshot={picture}", page.as_uri()),
    ]
    subprocess.run(command, check=True, timeout=120, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def main() -> None:
    """Record the run, read it, and draw it."""
    with tempfile.TemporaryDirectory() as folder:
        run = read_run(written(simulated(), Path(folder)))
        write_picture(run, HERE / "report.png")
        page = Path(folder) / "report.html"
        write_report(run, page)
        browser = next(filter(None, map(shutil.which, BROWSERS)), None)
        if browser is not None:
            photograph(page, HERE / "report_page.png", browser)


if __name__ == "__main__":
    main()
