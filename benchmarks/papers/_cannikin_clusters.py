"""Clusters and workloads of Cannikin's evaluation, its algorithms as printed, and the systems that it compares with.

The paper gives no times of any device and no rate of its links. The times of a T4 are those that AdaptDL measured; the
speeds of the other devices relative to it come from the table of published devices
(``lightning_hetero/simulate/devices/published.json``). Links and fixed times of the other devices are unknown, so every
figure is made for several of both.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import numpy.typing as npt
from _clusters import LBBSP, Array, Cluster, Noise

from lightning_hetero.core.as_published import bootstrap_sizes
from lightning_hetero.core.batching.integer_split import even_sizes, proportional_sizes
from lightning_hetero.core.batching.optperf import solve_optperf, solve_step_times
from lightning_hetero.core.batching.plan import BatchPlan
from lightning_hetero.core.observations import StepObservations
from lightning_hetero.core.policies.base import Decision, PlanContext, Proposal
from lightning_hetero.core.timing.fitting import fit_line
from lightning_hetero.core.timing.step_time import ClusterTimeModel, NodeTimeModel
from lightning_hetero.simulate import LinkProfile
from lightning_hetero.simulate.devices.catalog import cluster_devices, device_profile, workload_named

GAMMA, LATENCY, BUCKET = 0.12, 2e-4, 25e6
"""Share of the backward pass before the first bucket, seconds of an all-reduce without bytes, bytes of DDP's bucket."""
GBITS = (10.0, 25.0, 100.0)
"""Rates of the link in Gbit/s for which every figure is made."""
FIXED = ("same", "scaled")
"""Fixed times of a step: the same on all devices (they are the host's), or as much shorter as the device is faster."""
FORWARD = 1 / 3
"""Share of the time that is not the backward pass."""
NOISE = 0.03
"""Jitter of every time."""


@dataclass(frozen=True)
class Workload:
    """Row of the paper's Table 5, with what a training needs.

    Args:
        name: in the table of published devices.
        initial: ``B_0`` of Table 5.
        largest: greatest total, the end of AdaptDL's range to which the paper refers.
        reference: total against which ``samples`` and AdaptDL's traces count efficiency.
        samples: samples at that total until the target, from AdaptDL's traces.
        noise: noise scale in samples at :data:`SHARES` of the training, medians of the same traces.
        sample: seconds per sample on a T4.
        fixed: fixed seconds of a step on a T4; both are lines through AdaptDL's measurements of one GPU.
    """

    name: str
    initial: int
    largest: int
    reference: int
    samples: float
    noise: tuple[float, ...]
    sample: float
    fixed: float

    def noise_scale(self, progress: float) -> float:
        """Noise scale after a share of the training, between its knots in proportion."""
        return float(np.exp(np.interp(progress, SHARES, np.log(self.noise))))


SHARES = (0.0, 0.05, 0.1, 0.25, 0.5, 0.75, 1.0)
"""Shares of a training at which the noise scale is given.

Noise scales, samples and times were read off the logs that come with AdaptDL (branch ``osdi21-artifact``,
``simulator/traces``). Noise scale: ``grad_var / grad_sqr`` times the smallest total, at these shares of the progress to
the target of the paper's Table 5; medians over the totals that were trained with. Times: ``placements.csv``, one GPU.
"""
WORKLOADS: dict[str, Workload] = {
    "ResNet-50": Workload(
        "resnet50-imagenet", 100, 12_800, 200, 8.2e7, (930, 4500, 6300, 8500, 4.6e4, 3e4, 9.5e4), 4.2e-3, 0.083
    ),
    "ResNet-18": Workload(
        "resnet18-cifar10", 64, 4096, 128, 3.6e6, (99, 560, 1400, 3500, 7400, 1.5e4, 3.7e4), 6.5e-4, 0.020
    ),
    "DeepSpeech2": Workload(
        "deepspeech2-librispeech", 12, 640, 20, 9.3e4, (12, 12, 15, 92, 370, 790, 1300), 2.5e-2, 0.20
    ),
    "BERT": Workload("bert-squad", 9, 384, 12, 1.8e5, (1800, 1800, 1800, 1800, 1800, 3600, 7200), 5.8e-2, 0.21),
    "NeuMF": Workload(
        "neumf-movielens", 64, 32_768, 256, 2.5e7, (1.4e5, 1.4e5, 1.4e5, 2.3e5, 1.2e6, 1.4e6, 6.3e6), 4.6e-7, 0.0072
    ),
}


def per_sample(device: str, workload: str) -> float:
    """Seconds per sample of a device of the table."""
    profile = device_profile(device, workload)
    return profile.q + profile.k


def truth_of(devices: Sequence[str], workload: str, gbit: float = 25.0, fixed: str = "same") -> Cluster:
    """Devices of the table that train one of :data:`WORKLOADS`, joined by a ring of some rate."""
    job, n = WORKLOADS[workload], len(devices)
    slower = np.array([per_sample(d, job.name) for d in devices]) / per_sample("T4", job.name)
    sample, outside = job.sample * slower, job.fixed * (slower if fixed == "scaled" else np.ones(n))
    size = workload_named(job.name).gradient_bytes
    buckets = max(2, int(np.ceil(size / BUCKET)) + 1)
    link = LinkProfile(size, gbit / 8 * 1e9, LATENCY, buckets, GAMMA)
    times = (FORWARD * sample, FORWARD * outside, (1 - FORWARD) * sample, (1 - FORWARD) * outside)
    return Cluster.of(*times, link)


@cache
def cluster(name: str, workload: str, gbit: float = 25.0, fixed: str = "same") -> Cluster:
    """Cluster A, B or C of the paper on one of :data:`WORKLOADS`."""
    return truth_of(cluster_devices(name), workload, gbit, fixed)


def totals_of(workload: str, workers: int, count: int) -> list[int]:
    """Totals of the workload's range in equal ratios, each with a sample for every worker at least."""
    low, high = max(WORKLOADS[workload].initial, workers), WORKLOADS[workload].largest
    return sorted({int(total) for total in np.geomspace(low, high, count).round()})


def even_time(truth: Cluster, total: int) -> float:
    """Seconds of a step of DDP: equal sizes."""
    return truth.time(even_sizes(total, truth.workers))


# LB-BSP


def lb_bsp_step(truth: Cluster, sizes: Array, step: int) -> Array | None:
    """One move of LB-BSP on exact times: from the slowest worker to the fastest; ``None`` where it stops."""
    q, s, k, m = truth.coefficients
    seconds = (q + k) * sizes + s + m
    slow, fast = int(np.argmax(np.where(sizes > 1, seconds, 0.0))), int(np.argmin(seconds))
    move = min(step, int(sizes[slow]) - 1)
    if slow == fast or move < 1:
        return None
    moved = sizes.copy()
    moved[slow] -= move
    moved[fast] += move
    return moved


def lb_bsp_best(truth: Cluster, total: int, steps: Sequence[int] = (1, 5)) -> tuple[float, Array]:
    """Best step time, and its split, that LB-BSP ever passes through on exact times, with the best of some step sizes.

    Large steps lead near, single samples from there on: no published form of LB-BSP ends nearer to equal times.
    """
    begin = np.array(even_sizes(total, truth.workers), float)
    near = _equal_times(truth, total)  # where large steps lead in the end
    best = min(((truth.time(sizes), sizes) for sizes in (begin, near)), key=lambda found: found[0])
    for start in (near,) if total > 40 * truth.workers else (begin, near):
        for step in steps:
            sizes, passed = lb_bsp_step(truth, start, step), set()
            while sizes is not None and tuple(sizes) not in passed:
                passed.add(tuple(sizes))
                seconds = truth.time(sizes)
                if seconds < best[0]:
                    best = seconds, sizes
                sizes = lb_bsp_step(truth, sizes, step)
    return best


def _equal_times(truth: Cluster, total: int) -> Array:
    """Sizes at which all workers compute equally long, as near as whole samples come: the aim of LB-BSP."""
    sizes = algorithm_1(replace(model_of(truth), t_o=0.0), total).sizes
    return np.array(proportional_sizes(total, np.maximum(sizes, 1e-9), min_local=1), float)


def scaled(sizes: Array, total: int) -> Array:
    """The same shares at another total, as LB-BSP has them when the total has just changed."""
    return np.array(proportional_sizes(total, sizes, min_local=1), float)


# Cannikin as printed


def model_of(truth: Cluster) -> ClusterTimeModel:
    """The time model that is exactly the cluster's."""
    nodes = tuple(NodeTimeModel(device.q, device.s, device.k, device.m) for device in truth.devices)
    return ClusterTimeModel(nodes, truth.link.gamma, truth.t_o, truth.t_u)


@dataclass(frozen=True)
class Printed:
    """What Algorithm 1 returns, read as generously as its text allows.

    Args:
        sizes: real numbers.
        found: whether a boundary gave an overlap state in which no worker finishes later than the common time.
    """

    sizes: Array
    found: bool


def algorithm_1(model: ClusterTimeModel, total: int) -> Printed:
    """Split by overlap state (C Alg. 1): both checks, then every boundary between the workers on which they disagree.

    The printed loop halves an interval without saying which half; here all boundaries are tried.
    """
    alpha_1, beta_1, alpha_2, beta_2 = (np.asarray(x, float) for x in model.coefficients())
    beta_1, beta_2 = beta_1 - model.t_u, beta_2 - model.t_u
    k, m = (np.array([getattr(node, name) for node in model.nodes]) for name in "km")

    def together(alpha: Array, beta: Array) -> Array:
        seconds = (total + (beta / alpha).sum()) / (1.0 / alpha).sum()
        return np.asarray((seconds - beta) / alpha)

    def computes(sizes: Array) -> npt.NDArray[np.bool_]:
        return (1.0 - model.gamma) * (k * sizes + m) >= model.t_o

    by_compute, by_link = together(alpha_1, beta_1), together(alpha_2, beta_2)
    if computes(by_compute).all():
        return Printed(by_compute, True)
    if not computes(by_link).any():
        return Printed(by_link, True)
    first, second = computes(by_compute), computes(by_link)
    fixed = np.array([node.s + node.m for node in model.nodes])
    outliers = np.flatnonzero(first != second)
    outliers = outliers[np.argsort(fixed[outliers], kind="stable")]
    sizes = by_compute
    for boundary in range(len(outliers) + 1):
        state = first & second
        state[outliers[:boundary]] = True
        sizes = together(np.where(state, alpha_1, alpha_2), np.where(state, beta_1, beta_2))
        finish = np.maximum(alpha_1 * sizes + beta_1, alpha_2 * sizes + beta_2)
        common = float(np.where(state, alpha_1 * sizes + beta_1, alpha_2 * sizes + beta_2).max())
        if np.all(finish <= common * (1 + 1e-9)):
            return Printed(sizes, True)
    return Printed(sizes, False)


def published_fit(seen: Sequence[StepObservations], *, weighted: bool, least: bool) -> ClusterTimeModel:
    """Time model as the paper's section 4.5 learns it: a line for each worker, and one overlap and link for all.

    Args:
        seen: observations at two splits at least.
        weighted: the overlap ratio by inverse variance (C eq. 12, mean and sample variance), else by plain averaging.
        least: link times by the minimum over workers, else by plain averaging.
    """
    sizes = np.concatenate([s.local_batch_sizes for s in seen])
    a, p = (np.concatenate([getattr(s, name) for s in seen]) for name in ("outside_backward", "backward"))
    nodes = [NodeTimeModel(*(x for y in (a, p) for x in fit_line(sizes[:, i], y[:, i]))) for i in range(sizes.shape[1])]
    ratio = np.clip(np.concatenate([s.first_bucket / s.backward for s in seen]), 0.0, 1.0)
    weight = 1.0 / (ratio.var(axis=0, ddof=1) + 1e-12) if weighted else np.ones(ratio.shape[1])
    gamma = float((ratio.mean(axis=0) * weight).sum() / weight.sum())
    links = [np.concatenate([getattr(s, name) for s in seen]).mean(axis=0) for name in ("overlapped_sync", "last_sync")]
    t_o, t_u = (float(x.min() if least else x.mean()) for x in links)
    return ClusterTimeModel(tuple(nodes), gamma, t_o, t_u)


def predicted_times(model: ClusterTimeModel, totals: Sequence[int]) -> Array:
    """OptPerf that a model predicts."""
    return np.asarray(solve_step_times(model, list(totals)))


class DelayedFirstBucket(Noise):
    """Noise, and a delay of the measured first bucket on the last worker, as another process on its host causes it.

    Args:
        sigma: of all times.
        delay: mean of the delay as a share of the backward pass; exponential, so its median is smaller.
        seed: of the random numbers.
    """

    def __init__(self, sigma: float, delay: float, *, seed: int = 0, gamma: float = GAMMA) -> None:
        super().__init__(sigma, seed=seed)
        self.delay, self.gamma = delay, gamma

    def first(self, steps: int, workers: int) -> Array:
        """Factors on the time to the first bucket, at most those that make it the whole backward pass."""
        factors = np.asarray(super().first(steps, workers))
        factors[:, -1] += self.rng.exponential(self.delay, steps) / self.gamma
        return np.minimum(factors, 1.0 / self.gamma)


@dataclass
class PrintedCannikin(LBBSP):
    """Cannikin's own loop: a split by time per sample (C eq. 8), then its fit and the optimum of that."""

    seen: tuple[StepObservations, ...] = ()

    def decide(self, observations: StepObservations, current: BatchPlan, context: PlanContext) -> Decision:
        seen, total = (*self.seen, observations), context.total_batch_size
        if len(seen) < 2:
            seconds = observations.compute.mean(axis=0)
            plan = BatchPlan(total, bootstrap_sizes(total, current.local_batch_sizes, seconds.tolist(), min_local=1))
        else:
            plan = solve_optperf(published_fit(seen, weighted=True, least=True), total)
        return Decision(replace(self, seen=seen), None if plan == current else Proposal(plan, "as printed"))
