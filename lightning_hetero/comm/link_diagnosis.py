"""Says on rank 0 when a training waits for the network for longer than it computes, with numbers and what helps."""

import logging

from lightning_hetero.comm.agreement.rank_monitor import OVER
from lightning_hetero.comm.agreement.sync_schedule import NEVER, ExchangeSchedule
from lightning_hetero.comm.compressors.manager import GradientCompression
from lightning_hetero.comm.gradients.ddp_hook import HookState
from lightning_hetero.comm.timing.step_timer import StepObserver
from lightning_hetero.config import HeteroConfig
from lightning_hetero.core.link.bandwidth import sum_bytes
from lightning_hetero.core.link.diagnosis import AGAIN, THIN, NetworkBound, network_waits
from lightning_hetero.core.observations import StepObservations

__all__ = ["NetworkWatch"]

log = logging.getLogger("lightning_hetero")


class NetworkWatch:
    """Follows what steps wait for the network, and speaks when that changes.

    Two others say ``network-bound`` of a link that stays thin, with numbers of their own, because they act on it: the
    rule of the delays (``staleness=1``) and the controller of the density. There only stalls are said here.

    Args:
        config: settings of the run, for what helps.
        rank: this rank; only 0 speaks.
        hook: state of the gradient hook, which knows the bytes of a step.
        compression: of gradients, or ``None``.
    """

    def __init__(
        self, config: HeteroConfig, rank: int, hook: HookState, compression: GradientCompression | None
    ) -> None:
        self.config, self.speaks, self.hook, self.compression = config, rank == 0, hook, compression
        self.state = NetworkBound()
        self._longest_said = 0.0
        self._looked = 0, 0  # bytes and steps by then

    def see_wait(self, observer: StepObserver, schedule: ExchangeSchedule | None) -> None:
        """This rank may have waited long in a step: say so at once if it takes long until all ranks are compared.

        Before the first comparison, when nobody knows yet how fast workers are, that is no warning. In the first step
        they wait for whoever starts last.

        Args:
            observer: of this rank, behind the step.
            schedule: when ranks are compared, ``None`` if they are not.
        """
        wait, step = observer.long_wait, observer.synced_steps
        if not self.speaks or wait is None or step < 2 or wait.waited < AGAIN * self._longest_said:
            return
        left = schedule.next - step if schedule is not None and schedule.next < NEVER else None
        if wait.worth_saying(left):
            self._longest_said = wait.waited
            level = logging.INFO if schedule is not None and schedule.last == 0 else logging.WARNING
            log.log(level, "step %d: %s", step, wait.describe(self._sent_bytes(), left))

    def look(self, observations: StepObservations, *, accumulation: int, watched: bool) -> None:
        """Judge the steps since the last look.

        Args:
            observations: of all ranks.
            accumulation: micro-batches of a step.
            watched: whether a policy decides on the density, which watches for thin links itself.
        """
        if not self.speaks:
            return
        seconds = None if self.compression is None else self.compression.watch.seconds
        new = network_waits(observations, accumulation=accumulation, message_seconds=seconds)
        self.state, news = self.state.observe(new, lasting=not (watched or self.config.staleness > 0))
        if news == OVER:
            log.info("%s", self.state.describe())
        elif news is not None:
            advice = f". {self._advice()}" if news == THIN else ". Training goes on."
            log.warning("%s%s", self.state.describe(self._sent_bytes()), advice)
        self._looked = self.hook.num_bytes, self.hook.observer.synced_steps

    def _sent_bytes(self) -> float:
        """Bytes that a worker sends in a step, the mean since the last look."""
        exchange = None if self.compression is None else self.compression.averager
        if exchange is not None and exchange.report.steps:
            return exchange.report.sent / exchange.report.steps
        num_bytes, steps = self.hook.num_bytes - self._looked[0], self.hook.observer.synced_steps - self._looked[1]
        crossing = self.hook.world_size if self.hook.topology is None else self.hook.topology.size
        return sum_bytes(num_bytes / max(steps, 1), crossing)

    def _advice(self) -> str:
        """What would help and is not done yet."""
        exchange = None if self.compression is None else self.compression.averager
        sends_blocks = exchange is not None and exchange.blocks is not None and not exchange.blocks.paused
        less = "a lower density" if sends_blocks else 'compression="block_topk(density=0.01)"'
        text = (
            f"To wait less, send less ({less}; under Lightning, TTACallback finds it), or less often (larger "
            "batches, gradient accumulation)."
        )
        if self.config.hierarchy is None and self.hook.world_size > 2:
            text += ' Where several workers share one end of the link, hierarchy="auto" lets it carry one message.'
        return text
