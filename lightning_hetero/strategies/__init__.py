"""Strategies for Lightning, Fabric and Ray; one module per namespace, so that neither imports the other.

``lightning_ddp``, ``lightning_fsdp`` and ``lightning_elastic`` are for ``lightning.pytorch``; modules of the same name
with ``pytorch_`` before it are for the standalone ``pytorch_lightning``.
"""

__all__: list[str] = []
