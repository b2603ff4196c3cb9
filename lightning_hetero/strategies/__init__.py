"""Lightning strategies; one module per namespace, so that neither drags in the other.

``lightning_ddp`` is for ``lightning.pytorch``, ``pytorch_lightning_ddp`` for the standalone ``pytorch_lightning``.
"""

__all__: list[str] = []
