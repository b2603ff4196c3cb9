"""Transformers' ``Trainer`` and TRL's trainers on unequal workers: ``HeteroTrainer``, ``hetero_trainer``."""

from importlib.util import find_spec

missing = [name for name in ("transformers", "accelerate") if find_spec(name) is None]
if missing:
    raise ImportError(
        f"lightning_hetero.transformers needs {' and '.join(missing)}: pip install 'lightning-hetero[transformers]'."
    )

from lightning_hetero.transformers.arguments import HeteroTrainingArguments, hetero_arguments  # noqa: E402
from lightning_hetero.transformers.flag import adapt, adapt_if_switched_on, restore  # noqa: E402
from lightning_hetero.transformers.trainer import HeteroTrainer, hetero_trainer  # noqa: E402

__all__ = ["HeteroTrainer", "HeteroTrainingArguments", "adapt", "hetero_arguments", "hetero_trainer", "restore"]

adapt_if_switched_on()  # Transformers' Trainer may have been imported by this package first
