"""Strategies for Lightning, Fabric and Ray; one module per namespace, so that neither imports the other.

``lightning_ddp`` and ``lightning_elastic`` are for ``lightning.pytorch``, ``pytorch_lightning_ddp`` and
``pytorch_lightning_elastic`` for the standalone ``pytorch_lightning``.
"""

__all__: list[str] = []
