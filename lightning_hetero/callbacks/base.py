"""The policies of :mod:`lightning_hetero.core.policies` as Lightning callbacks.

A callback only connects: at the end of a step that is due, and at the start of each epoch, it hands its planner to the
engine, which gathers observations, lets rank 0 decide and adopts the plan on all ranks.
"""

from collections.abc import Mapping
from typing import Any, Protocol

from lightning_hetero.callbacks._display.progress_bar import SplitInBar, lengthen_bar
from lightning_hetero.callbacks._display.throughput import count_all_workers, count_own
from lightning_hetero.callbacks._flush_stale import apply_last_sums, check_staleness
from lightning_hetero.callbacks._lightning import (
    Callback,
    LightningModule,
    MisconfigurationException,
    Trainer,
    engine_if_any,
    log_metrics,
    logger_folder,
)
from lightning_hetero.core.checkpoint_state import check_tensors, reading_state
from lightning_hetero.core.keywords import checked_keywords
from lightning_hetero.core.policies import policy_name, same_policy
from lightning_hetero.core.policies.base import Planner, check_planner, load_planner
from lightning_hetero.engine import HeteroEngine
from lightning_hetero.frontend.report.begin import begin_report
from lightning_hetero.frontend.report.finish import finish_report

__all__ = ["PolicyCallback", "engine_of", "policy_states"]


INSTEAD = "Trainer(strategy='hetero_ddp'), or strategy='hetero_fsdp' if one worker cannot hold the model"


def policy_states(checkpoint: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the states of policies in a Lightning checkpoint; plain DDP's have none."""
    states = checkpoint.get("callbacks", {}).values()
    return [state for state in states if isinstance(state, dict) and {"policy", "engine"} <= set(state)]


def engine_of(trainer: Trainer, needs: str, use: str) -> HeteroEngine:
    """Return the engine of a trainer's strategy.

    Args:
        trainer: the trainer.
        needs: text of the error: who needs what.
        use: text of the error: what to use instead.

    Raises:
        MisconfigurationException: if the trainer runs with another strategy.
    """
    engine = engine_if_any(trainer)
    if engine is None:
        raise MisconfigurationException(f"{needs}; got {type(trainer.strategy).__name__}. Use {use}.")
    return engine


class UnevenStrategy(Protocol):
    """A strategy whose epochs change their length with the plan."""

    def refresh_epoch_length(self) -> None:
        """Make Lightning's counters follow an epoch of another length."""


def _strategy(trainer: Trainer) -> UnevenStrategy:
    strategy: Any = trainer.strategy
    found: UnevenStrategy = strategy
    return found


@checked_keywords
class PolicyCallback(Callback):
    """Lightning callback that runs one planner; ``planner=None`` keeps the split and only reports.

    Args:
        planner: decides on plans.

    Raises:
        TypeError: if the planner lacks something of :class:`~lightning_hetero.core.policies.base.Planner`.
    """

    def __init__(self, planner: Planner | None = None) -> None:
        self.planner = None if planner is None else check_planner(planner)
        self._first: tuple[Planner | None, ...] = ()
        self._engine: HeteroEngine | None = None
        self._shown: SplitInBar | None = None

    @property
    def policy(self) -> str:
        """Name in the table of policies, else the name of the planner's class; ``"fixed"`` without a planner."""
        return policy_name(self.planner)

    def companions(self, callbacks: list[Callback]) -> list[Callback]:
        """Return callbacks that this one needs and that are not among those given."""
        return []

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Find the engine of the strategy.

        Raises:
            MisconfigurationException: if the trainer runs with another strategy.
        """
        needs = f"{type(self).__name__} needs a strategy that can split batches unevenly"
        engine = self._engine = engine_of(trainer, needs, INSTEAD)
        self._first = self._first or (self.planner,)
        self._leave()  # Lightning calls no teardown after an exception
        if stage == "fit":
            engine.measure_noise(None)  # a callback that measures the noise of this fit is set up later
            engine.hook_state.forget_squares()
            self._shown = SplitInBar(trainer, engine)
            count_all_workers(trainer, engine)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Refuse stale gradients in a training that cannot have them.

        Raises:
            MisconfigurationException: with ``staleness=1``, if the loader is not split, so that no sync round decides
                on staleness, or the optimizer needs a closure, so that it could not take the last gradients.
        """
        assert self._engine is not None
        reason = check_staleness(trainer, self._engine)
        if reason is not None:
            raise MisconfigurationException(reason)
        self._begin_report(trainer)

    def _begin_report(self, trainer: Trainer) -> None:
        """Begin the run, and its record if it has one."""
        engine = self._engine
        if engine is None or engine.world_size == 1 or engine.sampler is None:
            return
        name = getattr(type(trainer.strategy), "strategy_name", type(trainer.strategy).__name__)
        begin_report(engine, self.planner, front_end="Trainer", strategy=name, folder=logger_folder(trainer))

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Reconsider the plan before the loader of this epoch is iterated."""
        assert self._engine is not None
        self._engine.observer.interrupt()
        split = self._engine.sampler is not None or self._engine.data.own is not None
        if trainer.current_epoch > 0 and split:
            if self._engine.sync_due_at_epoch(self.planner):
                self._exchange(trainer, (trainer.current_epoch, 0))
            _strategy(trainer).refresh_epoch_length()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: object, batch: object, batch_idx: int
    ) -> None:
        """Close the step's observation; reconsider the plan if it is time."""
        assert self._engine is not None
        if self._engine.end_step():
            self._exchange(trainer, (trainer.current_epoch, batch_idx + 1))

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Leave validation out of the step's observation."""
        if self._engine is not None:
            self._engine.observer.interrupt()

    def _exchange(self, trainer: Trainer, not_before: tuple[int, int]) -> None:
        assert self._engine is not None
        self._engine.rounds.accumulate(trainer.accumulate_grad_batches)
        plan = self._engine.plan
        done = self._engine.exchange(self.planner, not_before=not_before)
        self.planner = done.planner if done.planner is not None else self.planner
        if done.entry is not None:  # also with the same total: it may replace a plan that was due
            _strategy(trainer).refresh_epoch_length()
            if not_before[1]:  # inside an epoch; at its start the bar takes the length by itself
                lengthen_bar(trainer)
        if plan is not None:
            metrics = self._engine.metrics(done, plan)
            log_metrics(trainer, metrics)
            if self._shown is not None:
                self._shown.show(metrics)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Apply the gradients that are still in flight, learn from the last steps, and log the summary of the run."""
        assert self._engine is not None
        apply_last_sums(trainer, pl_module, self._engine)
        if self._engine.steps_to_conclude:
            done = self._engine.exchange(self.planner, not_before=self._engine.position, last=True)
            self.planner = done.planner if done.planner is not None else self.planner
        finish_report(self._engine)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Log the summary of a run that an exception ends."""
        if self._engine is not None:
            finish_report(self._engine, exception)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Take the split out of the progress bar."""
        count_own(trainer)
        self._leave()

    def _leave(self) -> None:
        shown, self._shown = self._shown, None
        if shown is not None:
            shown.remove()

    def state_dict(self) -> dict[str, Any]:
        """Return the plan, and what rank 0, which decides, has learned by hardware identity."""
        state: dict[str, Any] = {"policy": self.policy}
        if self.planner is not None:
            state["planner"] = self.planner.state_dict()
        if self._engine is not None:
            state["engine"] = self._engine.state_dict()
        return state

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Take over the plan of a run with another policy."""
        if self.state_key not in checkpoint.get("callbacks", {}):
            self.load_state_dict(next(iter(policy_states(checkpoint)), {}))

    @reading_state("what the policy has learned, and its plans")
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the plan and what was learned; another policy takes over the plan only, and learns from scratch."""
        if self.planner is not None and same_policy(state_dict.get("policy"), self.planner):
            self.planner = load_planner(self.planner, state_dict["planner"])
        elif self._first:
            (self.planner,) = self._first
        if self._engine is not None:
            state = state_dict.get("engine", {})
            check_tensors("sums", state.get("staleness", {}).get("sums", {}))
            self._engine.load_state_dict(state)
