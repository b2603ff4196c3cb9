"""Gradient noise scale of several workers, independent of the trainer."""

from typing import Any

from lightning_hetero.comm.agreement.control_plane import ControlPlane
from lightning_hetero.comm.gradients.ddp_hook import HookState
from lightning_hetero.comm.noise.collector import NoiseCollector
from lightning_hetero.comm.noise.window_sums import own_part
from lightning_hetero.core.noise.running import RunningNoiseScale
from lightning_hetero.optim.adam_preconditioner import AdamPreconditioner

__all__ = ["WorkersNoise"]


class WorkersNoise:
    """Measurement by the gradient hook's norms, whose sums the workers combine at sync rounds.

    Args:
        hook: state of the gradient hook.
        control: connects the workers.
        settings: keywords of :class:`~lightning_hetero.comm.noise.collector.NoiseCollector`.

    Example:
        >>> from lightning_hetero.comm.timing.clock import HostClock
        >>> from lightning_hetero.comm.timing.step_timer import StepTimer
        >>> noise = WorkersNoise(HookState(StepTimer(HostClock()), 1), ControlPlane(0, 1))
        >>> noise.interval()
        {'steps': 0, 'parts': [[0.0, 0.0, 0.0, 0.0, 0.0]]}
    """

    def __init__(self, hook: HookState, control: ControlPlane, **settings: Any) -> None:
        self.collector = NoiseCollector(hook, control.rank, **settings)
        self.control = control

    @property
    def running(self) -> RunningNoiseScale:
        """The running estimate, the same on all ranks."""
        return self.collector.running

    def take_over(self, running: RunningNoiseScale) -> None:
        """Continue from this estimate."""
        self.collector.take_over(running)

    def precondition(self, preconditioner: AdamPreconditioner | None) -> None:
        """Take norms of gradients as Adam scales them; ``None`` as they are."""
        self.collector.hook.squares.norms.precondition(preconditioner)

    def scaled_by(self, scaler: Any) -> None:
        """Divide out the factor of a gradient scaler, on the device: ``get_scale()`` would wait for the device."""
        self.collector.hook.squares.norms.scaled_by(None if scaler is None else scaler._get_scale_async)

    def exchange(self) -> None:
        """Update the running estimate by the sums of all workers; a collective call."""
        self.collector.unpack(self.control.gather(self.collector.pack()), self.control)

    def interval(self) -> dict[str, Any]:
        """Return the steps so far and the sums since the last exchange, for a checkpoint; a collective call."""
        self.collector.settle()
        sums = self.collector.sums
        parts = sums.reconcile(self.control.gather(sums.pack()), self.control)
        sums.load(parts[self.control.rank].tolist())  # the same order of summation as in a resumed run
        return {"steps": self.collector.number, "parts": parts.tolist()}

    def resume(self, interval: dict[str, Any]) -> None:
        """Continue in the middle of an interval, from what :meth:`interval` returned."""
        own = own_part(interval["parts"], self.control.rank, self.control.world_size)
        self.collector.resume(int(interval["steps"]), own)
