"""Metrics of a heterogeneous run under their fixed names, from what the ranks observed."""

import warnings

import numpy as np

from lightning_hetero.comm.staleness import Staleness
from lightning_hetero.core.plan import BatchPlan
from lightning_hetero.core.time_model import StepObservations

__all__ = ["exchange_metrics", "staleness_metrics"]


def exchange_metrics(
    observations: StepObservations, plan: BatchPlan, predicted: float | None, accumulation: int = 1
) -> dict[str, float]:
    """Metrics of the steps since the last exchange.

    ``hetero/idle_fraction`` is the share of all workers' time that is neither forward, backward nor update:
    ``1 - n mean_i(a_i + P_i) / T`` with ``n`` micro-batches in an optimizer step.

    Args:
        observations: of all ranks.
        plan: plan under which the last of these steps ran.
        predicted: predicted seconds of a step, ``None`` without a model.
        accumulation: micro-batches of an optimizer step; compute times are per micro-batch, step times per step.

    Example:
        >>> metrics = exchange_metrics(StepObservations.empty(2), BatchPlan(8, (6, 2)), 0.5)
        >>> metrics["hetero/local_batch_size/rank0"], metrics["hetero/predicted_step_time"]
        (6.0, 0.5)
    """
    metrics = {"hetero/total_batch_size": float(plan.total_batch_size)}
    for rank, size in enumerate(plan.local_batch_sizes):
        metrics[f"hetero/local_batch_size/rank{rank}"] = float(size)
    if predicted is not None:
        metrics["hetero/predicted_step_time"] = float(predicted)
    if observations.num_steps == 0:
        return metrics
    compute = np.median(observations.compute, axis=0)
    for rank, seconds in enumerate(compute):
        metrics[f"hetero/compute_time/rank{rank}"] = float(seconds)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        step_time = float(np.nanmedian(observations.step_time))
    if np.isfinite(step_time) and step_time > 0:
        metrics["hetero/step_time"] = step_time
        metrics["hetero/idle_fraction"] = float(np.clip(1.0 - accumulation * compute.mean() / step_time, 0.0, 1.0))
    return metrics


def staleness_metrics(staleness: Staleness | None) -> dict[str, float]:
    """Metrics of the link and of gradients that arrive a step later; none with ``staleness=0``.

    ``hetero/bandwidth`` is in bytes per second, ``hetero/delayed_share`` the share of the gradient that is delayed.

    Example:
        >>> staleness_metrics(None)
        {}
    """
    if staleness is None or staleness.limit == 0:
        return {}
    metrics = {"hetero/delayed_share": staleness.delayed_share}
    if staleness.link.rate is not None:
        metrics["hetero/bandwidth"] = staleness.link.rate
    if staleness.choice is not None:
        metrics["hetero/transfer_time"] = staleness.choice.transfer
    return metrics
