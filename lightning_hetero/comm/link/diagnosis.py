"""Warning of rank 0 that training is communication-bound, with measurements and advice."""

import logging

from lightning_hetero.comm.gradients.ddp_hook import HookState
from lightning_hetero.config import HeteroConfig
from lightning_hetero.core.link.bandwidth import sum_bytes
from lightning_hetero.core.link.diagnosis import CommunicationBound, network_waits
from lightning_hetero.core.observations import StepObservations

__all__ = ["LinkDiagnosis"]

log = logging.getLogger("lightning_hetero")


class LinkDiagnosis:
    """Watcher of the time that steps wait for the network; it logs changes.

    Two others act on a link that makes every step wait, and warn of it with their own numbers: the rule of stale
    buckets (``staleness=1``) and the controller of the density. Where one of them runs, only stalls are logged here.

    Args:
        config: settings of the run, for the advice.
        rank: this rank; only rank 0 logs.
        hook: state of the gradient hook, which knows the bytes of a step.
    """

    def __init__(self, config: HeteroConfig, rank: int, hook: HookState) -> None:
        self.config, self.speaks, self.hook = config, rank == 0, hook
        self.state = CommunicationBound()
        self._counted = 0, 0  # bytes and steps up to the last sync round

    def observe(
        self,
        observations: StepObservations,
        *,
        accumulation: int,
        controlled: bool = False,
        message_seconds: float | None = None,
    ) -> None:
        """Judge the steps since the last sync round.

        Args:
            observations: of all ranks.
            accumulation: micro-batches of a step.
            controlled: whether a policy decides on the density; it warns of a low-bandwidth link itself.
            message_seconds: seconds that compressed messages of a usual step take, ``None`` if that is not known.
        """
        if not self.speaks:
            return
        waits = network_waits(observations, accumulation=accumulation, message_seconds=message_seconds)
        self.state, news = self.state.observe(waits, lasting=not controlled and self.config.staleness == 0)
        if news:
            advice = f". {self._advice()}" if self.state.bound and self.state.lasting else ""
            level = logging.WARNING if self.state.bound else logging.INFO
            log.log(level, "%s%s", self.state.describe(self.sent_bytes()), advice)
        self._counted = self.hook.num_bytes, self.hook.observer.synced_steps

    def sent_bytes(self) -> float:
        """Return the bytes that a worker sends in a step (mean since the last sync round)."""
        report = self.hook.averager.report
        if report.steps:
            return report.sent / report.steps
        num_bytes, steps = self.hook.num_bytes - self._counted[0], self.hook.observer.synced_steps - self._counted[1]
        crossing = self.hook.world_size if self.hook.topology is None else self.hook.topology.size
        return sum_bytes(num_bytes / max(steps, 1), crossing)

    def _advice(self) -> str:
        """Return what would help and is not done yet."""
        if self.hook.averager.shards:
            return (
                "To wait less, use larger batches, or keep parameters after the forward pass if the memory allows it "
                "(HeteroFSDPStrategy(reshard_after_forward=False)), which gathers them once a step instead of twice."
            )
        less = "a lower density" if self.hook.averager.sends_blocks else 'compression="block_topk(density=0.01)"'
        text = (
            f"To wait less, send less ({less}; under Lightning, TTACallback finds it), or less often (larger "
            "batches, gradient accumulation)."
        )
        if self.config.hierarchy is None and self.hook.world_size > 2:
            text += ' Where several workers share one end of the link, hierarchy="auto" lets it carry one message.'
        return text
