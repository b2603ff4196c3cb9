"""Number of batches that an epoch has under a plan, for Lightning's loop."""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lightning.pytorch import Trainer
    from lightning.pytorch.utilities import CombinedLoader

__all__ = ["recount_batches"]


def _batches(combined: "CombinedLoader", namespace: str) -> int | float:
    """Return the steps of an epoch through one or several loaders; infinite ones are a float, as in Lightning."""
    counts = list(combined.limits or ())
    if len(counts) == 1:
        return counts[0]
    modes = importlib.import_module(f"{namespace}.utilities.combined_loader")._SUPPORTED_MODES
    steps: int | float = modes[combined._mode]["fn"](counts)
    return steps


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
    loop.max_batches = batches = _batches(combined, namespace)
    if combined._iterator is not None:
        combined._iterator.limits = combined.limits
        assert loop._data_fetcher is not None
        loop._data_fetcher.length = int(batches)
    if isinstance(trainer.val_check_interval, float) and trainer.val_check_batch is not None:
        trainer.val_check_batch = max(1, int(batches * trainer.val_check_interval))
