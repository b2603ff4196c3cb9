"""Figures of a plan: split, step time, idling, what balance and each worker bring, link and cost of an epoch.

All come from the time model (C eq. 7) and the exact solver (:mod:`lightning_hetero.core.batching.optperf`). Ratios
between plans compare step times without jitter; ``expected_step_time`` has the waiting that jitter causes.
"""

import math
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from lightning_hetero.core.batching.integer_split import even_sizes
from lightning_hetero.core.batching.optperf import solve_optperf
from lightning_hetero.core.keywords import checked_keywords
from lightning_hetero.core.timing.expected_maximum import expected_maximum
from lightning_hetero.core.timing.step_time import ClusterTimeModel
from lightning_hetero.simulate.planning.answer import Epoch, LinkAnswer, PlanAnswer, WorkerAnswer
from lightning_hetero.simulate.planning.cluster import Cluster
from lightning_hetero.simulate.planning.without_one import optimal_step_time, step_time_without, times_without_one

__all__ = [
    "alone_samples_per_second",
    "checked_total",
    "epoch_of",
    "even_step_time",
    "expected_step",
    "link_answer",
    "plan_cluster",
]

Array = npt.NDArray[np.float64]

MOST_SPREAD = 1e13
"""Greatest ratio of the longest time to that of a sample; numbers have 16 digits."""
LINK_SHARE = 0.95
"""Share of the speed with an infinite link at which a link counts as fast enough."""


@checked_keywords
def plan_cluster(cluster: Cluster, total_batch_size: int | None = None, samples: int | None = None) -> PlanAnswer:
    """Return the figures of the best plan for a cluster.

    Args:
        cluster: workers and link.
        total_batch_size: ``B``; that of the cluster by default.
        samples: of an epoch; those of the cluster by default.

    Raises:
        ValueError: if there is no total, or it does not fit the workers.

    Example:
        >>> from lightning_hetero.simulate.planning.cluster import Link, Worker
        >>> fast, slow = Worker("fast", 0.001, 0.01, 0.002, 0), Worker("slow", 0.003, 0.01, 0.006, 0)
        >>> answer = plan_cluster(Cluster((fast, slow), Link(4e6, 125e6)), 40)
        >>> answer.local_batch_sizes, round(answer.step_time, 4), round(answer.speedup_over_even, 2)
        ((30, 10), 0.1064, 1.85)
    """
    total = checked_total(cluster, total_batch_size)
    model, limits = cluster.model(), cluster.limits(total)
    plan = solve_optperf(model, total, max_local=limits)
    sizes, step_time = np.array(plan.local_batch_sizes), float(plan.step_time or 0.0)
    expected, error = expected_step(cluster, model, sizes)
    even, too_small = even_step_time(cluster, model, total)
    whole, without = times_without_one(cluster, total)
    alone = alone_samples_per_second(cluster, total)
    compute = _compute(cluster, sizes).sum(axis=0)
    least, time = _least_missed(cluster, without, total)
    brings = 1.0 - whole / without
    workers = tuple(
        WorkerAnswer(w.name, int(b), c, 1.0 - c / step_time, kind, w.memory, w.memory and int(b) / w.memory, x, y)
        for w, b, c, kind, x, y in zip(
            cluster.workers, sizes, compute.tolist(), plan.bottlenecks, alone.tolist(), brings.tolist(), strict=True
        )
    )
    return PlanAnswer(
        total_batch_size=total,
        step_time=step_time,
        expected_step_time=expected,
        step_time_error=error,
        samples_per_second=total / expected,
        even_step_time=even,
        speedup_over_even=None if even is None else even / step_time,
        even_does_not_fit=too_small,
        alone=float(alone.sum()),
        share_of_alone=total / step_time / float(alone.sum()),
        leave_out=least,
        without_it=time,
        gain_without_it=None if time is None else step_time / time - 1.0,
        leave_out_together=plan.leave_out,
        link=link_answer(cluster, total, step_time),
        epoch=epoch_of(cluster, samples or cluster.samples, total, expected),
        workers=workers,
    )


def checked_total(cluster: Cluster, given: int | None) -> int:
    """Return the total that is given, or else the cluster's.

    Raises:
        ValueError: if there is none, or it does not fit the workers.
    """
    total, count = given or cluster.total_batch_size, len(cluster.workers)
    if total is None:
        raise ValueError("the total batch size is not known. Give it: --total-batch 256, or total_batch_size: 256.")
    if total < count:
        raise ValueError(
            f"a total batch of {total} cannot give each of {count} workers a sample. Give a total of {count} at least, "
            "or fewer workers."
        )
    most = int(cluster.limits(total).sum())
    if most < total:
        raise ValueError(
            f"a total batch of {total} does not fit: the workers' memory holds {most} samples together. Give a total "
            f"of {most} at most, or more workers."
        )
    _check_spread(cluster)
    return total


def _check_spread(cluster: Cluster) -> None:
    """Refuse times of which floating-point numbers cannot hold the longest and the shortest in one sum."""
    q, s, k, m = cluster.coefficients.T
    shortest, longest = float((q + k).min()), max(float((q + k + s + m).max()), sum(cluster.link.times(len(q))))
    if longest > MOST_SPREAD * shortest:
        raise ValueError(
            f"the times are too different to compute with: a sample takes {shortest:.3g} s on the fastest, and "
            f"the slowest worker or the link {longest:.3g} s, more than {MOST_SPREAD:g} times as long. Check the "
            "workers' times, the model's size and the link's rate."
        )


def _compute(cluster: Cluster, sizes: npt.NDArray[np.int64]) -> Array:
    """Return ``a_i`` and ``P_i`` of all workers, shape ``(2, workers)``."""
    q, s, k, m = cluster.coefficients.T
    return np.stack([q * sizes + s, k * sizes + m])


def expected_step(cluster: Cluster, model: ClusterTimeModel, sizes: npt.NDArray[np.int64]) -> tuple[float, float]:
    """Return mean and standard deviation of the seconds of a step: the largest of the workers' uncertain times.

    Jitter disturbs ``a`` and ``P`` each by itself, an error of the time model both alike. Where the link bounds a
    worker, only the share ``gamma`` of its ``P`` counts (C eq. 7).
    """
    b = sizes.astype(float)
    alpha_1, beta_1, alpha_2, beta_2 = model.coefficients()
    bound = alpha_2 * b + beta_2 > alpha_1 * b + beta_1
    both = _compute(cluster, sizes) * np.stack([np.ones(len(b)), np.where(bound, model.gamma, 1.0)])
    jitter, error = np.array([(w.jitter, w.error) for w in cluster.workers]).T
    deviation = np.sqrt(((jitter * both) ** 2).sum(axis=0) + (error * both.sum(axis=0)) ** 2)
    finish = model.finish_times(b)
    if not deviation.any():
        return float(finish.max()), 0.0
    return expected_maximum(finish, deviation)


def even_step_time(cluster: Cluster, model: ClusterTimeModel, total: int) -> tuple[float | None, str | None]:
    """Return the seconds of a step with even sizes, and the name of a device whose memory they exceed, if any."""
    sizes, limits = even_sizes(total, len(cluster.workers)), cluster.limits(total)
    too_large = np.flatnonzero(np.array(sizes) > limits)
    if len(too_large):
        return None, cluster.workers[int(too_large[0])].name
    return model.step_time(sizes), None


def alone_samples_per_second(cluster: Cluster, total: int) -> Array:
    """Return the samples per second of each worker that trains alone with the same total, in parts if memory is short.

    Nothing is averaged then. A total of ``n`` parts takes ``(q + k) B + n (s + m)`` seconds.
    """
    q, s, k, m = cluster.coefficients.T
    parts = np.ceil(total / cluster.limits(total))
    return np.asarray(total / ((q + k) * total + parts * (s + m)))


def _least_missed(cluster: Cluster, without: Array, total: int) -> tuple[int | None, float | None]:
    """Return the place of the worker whose absence costs least, and the step time without it in whole sizes."""
    best = int(np.argmin(without))
    return (None, None) if math.isinf(without[best]) else (best, step_time_without(cluster, best, total))


def link_answer(cluster: Cluster, total: int, step_time: float) -> LinkAnswer:
    """Return what the link costs, and the rate at which the speed is 95 % of that with an infinite rate.

    The least such rate is found by halving an interval of its logarithm: the least step time never rises with the rate.
    """
    limits, link = cluster.limits(total), cluster.link

    def least(factor: float) -> float:
        return optimal_step_time(cluster.with_link(link.scaled(factor)).model(), limits, total)

    rate, best = link.effective_rate(), least(math.inf)
    if rate is not None and math.isinf(rate):
        needed = None
        if link.gradient_bytes and len(cluster.workers) > 1:
            finite = cluster.with_link(link.at_rate(link.gradient_bytes / step_time))
            needed = link_answer(finite, total, best).rate_needed
        return LinkAnswer(rate, 1.0, None, needed)
    factor = _least_factor(least, best / LINK_SHARE)
    return LinkAnswer(rate, best / step_time, factor, None if rate is None else rate * factor)


def _least_factor(step_time: Callable[[float], float], allowed: float) -> float:
    low, high = -40.0, 40.0  # powers of two
    if step_time(2.0**low) <= allowed:
        return 0.0
    while high - low > 1e-4:
        middle = (low + high) / 2
        low, high = (low, middle) if step_time(2.0**middle) <= allowed else (middle, high)
    return float(2.0**high)


def epoch_of(cluster: Cluster, samples: int | None, total: int, step_time: float) -> Epoch | None:
    """Return time and cost of an epoch; the last step may be smaller and takes its share of a step."""
    if samples is None:
        return None
    seconds = samples / total * step_time
    missing = tuple(dict.fromkeys(w.name for w in cluster.workers if w.price is None))
    price = None if missing else sum(w.price or 0.0 for w in cluster.workers)
    return Epoch(samples, seconds, price, None if price is None else price * seconds / 3600.0, missing)
