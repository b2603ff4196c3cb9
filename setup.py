"""Settings are in ``pyproject.toml``; here is what an editable installation copies, and the text for PyPI."""

import re
import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).parent
ENTRY = "_lightning_hetero_entry.py"
REPOSITORY = "lightning-hetero/lightning-hetero"


class BuildPy(build_py):
    """Puts the module of the ``torch.backends`` entry point into the environment, whatever becomes of the checkout."""

    def run(self) -> None:
        """Build; in editable mode, which copies nothing else, copy that one module beside the metadata."""
        super().run()
        if self.editable_mode:
            beside = Path(self.distribution.get_command_obj("install").install_lib)
            beside.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / ENTRY, beside / ENTRY)


def readme() -> str:
    """Return ``README.md`` with links to the files of this version in place of relative ones, which end on PyPI."""
    text, source = ((ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "lightning_hetero/__init__.py"))
    version = "v" + re.findall(r'^__version__ = "(.+)"$', source, re.M)[0]

    def absolute(match: re.Match[str]) -> str:
        before, path = match.groups()
        picture = path.endswith((".png", ".svg", ".gif", ".jpg"))
        site = "https://raw.githubusercontent.com" if picture else "https://github.com"
        return f"{before}{site}/{REPOSITORY}/{'' if picture else 'blob/'}{version}/{path}"

    return re.sub(r"""(\]\(|\b(?:src|srcset|href)=["'])(?![a-z]+:|#)([^)\s"']+)""", absolute, text)


setup(cmdclass={"build_py": BuildPy}, long_description=readme(), long_description_content_type="text/markdown")
