"""Number of batches that an epoch has under a plan, for Lightning's loop."""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

__all__ = ["recount_batches"]


def recount_batches(trainer: "Trainer", namespace: str) -> None:
    """Make a trainer count the batches of its running epoch again.

    Lightning counts them once, when it sets the loaders up. It would silently cut an epoch that got longer, and skip
    the validation of one that got shorter.

    Args:
        trainer: Lightning's trainer.
        namespace: ``lightning.pytorch`` or ``pytorch_lightning``.
    """
    loop = trainer.fit_loop
    combined = loop._combined_loader
    if combined is None:
        return
    connector = importlib.import_module(f"{namespace}.trainer.connectors.data_connector")
    combined.limits = [
        connector._parse_num_batches(trainer.state.stage, len(loader), trainer.limit_train_batches)
        for loader in combined.flattened
    ]
    loop.max_batches = batches = combined.limits[0]
    if combined._iterator is not None:
        combined._iterator.limits = combined.limits
        assert loop._data_fetcher is not None
        loop._data_fetcher.length = int(batches)
    if isinstance(trainer.val_check_interval, float) and trainer.val_check_batch is not None:
        trainer.val_check_batch = max(1, int(batches * trainer.val_check_interval))
