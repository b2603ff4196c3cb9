"""Start of the probe training that the environment orders, in place of the script's own."""

import importlib
import os
from dataclasses import replace
from typing import TYPE_CHECKING

from lightning_utilities.core.rank_zero import rank_zero_only

from lightning_hetero.callbacks import GNSCallback, LookAheadCallback, PolicyCallback
from lightning_hetero.callbacks._lightning import Callback, callbacks_of, replace_callbacks
from lightning_hetero.config import HeteroConfig
from lightning_hetero.core.compression.settings import BlockTopK
from lightning_hetero.probe_job import VARIABLE, ProbeOrder
from lightning_hetero.strategies._lightning.probes.convergence import ConvergenceProbe
from lightning_hetero.strategies._lightning.probes.device import DeviceProbe

if TYPE_CHECKING:
    from lightning_hetero.strategies._lightning.policy import PolicyMixin

__all__ = ["begin_probe"]


def begin_probe(strategy: "PolicyMixin") -> HeteroConfig:
    """Prepare the strategy for the probe training that the environment orders, if it orders one.

    Returns:
        The settings of the probe training; without an order, those of the strategy.

    Raises:
        MisconfigurationException: if the script cannot be probed.
        ValueError: if the order cannot be read.
    """
    order, trainer = ProbeOrder.from_environment(os.environ), strategy._trainer
    if order is None or strategy._probes:
        return strategy.config
    left_over = order.why_left_over(answers=getattr(rank_zero_only, "rank", 0) == 0)
    if left_over is not None:
        command = "profile" if order.steps else "profile-convergence"
        raise strategy._misconfiguration(
            f"the environment variable {VARIABLE} orders a probe training in place of this one, but is left over from "
            f"`lightning-hetero {command}`: {left_over}. Unset it to train: unset {VARIABLE}"
        )
    if strategy._start_method != "popen":
        raise strategy._misconfiguration(
            f"{VARIABLE} is set, and a probe training ends its process, which {strategy._start_method!r} would wait "
            "for. Profile with strategy='hetero_ddp'."
        )
    loggers = importlib.import_module(f"{strategy._namespace}.loggers.logger")
    trainer.loggers = [loggers.DummyLogger() for _ in trainer.loggers]
    trainer.limit_val_batches = trainer.num_sanity_val_steps = 0
    given = callbacks_of(trainer)
    kept = [callback for callback in given if not isinstance(callback, PolicyCallback | GNSCallback)]
    probe = DeviceProbe(order) if order.steps else ConvergenceProbe(order, _total(order, strategy.config))
    replace_callbacks(trainer, [probe, *([] if order.steps else _ahead(given)), *kept])
    return _of_device(strategy.config) if order.steps else _of_training(strategy.config, order)


def _total(order: ProbeOrder, config: HeteroConfig) -> int | None:
    sizes = config.local_batch_sizes
    return sum(sizes) if order.total is None and sizes else order.total


def _of_training(config: HeteroConfig, order: ProbeOrder) -> HeteroConfig:
    """Return the settings of a training that measures what compression costs in loss."""
    topk = config.compression if isinstance(config.compression, BlockTopK) else BlockTopK()
    return replace(
        config,
        policy=None,
        local_batch_sizes=None,
        balance_evaluation=False,
        probe_memory=False,
        compression=replace(topk, density=1.0 - order.rate) if order.rate > 0 else None,
        sparse_optimizer=config.sparse_optimizer if order.rate > 0 else False,
        staleness=order.staleness,
    )


def _of_device(config: HeteroConfig) -> HeteroConfig:
    """Return the settings of a training that measures times: a sync round as soon as a size has its steps."""
    return replace(
        config,
        policy=None,
        local_batch_sizes=None,
        balance_evaluation=False,
        replan=1,
        compression=None,
        sparse_optimizer=False,
        staleness=0,
    )


def _ahead(callbacks: list[Callback]) -> list[Callback]:
    """Return the look-ahead callbacks of the policies, so that stale gradients cost what they will cost with them."""
    policies = [callback for callback in callbacks if isinstance(callback, PolicyCallback)]
    brought = [callback for policy in policies for callback in policy.companions(callbacks)]
    return [callback for callback in brought if isinstance(callback, LookAheadCallback)]
