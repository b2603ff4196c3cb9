"""Course of a policy on a cluster: its splits over time, and how close to the optimum they come."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from lightning_hetero.core.keywords import checked_keywords
from lightning_hetero.core.rounded import rounded
from lightning_hetero.simulate.devices.catalog import published_devices
from lightning_hetero.simulate.planning.answer import Epoch
from lightning_hetero.simulate.planning.cluster import Cluster, Link
from lightning_hetero.simulate.planning.tables import epoch_text, group_label, table
from lightning_hetero.simulate.planning.units import format_seconds
from lightning_hetero.simulate.planning.wording import counted, labels

if TYPE_CHECKING:
    from lightning_hetero.simulate.cluster.link_profile import LinkProfile
    from lightning_hetero.simulate.cluster.result import SimulationResult

__all__ = ["LearnedAnswer", "PlanChange", "learned_text", "link_profile", "rated_speeds", "simulate_cluster"]

MOST_BUCKETS = 64
SHOWN_PLANS = 6
SHOWN_ROWS = 40


@dataclass(frozen=True, slots=True)
class PlanChange:
    """A plan, from a step on.

    Args:
        step: first step that runs under it.
        local_batch_sizes: its split.
        reason: why the policy chose it.
    """

    step: int
    local_batch_sizes: tuple[int, ...]
    reason: str


@dataclass(frozen=True)
class LearnedAnswer:
    """Course of a simulated training.

    Args:
        total_batch_size: ``B`` to begin with.
        policy: name of the policy.
        steps: number of simulated steps.
        seconds: that they took, sync rounds included.
        samples_per_second: over all of them.
        optimum: least seconds of a step without jitter, in the last step.
        steps_to_5_percent: steps until one takes at most 5 % longer than the optimum, both without jitter; ``None`` if
            none does.
        steps_to_1_percent: the same for 1 %.
        share_of_optimum: least time of all steps over the time that their splits take, both without jitter.
        share_at_the_end: the same for the second half of the steps.
        names: of the workers; different devices of one name are numbered.
        epoch: time and cost of an epoch at this throughput, ``None`` if its samples are unknown.
        plans: the plans.
        result: all that the simulator says.
    """

    total_batch_size: int
    policy: str
    steps: int
    seconds: float
    samples_per_second: float
    optimum: float
    steps_to_5_percent: int | None
    steps_to_1_percent: int | None
    share_of_optimum: float
    share_at_the_end: float
    names: tuple[str, ...]
    epoch: Epoch | None
    plans: tuple[PlanChange, ...]
    result: "SimulationResult"

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        plain = {name: getattr(self, name) for name in self.__dataclass_fields__ if name not in ("plans", "result")}
        plans = [
            {"step": p.step, "local_batch_sizes": list(p.local_batch_sizes), "reason": p.reason} for p in self.plans
        ]
        return {**plain, "names": list(self.names), "epoch": self.epoch and asdict(self.epoch), "plans": plans}


def link_profile(link: Link, workers: int) -> "LinkProfile":
    """Return the simulator's link; a measured one has as many equal buckets as ``t_o`` and ``t_u`` suggest."""
    from lightning_hetero.simulate.cluster.link_profile import LinkProfile

    if not link.measured_on:
        return LinkProfile(link.gradient_bytes or 0.0, link.rate, link.latency, link.buckets, link.gamma)
    t_o, t_u = link.times(workers)
    buckets = min(round(t_o / t_u) + 1, MOST_BUCKETS) if t_u > 0 else link.buckets
    return LinkProfile(latency=(t_o + t_u) / buckets, buckets=buckets, gamma=link.gamma)


@checked_keywords
def simulate_cluster(
    cluster: Cluster,
    total_batch_size: int | None = None,
    steps: int = 200,
    *,
    policy: str = "perf_model",
    seed: int = 0,
) -> LearnedAnswer:
    """Return what a policy does on a cluster, step by step, from equal sizes on.

    Args:
        cluster: workers and link.
        total_batch_size: ``B``; that of the cluster by default.
        steps: number of steps.
        policy: name in the table of policies.
        seed: of the jitter.

    Raises:
        ValueError: if the total is not known, something does not fit, or the policy needs what is not known.

    Example:
        >>> from lightning_hetero.simulate.planning.cluster import Worker
        >>> fast, slow = Worker("fast", 0.001, 0.01, 0.002, 0), Worker("slow", 0.003, 0.01, 0.006, 0)
        >>> answer = simulate_cluster(Cluster((fast, slow)), 40, steps=40)
        >>> answer.plans[-1].local_batch_sizes, answer.steps_to_5_percent, round(answer.share_at_the_end, 2)
        ((30, 10), 15, 1.0)
    """
    from lightning_hetero.simulate.cluster.simulator import ClusterSimulator
    from lightning_hetero.simulate.planning.figures import checked_total, epoch_of

    total, devices = checked_total(cluster, total_batch_size), [worker.profile() for worker in cluster.workers]
    link = link_profile(cluster.link, len(devices))
    capacities = rated_speeds([worker.name for worker in cluster.workers]) if policy == "static" else ()
    simulator = ClusterSimulator(devices, total, link=link, policy=policy, seed=seed, capacities=capacities)
    result = simulator.run(steps)
    speed = float(result.samples[-1] / result.clock[-1])
    return LearnedAnswer(
        total_batch_size=total,
        policy=policy,
        steps=result.steps,
        seconds=float(result.clock[-1]),
        samples_per_second=speed,
        optimum=float(result.optimum[-1]),
        steps_to_5_percent=_whole(result.first_within(0.05)),
        steps_to_1_percent=_whole(result.first_within(0.01)),
        share_of_optimum=result.share_of_optimum,
        share_at_the_end=result.share_since(result.steps // 2),
        names=tuple(labels([(w.name, (w.q, w.s, w.k, w.m, w.memory, w.jitter)) for w in cluster.workers])),
        epoch=epoch_of(cluster, cluster.samples, total, total / speed),
        plans=tuple(PlanChange(e.step, e.plan.local_batch_sizes, e.reason) for e in result.plans),
        result=result,
    )


def rated_speeds(names: Sequence[str]) -> tuple[float, ...]:
    """Return the FLOP/s of devices of the table, by which the static policy splits.

    Raises:
        ValueError: if one is not in the table.

    Example:
        >>> rated_speeds(["V100", "T4"])
        (13.5902, 4.9034)
    """
    known = published_devices()
    for name in names:
        if name not in known:
            raise ValueError(
                f"policy 'static' splits by the FLOP/s of each worker, which are not known of {name!r}. Name workers "
                "as in the table (`lightning-hetero plan --list`), or choose another policy."
            )
    return tuple(known[name].tflops for name in names)


def _whole(steps: float) -> int | None:
    return None if math.isinf(steps) else int(steps)


def learned_text(answer: LearnedAnswer, name: str = "") -> str:
    """Return the answer as lines for a terminal: the split at the first plans and the last, and its figures."""
    plans = answer.plans
    shown = plans if len(plans) <= SHOWN_PLANS else (*plans[: SHOWN_PLANS - 1], plans[-1])
    groups: dict[str, list[int]] = {}
    for i, worker in enumerate(answer.names):
        groups.setdefault(worker, []).append(i)
    rows = [
        (group_label(worker, len(own)), *(_range(plan, own) for plan in shown))
        for worker, own in list(groups.items())[:SHOWN_ROWS]
    ]
    lines = table(rows, ("samples from step", *(str(plan.step) for plan in shown)))
    if len(groups) > SHOWN_ROWS:
        lines.append(f"... and {counted(len(groups) - SHOWN_ROWS, 'more kind')} of workers (--json lists all)")
    title = (
        f"{name or 'cluster'}: {counted(len(answer.names), 'worker')}, total batch {answer.total_batch_size}, policy "
        f"{answer.policy}, {counted(answer.steps, 'step')}"
    )
    return "\n".join([title, "", *lines, "", *_facts(answer)]) + "\n"


def _range(plan: PlanChange, own: list[int]) -> str:
    sizes = [plan.local_batch_sizes[i] for i in own]
    return str(sizes[0]) if min(sizes) == max(sizes) else f"{min(sizes)}-{max(sizes)}"


def _facts(answer: LearnedAnswer) -> list[str]:
    def steps(number: int | None) -> str:
        return "not reached" if number is None else f"after {counted(number, 'step')}"

    facts = [
        f"within 5 % of the optimum  {steps(answer.steps_to_5_percent)}",
        f"within 1 % of the optimum  {steps(answer.steps_to_1_percent)}",
        f"share of the optimum       {answer.share_of_optimum:.1%}, in the second half {answer.share_at_the_end:.1%}",
        f"optimum                    {format_seconds(answer.optimum)} a step",
        f"changes of the plan        {len(answer.plans) - 1}",
        f"throughput                 {rounded(answer.samples_per_second, 4)} samples/s over "
        f"{format_seconds(answer.seconds)}",
    ]
    return [*facts, f"epoch                      {epoch_text(answer.epoch)}"] if answer.epoch else facts
