"""Training loops of Accelerate on unequal workers: ``Accelerator`` under a flag, or ``HeteroAccelerator`` in its place.

The names are imported on first use: the hook of the flag is in this package, and is installed while Accelerate is still
being imported.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # the names of _EXPORTS, for type checkers
    from lightning_hetero.accelerate.accelerator import HeteroAccelerator as HeteroAccelerator
    from lightning_hetero.accelerate.plugin import HeteroPlugin as HeteroPlugin

_EXPORTS = {
    "HeteroAccelerator": "lightning_hetero.accelerate.accelerator",
    "HeteroPlugin": "lightning_hetero.accelerate.plugin",
}
"""Module of each public name."""

__all__ = [*_EXPORTS]


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_EXPORTS[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
