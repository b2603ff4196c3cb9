"""Early end of a training: by a signal, which all ranks obey together, or by an exception of one rank."""

from typing import TypeVar

import torch
import torch.distributed as dist

from lightning_hetero.elastic import ElasticEngine
from lightning_hetero.engine import HeteroEngine
from lightning_hetero.strategies._lightning.base import LightningMixin
from lightning_hetero.strategies._lightning.signals import SharedSignals

__all__ = ["AloneMixin", "EndingMixin"]

T = TypeVar("T")


def _ours(message: str) -> str:
    """Rewrite Lightning's advice on unused parameters, which would lead to the plain strategy."""
    ours = message.replace("strategy='ddp_find_unused", "strategy='hetero_ddp_find_unused")
    return ours.replace("strategy=DDPStrategy(find_unused", "strategy=HeteroDDPStrategy(find_unused")


class AloneMixin(LightningMixin):
    """A strategy whose rank waits for no other while it handles its own exception, for example to save a checkpoint.

    The other ranks are elsewhere and would not take part in its collectives. Lightning's collective calls then concern
    this rank only.
    """

    engine: HeteroEngine | ElasticEngine | None
    _leaving = False

    def on_exception(self, exception: BaseException) -> None:
        """Tell the other ranks of the exception; in an error that follows from another rank's, name that rank."""
        super().on_exception(exception)
        if self.engine is not None and not self._told_together:
            self.engine.control.failures.explain(exception)

    @property
    def _told_together(self) -> bool:
        """``True`` if all ranks were told to end, and do so at the same batch."""
        return False

    @property
    def _alone(self) -> bool:
        """``True`` while this rank handles an exception that the others may not have, or leaves their group."""
        trainer = self._trainer_if_any
        if self._leaving:
            return True
        return trainer is not None and bool(trainer.interrupted) and not self._told_together

    def barrier(self, *args: object, **kwargs: object) -> None:
        """Wait for all ranks, unless this one is alone."""
        if not self._alone:
            super().barrier(*args, **kwargs)

    def broadcast(self, obj: T, src: int = 0) -> T:
        """Broadcast as DDP does, unless this rank is alone."""
        return obj if self._alone else super().broadcast(obj, src)

    def reduce(
        self,
        tensor: torch.Tensor,
        group: dist.ProcessGroup | None = None,
        reduce_op: dist.ReduceOp | str | None = "mean",
    ) -> torch.Tensor:
        """Reduce as DDP does, unless this rank is alone."""
        return tensor if self._alone else super().reduce(tensor, group, reduce_op)

    def all_gather(
        self, tensor: torch.Tensor, group: dist.ProcessGroup | None = None, sync_grads: bool = False
    ) -> torch.Tensor:
        """Gather as DDP does, unless this rank is alone."""
        return tensor[None] if self._alone else super().all_gather(tensor, group, sync_grads)


class EndingMixin(AloneMixin):
    """A strategy whose ranks end at the same batch if one is told to, and do not wait for a rank that has failed."""

    engine: HeteroEngine | None
    _signals: SharedSignals | None = None
    _kept_signal: int | None = None

    def _share_signals(self) -> None:
        """Note signals from now on, before Lightning registers handlers."""
        trainer = self._trainer_if_any
        if self.engine is not None and trainer is not None:
            control, hasten = self.engine.control, self.engine.rounds.hasten
            signals = SharedSignals(trainer, control, self._members_change, hasten)
            self._signals, self._kept_signal = signals.install(self._kept_signal), None

    def _keep_signal(self) -> None:
        """Keep a signal that was noted and not obeyed yet, for the next fit."""
        self._kept_signal = None if self._signals is None else self._signals.told_to_end

    def settle_signals(self) -> None:
        """Wait for the last message about signals; a process that ends must not leave it in flight."""
        if self._signals is not None:
            self._signals.settle()

    def ask_for_round(self) -> None:
        """Let a sync round follow the next batch but one, on all ranks; for any rank to call."""
        if self._signals is not None:
            self._signals.note_round()

    @property
    def _told_together(self) -> bool:
        return self._signals is not None and self._signals.agreed

    def on_train_start(self) -> None:
        """Check for signals before each batch."""
        super().on_train_start()
        if self._signals is not None:
            self._signals.start()

    def on_exception(self, exception: BaseException) -> None:
        """Correct Lightning's advice."""
        super().on_exception(exception)  # Lightning adds its advice here
        exception.args = tuple(_ours(part) if isinstance(part, str) else part for part in exception.args)

    def on_train_end(self) -> None:
        """Check losses and weights once more, and obey a signal that came after the last check."""
        super().on_train_end()
        if self.engine is not None:
            self.engine.health.finish()
        if self._signals is not None:
            self._signals.finish()

    def teardown(self) -> None:
        """Restore Lightning's handlers."""
        signals, self._signals = self._signals, None
        if signals is not None:
            signals.remove()
        super().teardown()
