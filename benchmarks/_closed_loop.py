"""Simulated clusters of exactly known speed, and the loop that a run closes between them and a planner.

The truth uses nothing of the package's time model: a step is simulated bucket by bucket, and its optimum is found by
bisection over integer splits.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt
from _clusters import EXCHANGE, LBBSP

from lightning_hetero.comm.agreement.sync_schedule import SyncSchedule
from lightning_hetero.comm.timing.settings import SETTINGS
from lightning_hetero.core.batching.integer_split import even_sizes
from lightning_hetero.core.batching.plan import BatchPlan
from lightning_hetero.core.observations import StepObservations
from lightning_hetero.core.policies.base import Decision, PlanContext, Planner, Proposal
from lightning_hetero.core.policies.perf_model import PerfModelPlanner

Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Truth:
    """A cluster: ``a = q b + s``, ``P = k b + m`` of each worker, and the link (Cannikin, eq. 3-7)."""

    q: Array
    s: Array
    k: Array
    m: Array
    gamma: float = 0.12
    t_o: float = 0.0
    t_u: float = 0.0
    buckets: int = 5

    @property
    def workers(self) -> int:
        return len(self.q)

    def slowed(self, factors: Array, link: float = 1.0) -> "Truth":
        """The cluster with each worker, and the link, slower by a factor."""
        scaled = {name: getattr(self, name) * factors for name in ("q", "s", "k", "m")}
        return replace(self, **scaled, t_o=self.t_o * link, t_u=self.t_u * link)

    def part(self, workers: Sequence[int]) -> "Truth":
        """The cluster of some of the workers."""
        return replace(self, **{name: getattr(self, name)[list(workers)] for name in ("q", "s", "k", "m")})

    def _events(self, a: Array, p: Array, link: Array) -> tuple[Array, Array]:
        """When each worker has each bucket, and when each is averaged; of ``(steps, workers)`` times."""
        count = max(self.buckets, 2)
        seconds = np.append(np.full(count - 1, self.t_o / (count - 1)), self.t_u)
        share = self.gamma + (1 - self.gamma) * np.arange(count) / (count - 1)
        ready = a[:, :, None] + p[:, :, None] * share
        latest, done, end = ready.max(axis=1), np.empty((len(a), count)), np.full(len(a), -np.inf)
        for j in range(count):
            end = np.maximum(end, latest[:, j]) + seconds[j] * link
            done[:, j] = end
        return ready, done

    def time(self, sizes: Sequence[int] | Array) -> float:
        """Seconds of a step without noise."""
        b = np.asarray(sizes, float)
        return float(self._events((self.q * b + self.s)[None], (self.k * b + self.m)[None], np.ones(1))[1][0, -1])

    def run(self, sizes: Sequence[int], steps: int, noise: "Noise") -> tuple[dict[str, Array], Array]:
        """What workers measure in some steps, and the seconds of each step."""
        b, factor, link = np.asarray(sizes, float), noise.workers(steps, self.workers), noise.link(steps)
        a, p = (self.q * b + self.s) * factor[:, :, 0], (self.k * b + self.m) * factor[:, :, 1]
        ready, done = self._events(a, p, link)
        before = np.concatenate([np.full((len(a), 1), -np.inf), done[:, :-1]], axis=1)
        sync = done[:, None, :] - np.maximum(ready, before[:, None, :])
        rows = {
            "local_batch_sizes": np.broadcast_to(b, a.shape).copy(),
            "forward": a,
            "backward": p,
            "first_bucket": p * self.gamma * noise.first(steps, self.workers),
            "overlapped_sync": sync[:, :, :-1].sum(axis=2),
            "last_sync": sync[:, :, -1],
            "step_time": np.broadcast_to(done[:, -1:], a.shape).copy(),
        }
        return rows, done[:, -1]

    def optimum(self, total: int) -> float:
        """Least seconds of a step over all integer splits, at least one sample each."""
        return self.best(total)[0]

    def best(self, total: int) -> tuple[float, Array]:
        """Least seconds of a step over all integer splits, at least one sample each, and a split that takes them."""

        def finish(b: Array) -> Array:
            a, p = self.q * b + self.s, self.k * b + self.m
            return np.maximum(a + p, a + self.gamma * p + self.t_o) + self.t_u

        def room(seconds: float) -> Array:
            compute = (seconds - self.t_u - self.s - self.m) / (self.q + self.k)
            send = (seconds - self.t_u - self.t_o - self.s - self.gamma * self.m) / (self.q + self.gamma * self.k)
            return np.clip(np.floor(np.minimum(compute, send) + 1e-9), 1.0, total)

        low, high = float(finish(np.ones(self.workers)).max()), float(finish(np.full(self.workers, total)).max())
        for _ in range(100 if room(low).sum() < total else 0):
            middle = 0.5 * (low + high)
            low, high = (low, middle) if room(middle).sum() >= total else (middle, high)
        high = low if room(low).sum() >= total else high
        sizes = room(high)
        left = int(sizes.sum()) - total
        for i in np.argsort(-finish(sizes), kind="stable"):  # what is too much goes from the slowest
            less = min(left, int(sizes[i]) - 1)
            sizes[i] -= less
            left -= less
        return high, sizes


class Noise:
    """Factors on times: log-normal for each step, worker and phase.

    Args:
        sigma: standard deviation of one time.
        slow: share of the variance that is one slow drift of the worker, which returns within 40 steps. The drift is
            a speed: :attr:`drift` has its factors in the newest steps.
        spikes: probability of a step that takes three times as long.
        seed: of the random numbers.
    """

    def __init__(self, sigma: float, *, slow: float = 0.0, spikes: float = 0.0, seed: int = 0) -> None:
        self.rng, self.sigma, self.slow, self.spikes = np.random.default_rng(seed), sigma, slow, spikes
        self.state: Array | None = None
        self.drift: Array | None = None

    def workers(self, steps: int, workers: int) -> Array:
        """Factors of shape ``(steps, workers, 2)``."""
        z = self.rng.standard_normal((steps, workers, 2)) * self.sigma * np.sqrt(1 - self.slow)
        if self.slow:
            keep, drift = np.exp(-1 / 40), np.empty((steps, workers))
            state = self.rng.standard_normal(workers) if self.state is None else self.state
            for t in range(steps):
                state = keep * state + np.sqrt(1 - keep**2) * self.rng.standard_normal(workers)
                drift[t] = state
            self.state = state
            z = z + self.sigma * np.sqrt(self.slow) * drift[:, :, None]
            self.drift = np.exp(self.sigma * np.sqrt(self.slow) * drift.mean(axis=0))
        factors: Array = np.exp(z - 0.5 * self.sigma**2)
        if self.spikes:
            factors = factors * np.where(self.rng.random((steps, workers, 1)) < self.spikes, 3.0, 1.0)
        return factors

    def link(self, steps: int) -> Array:
        """Factors on the seconds of averaging."""
        return np.asarray(np.exp(self.rng.standard_normal(steps) * self.sigma))

    def first(self, steps: int, workers: int) -> Array:
        """Factors on the time to the first bucket."""
        return np.asarray(np.exp(self.rng.standard_normal((steps, workers)) * self.sigma))


# clusters: speeds relative to the fastest worker


# seconds per sample of the fastest worker, fixed seconds outside of and in backward, bytes of gradients


# policies


@dataclass
class Oracle(LBBSP):
    """Knows all speeds at each look, and whether they move, and takes the exact optimum.

    No planner that has sync rounds as often can do better.
    """

    truth: Truth | None = None
    before: Truth | None = None

    def decide(self, observations: StepObservations, current: BatchPlan, context: PlanContext) -> Decision:
        assert self.truth is not None
        sizes = self.truth.best(context.total_batch_size)[1].astype(int)
        plan = BatchPlan(context.total_batch_size, tuple(sizes.tolist()))
        moving, self.before = self.truth is not self.before and self.before is not None, self.truth
        return Decision(self, None if plan == current else Proposal(plan, "known"), moving=moving)


@dataclass
class Loop:
    """A run: steps of a simulated cluster, sync rounds as a run schedules them, plans from the next step on.

    Args:
        planner: decides; ``None`` keeps equal sizes.
        truth: the cluster, which may be replaced between calls of :meth:`go`.
        total: total batch size.
        noise: of times.
        cost: seconds of a decision, ``None`` to charge the processor time that it takes.
    """

    planner: Planner | None
    truth: Truth
    total: int
    noise: Noise
    cost: float | None = None
    names: tuple[str, ...] = ()
    extra: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.names = self.names or tuple(f"device {i}" for i in range(self.truth.workers))
        self.plan = BatchPlan(self.total, even_sizes(self.total, self.truth.workers))
        self.schedule, self.step, self.skip = SyncSchedule("auto"), 0, SETTINGS.warm_up_steps
        self.rows: list[dict[str, Array]] = []
        self.changes: list[int] = []
        self.exact: list[float] = []  # seconds of each step without noise
        self.best: list[float] = []  # those of the optimum at that step
        self.costs: list[float] = []
        self._optimum: tuple[Truth, int, float] | None = None

    @property
    def context(self) -> PlanContext:
        """What the planner has to respect."""
        known = {"elapsed": self.step - self.schedule.last, **self.extra}
        return PlanContext(self.plan.total_batch_size, self.names, (1,) * len(self.names), **known)

    def change_workers(self, truth: Truth, names: Sequence[str]) -> None:
        """Go on with other workers, as a run that was started anew from its checkpoint."""
        assert self.planner is not None
        self.truth, self.names = truth, tuple(names)
        self.planner = self.planner.loaded(self.planner.state_dict())
        proposal = self.planner.initial(self.context)
        self.plan = BatchPlan(self.total, even_sizes(self.total, truth.workers)) if proposal is None else proposal.plan
        self.schedule, self.skip, self.rows = SyncSchedule("auto"), SETTINGS.warm_up_steps, []
        self.schedule.next += self.step
        self.schedule.last = self.step

    def planned(self, total: int) -> BatchPlan:
        """The optimum of what was learned, for another total, with its predicted time and the error of that."""
        assert isinstance(self.planner, PerfModelPlanner)
        context = replace(self.context, total_batch_size=total)
        proposal = self.planner.initial(context)
        assert proposal is not None
        return proposal.plan

    def go(self, steps: int) -> "Loop":
        """Run some steps."""
        end = self.step + steps
        while self.step < end:
            self._run(min(self.schedule.next, end) - self.step)
            if self.schedule.due(self.step):
                self._look()
        return self

    def _run(self, count: int) -> None:
        if count <= 0:
            return
        sizes = np.maximum(self.plan.local_batch_sizes, 1)
        rows, _ = self.truth.run(sizes, count, self.noise)
        if not self.rows:
            rows["step_time"][0] = np.nan
        left_out = min(self.skip, count)
        self.skip -= left_out
        if count > left_out:
            self.rows.append({name: values[left_out:] for name, values in rows.items()})
        now = self.truth if self.noise.drift is None else self.truth.slowed(self.noise.drift)
        if self._optimum is None or self._optimum[0] is not now or self._optimum[1] != self.plan.total_batch_size:
            self._optimum = now, self.plan.total_batch_size, now.optimum(self.plan.total_batch_size)
        self.exact += [now.time(sizes)] * count
        self.best += [self._optimum[2]] * count
        self.step += count

    def _look(self) -> None:
        rows, self.rows = self.rows, []
        seen = StepObservations.empty(self.truth.workers)
        if rows:
            seen = StepObservations(
                **{name: np.concatenate([r[name] for r in rows])[-SETTINGS.max_steps :] for name in rows[0]}
            )
        begin, decision = time.process_time(), Decision(self.planner)
        if isinstance(self.planner, Oracle):
            self.planner.truth = self.truth if self.noise.drift is None else self.truth.slowed(self.noise.drift)
        if self.planner is not None and seen.num_steps:
            decision = Decision.of(self.planner.decide(seen, self.plan, self.context))
            self.planner = decision.planner
            if decision.proposal is not None:
                self.plan = decision.proposal.plan
                self.changes.append(self.step)
                self.skip = max(self.skip, 1)
        taken = time.process_time() - begin
        self.costs.append(taken)
        cost = EXCHANGE + (taken if self.cost is None else self.cost)
        following = self.schedule.after(self.step, seen, cost, decision)
        self.schedule.done(self.step, following)


def first_within(lost: Array, share: float, *, for_good: bool = False) -> float:
    """Steps until no more than a share of the best time is lost; infinite if it never is.

    Args:
        lost: time of each step over the optimum's, less 1.
        share: of the best time.
        for_good: until it stays so.
    """
    outside = lost > share
    if for_good:
        late = np.flatnonzero(outside)
        steps = int(late[-1]) + 1 if len(late) else 0
        return steps if steps < len(outside) else np.inf
    inside = np.flatnonzero(~outside)
    return int(inside[0]) if len(inside) else np.inf
