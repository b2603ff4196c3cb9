"""Dense all-reduces whose sums are stale where the link would make every step wait (StellaTrain, sec. 3.3).

For a *stale* parameter the optimizer gets the sum of the previous step. This step's sum is in flight during the
optimizer step, the next forward and the next backward pass. The same parameters are stale on all ranks, with the same
sums, so replicas stay identical. No sum is lost: it is applied exactly once, when the parameter's next gradient is
averaged, or after :meth:`DenseStaleAverager.drain` at the end of a training; until then it is part of the checkpoint.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist

from lightning_hetero.comm.collectives import async_ops
from lightning_hetero.comm.collectives.async_ops import make_future, tensor_of
from lightning_hetero.comm.collectives.topology import Topology
from lightning_hetero.comm.gradients.averager import Future
from lightning_hetero.comm.gradients.squared_norms import BucketSquares
from lightning_hetero.comm.gradients.stale_averager import Predicted, StaleAverager
from lightning_hetero.comm.staleness.base import MeasuredStaleness
from lightning_hetero.comm.staleness.deadline_queue import TransferQueue
from lightning_hetero.comm.staleness.stale_bucket import StaleBucket
from lightning_hetero.comm.timing.clock import Clock
from lightning_hetero.core.link.bandwidth import LinkEstimate, sum_bytes

__all__ = ["DenseStaleAverager"]


class DenseStaleAverager(MeasuredStaleness):
    """Averager of gradient buckets for DDP's hook that applies some of them one step late.

    Args:
        limit: greatest staleness in steps, 0 or 1.
        parameters: the module's parameters that need gradients, by name.
        world_size: number of ranks.
        clock: marks moments on this rank's device.
        hysteresis: least predicted gain, as a share of the step time, for which more gradients become stale.
        topology: topology of stale sums, with process groups of its own, so that neither they nor other collectives
            wait for each other; ``None`` for that of synchronous sums, where all begin as soon as they are ready.
        priority: whether stale sums start only after the synchronous ones of their step; needs ``topology``.
        synchronous: topology of synchronous sums; ``None`` for flat ones.
        restored: :meth:`state_dict` of an earlier run.
        hold: remembers callbacks that a thread of the process group may still hold when training ends.
    """

    def __init__(
        self,
        limit: int,
        parameters: dict[str, torch.Tensor],
        *,
        world_size: int,
        clock: Clock,
        hysteresis: float = 0.03,
        topology: Topology | None = None,
        priority: bool = False,
        synchronous: Topology | None = None,
        restored: dict[str, Any] | None = None,
        hold: Callable[[Any], None] | None = None,
    ) -> None:
        super().__init__(
            limit,
            parameters,
            world_size=world_size,
            clock=clock,
            hysteresis=hysteresis,
            topology=topology,
            hold=hold,
        )
        self.synchronous = synchronous
        self.stale: frozenset[str] = frozenset()
        self._names = {parameter: name for name, parameter in parameters.items()}
        self._sums: dict[str, torch.Tensor] = {}
        self._buckets: dict[int, StaleBucket] = {}
        self._stale_parts: bool | list[bool] = False
        self.queue = TransferQueue(running=priority and topology is not None)
        self.load_state_dict(restored or {})

    @property
    def stale_parts(self) -> bool | list[bool]:
        """True if the last bucket holds only sums of the previous step; a list by parameter if it holds both."""
        return self._stale_parts

    def for_dense_sums(self, topology: Topology | None) -> StaleAverager:
        """Return this one: its sums are dense."""
        return self

    # the hook

    def average(self, bucket: dist.GradBucket, squares: BucketSquares | None = None) -> Future:
        """Average one bucket; DDP hands them over in the same order on all ranks."""
        if bucket.index() == 0:
            self.queue.begin_step()
            self.step_kind = frozenset()
        held, release = self._bucket(bucket), self._timer.ready(bucket.index())
        stale = self.stale.intersection(held.names)
        whole = 0 < len(stale) == len(held.names)
        self._stale_parts = whole or (bool(stale) and [name in stale for name in held.names])
        if self.step_kind is not None:
            self.step_kind |= stale
        future = self._send_stale(held, bucket.buffer()) if whole else self._await(held, bucket.buffer())

        def released(done: Future) -> torch.Tensor:
            value = tensor_of(done.value())
            release()
            return value

        return self._then(future, released)

    def _bucket(self, bucket: dist.GradBucket) -> StaleBucket:
        """Return the sums held for a bucket; when DDP rebuilds its buckets, sums follow by name."""
        names = tuple(self._names[parameter] for parameter in bucket.parameters())
        held = self._buckets.get(bucket.index())
        if held is None or held.names != names:
            if held is not None:
                self._sums.update(self._wait_all())
                self._buckets.clear()
            sizes = [parameter.numel() for parameter in bucket.parameters()]
            held = StaleBucket(names, sizes, bucket.buffer().numel() * bucket.buffer().element_size())
            self._buckets[bucket.index()] = held
        return held

    def _send_stale(self, held: StaleBucket, buffer: torch.Tensor) -> Future:
        """Send this step's gradient, and return the sum of the previous step."""
        before, sent = held.sums, held.buffer(buffer)
        torch.mul(buffer, 1.0 / self.world_size, out=sent)
        if self.keeps_own:
            held.keep_own(sent)
        held.send(self.queue.add(sent, self._sender(sent, self.topology or self.synchronous)))
        if before is not None:
            return before
        buffer.zero_()
        for name, part in zip(held.names, buffer.split(held.sizes), strict=True):
            if name in self._sums:
                part.copy_(self._sums.pop(name))
        done: Future = make_future(buffer)
        done.set_result(buffer)
        return done

    def _await(self, held: StaleBucket, buffer: torch.Tensor) -> Future:
        """Return the sum of this step, plus sums of the previous step that were not applied yet.

        A bucket with both stale and synchronous parameters, as the first after a resume may be, is awaited as a whole.
        """
        self._sums.update(held.take())
        future = self._sender(buffer.mul_(1.0 / self.world_size), self.synchronous)()
        self.queue.before(future)
        missing, stale = self._sums.keys() & held.names, self.stale
        if not missing and stale.isdisjoint(held.names):
            return future
        if missing - stale:
            self.step_kind = None

        def add_missing(done: Future) -> torch.Tensor:
            flat = tensor_of(done.value())
            for name, part in zip(held.names, flat.split(held.sizes), strict=True):
                before = self._sums.pop(name, None)
                if name in stale:
                    self._sums[name] = part.clone()
                    part.zero_()
                if before is not None:
                    part.add_(before)
            return flat

        return self._then(future, add_missing)

    def _sender(self, buffer: torch.Tensor, topology: Topology | None) -> Callable[[], Future]:
        """Return a function that begins the all-reduce of the current bucket."""
        begin = self._timer.sender()

        def send() -> Future:
            arrived = begin()
            future: Future = async_ops.async_all_reduce(buffer) if topology is None else topology.all_reduce(buffer)

            def mark(done: Future) -> torch.Tensor:
                value = tensor_of(done.value())
                arrived()
                return value

            return self._then(future, mark)

        return send

    # sums in flight

    def _wait_all(self) -> dict[str, torch.Tensor]:
        """Wait for all sums in flight, and return them by parameter."""
        return {name: value for held in self._buckets.values() for name, value in held.take().items()}

    def drain(self) -> dict[str, torch.Tensor]:
        """Return and forget all sums that were not applied yet, by parameter, flat: the caller has to apply them."""
        self._sums.update(self._wait_all())
        sums, self._sums = self._sums, {}
        return sums

    def wait_in_flight(self) -> tuple[list[tuple[torch.Tensor, list[torch.Tensor]]], bool]:
        """Return the sums in flight, once they have arrived; ``False``, as dense steps are never left out here."""
        in_flight = [(held.names, held.wait()) for held in self._ordered() if held.sums is not None]
        unapplied = [*in_flight, *(((name,), value) for name, value in self._sums.items())]
        return [(flat, [self.parameters[name] for name in names]) for names, flat in unapplied], False

    def predicted_sums(self, cluster_shares: list[float], share: float) -> Predicted | None:
        """Return a prediction of the next sums, see :meth:`StaleAverager.predicted_sums`."""
        if not self.stale:
            return None
        known = dict(self._sums)
        for held in self._buckets.values():
            flat = None
            if held.sums is not None and held.known:
                flat = held.wait()
            elif held.sums is not None and held.own is not None:
                flat = held.own * self.extrapolation_factor(share, self.world_size)
            if flat is not None:
                known |= dict(zip(held.names, flat.split(held.sizes), strict=True))
        return {self.parameters[name]: (None, known.get(name)) for name in self.stale}

    # the decision

    @property
    def stale_share(self) -> float:
        """Share of the gradient's elements that is stale, 0 to 1."""
        sizes = {name: parameter.numel() for name, parameter in self.parameters.items()}
        return sum(sizes[name] for name in self.stale) / max(sum(sizes.values()), 1)

    def make_stale(self, names: Iterable[str]) -> None:
        """Make exactly these parameters stale from the next backward pass on; all ranks have to call it together.

        Raises:
            ValueError: if a name is unknown, or the limit is 0.
        """
        wanted = frozenset(names)
        unknown = sorted(wanted - set(self.parameters))
        if unknown:
            raise ValueError(f"{unknown[0]!r} is no parameter that is trained; give names of named_parameters().")
        if wanted and self.limit == 0:
            raise ValueError("staleness=0 awaits every gradient. Set staleness=1 to let some of them be stale.")
        self.stale = wanted

    def make_all_stale(self) -> None:
        """Make all parameters stale from the next backward pass on; all ranks have to call it together."""
        self.make_stale(self.parameters)

    def _sent_bytes(self) -> list[float]:
        crossing = self.world_size if self.synchronous is None else self.synchronous.size
        return [sum_bytes(held.num_bytes, crossing) for held in self._ordered()]

    def _ordered(self) -> list[StaleBucket]:
        return [self._buckets[index] for index in sorted(self._buckets)]

    def _awaited(self) -> int:
        buckets = self._ordered()
        return next((i for i, held in enumerate(buckets) if not self.stale.isdisjoint(held.names)), len(buckets))

    def _await_first(self, number: int) -> None:
        self.make_stale(name for held in self._ordered()[number:] for name in held.names)

    # state

    def state_dict(self) -> dict[str, Any]:
        """Return the names of stale parameters and the sums in flight, equal on all ranks; wait for the sums."""
        known = {**self._sums}
        for held in self._buckets.values():
            if held.sums is not None:
                known |= dict(zip(held.names, held.share().split(held.sizes), strict=True))
        if not known and not self.stale:
            return {}
        sums = {name: value.detach().cpu().clone() for name, value in known.items()}
        return {"delayed": sorted(self.stale), "sums": sums, "rate": self.link.rate}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state; sums now in flight belong to steps that are undone, and are discarded.

        Raises:
            ValueError: if a sum does not fit its parameter.
        """
        self.drain()
        self.stale = frozenset(name for name in state.get("delayed", ()) if self.limit and name in self.parameters)
        self.link = LinkEstimate(state.get("rate"))
        for name, value in self._fitting(state.get("sums", {})).items():
            self._sums[name] = value.to(self.parameters[name].device, self.parameters[name].dtype)
