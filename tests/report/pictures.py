"""Take pictures of the reports of recorded runs, on a large and on a small screen, light and dark; needs Chromium.

    python tests/report/pictures.py [FOLDER]

The runs are those of ``tests/report/recorded``: the demo's, and one of sixteen emulated devices. Ends with an error if
a page is wider than the screen.
"""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from lightning_hetero.report import read_run, write_picture, write_report  # noqa: E402


def main(folder):
    """Write the pages, their main figures and their pictures into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for record in sorted((Path(__file__).parent / "recorded").glob("*.jsonl")):
        write_report(read_run(record), folder / f"{record.stem}.html")
        write_picture(read_run(record), folder / f"{record.stem}.png")
    script = ROOT / "docs" / "screenshots.py"
    return subprocess.run([sys.executable, script, "--built", folder, "--out", folder], check=False).returncode


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1] if len(sys.argv) > 1 else ROOT / "build" / "reports")))
