"""Steps on unequal batches, the same for every Lightning strategy that averages gradients of all ranks in each step."""

import inspect
from abc import abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from lightning_hetero.comm.agreement.group_lifetime import go_on
from lightning_hetero.config import HeteroConfig
from lightning_hetero.core.batching.plan import BatchPlan, PlanEntry
from lightning_hetero.engine import HeteroEngine
from lightning_hetero.frontend.joining import joining
from lightning_hetero.frontend.model_setup import raise_minimum
from lightning_hetero.frontend.plan_access import PlanAccess
from lightning_hetero.strategies._checkpoints.whole_files import WholeFilesMixin
from lightning_hetero.strategies._lightning.base import LightningMixin
from lightning_hetero.strategies._lightning.checkpoint import CheckpointMixin
from lightning_hetero.strategies._lightning.collectives import CollectivesMixin
from lightning_hetero.strategies._lightning.ending import EndingMixin
from lightning_hetero.strategies._lightning.train_data import TrainDataMixin

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule

__all__ = ["Marks", "RetriedStepsMixin", "UnevenStepsMixin"]


def _followed_by(closure: Callable[[], Any], check: Callable[[], None]) -> Callable[[], Any]:
    """Return a closure that also checks."""

    def checked() -> Any:
        result = closure()
        check()
        return result

    return checked


Marks = list[tuple[torch.Tensor | None, int]]
"""Gradient of each parameter and its version."""


class RetriedStepsMixin(LightningMixin):
    """A strategy whose step is done again if memory runs out on this rank.

    Mix it in before the class that weights losses: what it returns is a loss like any other.
    """

    engine: HeteroEngine | None
    _step: tuple[Any, ...] = ()

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward pass; if memory runs out, compute loss and gradient in pieces.

        Raises:
            torch.OutOfMemoryError: if the step cannot be done again in pieces.
        """
        self._step = ()
        try:
            output = super().training_step(*args, **kwargs)
        except RuntimeError as error:
            if self._passes_on(error):
                raise
            told = str(error)
        else:
            self._step = args
            return output
        return self._forward_again(args, told)

    def backward(
        self, closure_loss: torch.Tensor, optimizer: torch.optim.Optimizer | None, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        """Run the backward pass; if memory runs out, compute the gradients that are missing in pieces.

        Raises:
            torch.OutOfMemoryError: if the step cannot be done again in pieces.
        """
        step, self._step = self._step, ()
        gradients = [p.grad for p in self._parameters] if step else []
        before = [(g, -1 if g is None else g._version) for g in gradients]
        try:
            return super().backward(closure_loss, optimizer, *args, **kwargs)
        except RuntimeError as error:
            if not step or self._passes_on(error):
                raise
            told = str(error)
        closure_loss.detach_()  # frees what the failed pass holds
        return super().backward(self._backward_again(step, before, told), optimizer, *args, **kwargs)

    @property
    def _parameters(self) -> list[torch.Tensor]:
        """Parameters of the wrapped module."""
        assert self.engine is not None
        wrapped = self.engine.models.get(self.lightning_module)
        return [] if wrapped is None else wrapped.parameters

    @abstractmethod
    def _passes_on(self, error: RuntimeError) -> bool:
        """Return whether an error is none of this rank's memory, or no other rank could take over samples."""

    @abstractmethod
    def _forward_again(self, step: tuple[Any, ...], told: str) -> torch.Tensor:
        """Return a loss with the gradients of the whole step, computed in pieces."""

    @abstractmethod
    def _backward_again(self, step: tuple[Any, ...], before: Marks, told: str) -> torch.Tensor:
        """Return a loss with the gradients that are missing, computed in pieces."""


class UnevenStepsMixin(TrainDataMixin, CollectivesMixin, CheckpointMixin, EndingMixin, WholeFilesMixin, PlanAccess):
    """A strategy whose ranks train on unequal batches in each step, with the gradients of a single process.

    A class that mixes it in sets :attr:`config`, and calls :meth:`_check_module` before it wraps or shards the module.
    """

    config: HeteroConfig
    engine: HeteroEngine | None

    # what users read

    def adopt(self, plan: BatchPlan, reason: str = "given") -> PlanEntry:
        """Change the split, from a step that no rank has drawn yet; all ranks have to call it together."""
        entry = super().adopt(plan, reason)
        self.refresh_epoch_length()
        return entry

    # set-up

    def connect(self, model: "LightningModule") -> None:
        """Attach the module, and the callback of the policy unless the user gave one.

        Raises:
            MisconfigurationException: if two policies were given.
        """
        super().connect(model)
        self._attach_policy()

    def setup_environment(self) -> None:
        """Join the process group, then meet the other ranks."""
        self._begin_without_checkpoint()
        self.set_world_ranks()
        self.config.check_world_size(self.world_size)  # before the first collective call
        with joining(self):
            super().setup_environment()
        self._attach_policy()  # a module may get its trainer after `connect`
        if self.engine is None:
            self.engine = HeteroEngine(
                self.config,
                rank=self.global_rank,
                world_size=self.world_size,
                device=self.root_device,
                local_rank=self.local_rank,
                timeout=self._timeout,
            )
        else:
            go_on(self.engine.control, self.engine.control.failures, *self.engine.hook_state.topologies)
        self._share_signals()

    def _check_module(self, engine: HeteroEngine) -> None:
        """Refuse a module that draws batches by itself, and find its smallest batch.

        Raises:
            MisconfigurationException: if it draws batches by itself.
        """
        module = self._pl_module
        if "dataloader_iter" in inspect.signature(module.training_step).parameters:
            raise self._misconfiguration(
                "training_step(dataloader_iter) draws batches by itself, so that their samples cannot be counted. "
                "Take `batch` in training_step, or use strategy='ddp'."
            )
        raise_minimum(engine, module)

    def on_train_start(self) -> None:
        """Go on counting where a checkpoint ends, and log which settings do nothing."""
        super().on_train_start()
        self._go_on_counting()
        self._tell_settings()

    def on_validation_start(self) -> None:
        """Look at collectives of a validation in which sizes differ, as at those of a training step."""
        super().on_validation_start()
        self._watch_evaluation()

    def on_test_start(self) -> None:
        """Look at collectives of a test, as at those of a validation."""
        super().on_test_start()
        self._watch_evaluation()

    def _watch_evaluation(self) -> None:
        if self.engine is not None and self.config.balance_evaluation:
            self.engine.collectives.begin(())

    # one step

    def on_train_batch_start(self, batch: object, batch_idx: int) -> None:
        """Begin the step, with the weight of this batch."""
        if self._signals is not None and not self._signals.asked:  # Lightning has no check of its own
            self._signals.check()
        super().on_train_batch_start(batch, batch_idx)
        assert self.engine is not None
        assert self.lightning_module is not None
        trainer = self.lightning_module.trainer
        counted = self.engine.begin_step(trainer.current_epoch, batch_idx, batch)
        if counted == 0 and trainer._results is not None:
            trainer._results.batch_size = 0  # runs with weight 0: it must not count in logged means either

    def backward(
        self, closure_loss: torch.Tensor, optimizer: torch.optim.Optimizer | None, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        """Weight the loss by this rank's share of the batch, then run backward."""
        assert self.engine is not None
        loss = self.engine.scale_loss(closure_loss)
        with self.engine.backward():
            result: torch.Tensor = super().backward(loss, optimizer, *args, **kwargs)
        return result

    def optimizer_step(
        self,
        optimizer: torch.optim.Optimizer,
        closure: Callable[[], Any],
        model: "LightningModule | torch.nn.Module | None" = None,
        **kwargs: Any,
    ) -> Any:
        """Step as DDP does, timed.

        Raises:
            RuntimeError: if under manual optimization no backward pass went through the strategy before this step.
        """
        assert self.engine is not None
        assert self.lightning_module is not None
        if not self.lightning_module.automatic_optimization:
            closure = _followed_by(closure, self.engine.check_backward)  # the closure may hold the backward pass
        self.engine.observer.begin_update()
        result = super().optimizer_step(optimizer, closure, model, **kwargs)
        self.engine.observer.end_update()
        return result

    def teardown(self) -> None:
        """End the run; the engine stays: its plans can still be read, and a further run continues from them."""
        if self.engine is not None:
            self.engine.control.failures.close()  # Lightning has told it of an exception, unless it is no failure
            self.engine.close()
        super().teardown()
