"""Simulator of a data-parallel training on unequal workers: real planners and schedule, simulated steps."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from lightning_hetero.core.batching.plan import BatchPlan, PlanEntry
from lightning_hetero.core.compression.settings import BlockTopK
from lightning_hetero.core.keywords import checked_keywords
from lightning_hetero.core.policies.base import Planner
from lightning_hetero.core.validation import check_choice, check_int, check_number
from lightning_hetero.simulate.cluster.changes import Join, WorkerChange, checked_changes
from lightning_hetero.simulate.cluster.checks import (
    checked_capacities,
    checked_devices,
    checked_names,
    checked_policy,
    exchange_of,
)
from lightning_hetero.simulate.cluster.control.noise_trajectory import NoiseTrajectory
from lightning_hetero.simulate.cluster.control.rounds import VirtualRounds
from lightning_hetero.simulate.cluster.link_profile import LinkProfile
from lightning_hetero.simulate.cluster.result import Recorder, SimulationResult
from lightning_hetero.simulate.cluster.truth.factors import DisturbedFactors, FactorStream, ProfileFactors
from lightning_hetero.simulate.cluster.truth.state import ClusterState
from lightning_hetero.simulate.cluster.truth.steps import StepRunner
from lightning_hetero.simulate.devices.device_profile import Device

__all__ = ["ClusterSimulator"]

Array = npt.NDArray[np.float64]


@checked_keywords
class ClusterSimulator:
    """Training on a cluster of exactly known speed, without a process: steps by their events, decisions by the package.

    Every step is simulated bucket by bucket, and timed as a run's timers would time it. The planner, the schedule of
    sync rounds, and the path from a decision to the next plan are those of a run. The clock is virtual.

    Args:
        devices: profile of each worker; two to ten thousand of them take milliseconds to a tenth of a second per step.
            Any object with ``times(batch_size) -> (seconds outside of the backward pass, seconds in it)`` is one, and
            may have ``memory`` and ``name``.
        total_batch_size: ``B`` to begin with, ``>= 1``.
        link: link of the workers; by default gradients take no time.
        policy: name in :data:`~lightning_hetero.core.policies.POLICIES` that needs no settings, or a planner;
            ``None`` keeps equal sizes.
        seed: of all random numbers: device ``i`` has ``seed + i``, as an emulated one has.
        min_local: fewest samples of each worker, ``>= 1``.
        names: hardware identity of each worker; by default its profile's name and its place.
        capacities: peak FLOP/s of each worker, for policies that begin with them.
        replan: interval of sync rounds: ``"auto"``, a number of steps, or ``"epoch"`` for those of :meth:`sync_round`.
        hysteresis: least predicted gain for which a plan changes.
        change_cost: seconds that decisions count for a change of the plan; by default what the first worker measures. A
            simulated change takes none.
        round_seconds: seconds of a sync round up to its decision, a number or a function of the processor time that
            the decision took; by default what is typical for the number of workers (``benchmarks/scaling.py``).
        noise_scale: gradient noise scale in samples by the samples so far, a function or a
            :class:`~lightning_hetero.simulate.NoiseTrajectory`, for planners that move the
            total; ``None`` if it is not measured.
        compression: block top-k settings, for gradients sent as one message per worker; ``None`` for dense sums.
        staleness: 1 if messages travel while the next step computes.
        events: workers that join or leave, each by a restart from a checkpoint
            (:mod:`lightning_hetero.simulate.cluster.changes`); slowdowns are in the profiles.
        restart_seconds: seconds of such a restart.
        ahead: steps whose batches are drawn already when a plan is decided on, which run under the old one.
        noise: ``noise(rng, step, workers)`` returns factors on the times of a step, one for each worker, or two for
            what is outside of its backward pass and in it; beside the profiles' jitter.
        slowdown: ``slowdown(step)`` returns how many times as long each worker takes; beside the profiles' own.
        factors: source of the factors on all times, in place of the profiles' jitter and slowdowns.

    Raises:
        TypeError: if an argument has the wrong type.
        ValueError: if an argument is out of range, or no split fits the workers.

    Example:
        >>> from lightning_hetero.simulate import DeviceProfile
        >>> fast = DeviceProfile(q=0.001, s=0.01, k=0.002, m=0.01)
        >>> slow = DeviceProfile(q=0.004, s=0.01, k=0.008, m=0.01)
        >>> simulator = ClusterSimulator([fast, slow], 100, link=LinkProfile(gradient_bytes=1e6, rate=1e9))
        >>> result = simulator.run(40)
        >>> [entry.plan.local_batch_sizes for entry in result.plans]
        [(50, 50), (86, 14), (80, 20)]
        >>> round(result.share_since(20), 3), simulator.optimum()[1].tolist()
        (1.0, [80, 20])
    """

    def __init__(
        self,
        devices: Sequence[Device],
        total_batch_size: int,
        *,
        link: LinkProfile | None = None,
        policy: str | Planner | None = "perf_model",
        seed: int = 0,
        min_local: int = 1,
        names: Sequence[str] | None = None,
        capacities: Sequence[float] = (),
        replan: str | int = "auto",
        hysteresis: float | None = None,
        change_cost: float | None = None,
        round_seconds: float | Callable[[float], float] | None = None,
        noise_scale: Callable[[float], float] | NoiseTrajectory | None = None,
        compression: BlockTopK | None = None,
        staleness: int = 0,
        events: Sequence[WorkerChange] = (),
        restart_seconds: float = 0.0,
        ahead: int = 0,
        noise: Callable[[np.random.Generator, int, int], Any] | None = None,
        slowdown: Callable[[int], Any] | None = None,
        factors: FactorStream | None = None,
    ) -> None:
        devices, link = checked_devices(devices), LinkProfile() if link is None else link
        if not isinstance(link, LinkProfile):
            raise TypeError(f"link={link!r} must be a LinkProfile, such as LinkProfile(gradient_bytes=1e8, rate=1e9).")
        check_int("seed", seed, minimum=0)
        check_int("min_local", min_local, minimum=1)
        names = checked_names(devices, names)
        check_choice("staleness", staleness, (0, 1))
        cluster = ClusterState(devices, names, link, min_local, checked_capacities(devices, capacities))
        if factors is None:
            factors = ProfileFactors(devices, [seed + i for i in range(len(devices))], link.jitter, seed)
        if noise is not None or slowdown is not None:
            factors = DisturbedFactors(factors, len(devices), noise, slowdown, seed)
        self._record, self._seed = Recorder(), seed
        self._events = checked_changes(names, events, bool(capacities))
        self._restart = check_number("restart_seconds", restart_seconds, low=0.0)
        messages = None if compression is None else exchange_of(compression, staleness, cluster)
        self._steps = StepRunner(cluster, factors, self._record, messages)
        self._rounds = VirtualRounds(
            checked_policy(policy, check_int("total_batch_size", total_batch_size, minimum=1)),
            self._record,
            replan=replan,
            hysteresis=hysteresis,
            change_cost=change_cost,
            round_seconds=round_seconds,
            ahead=check_int("ahead", ahead, minimum=0),
            noise=None if noise_scale is None else NoiseTrajectory.of(noise_scale),
            seed=seed,
        )
        self._rounds.begin(cluster, total_batch_size)
        if messages is not None:
            self._rounds.begin_sending(messages)

    # what runs

    @property
    def cluster(self) -> ClusterState:
        """The workers and their link."""
        return self._steps.cluster

    @property
    def plan(self) -> BatchPlan:
        """Plan of the next step."""
        return self._rounds.plan_at(self.step)

    @property
    def planner(self) -> Planner | None:
        """Planner that has seen all rounds so far."""
        return self._rounds.planner

    @property
    def step(self) -> int:
        """Steps that have run."""
        return self._steps.count

    @property
    def clock(self) -> float:
        """Second of the virtual clock."""
        return self._steps.clock

    @property
    def result(self) -> SimulationResult:
        """Everything so far."""
        return self._record.result()

    def run(self, steps: int) -> SimulationResult:
        """Run some more steps; return the result of all steps so far.

        Raises:
            ValueError: if the number is negative.
        """
        self.advance(steps)
        return self.result

    def advance(self, steps: int) -> None:
        """Run some more steps, as :meth:`run` does, without making a result of all of them."""
        end = self.step + check_int("steps", steps, minimum=0)
        while self.step < end:
            self._happen()
            until = min(end, self._rounds.stretch_ends(self.step), self.step + self._steps.most)
            until = min([until, *(event.step for event in self._events)])
            self._rounds.see(self._steps.run(self.plan, until - self.step))
            if self._rounds.due(self.step):
                self.sync_round()

    def sync_round(self, *, unseen: int = 0) -> None:
        """Run a sync round now; ``unseen`` steps have passed since the last one beside those that were simulated."""
        unseen = check_int("unseen", unseen, minimum=0)
        self._steps.wait(self._rounds.run(self.step, self.cluster, self._steps.messages, unseen=unseen))

    def _happen(self) -> None:
        """Let the workers join and leave whose step has come."""
        due = [event for event in self._events if event.step <= self.step]
        if not due:
            return
        there = dict(zip(self.cluster.names, self.cluster.devices, strict=True))
        known = dict(zip(self.cluster.names, self.cluster.capacities, strict=False))  # empty if they are not known
        for event in due:
            if isinstance(event, Join):
                there[event.identity] = event.device
                known |= {} if event.capacity is None else {event.identity: event.capacity}
            else:
                del there[event.name]
        self._events = self._events[len(due) :]
        capacities = [known[name] for name in there] if known else ()
        self.change_workers(list(there.values()), list(there), restart_seconds=self._restart, capacities=capacities)

    def optimum(self, total_batch_size: int | None = None) -> tuple[float, npt.NDArray[np.int64]]:
        """Return the least seconds of the next step without jitter, and a split that takes them.

        Args:
            total_batch_size: samples of the step; by default those of the next one.
        """
        total = self.plan.total_batch_size if total_batch_size is None else total_batch_size
        return self._steps.best(check_int("total_batch_size", total, minimum=1))

    def time(self, plan: BatchPlan) -> float:
        """Return the seconds of the next step without jitter if it ran this plan, with ``min_local`` as least size."""
        return self._steps.exact_seconds(np.maximum(plan.local_batch_sizes, self.cluster.min_local))

    def coefficients(self) -> Array:
        """Return the rows ``q``, ``s``, ``k``, ``m`` of the next step without jitter, shape ``(4, workers)``."""
        return self._steps.coefficients()

    # what changes

    def slow_down(self, factors: float | Sequence[float] | Array, *, link: float = 1.0) -> None:
        """Make each worker, and the link, slower from the next step on than the profiles say; 1 takes it back.

        Workers that stay when others join or leave, and the link, stay as slow as they are.

        Args:
            factors: on all times of each worker, or one for all, above 0.
            link: factor on the seconds of all-reduces, above 0.
        """
        self._steps.slow_down(factors, link)

    def change_workers(
        self,
        devices: Sequence[Device],
        names: Sequence[str],
        *,
        restart_seconds: float = 0.0,
        capacities: Sequence[float] = (),
    ) -> None:
        """Go on with other workers, as a run that is started anew from its checkpoint.

        Args:
            devices: profiles of all workers from now on.
            names: hardware identity of each: a worker of a former name goes on with its random numbers, and the planner
                goes on with what it knows of it.
            restart_seconds: seconds that the restart takes.
            capacities: peak FLOP/s of each, for policies that begin with them.
        """
        if self._steps.messages is not None:
            raise ValueError("workers that join or leave are not simulated with compression; leave one of them out.")
        cluster = replace(
            self._steps.undisturbed,
            devices=checked_devices(devices),
            names=checked_names(devices, names),
            capacities=checked_capacities(devices, capacities),
        )
        self._steps.change_workers(cluster, self._seed)
        self._steps.wait(check_number("restart_seconds", restart_seconds, low=0.0))
        self._rounds.restart(self.cluster, self.step)

    def adopt(self, plan: BatchPlan, reason: str = "given") -> PlanEntry:
        """Make a plan that of the next steps, as an engine's ``adopt`` does."""
        return self._rounds.adopt(plan, reason, self.step, self.cluster)
