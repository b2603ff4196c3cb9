"""Compressed sums that arrive one step later: the messages of a step travel while the next one computes.

Block top-k sends one message a step for all parameters, so that all of them are delayed or none. Of a delayed step the
residual has given away what was sent; the optimizer gets the merged sum in the next step, the same on all ranks. What
is under way is applied once, or handed to :meth:`DelayedBlocks.take_sums`, or rides in the checkpoint, in the same form
as delayed dense sums (:mod:`lightning_hetero.comm.staleness.dense`), so that either can go on from the other's.
"""

from typing import Any

import torch
import torch.distributed as dist

from lightning_hetero.comm.collectives.topology import Topology
from lightning_hetero.comm.compressors.block_topk import BlockExchange
from lightning_hetero.comm.compressors.in_flight import Sending
from lightning_hetero.comm.staleness.base import Delays, Expected
from lightning_hetero.comm.timing.clock import Clock
from lightning_hetero.compression.layout import flat_view
from lightning_hetero.compression.reference import Pack, merge_sparse
from lightning_hetero.core.link.bandwidth import LinkEstimate

__all__ = ["DelayedBlocks"]


class DelayedBlocks(Delays):
    """Apply messages of block top-k at once or a step late.

    Args:
        limit: greatest delay in steps, 0 or 1.
        exchange: sends and receives; its messages take the way of this object.
        parameters: the module's parameters that need gradients, by name.
        clock: marks moments on this rank's device.
        hysteresis: least predicted gain for which messages are delayed, as a share of the step time.
        topology: way of messages, with process groups of its own, so that no other collective waits behind them;
            ``None`` for that of the exchange.
        restored: :meth:`state_dict` of an earlier run, or that of delayed dense sums.
        running: callbacks that a thread of the process group may still hold, by weak reference.
    """

    unit = "compressed messages"

    def __init__(
        self,
        limit: int,
        exchange: BlockExchange,
        parameters: dict[str, torch.Tensor],
        *,
        clock: Clock,
        hysteresis: float = 0.03,
        topology: Topology | None = None,
        restored: dict[str, Any] | None = None,
        running: Any = None,
    ) -> None:
        super().__init__(limit, parameters, clock=clock, hysteresis=hysteresis, topology=topology, running=running)
        exchange.read_on_host()
        self.exchange, self.delayed = exchange, False
        self._under_way: Sending | None = None
        self._owed: list[Pack] = []
        self._paid: list[Pack] = []
        self._spare: torch.Tensor | None = None
        self._in_vain = False
        exchange.late, exchange.way = self, topology
        self.load_state_dict(restored or {})

    # the hook

    def __call__(self, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Take one bucket; DDP hands them over in the same order on all ranks."""
        self.step_kind = frozenset(self.parameters if self.delayed and not self.exchange.dense else ())
        return self.exchange(None, bucket)

    def turn(self, sending: Sending) -> list[Pack]:
        """What the running step applies: all that is owed, and its own messages too unless they are delayed.

        Those of the step before have travelled since; by now they should be there.
        """
        release, arrived = self._log.ready(0), self._log.send()
        self._then(sending.arrival, lambda done: arrived())
        self.settle()
        self._say_in_vain()
        packs, self._owed = self._owed, []
        if self.delayed:
            self._keep(sending)
        else:
            packs = packs + self.exchange.receive(sending)
        release()
        return packs

    def _keep(self, sending: Sending) -> None:
        """Let messages travel, into another set of rows than those of the next step.

        A gradient that is not finite leaves the residual now, since it will be gone when the others learn of it.
        """
        topology, form = self.exchange.topology, self.exchange.encoder.form
        if topology.leads and form.gave_up(sending.rows[topology.cluster]):
            sending.finite = False
        if not sending.finite:
            self.exchange.encoder.undo()
        self._under_way = sending
        if self._spare is None or self._spare.shape != sending.rows.shape:
            self._spare = torch.zeros_like(sending.rows)
        self.exchange.use_rows(self._spare)

    def pay(self, bucket: dist.GradBucket) -> None:
        """Put what is owed into a bucket that is about to be summed densely: rank 0 adds it for all."""
        if bucket.index() == 0:
            self._log.gap()
            self.settle()
            self.exchange.encoder.merge(self._owed)
        self._say_in_vain(last=bucket.is_last())
        if self._owed:
            self.exchange.hook.exact_sum = False
            if self.exchange.topology.rank == 0:
                for gradient, parameter in zip(bucket.gradients(), bucket.parameters(), strict=True):
                    slot, flat = self.exchange.slots[parameter], flat_view(gradient)
                    merged = self.exchange.encoder.merged[slot.start : slot.start + slot.numel]
                    flat.add_(merged.to(flat.device, flat.dtype))
        if bucket.is_last():
            self.exchange.encoder.finish()
            self._owed, self._paid = [], self._owed

    def unpaid(self) -> None:
        """The dense sum that held what was owed was left out, so that it is owed again."""
        self._owed, self._paid = self._paid, []

    def _say_in_vain(self, last: bool = True) -> None:
        """Tell the hook in this step that the messages of the step before were left out."""
        if self._in_vain:
            self.exchange.hook.step_dropped = True
        self._in_vain = self._in_vain and not last

    # sums that are owed

    def settle(self) -> None:
        """Wait for the messages under way and read them. What was sent in vain returns to the residual."""
        if self._under_way is not None:
            sending, self._under_way = self._under_way, None
            found = self.exchange.receive(sending)
            self._owed, self._spare, self._in_vain = self._owed + found, sending.rows, not found

    def take_sums(self) -> dict[str, torch.Tensor]:
        """All sums that the optimizer has not had yet, by parameter, flat; from now on they are the caller's."""
        self.settle()
        owed, self._owed = self._owed, []
        if not owed:
            return {}
        self.exchange.gradients = None  # what follows is a dense step
        sums = self.exchange.sums_of(owed)
        return {name: sums[name].to(p.device, p.dtype) for name, p in self.parameters.items()}

    def arrived(self) -> tuple[list[tuple[torch.Tensor, list[torch.Tensor]]], bool]:
        """No sums of which a norm would be needed, and whether what was under way was sent in vain."""
        self.settle()
        return [], self._in_vain

    def expected(self, cluster_shares: list[float], share: float) -> Expected | None:
        """As :meth:`Delays.expected`; only leaders of clusters have a message of their own."""
        exchange, packs, total = self.exchange, self._owed, sum(cluster_shares)
        if not self.delayed or exchange.dense:
            return None
        factor = 1.0
        if self._under_way is not None:
            own = exchange.topology.leads and self._under_way.finite
            row = self._under_way.rows[exchange.topology.cluster]
            packs, factor = (
                ([exchange.encoder.form.unpack(row.cpu())] if own else []),
                self.whole(total, exchange.topology.size),
            )
        if not packs:
            return dict.fromkeys(exchange.slots, (None, None))
        found: Expected = {}
        for parameter, gradient in exchange.parts.of(merge_sparse(packs)).items():
            block = gradient.values.shape[1]
            places = (gradient.rows[:, None] * block + torch.arange(block, device=gradient.rows.device)).view(-1)
            inside = places < parameter.numel()
            found[parameter] = places[inside], gradient.values.view(-1)[inside] * factor
        return found

    # the decision

    @property
    def delayed_share(self) -> float:
        """Share of the gradient's elements that is delayed, 0 or 1."""
        return float(self.delayed)

    def delay(self, delayed: bool) -> None:
        """Delay messages from the next backward pass on, or do not; all ranks have to call it together.

        Raises:
            ValueError: if the limit is 0.
        """
        if delayed and self.limit == 0:
            raise ValueError("staleness=0 awaits every gradient. Set staleness=1 to delay some of them.")
        self.delayed = delayed

    def delay_all(self) -> None:
        """Delay messages from the next backward pass on; all ranks have to call it together."""
        self.delay(True)

    def _sent_bytes(self) -> list[float]:
        return [(self.exchange.topology.size - 1) * float(self.exchange.encoder.form.num_bytes)]

    def _fresh(self) -> int:
        return int(not self.delayed)

    def _keep_fresh(self, number: int) -> None:
        self.delay(number == 0)

    # state

    def state_dict(self) -> dict[str, Any]:
        """What is delayed and the sums that are owed, equal on all ranks; waits for what is under way."""
        self.settle()
        if not self._owed and not self.delayed:
            return {}
        state: dict[str, Any] = {"delayed": sorted(self.parameters) if self.delayed else [], "rate": self.link.rate}
        if not self._owed:
            return {**state, "sums": {}}
        sums = {name: value.cpu() for name, value in self.exchange.sums_of(self._owed).items()}
        touched = torch.cat([pack.indices for pack in self._owed]).unique().cpu()
        return {**state, "sums": sums, "blocks": {"layout": self.exchange.layout.fingerprint(), "touched": touched}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there; what is under way now belongs to steps that are taken back.

        Raises:
            ValueError: if a sum does not fit its parameter.
        """
        if self._under_way is not None:
            self._under_way.arrival.wait()
            self._spare, self._under_way = self._under_way.rows, None
        self._in_vain = False
        self.delayed = bool(self.limit) and set(self.parameters) <= set(state.get("delayed", ()))
        self.link = LinkEstimate(state.get("rate"))
        sums = self._fitting(state.get("sums", {}))
        self._owed = [self._pack(sums, state.get("blocks", {}))] if sums else []

    def _pack(self, sums: dict[str, torch.Tensor], blocks: dict[str, Any]) -> Pack:
        """Restored sums as blocks: those that were touched if that is known, else all that are not 0."""
        layout, merged = self.exchange.layout, self.exchange.encoder.merged
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
