"""State of the entry point by which ``import torch`` makes the strategies' names known."""

import importlib.util
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from importlib import metadata
from typing import Any

__all__ = ["Autoload", "autoload_of"]

LONGEST_S = 120.0
"""Seconds that a program may take to import torch and Lightning."""
SWITCH = "TORCH_DEVICE_BACKEND_AUTOLOAD"
NAMES = ("hetero_ddp", "hetero_elastic", "hetero_fsdp")
# A program of its own, because this one has imported the package.
PROGRAM = f"""
import json, sys, torch
called = any(type(finder).__name__ == "RegistryFinder" for finder in sys.meta_path)
from lightning.pytorch.strategies import StrategyRegistry
print(json.dumps({{"called": called, "names": [name for name in {NAMES!r} if name in StrategyRegistry]}}))
"""
REINSTALL = "Install the package again: pip install --force-reinstall --no-deps lightning-hetero (or -e FOLDER)."


@dataclass(frozen=True)
class Autoload:
    """State of the entry point.

    Args:
        entry_points: entry points of ours that are installed; one is right.
        dangling: whether the module of one cannot be found, or what it starts.
        switched_off: whether the environment keeps torch from calling entry points.
        names: strategies that a program knows that imports torch and Lightning and nothing of ours.
        error: what such a program failed with, empty if it did not.
    """

    entry_points: int
    dangling: bool
    switched_off: bool
    names: tuple[str, ...]
    error: str = ""

    @property
    def works(self) -> bool:
        """True if a script needs no import of ours."""
        return len(self.names) == len(NAMES)

    def sentence(self) -> str:
        """Return what it means for a script, and what to do if the names are not known."""
        if self.error:
            return f"a program that imports torch and Lightning fails: {self.error}"
        if self.works:
            return 'strategy="hetero_ddp" needs no import: torch calls lightning-hetero'
        instead = "Begin scripts with `import lightning_hetero`"
        if self.switched_off:
            return f"{SWITCH} is not 1, so torch does not call lightning-hetero. Unset it. Or: {instead.lower()}."
        if not self.entry_points:
            return f"torch does not know lightning-hetero, which is on the path without being installed. {instead}."
        if self.dangling:
            return f"the entry point of lightning-hetero leads to a folder where it no longer is. {REINSTALL}"
        return f"torch calls lightning-hetero, and Lightning does not know its strategies. {instead}; {REINSTALL}"


def autoload_of(timeout: float = LONGEST_S) -> Autoload:
    """Return the state in this environment; a second program is started for it.

    Args:
        timeout: longest wait for that program, in seconds.
    """
    ours = [point for point in metadata.entry_points(group="torch.backends") if point.name == "lightning_hetero"]
    modules = {point.value.partition(":")[0] for point in ours}
    dangling = bool(ours) and any(not _found(name) for name in (*modules, "_lightning_hetero_autoload"))
    found = _ask(timeout)
    names, error = tuple(found.get("names", ())), str(found.get("error", ""))
    return Autoload(len(ours), dangling, os.environ.get(SWITCH, "1") != "1", names, error)


def _found(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def _ask(timeout: float) -> dict[str, Any]:
    """Return the answer of the program, or its error."""
    try:
        done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=timeout)
    except subprocess.TimeoutExpired:
        return {"error": f"it was not done within {timeout:g} s"}
    lines = done.stdout.strip().splitlines()
    if done.returncode == 0 and lines:
        answer: dict[str, Any] = json.loads(lines[-1])
        return answer
    return {"error": (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]}
