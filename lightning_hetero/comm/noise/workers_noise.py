"""Measure the gradient noise scale of several workers, whatever trains them."""

from typing import Any

from lightning_hetero.comm.agreement.control_plane import ControlPlane
from lightning_hetero.comm.gradients.ddp_hook import HookState
from lightning_hetero.comm.noise.collector import NoiseCollector
from lightning_hetero.comm.noise.window_sums import own_part
from lightning_hetero.core.noise.running import RunningNoiseScale
from lightning_hetero.optim.adam_preconditioner import AdamPreconditioner

__all__ = ["WorkersNoise"]


class WorkersNoise:
    """Measure by the gradient hook's norms; workers put their sums together at sync rounds.

    Args:
        hook: state of the gradient hook.
        control: connects the workers.
        settings: those of :class:`~lightning_hetero.comm.noise.collector.NoiseCollector`.

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
        """Go on from an estimate."""
        self.collector.take_over(running)

    def precondition(self, preconditioner: AdamPreconditioner | None) -> None:
        """Take norms of gradients as Adam scales them."""
        self.collector.hook.squares.norms.precondition(preconditioner)

    def scaled_by(self, scaler: Any) -> None:
        """Leave the factor of a gradient scaler out, on the device: ``get_scale()`` would wait for it."""
        self.collector.hook.squares.norms.scaled_by(None if scaler is None else scaler._get_scale_async)

    def exchange(self) -> None:
        """Take what all workers have seen into the running estimate; a collective call."""
        self.collector.unpack(self.control.gather(self.collector.pack()), self.control)

    def interval(self) -> dict[str, Any]:
        """Return what was seen since the last message, for a checkpoint; a collective call."""
        self.collector.settle()
        sums = self.collector.sums
        parts = sums.reconcile(self.control.gather(sums.pack()), self.control)
        sums.load(parts[self.control.rank].tolist())  # adds up in the order in which a run that resumes does
        return {"steps": self.collector.number, "parts": parts.tolist()}

    def resume(self, interval: dict[str, Any]) -> None:
        """Go on in the middle of an interval."""
        own = own_part(interval["parts"], self.control.rank, self.control.world_size)
        self.collector.resume(int(interval["steps"]), own)
