"""A policy of your own: a small value with five methods and a constant, handed to ``PolicyCallback``.

``decide`` is pure: it gets what all workers measured, and returns a decision: its next self, and a proposal or
``None``. It runs on rank 0 only; the strategy hands the plan to all ranks.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import lightning as L
import numpy as np
from _model import Classifier, SlowSecondWorker, report, train_loader

from lightning_hetero import BatchPlan
from lightning_hetero.callbacks import PolicyCallback
from lightning_hetero.core.batching.integer_split import proportional_sizes
from lightning_hetero.core.policies.base import Decision, PlanContext, Proposal


@dataclass(frozen=True)
class SplitOnce:
    """Measures for a while, then splits by samples per second, once and for all."""

    done: bool = False
    moves_total: ClassVar[bool] = False  # the total batch stays as the loader has it

    def initial(self, context: PlanContext) -> Proposal | None:
        return None  # equal sizes

    def decide(self, observations, current: BatchPlan, context: PlanContext) -> Decision:
        if self.done or observations.num_steps == 0:
            return Decision(self, kept="split once: that was done" if self.done else "too few observations")
        speeds = np.median(observations.local_batch_sizes / observations.compute, axis=0)
        sizes = proportional_sizes(
            context.total_batch_size,
            speeds,
            min_local=context.min_local,
            max_local=context.max_local,
            multiple=context.multiple,
        )
        plan = BatchPlan(context.total_batch_size, sizes)
        return Decision(SplitOnce(done=True), Proposal(plan, "by samples per second, once"))

    def predict(self, plan: BatchPlan, context: PlanContext) -> float | None:
        return None  # no model of time

    def state_dict(self) -> dict[str, Any]:
        return {"done": self.done}

    def loaded(self, state: dict[str, Any]) -> "SplitOnce":
        return SplitOnce(state["done"])


if __name__ == "__main__":
    trainer = L.Trainer(
        accelerator="cpu",
        devices=2,
        strategy="hetero_ddp",
        max_epochs=2,
        callbacks=[SlowSecondWorker(), PolicyCallback(SplitOnce())],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Classifier(), train_loader())
    report(trainer)
