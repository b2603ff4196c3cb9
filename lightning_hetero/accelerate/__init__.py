"""Training loops of Accelerate on unequal workers: ``Accelerator`` under a flag, or ``HeteroAccelerator`` in its place.

The names are imported on first use: the hook of the flag is in this package, and is installed while Accelerate is still
being imported.
"""

from typing import TYPE_CHECKING

from lightning_hetero.lazy_exports import lazy_exports

if TYPE_CHECKING:  # the names of _EXPORTS, for type checkers
    from lightning_hetero.accelerate.accelerator import HeteroAccelerator as HeteroAccelerator
    from lightning_hetero.accelerate.plugin import HeteroPlugin as HeteroPlugin

_EXPORTS = {
    "HeteroAccelerator": "lightning_hetero.accelerate.accelerator",
    "HeteroPlugin": "lightning_hetero.accelerate.plugin",
}
"""Module of each public name."""

__all__ = [*_EXPORTS]

__getattr__, __dir__ = lazy_exports(__name__, _EXPORTS)
