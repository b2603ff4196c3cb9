"""Metrics of a sync round, under their fixed names."""

import warnings
from collections.abc import Sequence

import numpy as np

from lightning_hetero.core.batching.plan import BatchPlan
from lightning_hetero.core.noise.running import RunningNoiseScale
from lightning_hetero.core.observations import StepObservations

__all__ = ["noise_metrics", "plan_metrics"]


def plan_metrics(
    observations: StepObservations,
    plan: BatchPlan,
    predicted: float | None,
    accumulation: int = 1,
    error: float | None = None,
    rows: Sequence[float] = (),
) -> dict[str, float]:
    """Return the metrics of the steps since the last sync round.

    ``hetero/idle_fraction`` is the share of all workers' time that is neither load, forward, backward nor update:
    ``1 - n mean_i(a_i + P_i) / T`` with ``n`` micro-batches in an optimizer step.

    Args:
        observations: of all ranks.
        plan: plan under which the last of these steps ran.
        predicted: seconds of a step as predicted before they ran, ``None`` without a model.
        accumulation: micro-batches of an optimizer step; compute times are per micro-batch, step times per step.
        error: standard error of ``predicted`` in seconds, ``None`` where it is not known.
        rows: samples that each worker ran in a step, on average; by default those of the plan.

    Example:
        >>> metrics = plan_metrics(StepObservations.empty(2), BatchPlan(8, (6, 2)), 0.5)
        >>> metrics["hetero/local_batch_size/rank0"], metrics["hetero/predicted_step_time"]
        (6.0, 0.5)
    """
    metrics = {"hetero/total_batch_size": float(plan.total_batch_size)}
    for rank, size in enumerate(rows or plan.local_batch_sizes):
        metrics[f"hetero/local_batch_size/rank{rank}"] = float(size)
    for rank, share in enumerate(plan.shares if plan.cost is not None else ()):
        metrics[f"hetero/work_share/rank{rank}"] = share
    if predicted is not None:
        metrics["hetero/predicted_step_time"] = float(predicted)
        if error is not None:
            metrics["hetero/predicted_step_time_error"] = float(error)
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


def noise_metrics(estimate: RunningNoiseScale) -> dict[str, float]:
    """Return the metrics of the gradient noise scale.

    Example:
        >>> list(noise_metrics(RunningNoiseScale()))
        ['hetero/noise_scale', 'hetero/grad_sq_norm', 'hetero/grad_variance']
    """
    return {
        "hetero/noise_scale": estimate.noise_scale,
        "hetero/grad_sq_norm": estimate.grad_sq_norm,
        "hetero/grad_variance": estimate.trace,
    }
