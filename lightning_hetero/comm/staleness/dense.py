"""Gradient sums that arrive one step later, where the link would make every step wait (StellaTrain, sec. 3.3).

Of a *delayed* parameter the optimizer gets the sum of the step before, while this step's sum travels through the
optimizer, the next forward and the next backward pass. All ranks delay the same parameters and hold the same sums, so
that replicas stay identical. No sum is lost: it is applied once, when the parameter's next gradient is, or by
:meth:`Staleness.take_sums` at the end of a training; until then it rides in the checkpoint.
"""

import logging
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist

from lightning_hetero.comm.collectives import async_ops as sums
from lightning_hetero.comm.collectives.async_ops import tensor_of
from lightning_hetero.comm.collectives.topology import Topology
from lightning_hetero.comm.staleness.base import Delays, Expected
from lightning_hetero.comm.staleness.deadline_queue import TransferQueue
from lightning_hetero.comm.timing.clock import Clock
from lightning_hetero.core.link.bandwidth import LinkEstimate, sum_bytes

__all__ = ["Staleness"]

log = logging.getLogger("lightning_hetero")

Future = torch.futures.Future[Any]


class _Lane:
    """One bucket: its parameters, and two buffers, one that sends while the other is read."""

    def __init__(self, names: tuple[str, ...], sizes: list[int], num_bytes: int) -> None:
        self.names, self.sizes, self.num_bytes = names, sizes, num_bytes
        self.sums: Future | None = None
        self.own: torch.Tensor | None = None
        self.known = False
        self._buffers: list[torch.Tensor] = []
        self._turn = 0

    def buffer(self, like: torch.Tensor) -> torch.Tensor:
        """The buffer whose sum was read in the last step."""
        if not self._buffers:
            self._buffers = [torch.empty_like(like), torch.empty_like(like)]
        self._turn ^= 1
        return self._buffers[self._turn]

    def take(self) -> dict[str, torch.Tensor]:
        """Wait for the sums that are under way, by parameter; they are no longer the lane's."""
        if self.sums is None:
            return {}
        flat, self.sums, self.known = tensor_of(self.sums.wait()), None, False
        return {name: part.clone() for name, part in zip(self.names, flat.split(self.sizes), strict=True)}


class Staleness(Delays):
    """Averages gradient buckets for DDP's hook, some of them with a delay of one step.

    Args:
        limit: greatest delay in steps, 0 or 1.
        parameters: the module's parameters that need gradients, by name.
        world_size: number of ranks.
        clock: marks moments on this rank's device.
        hysteresis: least predicted gain for which more is delayed, as a share of the step time.
        topology: way of delayed sums, with process groups of its own, so that no other collective waits behind them,
            and they for fresh ones; ``None`` for that of fresh sums, in which all set out as they are ready.
        fresh: way of fresh sums; ``None`` for straight ones.
        restored: :meth:`state_dict` of an earlier run.
        running: callbacks that a thread of the process group may still hold, by weak reference.
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
        fresh: Topology | None = None,
        restored: dict[str, Any] | None = None,
        running: Any = None,
    ) -> None:
        super().__init__(limit, parameters, clock=clock, hysteresis=hysteresis, topology=topology, running=running)
        self.world_size, self.fresh = world_size, fresh
        self.delayed: frozenset[str] = frozenset()
        self._names = {parameter: name for name, parameter in parameters.items()}
        self._sums: dict[str, torch.Tensor] = {}
        self._lanes: dict[int, _Lane] = {}
        self.queue = TransferQueue(running=topology is not None)
        self.load_state_dict(restored or {})

    @classmethod
    def after(cls, before: Delays, world_size: int, fresh: Topology | None) -> "Staleness":
        """Sums that are dense from now on, in place of other delays of these parameters.

        It goes on with what those owe, and by its own rule: who has led them decided on messages.
        """
        late = cls(
            before.limit,
            before.parameters,
            world_size=world_size,
            clock=before._log.clock,
            hysteresis=before.hysteresis,
            topology=before.topology,
            fresh=fresh,
            restored=before.state_dict(),
            running=before._running,
        )
        late.keeps_own = before.keeps_own
        return late

    # the hook

    def __call__(self, bucket: dist.GradBucket) -> Future:
        """Average one bucket; DDP hands them over in the same order on all ranks."""
        if bucket.index() == 0:
            self.queue.begin_step()
            self.step_kind = frozenset()
        lane, release = self._lane(bucket), self._log.ready(bucket.index())
        delayed = self.delayed.intersection(lane.names)
        whole = 0 < len(delayed) == len(lane.names)
        self.gave_late = whole or (bool(delayed) and [name in delayed for name in lane.names])
        if self.step_kind is not None:
            self.step_kind |= delayed
        future = self._delay(lane, bucket.buffer()) if whole else self._await(lane, bucket.buffer())

        def released(done: Future) -> torch.Tensor:
            value = tensor_of(done.value())
            release()
            return value

        return self._then(future, released)

    def _lane(self, bucket: dist.GradBucket) -> _Lane:
        """The bucket's lane. DDP lays its buckets out anew after the first step; sums under way follow by name."""
        names = tuple(self._names[parameter] for parameter in bucket.parameters())
        lane = self._lanes.get(bucket.index())
        if lane is None or lane.names != names:
            if lane is not None:
                self._sums.update(self._settle())
                self._lanes.clear()
            sizes = [parameter.numel() for parameter in bucket.parameters()]
            lane = _Lane(names, sizes, bucket.buffer().numel() * bucket.buffer().element_size())
            self._lanes[bucket.index()] = lane
        return lane

    def _delay(self, lane: _Lane, buffer: torch.Tensor) -> Future:
        """Send this step's gradient, hand out the sum of the step before."""
        before, sent = lane.sums, lane.buffer(buffer)
        torch.mul(buffer, 1.0 / self.world_size, out=sent)
        if self.keeps_own:
            lane.own, lane.known = sent.clone() if lane.own is None else lane.own.copy_(sent), False
        lane.sums = self.queue.add(sent, self._sender(sent, self.topology or self.fresh))
        if before is not None:
            return before
        buffer.zero_()
        for name, part in zip(lane.names, buffer.split(lane.sizes), strict=True):
            if name in self._sums:
                part.copy_(self._sums.pop(name))
        done: Future = torch.futures.Future(devices=[buffer.device] if buffer.is_cuda else None)  # type: ignore[list-item]
        done.set_result(buffer)
        return done

    def _await(self, lane: _Lane, buffer: torch.Tensor) -> Future:
        """Hand out the sum of this step, with what the step before still owes.

        A bucket that has delayed and other parameters, as the first after a resume may, is awaited as a whole.
        """
        self._sums.update(lane.take())
        future = self._sender(buffer.mul_(1.0 / self.world_size), self.fresh)()
        self.queue.before(future)
        owed, delayed = self._sums.keys() & lane.names, self.delayed
        if not owed and delayed.isdisjoint(lane.names):
            return future
        if owed - delayed:
            self.step_kind = None

        def settle(done: Future) -> torch.Tensor:
            flat = tensor_of(done.value())
            for name, part in zip(lane.names, flat.split(lane.sizes), strict=True):
                owed = self._sums.pop(name, None)
                if name in delayed:
                    self._sums[name] = part.clone()
                    part.zero_()
                if owed is not None:
                    part.add_(owed)
            return flat

        return self._then(future, settle)

    def _sender(self, buffer: torch.Tensor, topology: Topology | None) -> Callable[[], Future]:
        """Lets the sum of the bucket at hand set out when it is called."""
        begin = self._log.sender()

        def send() -> Future:
            arrived = begin()
            future: Future = sums.sum_over_ranks(buffer) if topology is None else topology.sum(buffer)

            def mark(done: Future) -> torch.Tensor:
                value = tensor_of(done.value())
                arrived()
                return value

            return self._then(future, mark)

        return send

    # sums that are owed

    def _settle(self) -> dict[str, torch.Tensor]:
        """Wait for all that is under way."""
        return {name: value for lane in self._lanes.values() for name, value in lane.take().items()}

    def take_sums(self) -> dict[str, torch.Tensor]:
        """All sums that the optimizer has not had yet, by parameter, flat; from now on they are the caller's."""
        self._sums.update(self._settle())
        owed, self._sums = self._sums, {}
        return owed

    def arrived(self) -> tuple[list[tuple[torch.Tensor, list[torch.Tensor]]], bool]:
        """The sums that are owed, and that their step was not left out."""
        lanes = [(lane.names, tensor_of(lane.sums.wait())) for lane in self._ordered() if lane.sums is not None]
        owed = [*lanes, *(((name,), value) for name, value in self._sums.items())]
        return [(flat, [self.parameters[name] for name in names]) for names, flat in owed], False

    def expected(self, cluster_shares: list[float], share: float) -> Expected | None:
        """As :meth:`Delays.expected`."""
        if not self.delayed:
            return None
        known = dict(self._sums)
        for lane in self._lanes.values():
            flat = None
            if lane.sums is not None and lane.known:
                flat = tensor_of(lane.sums.wait())
            elif lane.sums is not None and lane.own is not None:
                flat = lane.own * self.whole(share, self.world_size)
            if flat is not None:
                known |= dict(zip(lane.names, flat.split(lane.sizes), strict=True))
        return {self.parameters[name]: (None, known.get(name)) for name in self.delayed}

    # the decision

    @property
    def delayed_share(self) -> float:
        """Share of the gradient's elements that is delayed, 0 to 1."""
        sizes = {name: parameter.numel() for name, parameter in self.parameters.items()}
        return sum(sizes[name] for name in self.delayed) / max(sum(sizes.values()), 1)

    def delay(self, names: Iterable[str]) -> None:
        """Delay these parameters from the next backward pass on; all ranks have to call it together.

        Raises:
            ValueError: if a name is unknown, or the limit is 0.
        """
        wanted = frozenset(names)
        unknown = sorted(wanted - set(self.parameters))
        if unknown:
            raise ValueError(f"{unknown[0]!r} is no parameter that is trained; give names of named_parameters().")
        if wanted and self.limit == 0:
            raise ValueError("staleness=0 awaits every gradient. Set staleness=1 to delay some of them.")
        self.delayed = wanted

    def delay_all(self) -> None:
        """Delay all parameters from the next backward pass on; all ranks have to call it together."""
        self.delay(self.parameters)

    def _sent_bytes(self) -> list[float]:
        crossing = self.world_size if self.fresh is None else self.fresh.size
        return [sum_bytes(lane.num_bytes, crossing) for lane in self._ordered()]

    def _ordered(self) -> list[_Lane]:
        return [self._lanes[index] for index in sorted(self._lanes)]

    def _fresh(self) -> int:
        lanes = self._ordered()
        return next((i for i, lane in enumerate(lanes) if not self.delayed.isdisjoint(lane.names)), len(lanes))

    def _keep_fresh(self, number: int) -> None:
        self.delay(name for lane in self._ordered()[number:] for name in lane.names)

    # state

    def state_dict(self) -> dict[str, Any]:
        """What is delayed and the sums that are owed, equal on all ranks; waits for what is under way."""
        held = {**self._sums}
        for lane in self._lanes.values():
            if lane.sums is not None:
                flat, lane.known = tensor_of(lane.sums.wait()), True
                held |= dict(zip(lane.names, flat.split(lane.sizes), strict=True))
        if not held and not self.delayed:
            return {}
        owed = {name: value.detach().cpu().clone() for name, value in held.items()}
        return {"delayed": sorted(self.delayed), "sums": owed, "rate": self.link.rate}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there; what is under way now belongs to steps that are taken back.

        Raises:
            ValueError: if a sum does not fit its parameter.
        """
        self.take_sums()
        self.delayed = frozenset(name for name in state.get("delayed", ()) if self.limit and name in self.parameters)
        self.link = LinkEstimate(state.get("rate"))
        for name, value in self._fitting(state.get("sums", {})).items():
            self._sums[name] = value.to(self.parameters[name].device, self.parameters[name].dtype)
