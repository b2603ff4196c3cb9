"""A whole training of a workload on a simulated cluster: time until a number of samples, by Pollux's model.

A step of ``B`` samples at a noise scale ``phi`` counts as ``B (phi + B_ref) / (phi + B)`` samples at the total
``B_ref`` (Cannikin, sec. 4.1); a training ends when the samples of its :class:`Workload` are reached. All systems see
the same measurements of the noise scale, and each looks at its observations equally often.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from _cannikin_clusters import NOISE, Workload, even_time, lb_bsp_best, model_of, predicted_times
from _clusters import EXCHANGE, LBBSP, Array, Cluster, Noise, simulator

from lightning_hetero.core.batching.goodput import efficiency
from lightning_hetero.core.batching.integer_split import even_sizes
from lightning_hetero.core.batching.plan import BatchPlan
from lightning_hetero.core.observations import StepObservations
from lightning_hetero.core.policies.base import Decision, PlanContext, Proposal
from lightning_hetero.core.policies.goodput import GoodputPlanner
from lightning_hetero.simulate import NoiseTrajectory

SHOWN = 40
"""Steps between two looks that are simulated one by one; the others take as long."""
GROWTH, PART = 1.2, 0.004
"""Growth of the steps between two looks, and the greatest share of the training between them."""


def counted(workload: Workload, total: int, phi: float) -> float:
    """Samples at the reference total for which a step counts."""
    return float(total * efficiency(total, phi, workload.reference))


def seconds_at(workload: Workload, time_of: Callable[[int], float], total: int, parts: int = 400) -> float:
    """Seconds of a training with one total."""
    progress = (np.arange(parts) + 0.5) / parts
    per_step = np.array([counted(workload, total, workload.noise_scale(x)) for x in progress])
    return float((workload.samples / parts / per_step).sum() * time_of(total))


def best_total(workload: Workload, workers: int, time_of: Callable[[int], float]) -> tuple[int, float]:
    """The one total that ends a training soonest, and its seconds."""
    low = -(-max(workload.initial, workers) // workers)
    grid = np.unique(np.geomspace(low, workload.largest / workers, 24).round().astype(int)) * workers
    found = {int(total): seconds_at(workload, time_of, int(total)) for total in grid}
    total = min(found, key=lambda total: found[total])
    return total, found[total]


@dataclass
class KnownGoodput(LBBSP):
    """The total with the highest goodput, by step times that are given: no hysteresis, no limit of growth.

    The noise scale is the one that all systems measure. With the exact step times of equal sizes, it is AdaptDL in its
    strongest form, which learns nothing and never errs about times; with those of the optimum, nobody can do better.

    Args:
        initial_total: ``B_0``.
        totals: that it chooses from.
        seconds: of a step with each.
        split: sizes with a total.
        settled: whether the sizes are its own.
        moves_total: tells the loop that it changes the total.
    """

    initial_total: int = 1
    totals: Array | None = None
    seconds: Array | None = None
    split: Callable[[int], tuple[int, ...]] | None = None
    settled: bool = False
    moves_total: bool = True

    def decide(self, observations: StepObservations, current: BatchPlan, context: PlanContext) -> Decision:
        assert self.totals is not None
        assert self.seconds is not None
        assert self.split is not None
        phi = np.nan if context.noise is None else context.noise.noise_scale
        if not phi >= 0:
            return Decision(self)
        goodput = self.totals / self.seconds * efficiency(self.totals, phi, self.initial_total)
        total = int(self.totals[int(np.argmax(goodput))])
        if total == current.total_batch_size and self.settled:
            return Decision(self)
        plan = BatchPlan(total, self.split(total))
        return Decision(replace(self, settled=True), None if plan == current else Proposal(plan, "goodput"))


def adapt_dl(workload: Workload, truth: Cluster) -> KnownGoodput:
    """AdaptDL in its strongest form."""
    workers = truth.workers
    low = -(-max(workload.initial, workers) // workers)
    totals = np.unique(np.geomspace(low, workload.largest / workers, 50).round()) * workers
    seconds = np.array([even_time(truth, int(total)) for total in totals])
    return KnownGoodput(
        initial_total=workload.initial,
        totals=totals,
        seconds=seconds,
        split=lambda total: even_sizes(total, workers),
    )


def all_known(workload: Workload, truth: Cluster) -> KnownGoodput:
    """The best split of the best total at each look."""
    totals = np.unique(np.geomspace(max(workload.initial, truth.workers), workload.largest, 60).round())
    seconds = predicted_times(model_of(truth), totals.astype(int).tolist())
    return KnownGoodput(
        initial_total=workload.initial,
        totals=totals,
        seconds=seconds,
        split=lambda total: tuple(truth.best(total)[1].tolist()),
    )


@dataclass(frozen=True)
class Record:
    """What became of a training.

    Args:
        seconds: until the last sample.
        looks: at observations.
        steps: of the training.
        overhead: seconds of all looks, the processor time of their decisions and the exchange.
        history: ``(progress, total, sizes, seconds of a step, of its optimum)`` at each look.
    """

    seconds: float
    looks: int
    steps: int
    overhead: float
    history: list[tuple[float, int, tuple[int, ...], float, float]]


def train(workload: Workload, truth: Cluster, planner: Any, total: int, seed: int) -> Record:
    """Simulate a training that begins with a total in equal sizes.

    Its looks become rarer, so that a training of a million steps has some hundred of them. Between two of them only
    the first steps are simulated.
    """
    progress, seconds, steps, interval, history = 0.0, 0.0, 0, 8.0, []
    gradients = NoiseTrajectory(lambda samples: workload.noise_scale(progress))
    noise = Noise(NOISE, seed=seed)
    run = simulator(planner, truth, total, noise, replan="epoch", noise_scale=gradients, seed=seed)
    while progress < 1.0:
        b, sizes, step_time = run.plan.total_batch_size, run.plan.local_batch_sizes, run.time(run.plan)
        done = counted(workload, b, workload.noise_scale(progress)) / workload.samples
        most = max(PART / done, 8.0)
        count = max(int(min(interval, most, np.ceil((1.0 - progress) / done))), 1)
        shown = min(count, SHOWN)
        run.advance(shown)
        history.append((progress + count * done, b, sizes, step_time, run.optimum()[0]))
        run.sync_round(unseen=count - shown)
        seconds, progress, steps = seconds + count * step_time + EXCHANGE, progress + count * done, steps + count
        interval *= GROWTH
    return Record(seconds, len(history), steps, sum(look.seconds for look in run.result.rounds), history)


def systems(workload: Workload, truth: Cluster) -> dict[str, tuple[Any, int]]:
    """Planner and first total of each system whose run is simulated."""
    first = max(workload.initial, truth.workers)
    goodput = partial(GoodputPlanner, workload.largest, min_total_batch_size=first, initial_total=first)
    even = -(-first // truth.workers) * truth.workers
    tuned, _ = best_total(workload, truth.workers, lambda total: lb_bsp_best(truth, total)[0])
    found: dict[str, tuple[Any, int]] = {
        "ours": (goodput(), first),
        "AdaptDL": (adapt_dl(workload, truth), even),
        "all known": (all_known(workload, truth), first),
    }
    found["LB-BSP at B_0"] = LBBSP(step=5), first
    for step in (1, 5, 20):
        found[f"LB-BSP at its best total, step {step}"] = LBBSP(step=step), tuned
    return found


def fixed(workload: Workload, truth: Cluster) -> dict[str, tuple[int, float]]:
    """Total and seconds of DDP at ``B_0`` and at its best total."""
    first = max(workload.initial, truth.workers)
    time_of = partial(even_time, truth)
    return {
        "DDP at B_0": (first, seconds_at(workload, time_of, first)),
        "DDP at its best total": best_total(workload, truth.workers, time_of),
    }
