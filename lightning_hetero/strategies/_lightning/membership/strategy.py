"""Strategy whose workers may be lost and replaced during a fit; the total batch stays as it is."""

import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from lightning_hetero.callbacks.base import policy_states
from lightning_hetero.comm.compressors.manager import GradientCompression
from lightning_hetero.comm.membership.members import MembershipError
from lightning_hetero.comm.membership.roster import Roster
from lightning_hetero.comm.membership.slots import Slot
from lightning_hetero.comm.membership.state_transfer import WorkerState
from lightning_hetero.config import HeteroConfig
from lightning_hetero.core.batching.integer_split import proportional_sizes
from lightning_hetero.data.sampler import UnevenBatchSampler
from lightning_hetero.engine import HeteroEngine
from lightning_hetero.strategies._checkpoints.residuals import KEY
from lightning_hetero.strategies._lightning.base import LightningMixin
from lightning_hetero.strategies._lightning.membership.joining import join_running
from lightning_hetero.strategies._lightning.membership.launcher import PEERS, SAVED, STEP, MembershipLauncher
from lightning_hetero.strategies._lightning.membership.resume_point import (
    begin_of_step,
    count_from_epoch_start,
    count_logged_steps,
    end_epoch_as_usual,
    end_validation,
    forget_failed_batch,
    metrics_of_callbacks,
    steps_added,
    validate_again,
)

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer

__all__ = ["MembershipMixin", "config_of_members"]

METRICS = "lightning_hetero/callback_metrics"
"""Key of what callbacks and schedulers look at, in the state that workers go on from."""

STALE = "staleness"
"""Key of gradients in flight in the state of an engine, which must be equal on all ranks."""


def config_of_members(config: HeteroConfig, slots: list[int]) -> HeteroConfig:
    """Return the settings for these workers: lists with an entry for each, and the same total batch.

    Example:
        >>> config_of_members(HeteroConfig(local_batch_sizes=[4, 2, 2]), [0, 2]).local_batch_sizes
        (5, 3)
    """
    changed: dict[str, Any] = {}
    if isinstance(config.max_local_batch_sizes, tuple):
        changed["max_local_batch_sizes"] = tuple(config.max_local_batch_sizes[slot] for slot in slots)
    if config.local_batch_sizes is not None:
        kept = [config.local_batch_sizes[slot] for slot in slots]
        unit = config.local_batch_multiple
        changed["local_batch_sizes"] = proportional_sizes(sum(config.local_batch_sizes), kept, multiple=unit)
    if isinstance(config.hierarchy, tuple):
        places = {slot: rank for rank, slot in enumerate(slots)}
        clusters = [[places[slot] for slot in cluster if slot in places] for cluster in config.hierarchy]
        changed["hierarchy"] = tuple(tuple(cluster) for cluster in clusters if cluster)
    return replace(config, **changed)


class MembershipMixin(LightningMixin):
    """A strategy that goes on with the workers that are left, under a keeper (:mod:`lightning_hetero.keeper`)."""

    config: HeteroConfig
    engine: HeteroEngine | None
    _given: HeteroConfig | None = None
    _roster: Roster | None = None
    _state: WorkerState | None = None
    _trains = False

    def _configure_launcher(self) -> None:
        """Put our launcher in front of Lightning's, if this process has a keeper."""
        super()._configure_launcher()
        if Slot.of(os.environ) is None:
            return
        self._require_known_ranks()
        roster = self._roster = Roster.of_process()
        assert roster is not None
        self._launcher: Any = MembershipLauncher(self._launcher, self, roster)

    def _require_known_ranks(self) -> None:
        """Refuse a keeper where a lost worker is not noticed, or ranks are not those of the environment.

        Raises:
            MisconfigurationException: in these cases.
        """
        backend = self._get_process_group_backend()
        if "nccl" in backend:
            raise self._misconfiguration(
                f"the keeper needs process_group_backend='gloo', and this one is {backend!r}: NCCL's calls do not end "
                "when a worker is lost. Start the script without lightning_hetero.keeper; torchrun --max-restarts then "
                "starts all workers again."
            )
        environment = type(self.cluster_environment).__name__
        if environment != "TorchElasticEnvironment":
            raise self._misconfiguration(
                f"the keeper needs ranks that torchrun gives, and these are from {environment}. Start the keeper by "
                "torchrun: torchrun --nproc-per-node=4 -m lightning_hetero.keeper train.py."
            )

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Number of ranks and this rank, for evaluation: as many as there are now."""
        return {**super().distributed_sampler_kwargs, "num_replicas": self.world_size}

    @property
    def _members_change(self) -> Callable[[], bool] | None:
        roster = self._roster
        return None if roster is None else lambda: roster.next_is_open

    def begin_generation(self, roster: Roster) -> None:
        """Take over the members of a new generation, before its process group is made."""
        assert roster.generation is not None
        self._given = self._given or self.config
        self.config = config_of_members(self._given, [one.slot for one in roster.generation.members])

    def serve_members(self, engine: HeteroEngine) -> None:
        """Keep the total batch of the workers that the job began with, and let sums fail when one of them is lost."""
        if self._roster is not None:
            engine.data.keep_total_of(self._roster.slot.slots)
            self._roster.fail_by(engine.hook_state.let_fail().fail)

    def go_on_from(self, state: WorkerState | None) -> None:
        """Fit from this state next."""
        self._state, self._trains = state, False

    def setup_environment(self) -> None:
        """Set up the process, and join a training that runs if there is one."""
        super().setup_environment()
        if self._state is not None:
            join_running(self._pl_module.trainer)

    def on_train_batch_start(self, *args: Any, **kwargs: Any) -> None:
        """Write down the step, in case that all workers are lost."""
        super().on_train_batch_start(*args, **kwargs)
        if self._roster is not None and self.is_global_zero:
            self._roster.note(STEP, str(self._pl_module.trainer.global_step))

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: str | Path, *args: Any, **kwargs: Any) -> None:
        """Save the checkpoint, and write down where, in case that all workers are lost."""
        super().save_checkpoint(checkpoint, filepath, *args, **kwargs)
        if self._roster is not None and self.is_global_zero and "loops" in checkpoint:
            self._roster.note(SAVED, os.path.abspath(filepath))

    def on_train_start(self) -> None:
        """Note that the state is that of the training from now on."""
        super().on_train_start()
        if self._state is not None:
            trainer = self._pl_module.trainer
            forget_failed_batch(trainer)
            end_epoch_as_usual(trainer)
            metrics_of_callbacks(trainer).update(self._state.checkpoint[METRICS])
        self._state, self._trains = None, True

    def has_stepped(self) -> bool:
        """Return whether the members have completed a step together."""
        return self.engine is not None and self.engine.observer.synced_steps > 0

    def outlive_members(self, trainer: "Trainer") -> WorkerState | None:
        """Return this worker's state after a step that has failed, and let go of the engine.

        If the training has failed while it was set up, that is the state that it was to go on from.

        Raises:
            MembershipError: if the training data cannot be split anew.
        """
        self._leaving = True
        try:
            self._keep_signal()
            state = self._state_after_step(trainer) if self._trains else self._state
            if self.engine is not None:
                position, steps = self.engine.position, self.engine.observer.synced_steps
                self.engine.rounds.watch.finish("the members have changed", position, steps)
            self.engine = None
            trainer._teardown()
        finally:
            self._leaving = False
        return state

    def _state_after_step(self, trainer: "Trainer") -> WorkerState:
        engine = self.engine
        if engine is None or not isinstance(engine.sampler, UnevenBatchSampler):
            raise MembershipError(
                "a worker is lost, and the others cannot take over its samples: they are known by their index only "
                "where one DataLoader has a map-style dataset and a batch_size. Start again from the last checkpoint."
            )
        again = trainer.validating
        if trainer.evaluating:
            end_validation(trainer)
        untoggle(self._pl_module)
        count_from_epoch_start(trainer)
        state = self._state_of(trainer, engine)
        if again:
            validate_again(state.checkpoint)
        return state

    def _state_of(self, trainer: "Trainer", engine: HeteroEngine) -> WorkerState:
        assert self._roster is not None
        compression = engine.compression
        if compression is not None:
            compression.optimizers.flush()
        shared: dict[str, Any] = {STALE: engine.hook_state.stale_state()}  # first, as messages in flight may be lost
        if compression is not None:
            shared[KEY] = {**compression.state_dict_of_rank(), "residuals": {}}
        checkpoint = trainer._checkpoint_connector.dump_checkpoint(weights_only=False)
        checkpoint[METRICS] = dict(metrics_of_callbacks(trainer))
        batches = begin_of_step(checkpoint, trainer.accumulate_grad_batches, validating=trainer.validating)
        added = steps_added(trainer, checkpoint)
        count_logged_steps(checkpoint, added, automatic=self._pl_module.automatic_optimization)
        progress = self._roster.fits, trainer.global_step, trainer.current_epoch, batches
        return WorkerState(progress, self.global_rank, checkpoint, shared, partial(residuals_of, engine.compression))

    def load_checkpoint(self, checkpoint_path: str | Path, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Read the checkpoint, or take the state of the workers that go on."""
        if checkpoint_path != PEERS:
            return super().load_checkpoint(checkpoint_path, *args, **kwargs)
        state = self._state
        assert state is not None
        checkpoint = dict(state.checkpoint)
        for policy in policy_states(checkpoint):
            policy["engine"][STALE] = state.shared[STALE]
        if KEY in state.shared and self.engine is not None and self.engine.compression is not None:
            own = state.own(True)
            self._state = replace(state, own=lambda again: own)  # it is undone once, should the set-up fail
            mine = {**state.shared[KEY], "residuals": own}
            clusters = self.engine.compression.checkpoint.topology.clusters
            checkpoint[KEY] = {"ranks": [mine] * self.engine.world_size, "clusters": clusters}
        return checkpoint


def untoggle(module: "LightningModule") -> None:
    """Undo ``toggle_optimizer`` of a step that has failed, which leaves the parameters of others frozen."""
    frozen: Any = module._param_requires_grad_state
    for parameter, trained in frozen.items():
        parameter.requires_grad_(trained)
    module._param_requires_grad_state = {}


def residuals_of(compression: GradientCompression | None, again: bool) -> dict[str, torch.Tensor]:
    """Return what compression has not sent yet; as before the step that has failed, if that is done again."""
    if compression is None:
        return {}
    if again and compression.averager is not None:
        compression.averager.undo_failed()
    residuals: dict[str, torch.Tensor] = compression.state_dict_of_rank().get("residuals", {})
    return residuals
