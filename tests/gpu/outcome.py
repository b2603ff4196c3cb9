"""What a check is, and what it writes down."""

import json
import os
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Check:
    """One check: ``tests.gpu.<module>.<name>(figures, device)``; on a CPU it runs the same code at a small size.

    Args:
        name: of the function.
        module: that has it.
        must: what it shows.
        takes: seconds that it takes on a GPU; with fewer left of a budget it is skipped.
        limit: seconds after which it is ended.
        needs: packages without which it is skipped.
    """

    name: str
    module: str
    must: str
    takes: float
    limit: float
    needs: tuple[str, ...] = ()


class Figures(dict):
    """Figures of a check, each of them on disk as soon as it is known.

    Args:
        path: file of the figures.
        known: figures of earlier checks by name.

    Attributes:
        folder: where a check may leave other files.
    """

    def __init__(self, path, known=None):
        super().__init__()
        self.folder, self.known = Path(path).parent, known or {}
        self._path, self._wrong, self._outcome = Path(path), [], {}

    def __setitem__(self, key, value):
        super().__setitem__(key, value)
        self._write()

    def add(self, found, name=""):
        """Add several figures, whose names begin with ``name``."""
        for key, value in found.items():
            self[f"{name}: {key}" if name else key] = value

    def must(self, holds, what):
        """Note what is wrong unless a condition holds; the check goes on and fails at its end."""
        if not holds:
            self._wrong.append(what)
            self._write()

    def state(self):
        """Return what a rank has added to its copy, for :meth:`take`."""
        return dict(self), self._wrong

    def take(self, state):
        """Continue with what a rank has added to its copy."""
        found, self._wrong = state
        self.add(found)

    def end(self, error=""):
        """Write down how the check has ended."""
        self._wrong += [error] if error else []
        self._outcome = {"outcome": "failed" if self._wrong else "passed"}
        self._write()

    def _write(self):
        known = {"figures": dict(self), "why": "; ".join(self._wrong), **self._outcome}
        part = self._path.with_suffix(".part")
        part.write_text(json.dumps(known, default=str))
        os.replace(part, self._path)
