"""A short probe training in place of the script's own, where the environment orders one (StellaTrain, Alg. 1).

The order fixes the total batch, compression, staleness, and when to stop. Everything in the script's own run that would
outlive the probe or stop it is off: checkpoints, logs, validation, early stopping, and changes of the batch.
"""

import importlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from lightning_hetero.callbacks import GNSCallback, PolicyCallback
from lightning_hetero.callbacks._lightning import LightningModule, Trainer, callbacks_of, replace_callbacks
from lightning_hetero.core.batching.integer_split import proportional_sizes
from lightning_hetero.core.batching.plan import BatchPlan
from lightning_hetero.core.policies.base import PlanContext, Proposal
from lightning_hetero.core.policies.static import StaticPlanner
from lightning_hetero.frontend.model_setup import loss_scaler
from lightning_hetero.probe_job import VARIABLE, ProbeOrder, ProbeReport

if TYPE_CHECKING:
    from lightning_hetero.strategies._lightning.ddp import HeteroDDPMixin

__all__ = ["ConvergenceProbe", "strategy_of"]


def strategy_of(trainer: Trainer) -> "HeteroDDPMixin":
    """Return the strategy of a trainer, typed as ours."""
    strategy: Any = trainer.strategy
    found: HeteroDDPMixin = strategy
    return found


@dataclass(frozen=True)
class _EvenTotal(StaticPlanner):
    """Equal sizes of one total batch: results must not depend on measured times."""

    moves_total: ClassVar[bool] = True

    total: int

    def initial(self, context: PlanContext) -> Proposal | None:
        """Propose the total of the order, whatever the loader's."""
        total = max(self.total // context.multiple, 1) * context.multiple
        even = [1.0] * len(context.identities)
        plan = BatchPlan(total, proportional_sizes(total, even, multiple=context.multiple))
        return Proposal(plan, "a probe training's total batch")


class ConvergenceProbe(PolicyCallback):
    """Callback that carries out an order for a probe training: total batch, staleness, the end, and the answer.

    Args:
        order: what to train.
        total: total batch size, ``None`` for the loader's.
    """

    averaged_share = 0.25
    """Share of the samples over which the loss is averaged: the last ones, the same for every batch size."""

    def __init__(self, order: ProbeOrder, total: int | None) -> None:
        super().__init__(None if total is None else _EvenTotal(total))
        self.order = order
        self._seen, self._loss = 0, torch.zeros(())
        self._losses: list[tuple[int, torch.Tensor]] = []

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Remove the callbacks that save or stop, including those of the module."""
        super().setup(trainer, pl_module, stage)
        callbacks = importlib.import_module(f"{strategy_of(trainer)._namespace}.callbacks")
        stopping = (callbacks.Checkpoint, callbacks.EarlyStopping, GNSCallback)
        replace_callbacks(trainer, [one for one in callbacks_of(trainer) if not isinstance(one, stopping)])

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Refuse to resume from a checkpoint.

        Raises:
            MisconfigurationException: always.
        """
        raise strategy_of(trainer)._misconfiguration(
            f"{VARIABLE} is set: a probe training begins with a new model, and this script loads a checkpoint. Leave "
            "ckpt_path out where the variable is set, or move the checkpoint away while profiling."
        )

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Make gradients stale if the order says so; answer at once if it asks for no training.

        Raises:
            MisconfigurationException: if there is no other worker to send gradients to.
        """
        super().on_train_start(trainer, pl_module)
        assert self._engine is not None
        if self._engine.world_size == 1:
            raise strategy_of(trainer)._misconfiguration(
                "a probe training with one worker sends no gradients, so that compression would cost nothing. Profile "
                "with two workers at least; they may share a CPU."
            )
        if self.order.samples == 0:
            self._end(trainer)
        staleness = self._engine.hook_state.staleness
        if staleness is not None and staleness.limit:
            staleness.make_all_stale()
        trainer.fit_loop.max_epochs = trainer.fit_loop.epoch_loop.max_steps = -1
        for config in trainer.lr_scheduler_configs:
            config.strict = False  # a schedule may follow a validation metric, which a probe never has

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Keep the plan, which is that of the order."""

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: torch.Tensor) -> None:
        """Add the weighted loss of this rank: the mean over ranks is then that of the total batch."""
        scaler = loss_scaler(trainer.precision_plugin)
        self._loss = self._loss + loss.detach() / (1.0 if scaler is None else scaler.get_scale())

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: object, batch: object, batch_idx: int
    ) -> None:
        """Record the loss, and end after the samples of the order."""
        assert self._engine is not None
        assert self._engine.sampler is not None
        self._engine.end_step()
        size = sum(self._engine.sampler.sizes_at(trainer.current_epoch, batch_idx))
        scale = float(trainer.accumulate_grad_batches)  # Lightning has divided by it
        if self._engine.config.loss_reduction == "sum":
            scale *= self._engine.world_size / size
        self._seen += size
        self._losses.append((self._seen, self._loss * scale))
        self._loss = torch.zeros(())
        if self._seen >= self.order.samples:
            self._end(trainer)

    def _end(self, trainer: Trainer) -> None:
        """Answer, and end the script's process with success, on all ranks at the same batch."""
        engine, strategy = self._engine, strategy_of(trainer)
        assert engine is not None
        assert engine.sampler is not None
        assert engine.plan is not None
        assert engine.workers is not None
        last = [loss for seen, loss in self._losses if seen > (1.0 - self.averaged_share) * self._seen]
        loss = float(strategy.reduce(torch.stack(last).mean())) if last else None
        staleness = engine.hook_state.staleness
        if staleness is not None:
            staleness.drain()
        strategy.settle_signals()
        report = ProbeReport(
            loss=loss,
            samples=self._seen,
            staleness=int(staleness is not None and staleness.stale_share > 0.0),
            world_size=engine.world_size,
            total=engine.plan.total_batch_size,
            dataset=len(engine.sampler.stream),
            min_local=engine.workers.least,
        )
        if trainer.is_global_zero:
            report.write(self.order.report)
        strategy.barrier()
        raise SystemExit(0)
