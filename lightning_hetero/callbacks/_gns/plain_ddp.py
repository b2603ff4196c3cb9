"""Gradient norms under Lightning's own DDP strategy, from a hook of our own."""

from typing import Any

from torch.nn.parallel import DistributedDataParallel

from lightning_hetero.callbacks._gns.base import INTERVAL, WorkersSource, log
from lightning_hetero.callbacks._lightning import MisconfigurationException, Trainer
from lightning_hetero.comm.agreement.control_plane import ControlPlane
from lightning_hetero.comm.gradients.ddp_hook import HookState, gradient_hook
from lightning_hetero.comm.noise.window_sums import merge_parts
from lightning_hetero.comm.timing.clock import HostClock
from lightning_hetero.comm.timing.step_timer import StepTimer

__all__ = ["PlainDDPSource"]


class PlainDDPSource(WorkersSource):
    """Workers of plain ``ddp``: equal batches, a hook of our own, a message every 50 steps that were observed."""

    def __init__(self, rank: int, world_size: int, **settings: Any) -> None:
        self.world_size = world_size
        self.hook = HookState(StepTimer(HostClock()), world_size)
        super().__init__(self.hook, ControlPlane(rank, world_size), **settings)
        self.warned = False

    def start(self, trainer: Trainer) -> None:
        super().start(trainer)
        model = trainer.strategy.model
        if (
            not isinstance(model, DistributedDataParallel)
            or getattr(trainer.strategy, "_ddp_comm_hook", None) is not None
        ):
            raise MisconfigurationException(
                "GNSCallback needs DDP's communication hook, and the strategy has one of its own or no DDP module "
                f"({type(model).__name__}). Use strategy='hetero_ddp', which takes your hook inside its own."
            )
        model.register_comm_hook(self.hook, gradient_hook)

    def begin(self, trainer: Trainer, batch_size: int) -> None:
        self.collector.begin_step((batch_size,) * self.world_size)

    def backward(self, trainer: Trainer) -> None:
        self.collector.after_backward()

    def end(self, trainer: Trainer) -> None:
        if not self.hook.take_fired():
            return
        self.collector.end_step()
        if self.collector.sums.steps >= INTERVAL:
            self.exchange()

    def exchange(self) -> None:
        parts, collector = self.control.gather(self.collector.sums.pack()), self.collector
        parts = collector.sums.reconcile(parts, self.control)
        collector.sums.clear()
        if len(set(parts[:, 3])) == 1:
            collector.take_over(merge_parts(collector.running, parts))
            return
        if not self.warned and self.control.rank == 0:
            log.warning(
                "plain DDP averages workers alike, and their batches differ (%s samples in %d steps): such steps are "
                "left out of the noise scale. Give every worker batches of one size, or use strategy='hetero_ddp'.",
                ", ".join(f"{samples / self.world_size:g}" for samples in parts[:, 3]),
                int(parts[0, 4]),
            )
        self.warned = True

    def stop(self) -> None:
        super().stop()
        self.hook.settle()
