"""Parts of an engine, their public values, and their state in a checkpoint."""

import os
import weakref
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import torch

from lightning_hetero.comm.agreement.control_plane import ControlPlane
from lightning_hetero.comm.agreement.notices import Notices
from lightning_hetero.comm.agreement.workers import Workers
from lightning_hetero.comm.collectives.row_gather import ForeignCollectives
from lightning_hetero.comm.collectives.topology import Topology
from lightning_hetero.comm.compressors.manager import GradientCompression
from lightning_hetero.comm.gradients.ddp_hook import HookState
from lightning_hetero.comm.gradients.health import Health
from lightning_hetero.comm.gradients.loss_weighting import LossWeighting
from lightning_hetero.comm.link.diagnosis import LinkDiagnosis
from lightning_hetero.comm.membership.slots import Slot
from lightning_hetero.comm.noise.collector import NoiseCollector
from lightning_hetero.comm.timing.clock import agreed_clock
from lightning_hetero.comm.timing.settings import SETTINGS
from lightning_hetero.comm.timing.step_timer import StepTimer
from lightning_hetero.config import HeteroConfig
from lightning_hetero.core.batching.plan import BatchPlan, PlanEntry, PlanHistory
from lightning_hetero.core.keywords import checked_keywords
from lightning_hetero.core.noise.running import RunningNoiseScale
from lightning_hetero.core.observations import StepObservations
from lightning_hetero.data.step_share import StepSampler
from lightning_hetero.elastic.batch_queue import job_store
from lightning_hetero.engine.sync_rounds import SyncRounds
from lightning_hetero.engine.training_data import TrainingData
from lightning_hetero.engine.watch.watch import RunWatch
from lightning_hetero.hardware import cpu_quota

__all__ = ["EngineParts"]


@checked_keywords
class EngineParts:
    """Parts of a :class:`~lightning_hetero.engine.HeteroEngine`, each of which owns its state.

    Attributes:
        control: control plane, by which ranks agree.
        observer: timer of this rank's steps.
        hook_state: state of the gradient hook, which knows the averager.
        compression: compression of gradients, ``None`` without.
        weighting: weighting of losses.
        health: checks of losses, gradients and weights.
        noise: collector of the gradient noise, ``None`` without.
        noise_scale: returns the running estimate of the noise scale, or ``None``.
        models: for each trained model, the object that acts after its backward passes.
        put_back: restores weights if a step runs with predicted ones, ``None`` without.
        data: training data, and the plans by which it is split.
        rounds: sync rounds, in which ranks agree on plans.
        notices: notices to the user, each given once, on rank 0.
        collectives: watch over collectives that a model or a loss calls by itself.
        position: epoch and step of the running batch.
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
        self.config = config
        self.control = ControlPlane(rank, world_size, timeout=timeout)
        self.control.require_equal("the settings of the strategy", config.fingerprint())
        cores = cpu_quota() if device.type == "cpu" else None
        self.observer = StepTimer(agreed_clock(device, self.control), cores=cores, settings=SETTINGS.of(world_size))
        topology = Topology.form(config.hierarchy, self.control, timeout)
        self.hook_state = HookState(self.observer, world_size, topology=topology)
        self.compression = GradientCompression.of(config, self.control, self.hook_state)
        self.weighting = LossWeighting(config, world_size, device)
        self.health = Health(config.on_nonfinite, self.control, self.hook_state, self.observer.clock)
        self.noise: NoiseCollector | None = None
        self.noise_scale: Callable[[], RunningNoiseScale | None] = lambda: None
        self.models: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
        self.put_back: Callable[[], None] | None = None
        self.data = TrainingData(config, self.control, device, local_rank)
        diagnosis = LinkDiagnosis(config, rank, self.hook_state)
        watch = RunWatch(rank, world_size, device, records=bool(config.report))
        self.rounds = SyncRounds(self.control, self.data, self.observer, diagnosis, watch)
        self.notices, self.position = Notices(rank == 0), (0, 0)
        in_backward = partial(getattr, self.hook_state, "backward_via_strategy")
        moves = config.policy != "even" and not config.fixes_split
        self.collectives = ForeignCollectives(self.control, self.notices, self.observer, in_backward, moves=moves)
        if Slot.of(os.environ) is None:  # else its keeper watches it, and the others go on without it
            self.control.failures.begin(
                job_store, self, lambda own: (*own.position, own.hook_state.backward_via_strategy)
            )

    def restore_weights_by(self, put_back: Callable[[], None] | None) -> None:
        """Set the function that restores weights if a step runs with predicted ones; ``None`` if none does."""
        self.put_back = put_back

    def measure_noise(
        self,
        collector: NoiseCollector | None,
        estimate: Callable[[], RunningNoiseScale | None] | None = None,
    ) -> None:
        """Collect the gradient noise by ``collector`` from now on; ``None`` to stop.

        Args:
            collector: collector of this rank.
            estimate: returns the running estimate, equal on all ranks; by default there is none.

        Raises:
            ValueError: if batches are to be divided by cost.
        """
        if collector is not None and self.config.cost_fn not in (None, "auto"):
            raise ValueError(
                "the gradient noise scale compares shares that were drawn at random, and cost_fn gives workers samples "
                "by their cost. Leave cost_fn or the noise scale (GNSCallback, AdaptiveBatchCallback) out."
            )
        self.noise, self.noise_scale = collector, estimate or (lambda: None)
        self.data.costs.compare(collector is not None)

    # what others read

    @property
    def rank(self) -> int:
        """This rank."""
        return self.control.rank

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.control.world_size

    @property
    def sampler(self) -> StepSampler | None:
        """This rank's sampler, ``None`` if no data is sharded."""
        return self.data.sampler

    @property
    def workers(self) -> Workers | None:
        """The workers of the run, ``None`` before data was sharded."""
        return self.data.workers

    @property
    def history(self) -> PlanHistory | None:
        """Plans from the running epoch on, ``None`` before data was sharded."""
        return self.data.plans.history

    @property
    def plan(self) -> BatchPlan | None:
        """Plan of the running step, ``None`` before the first loader was sharded."""
        return self.data.plans.plan_at(self.position)

    @property
    def plan_history(self) -> tuple[PlanEntry, ...]:
        """All plans since training began or resumed, each with its first step and its reason."""
        return tuple(self.data.plans.log)

    @property
    def accumulation(self) -> int:
        """Micro-batches of an optimizer step."""
        return self.rounds.accumulation

    def current_shares(self) -> tuple[float, ...]:
        """Return the share of each rank in the newest plan; equal shares before there is one."""
        return (1.0,) * self.world_size if self.history is None else self.history.last.plan.shares

    def observations(self) -> StepObservations:
        """Return the measurements of all ranks from the newest sync round that had any."""
        return self.rounds.observations

    # state

    def state_dict(self) -> dict[str, Any]:
        """Return the plans of the running epoch and stale gradients in flight, as plain Python values.

        The time of writing the checkpoint is kept out of the next step's time.
        """
        self.observer.interrupt()
        stale: dict[str, Any] = {"staleness": self.hook_state.stale_state()}
        if self.data.own is not None:  # the number of a batch has a meaning for as many ranks
            return {**stale, "own": self.world_size}
        if self.history is None or self.workers is None:
            return stale
        taken = {} if self.sampler is None else self.sampler.taken(self.position)
        return {
            **self.data.plans.state_dict(self.workers, self.position),
            **stale,
            **({"taken": taken} if taken else {}),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore plans and in-flight gradients from a checkpoint; either may be absent."""
        self.hook_state.load_stale_state(state.get("staleness", {}))
        self.data.plans.load_state_dict(state)
        if "history" in state:
            self.data.streams.go_on_from(state.get("taken", {}))

    def resume_at(self, epoch: int, step: int) -> None:
        """Resume at this step; call it before the data is sharded."""
        self.position = (epoch, step)
        self.data.plans.resume_at(epoch, step)
