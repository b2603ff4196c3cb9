"""Outcome of a sync round between ranks, and its metrics under their fixed names."""

import warnings
from dataclasses import dataclass

import numpy as np

from lightning_hetero.core.batching.plan import BatchPlan, PlanEntry
from lightning_hetero.core.noise.running import RunningNoiseScale
from lightning_hetero.core.observations import StepObservations
from lightning_hetero.core.policies.perf_model import Planner

__all__ = ["Exchange", "exchange_metrics", "noise_metrics"]


@dataclass(frozen=True)
class Exchange:
    """Outcome of one agreement between ranks.

    Args:
        planner: the planner that has seen the observations (on rank 0; unchanged elsewhere).
        observations: what all ranks measured since the last sync round.
        entry: the plan that was adopted, ``None`` if the current one stays.
        predicted: predicted seconds of a step under the plan that ran, ``None`` without a model.
        error: standard error of that in seconds, ``None`` where it is not known.
        density: whether the policy decided on the density of compressed gradients (on rank 0).

    Example:
        >>> done = Exchange(None, StepObservations.empty(2), PlanEntry(0, 9, BatchPlan(8, (6, 2)), "by hand"), None)
        >>> done.entry.describe(), done.observations.num_steps
        ('6/2 of 8 samples (by hand)', 0)
    """

    planner: Planner | None
    observations: StepObservations
    entry: PlanEntry | None
    predicted: float | None
    error: float | None = None
    density: bool = False


def exchange_metrics(
    observations: StepObservations,
    plan: BatchPlan,
    predicted: float | None,
    accumulation: int = 1,
    error: float | None = None,
) -> dict[str, float]:
    """Return the metrics of the steps since the last sync round.

    ``hetero/idle_fraction`` is the share of all workers' time that is neither forward, backward nor update:
    ``1 - n mean_i(a_i + P_i) / T`` with ``n`` micro-batches in an optimizer step.

    Args:
        observations: of all ranks.
        plan: plan under which the last of these steps ran.
        predicted: predicted seconds of a step, ``None`` without a model.
        accumulation: micro-batches of an optimizer step; compute times are per micro-batch, step times per step.
        error: standard error of ``predicted`` in seconds, ``None`` where it is not known.

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
