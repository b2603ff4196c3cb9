"""Stale messages of block top-k: they travel while the next step computes.

Block top-k sends one message per step for all parameters, so all of them are stale or none. In a stale step the sent
blocks leave the residual at once, and the optimizer gets the merged sum in the next step, the same on all ranks. Sums
in flight are applied once, or handed out by :meth:`BlockTopKStaleAverager.drain`, or stored in the checkpoint, in the
same form as stale dense sums (:mod:`lightning_hetero.comm.staleness.dense`): either can resume from the other's.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from lightning_hetero.comm.collectives.topology import Topology
from lightning_hetero.comm.compressors.block_topk import BlockTopKAverager
from lightning_hetero.comm.compressors.block_topk.in_flight import InFlight
from lightning_hetero.comm.gradients.averager import Future
from lightning_hetero.comm.gradients.squared_norms import BucketSquares
from lightning_hetero.comm.gradients.stale_averager import Predicted, StaleAverager
from lightning_hetero.comm.staleness.base import MeasuredStaleness
from lightning_hetero.comm.staleness.dense import DenseStaleAverager
from lightning_hetero.comm.timing.clock import Clock
from lightning_hetero.compression.layout import flat_view
from lightning_hetero.compression.reference import Pack, merge_sparse
from lightning_hetero.core.link.bandwidth import LinkEstimate

__all__ = ["BlockTopKStaleAverager"]


class BlockTopKStaleAverager(MeasuredStaleness):
    """Averager that applies the messages of block top-k at once, or in the next step.

    Args:
        limit: greatest staleness in steps, 0 or 1.
        averager: averager that sends and receives the messages, over ``topology``.
        parameters: the module's parameters that need gradients, by name.
        clock: marks moments on this rank's device.
        hysteresis: least predicted gain, as a share of the step time, for which messages become stale.
        topology: topology of messages, with process groups of its own, so no other collective waits behind them;
            ``None`` for that of the averager.
        restored: :meth:`state_dict` of an earlier run, or that of stale dense sums.
        hold: remembers callbacks that a thread of the process group may still hold when training ends.
    """

    unit = "compressed messages"
    kind = BlockTopKAverager.kind
    skips_nonfinite = True

    def __init__(
        self,
        limit: int,
        averager: BlockTopKAverager,
        parameters: dict[str, torch.Tensor],
        *,
        clock: Clock,
        hysteresis: float = 0.03,
        topology: Topology | None = None,
        restored: dict[str, Any] | None = None,
        hold: Callable[[Any], None] | None = None,
    ) -> None:
        super().__init__(
            limit,
            parameters,
            world_size=averager.world_size,
            clock=clock,
            hysteresis=hysteresis,
            topology=topology,
            hold=hold,
        )
        self.averager, self.flags, self.stale = averager, averager.flags, False
        self._in_flight: InFlight | None = None
        self._arrived: list[Pack] = []
        self._added: list[Pack] = []
        self._spare: torch.Tensor | None = None
        self._in_vain = False
        self.path = averager.apply_by(self)
        self.load_state_dict(restored or {})

    def for_dense_sums(self, topology: Topology | None) -> StaleAverager:
        """Return an averager of stale dense sums that takes over the sums in flight, and decides by its own rule."""
        successor = DenseStaleAverager(
            self.limit,
            self.parameters,
            world_size=self.world_size,
            clock=self.clock,
            hysteresis=self.hysteresis,
            topology=self.topology,
            synchronous=topology,
            restored=self.state_dict(),
            hold=self._hold,
        )
        if self.keeps_own:
            successor.keep_own()
        return successor

    # the hook

    def average(self, bucket: dist.GradBucket, squares: BucketSquares | None = None) -> Future:
        """Take one bucket; DDP hands them over in the same order on all ranks."""
        self.step_kind = frozenset(self.parameters if self.stale and not self.averager.dense else ())
        return self.averager.average(bucket)

    def step(self, sent: InFlight) -> list[Pack]:
        """Return the packs that the running step applies: all that have arrived, and its own unless they are stale.

        The messages of the previous step were in flight during this one, and should have arrived by now.
        """
        release, arrived = self._timer.ready(0), self._timer.send()
        self._then(sent.arrival, lambda done: arrived())
        self.wait()
        self._report_in_vain()
        packs, self._arrived = self._arrived, []
        if self.stale:
            self._keep(sent)
        else:
            packs = packs + self.path.receive(self.averager, sent)
        release()
        return packs

    def _keep(self, sent: InFlight) -> None:
        """Leave messages in flight, and give the next step another set of rows.

        A gradient that is not finite is undone in the residual now: when the other ranks learn of it, it will be gone.
        """
        topology, form = self.averager.topology, self.path.encoder.form
        if topology.is_leader and form.gave_up(sent.rows[topology.cluster]):
            sent.mark_not_finite()
        if not sent.finite:
            self.path.encoder.undo()
        self._in_flight = sent
        if self._spare is None or self._spare.shape != sent.rows.shape:
            self._spare = torch.zeros_like(sent.rows)
        self.path.use_rows(self._spare)

    def add_to_dense(self, bucket: dist.GradBucket) -> None:
        """Add the sums that have arrived to a bucket that is about to be summed densely; rank 0 adds them for all."""
        if bucket.index() == 0:
            self._timer.gap()
            self.wait()
            self.path.encoder.merge(self._arrived)
        self._report_in_vain(last=bucket.is_last())
        if self._arrived:
            self.flags.add_other_step()
            if self.averager.topology.rank == 0:
                for gradient, parameter in zip(bucket.gradients(), bucket.parameters(), strict=True):
                    flat = flat_view(gradient)
                    merged = self.path.merged(self.averager.model.slots[parameter])
                    flat.add_(merged.to(flat.device, flat.dtype))
        if bucket.is_last():
            self.path.encoder.finish()
            self._arrived, self._added = [], self._arrived

    def undo_add(self) -> None:
        """Undo :meth:`add_to_dense`, because the dense sum was left out."""
        self._arrived, self._added = self._added, []

    def _report_in_vain(self, last: bool = True) -> None:
        """Flag this step as left out if the messages of the previous step were."""
        if self._in_vain:
            self.flags.skip()
        self._in_vain = self._in_vain and not last

    def after_backward(self) -> None:
        """Give parameters their sparse gradients; leave out a dense sum that is not finite."""
        self.averager.after_backward()

    # sums in flight

    def wait(self) -> None:
        """Wait for the messages in flight and read them; if left out, the sent blocks return to the residual."""
        if self._in_flight is not None:
            sent, self._in_flight = self._in_flight, None
            found = self.path.receive(self.averager, sent)
            self._arrived, self._spare, self._in_vain = self._arrived + found, sent.rows, not found

    def drain(self) -> dict[str, torch.Tensor]:
        """Return and forget all sums that were not applied yet, by parameter, flat: the caller has to apply them."""
        self.wait()
        arrived, self._arrived = self._arrived, []
        if not arrived:
            return {}
        self.averager.forget_gradients()  # what follows is a dense step
        sums = self.path.sums_of(arrived)
        return {name: sums[name].to(p.device, p.dtype) for name, p in self.parameters.items()}

    def wait_in_flight(self) -> tuple[list[tuple[torch.Tensor, list[torch.Tensor]]], bool]:
        """Return no sums, since their norms are not needed, and whether the messages in flight were left out."""
        self.wait()
        return [], self._in_vain

    def predicted_sums(self, cluster_shares: list[float], share: float) -> Predicted | None:
        """Return a prediction of the next sums; only leaders of clusters have a message of their own."""
        averager, packs, total = self.averager, self._arrived, sum(cluster_shares)
        if not self.stale or averager.dense:
            return None
        factor = 1.0
        if self._in_flight is not None:
            own = averager.topology.is_leader and self._in_flight.finite
            row = self._in_flight.rows[averager.topology.cluster]
            packs, factor = (
                ([self.path.encoder.form.unpack(row.cpu())] if own else []),
                self.extrapolation_factor(total, averager.topology.size),
            )
        if not packs:
            return dict.fromkeys(averager.model.slots, (None, None))
        found: Predicted = {}
        for parameter, gradient in averager.model.parts.of(merge_sparse(packs)).items():
            block = gradient.values.shape[1]
            places = (gradient.rows[:, None] * block + torch.arange(block, device=gradient.rows.device)).view(-1)
            inside = places < parameter.numel()
            found[parameter] = places[inside], gradient.values.view(-1)[inside] * factor
        return found

    # the decision

    @property
    def stale_share(self) -> float:
        """Share of the gradient's elements that is stale, 0 or 1."""
        return float(self.stale)

    def make_stale(self, stale: bool) -> None:
        """Make messages stale or synchronous from the next backward pass on; all ranks have to call it together.

        Raises:
            ValueError: if the limit is 0.
        """
        if stale and self.limit == 0:
            raise ValueError("staleness=0 awaits every gradient. Set staleness=1 to let some of them be stale.")
        self.stale = stale

    def make_all_stale(self) -> None:
        """Make messages stale from the next backward pass on; all ranks have to call it together."""
        self.make_stale(True)

    def _sent_bytes(self) -> list[float]:
        return [(self.averager.topology.size - 1) * float(self.path.encoder.form.num_bytes)]

    def _awaited(self) -> int:
        return int(not self.stale)

    def _await_first(self, number: int) -> None:
        self.make_stale(number == 0)

    # state

    def state_dict(self) -> dict[str, Any]:
        """Return the names of stale parameters and the sums in flight, equal on all ranks; wait for the sums."""
        self.wait()
        if not self._arrived and not self.stale:
            return {}
        state: dict[str, Any] = {"delayed": sorted(self.parameters) if self.stale else [], "rate": self.link.rate}
        if not self._arrived:
            return {**state, "sums": {}}
        sums = {name: value.cpu() for name, value in self.path.sums_of(self._arrived).items()}
        touched = torch.cat([pack.indices for pack in self._arrived]).unique().cpu()
        layout = self.averager.model.layout.fingerprint()
        return {**state, "sums": sums, "blocks": {"layout": layout, "touched": touched}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state; messages now in flight belong to steps that are undone, and are discarded.

        Raises:
            ValueError: if a sum does not fit its parameter.
        """
        if self._in_flight is not None:
            self._in_flight.arrival.wait()
            self._spare, self._in_flight = self._in_flight.rows, None
        self._in_vain = False
        self.stale = bool(self.limit) and set(self.parameters) <= set(state.get("delayed", ()))
        self.link = LinkEstimate(state.get("rate"))
        sums = self._fitting(state.get("sums", {}))
        self._arrived = [self._pack(sums, state.get("blocks", {}))] if sums else []

    def _pack(self, sums: dict[str, torch.Tensor], blocks: dict[str, Any]) -> Pack:
        """Return restored sums as blocks: the touched ones if the checkpoint lists them, else all that are not 0."""
        layout, merged = self.averager.model.layout, self.path.encoder.merged
        flat = torch.zeros_like(merged)
        for name, value in sums.items():
            slot = layout.by_name[name]
            flat[slot.start : slot.start + slot.numel].copy_(value)
        values = flat.view(-1, layout.block)
        if blocks.get("layout") == layout.fingerprint():
            indices = blocks["touched"].to(flat.device)
        else:
            indices = (values != 0).any(1).nonzero().view(-1)
        return Pack(indices, values[indices])
