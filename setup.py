"""All settings are in ``pyproject.toml``; here is what an editable installation copies instead of pointing to it."""

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

ENTRY = "_lightning_hetero_entry.py"


class BuildPy(build_py):
    """Puts the module of the ``torch.backends`` entry point into the environment, whatever becomes of the checkout."""

    def run(self) -> None:
        """Build; in editable mode, which copies nothing else, copy that one module beside the metadata."""
        super().run()
        if self.editable_mode:
            beside = Path(self.distribution.get_command_obj("install").install_lib)
            beside.mkdir(parents=True, exist_ok=True)
            shutil.copy(Path(__file__).with_name(ENTRY), beside / ENTRY)


setup(cmdclass={"build_py": BuildPy})
