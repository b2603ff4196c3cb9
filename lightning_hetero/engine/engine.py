"""Engine of heterogeneous data parallelism, independent of any trainer.

:class:`HeteroEngine` holds the plan, shards data and weights losses by it, observes each step, and agrees with the
other ranks on the next plan. The planners of :mod:`lightning_hetero.core.policies` decide on plans.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
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
from lightning_hetero.data.division import Division
from lightning_hetero.data.index_stream import IndexStream
from lightning_hetero.data.sampler import UnevenBatchSampler
from lightning_hetero.data.streams.sampler import StreamSampler
from lightning_hetero.data.streams.source import SampleStream
from lightning_hetero.engine.parts import EngineParts
from lightning_hetero.engine.sync_rounds import Decide

__all__ = ["HeteroEngine"]


class HeteroEngine(EngineParts):
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

    def shard(
        self,
        stream: IndexStream,
        batch_size: int,
        *,
        drop_last: bool = False,
        planner: Planner | None = None,
        epoch: int = 0,
        division: Division | None = None,
        dataset: Any = None,
    ) -> UnevenBatchSampler:
        """Make this rank's sampler over a stream; a collective call.

        Args:
            stream: order of the samples, equal on all ranks.
            batch_size: samples per rank on average, as under DDP: the total is ``batch_size * world_size``.
            drop_last: whether the ragged last batch is dropped.
            planner: planner that may know a plan from an earlier run.
            epoch: next epoch, unless a resumed position is later.
            division: divides each global batch, equal on all ranks; by default it is cut by the number of samples, or
                by cost if the settings have a ``cost_fn``.
            dataset: dataset of the samples; only ``cost_fn`` needs it.

        Raises:
            PlanMismatchError: if ranks differ in dataset, order, batch size, ``drop_last`` or division.
            ValueError: if the bounds cannot give the total, or ``shard="claim"`` is set.
        """
        sampler = self.data.shard(
            stream, batch_size, drop_last=drop_last, planner=planner, epoch=epoch, division=division, dataset=dataset
        )
        self.observer.measure_work(0 if sampler.division is None else sampler.division.features)
        self.position = max(self.position, sampler.start)
        return sampler

    def shard_stream(self, stream: SampleStream, *, planner: Planner | None = None, epoch: int = 0) -> StreamSampler:
        """Make this rank's sampler over a loader whose samples come as a stream; a collective call.

        Args:
            stream: loader of this rank, and who has which samples.
            planner: planner that may know a plan from an earlier run.
            epoch: next epoch, unless a resumed position is later.

        Raises:
            PlanMismatchError: if ranks differ in ``shard`` or ``drop_last``.
            ValueError: if the planner moves the total, the bounds cannot give it, or a state saved inside an epoch
                cannot be resumed by this run.
        """
        sampler = self.data.shard_stream(stream, planner=planner, epoch=epoch)
        self.observer.measure_work(0)
        self.position = max(self.position, sampler.start)
        return sampler

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
        weighted = data.sampler is not None or self.config.weight_fn is not None
        if weighted != self.hook_state.weighted:
            self.hook_state.require_weighting(weighted)
        if data.sampler is None:
            self.observer.begin_step(0, regular=False)
            self.weighting.begin(1, self.world_size, batch)
            return None
        sizes, regular, planned, work = data.sampler.step_at(epoch, step)
        own = sizes[self.control.rank]
        if self.noise is not None:
            self.noise.begin_step(sizes)
        size = own if planned is None else planned
        self.observer.begin_step(max(size, data.sampler.min_local), regular=regular, work=work)
        self.weighting.begin(own, sum(sizes), batch, sizes)
        return own

    @property
    def own_size(self) -> int | None:
        """Samples of this rank in the running step; 0 if it runs with weight 0, ``None`` if data is not sharded."""
        return None if self.sampler is None else self.sampler.sizes_at(*self.position)[self.rank]

    def scale_loss(self, loss: torch.Tensor) -> torch.Tensor:
        """Weight the loss, as does :class:`~lightning_hetero.comm.gradients.loss_weighting.LossWeighting`."""
        self.health.see(loss, self.position)
        with self.excluded() if self.weighting.waits else nullcontext():
            return self.weighting.scale(loss)

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Measure the backward pass inside, and average its gradients."""
        with self.hook_state.backward():
            self.observer.begin_backward()
            yield
            self.observer.end_backward()
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
        self.hook_state.settle()
        if self.compression is not None:
            self.compression.close()
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

    def exchange(self, planner: Planner | None, *, not_before: tuple[int, int] = (0, 0)) -> RoundResult:
        """Run a sync round: gather observations, let rank 0 decide, adopt its plan from an undrawn step on; collective.

        Args:
            planner: planner that decides on rank 0; ``None`` keeps the plan.
            not_before: earliest ``(epoch, step)`` for a new plan.

        Raises:
            PlanMismatchError: if a rank holds another plan.
            ValueError: if the planner's plan exceeds a bound.
        """

        def decide(observations: StepObservations) -> tuple[Decision, tuple[float | None, float | None]]:
            current, begins = self.plan, not_before[1] == 0 and not self.rounds.keeps_window
            if planner is None or current is None or not (observations.num_steps or (begins and moves_total(planner))):
                kept = None if planner is None else "too few observations: no timed step"
                return Decision(planner, kept=kept), (None, None)
            upcoming = self.history.last.plan if self.history is not None else current
            context = self._context(upcoming, noise=self.noise_scale(), epoch_begins=begins)
            outcome = planner.decide(observations, upcoming, context)
            decision = Decision.of(outcome, planner, upcoming.total_batch_size)
            predicted = (decision.planner or planner).predict(current, self._context(current))
            return decision, (predicted, decision.error if upcoming == current else None)

        done = self._run_sync_round(decide, not_before)
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
        done = self._run_sync_round(lambda _: (Decision(None, Proposal(plan, reason)), (None, None)), not_before)
        assert done.entry is not None
        return done.entry

    def _context(self, plan: BatchPlan, **known: Any) -> PlanContext:
        assert self.workers is not None
        known |= {"change_cost": self.observer.change_cost, "elapsed": self.rounds.elapsed}
        known["link"] = self.compression.link() if self.compression else None
        return self.workers.context(self.config, plan.total_batch_size, self.accumulation, **known)

    def _run_sync_round(self, decide: Decide, not_before: tuple[int, int]) -> RoundResult:
        parts = (self.hook_state.staleness, self.compression)
        payloads: list[SyncPayload] = [self.health, self.noise or Padding(NOISE_FIELDS)]
        payloads += [part for part in parts if part is not None]
        done, messages = self.rounds.run(decide, self.position, not_before, payloads)
        if self.compression is not None:
            self.compression.apply_choice(*messages)
        self.observer.interrupt()
        return done

    def metrics(self, done: RoundResult, plan: BatchPlan) -> dict[str, float]:
        """Return metrics of the steps up to a sync round, and of the traffic in them."""
        metrics = plan_metrics(done.observations, plan, done.predicted, self.accumulation, done.error)
        for part in (self.hook_state.staleness, self.compression):
            metrics |= {} if part is None else part.metrics()
        return metrics
