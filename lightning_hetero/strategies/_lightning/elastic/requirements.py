"""Trainer settings that elastic averaging refuses, because they need all ranks at every batch."""

import inspect
from typing import Any

from lightning_hetero.callbacks._lightning import is_named

__all__ = ["unsupported_settings"]


def unsupported_settings(trainer: Any, layer_sync: object = None) -> str | None:
    """Return why a trainer cannot fit with elastic averaging, with advice; ``None`` if it can.

    Args:
        trainer: trainer, with its module and callbacks attached.
        layer_sync: the plugin behind ``sync_batchnorm=True``, ``None`` without it.
    """
    for found, reason in (*_of_trainer(trainer, layer_sync), *_of_callbacks(trainer)):
        if found:
            return reason
    return None


def _of_trainer(trainer: Any, layer_sync: object) -> list[tuple[bool, str]]:
    interval, parameters = trainer.val_check_interval, inspect.signature(trainer.lightning_module.training_step)
    timed = getattr(trainer, "_val_check_time_interval", None) is not None
    return [
        (
            trainer.accumulate_grad_batches != 1,
            f"accumulate_grad_batches={trainer.accumulate_grad_batches} has no use with hetero_elastic, where every "
            "batch is a local update and nothing is sent in between. Leave it out; use a larger or smaller batch_size.",
        ),
        (
            trainer.max_steps != -1 and not trainer.fast_dev_run,
            f"max_steps={trainer.max_steps} counts updates, of which every worker does a number of its own. Use "
            "max_epochs, with limit_train_batches for less than an epoch.",
        ),
        (
            timed or trainer.check_val_every_n_epoch is None or not isinstance(interval, float),
            f"validation inside an epoch is possible only after a merge: val_check_interval={interval!r} has to be a "
            "share of the epoch, such as 0.25, and check_val_every_n_epoch a number.",
        ),
        (
            layer_sync is not None,
            "sync_batchnorm=True needs all workers in every forward pass. Leave it out; statistics are averaged when "
            "replicas are merged.",
        ),
        (
            "dataloader_iter" in parameters.parameters,
            "training_step(dataloader_iter) draws batches by itself, so that they cannot be claimed. Take `batch`.",
        ),
    ]


def _of_callbacks(trainer: Any) -> list[tuple[bool, str]]:
    found = []
    for callback in trainer.callbacks:
        in_steps = getattr(callback, "_every_n_train_steps", 0) or getattr(callback, "_train_time_interval", None)
        found.append(
            (
                is_named(callback, "ModelCheckpoint") and bool(in_steps),
                "ModelCheckpoint can save only after a merge, not at a number of steps or a time, which ranks reach at "
                "different batches. Use every_n_epochs, or val_check_interval as a share of the epoch.",
            )
        )
        found.append(
            (
                is_named(callback, "Timer") and str(getattr(callback, "_interval", "")).endswith("step"),
                "max_time and Timer(interval='step') ask rank 0 after every batch. Use callbacks=[Timer(duration, "
                "interval='epoch')].",
            )
        )
        found.append(
            (
                is_named(callback, "WeightAveraging"),
                f"{type(callback).__name__} averages the weights of each worker's own replica after each of its own "
                "steps, so that workers would end with different models. Leave it out: a merge is an average of "
                "replicas already. Or use strategy='hetero_ddp'.",
            )
        )
        found.append(
            (
                is_named(callback, "GradientAccumulationScheduler"),
                "GradientAccumulationScheduler has no use with hetero_elastic, where every batch is a local update.",
            )
        )
    return found
