"""Engine of heterogeneous data parallelism, independent of any trainer.

:class:`HeteroEngine` holds the plan, shards data and weights losses by it, observes each step, and agrees with the
other ranks on the next plan. The planners of :mod:`lightning_hetero.core.policies` decide on plans.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from lightning_hetero.comm.agreement.group_lifetime import ended
from lightning_hetero.comm.agreement.round_result import RoundResult
from lightning_hetero.comm.agreement.sync_round import Padding, SyncPayload
from lightning_hetero.comm.noise.window_sums import NOISE_FIELDS
from lightning_hetero.core.batching.plan import BatchPlan, PlanEntry
from lightning_hetero.core.metrics import plan_metrics
from lightning_hetero.core.observations import StepObservations
from lightning_hetero.core.policies.base import Decision, PlanContext, Planner, Proposal, moves_total
from lightning_hetero.core.policies.round_decision import decide_round
from lightning_hetero.engine.engine_data import EngineData
from lightning_hetero.engine.sync_rounds import NOT_PREDICTED, Decide, Predicted
from lightning_hetero.engine.watch.gains import MIN_STEPS

__all__ = ["HeteroEngine"]


class HeteroEngine(EngineData):
    """Plan, shards, weights, observations and agreement of one rank.

    Args:
        config: settings, equal on all ranks.
        rank: this rank.
        world_size: number of ranks.
        device: this rank's device.
        local_rank: slot on this host, part of the identity of a CPU worker.
        timeout: longest wait for another rank when ranks agree on plans; torch's own by default.

    Raises:
        ValueError: if a setting does not fit the number of ranks.
        PlanMismatchError: if the settings differ between ranks.

    Example:
        >>> from lightning_hetero.config import HeteroConfig
        >>> engine = HeteroEngine(HeteroConfig(), rank=0, world_size=1, device=torch.device("cpu"))
        >>> from lightning_hetero.data import PermutationStream
        >>> sampler = engine.shard(PermutationStream(10, shuffle=False, seed=0), batch_size=4)
        >>> [len(batch) for batch in sampler]
        [4, 4, 2]
    """

    # one step

    def fetch(self, iterator: Iterator[Any]) -> Any:
        """Return the next batch of the loader, timed."""
        return self.observer.fetch(iterator)

    def begin_step(self, epoch: int, step: int, batch: Any = None) -> int | None:
        """Begin a step; weight its batch by ``W b_i / B`` or the counts of ``weight_fn``; return :attr:`own_size`."""
        data = self.data
        self.position = (epoch, step)
        if self.hook_state.backwards.stepped:
            self.hook_state.backwards.begin_batch()
        weighted = data.sampler is not None or data.own is not None or self.config.weight_fn is not None
        if weighted != self.hook_state.weighted:
            self.hook_state.require_weighting(weighted)
        if data.sampler is None:
            self.observer.begin_step(0, regular=False)
            if data.own is None:
                self.collectives.end()
                self.weighting.begin(1, self.world_size, batch)
                return None
            self.collectives.begin(())
            self.weighting.begin_counted(data.own.rows_at(epoch, step), batch)
            self.rows = data.own.rows_at(epoch, step)
            return self.rows
        share = data.sampler.step_at(epoch, step)
        self.rounds.begin_step(self.position, share)
        # a loop that fetches ahead may still hold an earlier batch of this epoch
        held = self.weighting.trace.several and step > 0
        self.collectives.begin(share.sizes, held=held)
        own = share.sizes[self.control.rank] if share.sizes else share.counted
        self.rows = own or data.sampler.min_local
        if self.noise is not None:
            self.noise.begin_step(share.sizes or self._counted_noise())
        size = own if share.planned is None or not share.work else share.planned
        self.observer.begin_step(
            max(size, data.sampler.min_local), regular=share.regular, work=share.work, planned=share.planned
        )
        if share.sizes:
            self.weighting.begin(own, sum(share.sizes), batch, share.sizes)
        else:
            self.weighting.begin_counted(own, batch)
        return own

    def _counted_noise(self) -> tuple[int, ...]:
        """Refuse the noise scale where samples are counted, on all ranks.

        Raises:
            ValueError: always.
        """
        raise ValueError(
            "the noise scale is measured (GNSCallback, noise_scale=True), and each rank knows only the samples of its "
            "own batch (batch_size=None). Leave the noise scale out, or give the DataLoader a batch_size."
        )

    @property
    def own_size(self) -> int | None:
        """Samples of this rank in the running step; 0 if it runs with weight 0, ``None`` if data is not sharded."""
        if self.sampler is None:
            return None if self.data.own is None else self.data.own.rows_at(*self.position)
        return self.sampler.step_at(*self.position).own(self.rank)

    def scale_loss(self, loss: torch.Tensor) -> torch.Tensor:
        """Weight the loss, as does :class:`~lightning_hetero.comm.gradients.loss_weighting.LossWeighting`."""
        self.health.see(loss, self.position, self.rows)
        return self.weighting.scale(loss, self.excluded)

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Measure the backward pass inside, and average its gradients; say which rank is behind a lost connection."""
        try:
            with self.hook_state.backward():
                self.observer.begin_backward()
                yield
                self.observer.end_backward()
        except Exception as error:
            self.control.failures.explain_connection(error)
            raise
        for part in (*self.models.values(), self.noise, self.compression, self.health):
            if part is not None:
                part.after_backward()

    def check_backward(self) -> None:
        """Check that the gradients of an optimizer step went through :meth:`backward`.

        Raises:
            RuntimeError: if no backward pass went through it since the batch of the last optimizer step.
        """
        self.hook_state.backwards.step()

    def excluded(self) -> Any:
        """Return a context that does not count as computing time, for collectives outside the backward pass."""
        return self.observer.excluded()

    def end_step(self) -> bool:
        """End the step; return whether a sync round is due now, the same on all ranks."""
        if self.observer.end_step():
            for part in (self.noise, self.compression):
                if part is not None:
                    part.end_step()
        return self.data.sampler is not None and self.observer.synced_steps >= self.rounds.schedule.next

    def close(self) -> None:
        """Finish the run; check the last step's message on GPU, whose validation is asynchronous."""
        self.collectives.end()
        self.health.close()
        self.hook_state.settle()
        if self.compression is not None:
            self.compression.close()
        self.control.failures.end()
        ended(self.control, *self.hook_state.topologies)

    # sync rounds

    @property
    def sync_due(self) -> bool:
        """True if a sync round is due now; the same on all ranks."""
        return self.data.sampler is not None and self.rounds.schedule.due(self.observer.synced_steps)

    def sync_due_at_epoch(self, planner: Planner | None) -> bool:
        """Return whether enough steps have passed since the last sync round for one between two epochs."""
        step, move = self.observer.synced_steps, moves_total(planner) and not self.rounds.keeps_window
        return self.data.sampler is not None and self.rounds.schedule.due_at_epoch(step, micro_batches_move=move)

    @property
    def steps_to_conclude(self) -> bool:
        """``True`` if enough steps have passed since the last sync round for one when training ends."""
        return self.data.sampler is not None and self.world_size > 1 and self.rounds.elapsed >= MIN_STEPS

    def exchange(
        self, planner: Planner | None, *, not_before: tuple[int, int] = (0, 0), last: bool = False
    ) -> RoundResult:
        """Run a sync round: gather observations, let rank 0 decide, adopt its plan from an undrawn step on; collective.

        Args:
            planner: planner that decides on rank 0; ``None`` keeps the plan.
            not_before: earliest ``(epoch, step)`` for a new plan.
            last: whether training ends: the planner learns, and nothing changes any more.

        Raises:
            PlanMismatchError: if a rank holds another plan.
            ValueError: if the planner's plan exceeds a bound.
        """

        def decide(observations: StepObservations) -> tuple[Decision, Predicted]:
            begins = not_before[1] == 0 and not self.rounds.keeps_window
            upcoming = self.plan if self.history is None else self.history.last.plan

            def context() -> PlanContext:
                assert upcoming is not None
                return self._context(upcoming, noise=self.noise_scale(), epoch_begins=begins)

            fitting = None if last or upcoming is None else self._within_bounds(planner, upcoming)
            decision, predicted = decide_round(planner, observations, self.plan, upcoming, context)
            if last:
                decision = replace(decision, proposal=None, density=None, kept=None)
            elif fitting is not None and decision.proposal is None:
                decision = replace(decision, proposal=fitting, kept=None)
            return decision, (*predicted, self._even_step(decision.planner or planner, observations))

        done = self._run_sync_round(decide, not_before)
        if not last:
            self.rounds.diagnosis.observe(
                done.observations,
                accumulation=self.accumulation,
                controlled=done.density,
                message_seconds=None if self.compression is None else self.compression.watch.seconds,
            )
        return done

    def adopt(self, plan: BatchPlan, reason: str = "given", *, not_before: tuple[int, int] = (0, 0)) -> PlanEntry:
        """Make rank 0's plan the plan of all ranks, from the first step that no rank has drawn; collective.

        Raises:
            ValueError: if the plan has another number of workers, or exceeds a bound.
        """
        done = self._run_sync_round(lambda _: (Decision(None, Proposal(plan, reason)), NOT_PREDICTED), not_before)
        assert done.entry is not None
        return done.entry

    def _within_bounds(self, planner: Planner | None, plan: BatchPlan) -> Proposal | None:
        """Return the newest plan within bounds that have fallen; ``None`` if it fits, or the planner moves the total.

        Raises:
            ValueError: if the workers can no longer hold a total that nobody moves.
        """
        workers = self.workers
        assert workers is not None
        if moves_total(planner) and not workers.has_room(plan.total_batch_size):
            return None
        return workers.within_bounds(plan)

    def _context(self, plan: BatchPlan, **known: Any) -> PlanContext:
        assert self.workers is not None
        known |= {"change_cost": self.observer.change_cost, "elapsed": self.rounds.elapsed}
        known["link"] = self.compression.link() if self.compression else None
        return self.workers.context(self.config, plan.total_batch_size, self.accumulation, **known)

    def _run_sync_round(self, decide: Decide, not_before: tuple[int, int]) -> RoundResult:
        parts = (self.hook_state.staleness, self.compression)
        payloads: list[SyncPayload] = [self.health, self.noise or Padding(NOISE_FIELDS)]
        payloads += [part for part in parts if part is not None]
        plan = self.plan
        done, density = self.rounds.run(decide, self.position, not_before, payloads)
        self.rounds.watch.observe(
            done, plan, self.position, self.observer.synced_steps, self.accumulation, **self._facts(done, plan)
        )
        if self.compression is not None:
            self.compression.apply_choice(density)
        self.observer.interrupt()
        return done

    def _even_step(self, planner: Planner | None, observations: StepObservations) -> float:
        """Return the predicted seconds of a step of equal sizes, on rank 0; NaN if unknown."""
        plan = self.plan
        if plan is None:
            return math.nan
        return self.rounds.watch.even_step(planner, observations, plan, self._context(plan))

    def _facts(self, done: RoundResult, plan: BatchPlan | None) -> dict[str, Any]:
        """Return what the record of a sync round says of messages, noise and bounds, on rank 0."""
        if self.rank != 0 or plan is None or self.workers is None:
            return {}
        report, noise = self.hook_state.averager.report, self.noise_scale()
        table = getattr(done.planner, "table", ())
        goodput = [one.goodput for one in table if one.total_batch_size == plan.total_batch_size * self.accumulation]
        return {
            "max_local": self.workers.max_local or (),
            "density": report.density / report.steps if report.steps else math.nan,
            "stale": self.hook_state.staleness is not None and self.hook_state.staleness.stale_share > 0.0,
            "sent_bytes": self.rounds.diagnosis.sent_bytes(),
            "noise_scale": math.nan if noise is None else noise.noise_scale,
            "goodput": goodput[0] if goodput else math.nan,
        }

    def metrics(self, done: RoundResult, plan: BatchPlan) -> dict[str, float]:
        """Return metrics of the steps up to a sync round, and of the traffic in them."""
        watch = self.rounds.watch
        predicted, error = (None if math.isnan(one) else one for one in watch.predictions.predicted)
        metrics = plan_metrics(done.observations, plan, predicted, self.accumulation, error, done.rows)
        metrics |= watch.metrics()
        for part in (self.hook_state.staleness, self.compression):
            metrics |= {} if part is None else part.metrics()
        return metrics
