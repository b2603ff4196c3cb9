"""Training loops of Accelerate on unequal workers: ``HeteroAccelerator`` in place of ``Accelerator``."""

from lightning_hetero.accelerate.accelerator import HeteroAccelerator
from lightning_hetero.accelerate.plugin import HeteroPlugin

__all__ = ["HeteroAccelerator", "HeteroPlugin"]
