"""The mechanism of heterogeneous data parallelism, free of any trainer.

:class:`HeteroEngine` holds the plan, shards by it, weights by it, observes each step, and agrees with the other ranks
on the next plan, on which the planners of :mod:`lightning_hetero.core.policies.perf_model` decide.
"""

import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from typing import Any

import torch

from lightning_hetero.comm.agreement.control_plane import ControlPlane
from lightning_hetero.comm.agreement.group_lifetime import ended
from lightning_hetero.comm.agreement.notices import Notices
from lightning_hetero.comm.agreement.plan_log import SplitLog
from lightning_hetero.comm.agreement.sync_round import Padding, SyncPayload, gather_payloads
from lightning_hetero.comm.agreement.sync_schedule import ExchangeSchedule
from lightning_hetero.comm.agreement.workers import Roster
from lightning_hetero.comm.collectives.topology import Topology
from lightning_hetero.comm.compressors.manager import GradientCompression
from lightning_hetero.comm.gradients.ddp_hook import DIRECT_BACKWARD, HookState
from lightning_hetero.comm.gradients.health import Health
from lightning_hetero.comm.gradients.loss_weighting import LossWeighting
from lightning_hetero.comm.link.diagnosis import LinkDiagnosis
from lightning_hetero.comm.noise.collector import NoiseCollector
from lightning_hetero.comm.noise.window_sums import NOISE_FIELDS
from lightning_hetero.comm.timing.clock import agreed_clock
from lightning_hetero.comm.timing.step_timer import StepTimer
from lightning_hetero.config import HeteroConfig
from lightning_hetero.core.batching.plan import BatchPlan, PlanEntry, PlanHistory
from lightning_hetero.core.metrics import Exchange, exchange_metrics
from lightning_hetero.core.noise.running import RunningNoiseScale
from lightning_hetero.core.observations import StepObservations
from lightning_hetero.core.policies.base import Decision, PlanContext, Planner, Proposal, moves_total
from lightning_hetero.data.index_stream import IndexStream
from lightning_hetero.data.sampler import UnevenBatchSampler
from lightning_hetero.hardware import capacity, cpu_quota, identity

__all__ = ["Exchange", "HeteroEngine"]

Decide = Callable[[StepObservations], tuple[Decision, tuple[float | None, float | None]]]


class HeteroEngine:
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
        >>> engine = HeteroEngine(HeteroConfig(), rank=0, world_size=1, device=torch.device("cpu"))
        >>> from lightning_hetero.data import PermutationStream
        >>> sampler = engine.shard(PermutationStream(10, shuffle=False, seed=0), batch_size=4)
        >>> [len(batch) for batch in sampler]
        [4, 4, 2]
    """

    def __init__(
        self,
        config: HeteroConfig,
        *,
        rank: int,
        world_size: int,
        device: torch.device,
        local_rank: int = 0,
        timeout: timedelta | None = None,
    ) -> None:
        config.check_world_size(world_size)
        self.config, self.rank, self.world_size, self.device = config, rank, world_size, device
        self.control = ControlPlane(rank, world_size, timeout=timeout)
        self.control.require_equal("the settings of the strategy", config.fingerprint())
        cores = cpu_quota() if device.type == "cpu" else None
        self.observer = StepTimer(agreed_clock(device, self.control), cores=cores)
        topology = Topology.form(config.hierarchy, self.control, timeout)
        self.hook_state = HookState(self.observer, world_size, topology=topology)
        self.compression = GradientCompression.of(config, self.control, self.hook_state)
        self.network = LinkDiagnosis(config, rank, self.hook_state)
        self.weighting, self.schedule = LossWeighting(config, world_size, device), ExchangeSchedule(config.replan)
        self.health = Health(config.nonfinite, self.control, self.hook_state, self.observer.clock)
        self.noise: NoiseCollector | None = None
        self.models: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
        self.put_back: Callable[[], None] | None = None
        self.noise_scale: Callable[[], RunningNoiseScale | None] = lambda: None
        self.sampler: UnevenBatchSampler | None = None
        self.history: PlanHistory | None = None
        self.log: list[PlanEntry] = []
        self.last_observations = StepObservations.empty(world_size)
        self.accumulation, self.batch_size, self.min_local = 1, 0, config.min_local_batch_size or 1
        self.keeps_window = False  # whether the training loop itself says how many micro-batches a step has
        self.memory_bound: int | None = None
        self._restored: PlanHistory | None = None
        self._start = self._position = (0, 0)
        self._backwards, self._stepped, self._local_rank = 0, False, local_rank
        self.roster: Roster | None = None
        self._restored_workers: tuple[str, ...] = ()
        self._restored_at: tuple[int, ...] = ()
        self._plans, self.notices = SplitLog(rank == 0 and world_size > 1), Notices(rank == 0)

    def restore_weights_by(self, put_back: Callable[[], None] | None) -> None:
        """Restore weights by this where a step runs with predicted ones; ``None`` if none does."""
        self.put_back = put_back

    @property
    def plan(self) -> BatchPlan | None:
        """The plan of the running step, ``None`` before the first loader was sharded."""
        return None if self.history is None else self.history.at(*self._position).plan

    @property
    def plan_history(self) -> tuple[PlanEntry, ...]:
        """All plans since training began or went on, with the step from which each held and the reason."""
        return tuple(self.log)

    def current_shares(self) -> tuple[float, ...]:
        """Share of each rank in the newest plan; equal shares before there is one."""
        return (1.0,) * self.world_size if self.history is None else self.history.last.plan.shares

    def observations(self) -> StepObservations:
        """What all ranks measured up to the last exchange."""
        return self.last_observations

    def shard(
        self,
        stream: IndexStream,
        batch_size: int,
        *,
        drop_last: bool = False,
        planner: Planner | None = None,
        epoch: int = 0,
    ) -> UnevenBatchSampler:
        """Sampler of this rank over the stream; a collective call.

        Args:
            stream: order of the samples, equal on all ranks.
            batch_size: samples per rank on average, as under DDP: the total is ``batch_size * world_size``.
            drop_last: whether the ragged last batch is dropped.
            planner: may know a plan from an earlier run.
            epoch: epoch that comes next, unless a resumed position is later.

        Raises:
            PlanMismatchError: if ranks differ in dataset, order, batch size or ``drop_last``.
            ValueError: if the bounds cannot give the total.
        """
        self.control.require_equal(
            "the training data",
            f"{len(stream)} samples, order {stream.fingerprint():08x}, batch_size={batch_size}, drop_last={drop_last}",
        )
        given, self.batch_size = self.config.max_local_batch_sizes, batch_size
        own = given[self.rank] if isinstance(given, tuple) else given
        self.roster = Roster.meet(
            self.control,
            identity(self.device, self._local_rank),
            capacity(self.device),
            min_local=self.min_local,
            bounds=(own, self.memory_bound),  # type: ignore[arg-type]
        )
        start = max(self._start, (epoch, 0))
        self._position = max(self._position, start)
        restored, self.history = self._restored, self._known_history(start)
        fixed = self.config.local_batch_sizes
        self._begin(sum(fixed) if fixed is not None else batch_size * self.world_size, planner, start)
        if restored is not None and self.history is not None:
            self._go_on(restored, start)
        self.sampler = UnevenBatchSampler(
            stream,
            lambda: self.history,  # type: ignore[arg-type, return-value]
            self.rank,
            drop_last=drop_last,
            min_local=self.roster.min_local,
            start=start,
        )
        return self.sampler

    def _known_history(self, start: tuple[int, int]) -> PlanHistory | None:
        """History of the checkpoint or of this run, as far as it can be continued at ``start``."""
        history, self._restored = self._restored or self.history, None
        before = [entry for entry in history.entries if (entry.epoch, entry.step) <= start] if history else []
        return PlanHistory(tuple(before)) if before else None

    def _go_on(self, restored: PlanHistory, start: tuple[int, int]) -> None:
        """Say which plan of the checkpoint runs, and take over one that all ranks had agreed on for a later step."""
        assert self.history is not None
        assert self.roster is not None
        if self.history.last not in self.log:
            self.log = [self.history.last]
            self._plans.adopted(self.history.last, "plan of the checkpoint")
        if self.roster.identities == self._restored_workers and start >= self._restored_at > ():
            for entry in restored.entries:
                if (entry.epoch, entry.step) > start:
                    self._append(entry)

    def _begin(self, total: int, planner: Planner | None, start: tuple[int, int]) -> None:
        """Adopt the plan to begin with, decided by rank 0."""
        assert self.roster is not None
        running = None if self.history is None else self.history.at(*start).plan
        total = running.total_batch_size if running is not None and moves_total(planner) else total
        same_workers = self._restored_workers in ((), self.roster.identities)
        roster, first = self.roster, start if self.history is not None else (0, 0)

        def decision() -> PlanEntry | None:
            proposal = roster.first_plan(self.config, total, planner, running if same_workers else None)
            return None if proposal is None else PlanEntry(*first, proposal.plan, proposal.reason)

        entry = self.control.decide(decision)
        if entry is not None:
            self._append(entry)

    def _append(self, entry: PlanEntry) -> None:
        self.history = PlanHistory((entry,)) if self.history is None else self.history.extended(entry)
        self.log.append(entry)
        self._plans.adopted(entry)

    # one step

    def fetch(self, iterator: Iterator[Any]) -> Any:
        """Next batch of the loader, timed."""
        return self.observer.fetch(iterator)

    def begin_step(self, epoch: int, step: int, batch: Any = None) -> int | None:
        """A batch is at hand: take its weight, ``W b_i / B`` or what ``weight_fn`` counts; gives :attr:`own_size`."""
        self._position = (epoch, step)
        if self._stepped:
            self._backwards, self._stepped = 0, False
        self.hook_state.require_weighting(self.sampler is not None or self.config.weight_fn is not None)
        if self.sampler is None:
            self.observer.begin_step(0, regular=False)
            self.weighting.begin(1, self.world_size, batch)
            return None
        sizes = self.sampler.sizes_at(epoch, step)
        own, plan = sizes[self.rank], self.plan
        if self.noise is not None:
            self.noise.begin_step(sizes)
        regular = plan is not None and sizes == plan.local_batch_sizes  # the ragged tail is not
        self.observer.begin_step(max(own, self.sampler.min_local), regular=regular)
        self.weighting.begin(own, sum(sizes), batch, sizes)
        return own

    @property
    def own_size(self) -> int | None:
        """Samples of this rank that count in the running step; 0 if it runs with weight 0, ``None`` if not sharded."""
        return None if self.sampler is None else self.sampler.sizes_at(*self._position)[self.rank]

    def scale_loss(self, loss: torch.Tensor) -> torch.Tensor:
        """Weight the loss: :class:`~lightning_hetero.comm.gradients.loss_weighting.LossWeighting`."""
        self.health.see(loss, self._position)
        with self.excluded() if self.weighting.waits else nullcontext():
            return self.weighting.scale(loss)

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Around every backward pass."""
        self._backwards += 1
        with self.hook_state.backward():
            self.observer.begin_backward()
            yield
            self.observer.end_backward()
        for part in (*self.models.values(), self.noise, self.compression, self.health):
            if part is not None:
                part.after_backward()

    def check_backward(self) -> None:
        """Make sure that the gradients of an optimizer step went through :meth:`backward`.

        Raises:
            RuntimeError: if no backward pass did since the batch of the last optimizer step.
        """
        if self._backwards == 0:
            raise RuntimeError(DIRECT_BACKWARD)
        self._stepped = True

    def excluded(self) -> Any:
        """Around collectives outside the backward pass, whose waiting is no computing."""
        return self.observer.excluded()

    def end_step(self) -> None:
        """The step is over."""
        if not self.observer.end_step():
            return
        for part in (p for p in (self.noise, self.compression) if p is not None):
            part.end_step()

    def close(self) -> None:
        """The run ends; a GPU tells only now whether a message of the very last step was malformed."""
        self.hook_state.settle()
        if self.compression is not None:
            self.compression.close()
        ended(self.control, *self.hook_state.topologies)

    # agreement

    @property
    def due(self) -> bool:
        """Whether ranks agree on plans now; the same on all ranks."""
        return self.sampler is not None and self.schedule.due(self.observer.synced_steps)

    def due_at_epoch(self, planner: Planner | None) -> bool:
        """Whether enough steps have passed since the last exchange to look at the plan between two epochs."""
        step, move = self.observer.synced_steps, moves_total(planner) and not self.keeps_window
        return self.sampler is not None and self.schedule.due_at_epoch(step, micro_batches_move=move)

    def exchange(self, planner: Planner | None, *, not_before: tuple[int, int] = (0, 0)) -> Exchange:
        """Gather observations, let rank 0 decide, adopt its plan from a step that no rank has drawn; collective.

        Args:
            planner: decides on rank 0; ``None`` keeps the plan.
            not_before: earliest ``(epoch, step)`` for a new plan.

        Raises:
            PlanMismatchError: if a rank holds another plan.
            ValueError: if the planner's plan exceeds a bound.
        """

        def decide(observations: StepObservations) -> tuple[Decision, tuple[float | None, float | None]]:
            current, begins = self.plan, not_before[1] == 0 and not self.keeps_window
            if planner is None or current is None or not (observations.num_steps or (begins and moves_total(planner))):
                kept = None if planner is None else "too few observations: no timed step"
                return Decision(planner, kept=kept), (None, None)
            upcoming = self.history.last.plan if self.history is not None else current
            context = self._context(upcoming, noise=self.noise_scale(), epoch_begins=begins)
            decision = Decision.of(planner.decide(observations, upcoming, context))
            predicted = (decision.planner or planner).predict(current, self._context(current))
            return decision, (predicted, decision.error if upcoming == current else None)

        done = self._agree(decide, not_before)
        seconds = None if self.compression is None else self.compression.watch.seconds
        self.network.observe(
            done.observations, accumulation=self.accumulation, controlled=done.density, message_seconds=seconds
        )
        return done

    def adopt(self, plan: BatchPlan, reason: str = "given", *, not_before: tuple[int, int] = (0, 0)) -> PlanEntry:
        """Make rank 0's plan the plan of all ranks, from a step that no rank has drawn yet; collective.

        Raises:
            ValueError: if the plan has another number of workers, or exceeds a bound.
        """
        done = self._agree(lambda _: (Decision(None, Proposal(plan, reason)), (None, None)), not_before)
        assert done.entry is not None
        return done.entry

    def _context(self, plan: BatchPlan, **known: Any) -> PlanContext:
        assert self.roster is not None
        known |= {"change_cost": self.observer.change_cost, "elapsed": self.observer.synced_steps - self.schedule.last}
        known["link"] = self.compression.link() if self.compression else None
        return self.roster.context(self.config, plan.total_batch_size, self.accumulation, **known)

    def _agree(self, decide: Decide, not_before: tuple[int, int]) -> Exchange:
        if self.history is None or self.sampler is None or self.roster is None:
            raise RuntimeError("no training data was sharded yet; call shard() first.")
        begin = time.perf_counter()
        held = self.history.digest(), *self.sampler.drawn
        payloads: list[SyncPayload] = [self.observer, self.health, self.noise or Padding(NOISE_FIELDS)]
        payloads += [] if self.compression is None else [self.compression]
        reached = gather_payloads(self.control, held, payloads)
        observations = self.observer.matched
        self.last_observations = observations if observations.num_steps else self.last_observations
        done, roster = Decision(None), self.roster

        def decision() -> Any:
            nonlocal done
            epoch, step = max(not_before, *reached)
            start = epoch, -(-step // self.accumulation) * self.accumulation  # a window has one plan
            (done, predicted), entry = decide(observations), None
            if done.proposal is not None:
                roster.check_given(done.proposal.plan)
                entry = PlanEntry(*start, done.proposal.plan, done.proposal.reason)
            cost, step = time.perf_counter() - begin, self.observer.synced_steps
            ahead = start[1] - (self._position[1] + 1 if start[0] == self._position[0] else 0)
            following = self.schedule.after(step, observations, cost, done, ahead=ahead // self.accumulation)
            return entry, predicted, following, (done.density, done.stale)

        entry, (predicted, error), following, messages = self.control.decide(decision)
        if entry is not None:
            self._append(entry)
        self.control.require_equal("the plan and the step of the next look", (self.history.digest(), following))
        self.history = self.history.since(self._position[0])
        self.schedule.done(self.observer.synced_steps, following, between_epochs=not_before[1] == 0)
        if self.hook_state.staleness is not None:
            self.hook_state.staleness.agree(self.control)
        if self.compression is not None:
            self.compression.apply_choice(*messages)
        self.observer.interrupt()
        self._plans.see(done)
        return Exchange(done.planner, observations, entry, predicted, error, done.density is not None)

    def metrics(self, done: Exchange, plan: BatchPlan) -> dict[str, float]:
        """Metrics of the steps up to an exchange and of what was sent in them."""
        metrics = exchange_metrics(done.observations, plan, done.predicted, self.accumulation, done.error)
        for part in (self.hook_state.staleness, self.compression):
            metrics |= {} if part is None else part.metrics()
        return metrics

    def state_dict(self) -> dict[str, Any]:
        """Plan history of the running epoch, and gradients that are under way, as plain Python values."""
        late = {"staleness": self.hook_state.stale_state()}
        if self.history is None or self.roster is None:
            return late
        history = self.history.since(self._position[0]).state_dict()
        return {"history": history, "workers": list(self.roster.identities), "at": list(self._position), **late}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on with the plans of an earlier run, and with the gradients that were under way, be it none."""
        self.hook_state.load_stale_state(state.get("staleness", {}))
        if "history" in state:
            self._restored = PlanHistory.from_state_dict(state["history"])
            self._restored_workers, self._restored_at = tuple(state["workers"]), tuple(state.get("at", ()))

    def resume_at(self, epoch: int, step: int) -> None:
        """A resumed run goes on at this step; to be called before the data is sharded."""
        self._start = self._position = (epoch, step)
