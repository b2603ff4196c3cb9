"""Batches of one rank from a stream that all ranks read alike: each keeps its share of every batch."""

import math
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from lightning_hetero.core.batching.integer_split import tail_sizes
from lightning_hetero.core.batching.plan import NO_LIMIT, PlanHistory
from lightning_hetero.core.batching.stream_steps import StreamRules
from lightning_hetero.data.step_share import StepShare
from lightning_hetero.data.streams.fingerprint import fingerprint
from lightning_hetero.data.streams.source import Drawing, SampleStream

__all__ = ["COMPARED", "Peers", "StreamSampler", "WholeStreamSampler"]

REMEMBERED = 1024
"""Steps of which the sizes are kept; a loop that holds more batches at once needs more."""

STARTING = 2
"""Steps of a pass whose batches may have to wait for other ranks' first samples; their times tell nothing of a rank."""

COMPARED = 4
"""Samples at the beginning of streams by which ranks notice that they read the same ones."""

Array = npt.NDArray[np.float64]


class Peers(Protocol):
    """This rank among the others, and what they tell each other."""

    rank: int
    world_size: int

    def gather(self, values: Array) -> Array:
        """Gather the arrays of all ranks."""

    def gather_later(self, values: Array) -> Callable[[], Array]:
        """Begin to gather the arrays of all ranks; return a function that waits for them."""

    def gather_objects(self, value: Any) -> list[Any]:
        """Gather the objects of all ranks."""


class _Step(NamedTuple):
    """Share of the ranks in a step, and the samples that each has taken before it in its epoch."""

    share: StepShare
    before: tuple[int, ...]


class StreamSampler:
    """Batches of one rank from a stream: iterating it draws samples and yields batches that are ready to train on.

    Args:
        stream: where samples come from.
        history: returns the current plan history.
        peers: this rank and the others.
        rules: bounds of a step.
        start: ``(epoch, step)`` at which a run resumes.
        num_samples: samples of an epoch over all ranks if that is known.
    """

    def __init__(
        self,
        stream: SampleStream,
        history: Callable[[], PlanHistory],
        peers: Peers,
        rules: StreamRules,
        *,
        start: tuple[int, int] = (0, 0),
        num_samples: int | None = None,
    ) -> None:
        self.stream, self.rank, self.rules = stream, peers.rank, rules
        self.start, self.epoch, self.drawn = start, start[0], start
        self._history, self._peers, self._num_samples = history, peers, num_samples
        self._steps: OrderedDict[tuple[int, int], _Step] = OrderedDict()
        self._ends: dict[int, int] = {}
        self._first = 0
        self._restored: dict[str, Any] = {}

    @property
    def sampler(self) -> "StreamSampler":
        """The object on which frameworks call ``set_epoch``: this one."""
        return self

    @property
    def drop_last(self) -> bool:
        """True if the ragged last batch is dropped."""
        return self.rules.drop_last

    @property
    def min_local(self) -> int:
        """Smallest batch that a rank can run."""
        return self.rules.stand_in

    def set_epoch(self, epoch: int) -> None:
        """Begin this epoch at the next ``iter``."""
        self.epoch = epoch

    # what every rank takes

    def __len__(self) -> int:
        if self._known_length(self.epoch) is None:
            raise TypeError("the length of a stream is not known before it has ended.")
        return self.num_batches(self.epoch)

    def num_batches(self, epoch: int) -> int:
        """Return the steps of an epoch; ``NO_LIMIT`` while it is not known where the streams end."""
        known = self._ends.get(epoch, self._known_length(epoch))
        return NO_LIMIT if known is None else known

    def _known_length(self, epoch: int) -> int | None:
        """Return the steps of an epoch by what its data says of its length, where sizes cannot deviate from it."""
        rules = self.rules
        if self._num_samples is None or rules.min_local > 1 or rules.multiple > 1 or rules.max_local is not None:
            return None
        return self._history().num_batches(epoch, self._num_samples, drop_last=self.rules.drop_last)

    def step_at(self, epoch: int, step: int) -> StepShare:
        """Return what each rank takes of a step; of one that is not drawn yet, what the plan gives it."""
        known = self._steps.get((epoch, step))
        return StepShare(self._planned(epoch, step), True) if known is None else known.share

    def sizes_at(self, epoch: int, step: int) -> tuple[int, ...]:
        """Return the samples of every rank at a step."""
        return self.step_at(epoch, step).sizes

    def _planned(self, epoch: int, step: int) -> tuple[int, ...]:
        return self._history().at(epoch, step).plan.local_batch_sizes

    def _note(self, epoch: int, step: int, sizes: tuple[int, ...], before: Sequence[int]) -> None:
        starts = self._peers.world_size > 1 and step < self._first + STARTING
        share = StepShare(sizes, sizes == self._planned(epoch, step) and not starts)
        self._steps.pop((epoch, step), None)
        self._steps[epoch, step] = _Step(share, tuple(before))
        if len(self._steps) > REMEMBERED:
            self._steps.popitem(last=False)

    # one pass

    def __iter__(self) -> Iterator[Any]:
        epoch = self.epoch
        step = self.start[1] if epoch == self.start[0] else 0
        self.drawn, self._first = (epoch, step), step
        self._ends.pop(epoch, None)
        for batch in self._batches(epoch, step):
            yield batch
            step += 1
        self._ends = {epoch: step}
        self.drawn = (epoch + 1, 0)

    def _batches(self, epoch: int, step: int) -> Iterator[Any]:
        """Yield the batches of a pass from a step on."""
        raise NotImplementedError

    # state

    def state_dict(self, step: int | None = None) -> dict[str, Any]:
        """Return the position at which an epoch can resume, the same on all ranks.

        Args:
            step: batches of the epoch that were trained on; by default those that were drawn.
        """
        return {"epoch": self.epoch, "step": self.drawn[1] if step is None else step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume after the batches that a state counts."""
        self.start = self.drawn = (state["epoch"], state["step"])
        self.epoch = state["epoch"]

    def taken(self, position: tuple[int, int]) -> dict[str, Any]:
        """Return what the steps before a position, and before the next one, have taken, in plain values."""
        return {"shard": self.stream.shard, "epoch": position[0], "ranks": self._peers.world_size}

    def resume_from(self, taken: dict[str, Any]) -> None:
        """Resume after what :meth:`taken` has told.

        Raises:
            ValueError: if the state was saved inside an epoch that this run cannot go on with.
        """
        before = taken.get("shard", self.stream.shard)
        if before != self.stream.shard and self.start[1] > 0 and taken.get("epoch") == self.start[0]:
            raise ValueError(
                f"the state was saved inside an epoch with shard={before!r}, and shard={self.stream.shard!r} is given "
                f"now. Resume with shard={before!r}, or from a state between two epochs."
            )
        self._restored = dict(taken)


class WholeStreamSampler(StreamSampler):
    """Each rank draws the whole stream and keeps its slice of every global batch, as of a map-style dataset.

    The order is that of one process, and each sample is used once; it does not matter how many ranks there are.
    """

    def _batches(self, epoch: int, step: int) -> Iterator[Any]:
        drawing = Drawing(lambda: self.stream.open(epoch), self.stream.buffer())
        behind = self._history().offset(epoch, step)
        drawing.skip(behind)
        drawing.fill(COMPARED)
        self._require_same(drawing)
        buffer = drawing.buffer
        drawing.fill(sum(self._planned(epoch, step)))
        told = self._tell_rest(drawing)
        while True:
            plan = self._planned(epoch, step)
            total = sum(plan)
            drawing.fill(total)
            self._require_same_rest(told(), drawing)
            here = min(total, len(buffer))
            if here < (total if self.rules.drop_last else 1):
                return
            sizes = plan if here == total else tail_sizes(here, plan, self.rules.min_local, self.rules.multiple)
            self._note(epoch, step, sizes, (behind,) * len(sizes))
            self.drawn = (epoch, step + 1)
            batch = buffer.batch(self._share(buffer, sizes))
            drawing.fill(total)
            told = self._tell_rest(drawing)
            yield batch
            step, behind = step + 1, behind + here

    def _share(self, buffer: Any, sizes: tuple[int, ...]) -> list[Any]:
        """Take a global batch; return this rank's slice of it, or a few samples to run with weight 0."""
        own = sizes[self.rank]
        stand_in = [] if own else buffer.peek(min(self.rules.stand_in, sum(sizes)))
        buffer.take(sum(sizes[: self.rank]))
        mine = buffer.take(own)
        buffer.take(sum(sizes[self.rank + 1 :]))
        return mine if own else stand_in

    def _tell_rest(self, drawing: Drawing) -> Callable[[], Array]:
        """Begin to tell the others how many samples are left of a stream that has ended, -1 of one that goes on.

        The message is in flight while the step before is trained on, so that no step waits for it.
        """
        rest = len(drawing.buffer) if drawing.ended else -1
        return self._peers.gather_later(np.array([math.nan if drawing.error is not None else rest]))

    def _require_same_rest(self, told: Array, drawing: Drawing) -> None:
        """Check that the streams of all ranks go on, or end, alike; see :meth:`_require_equal` for what it raises."""
        self._require_equal(
            told,
            drawing,
            "the samples that are left of it differ",
            lambda rest: "more" if rest < 0 else str(int(rest)),
            "Let the stream yield the same samples on every rank",
        )

    def _require_same(self, drawing: Drawing) -> None:
        """Check that the streams of all ranks begin alike; a collective call that raises as :meth:`_require_equal`."""
        failed = drawing.error is not None
        mine = math.nan if failed else float(fingerprint(drawing.buffer.peek(COMPARED)))
        self._require_equal(
            self._peers.gather(np.array([mine])),
            drawing,
            "their first samples differ",
            lambda crc: f"{int(crc):08x}",
            "Seed the stream alike on every rank",
        )

    def _require_equal(
        self, told: Array, drawing: Drawing, what: str, shown: Callable[[float], str], cure: str
    ) -> None:
        """Check that all ranks have told the same of their streams; ``nan`` is that of one that has raised an error.

        Raises:
            ValueError: on every rank if they have not.
            RuntimeError: if the stream of another rank has raised an error; on that rank itself, what it has raised.
        """
        values = told[:, 0]
        if drawing.error is not None:
            raise drawing.error
        if np.isnan(values).any():
            ranks = ", ".join(map(str, np.flatnonzero(np.isnan(values))))
            raise RuntimeError(f"the data stream of rank {ranks} has raised an error, so this rank ends as well.")
        if len(set(values.tolist())) > 1:
            said = ", ".join(f"rank {rank}: {shown(value)}" for rank, value in enumerate(values.tolist()))
            raise ValueError(
                f"shard='whole' says that all ranks read the same stream, and {what} ({said}). {cure}, or set "
                "shard='mine' if each rank has data of its own."
            )
