"""Sampler over one or several loaders whose steps are made of units, split in proportion to the plan.

The units of a step and their samples follow from the order and the number of ranks alone. The plan says only who gets
which of them, so every plan gives the same global batches.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from torch.utils.data import Sampler

from lightning_hetero.core.batching.integer_split import joint_sizes
from lightning_hetero.core.batching.plan import PlanHistory
from lightning_hetero.data.division import Division, Parts
from lightning_hetero.data.step_share import StepShare
from lightning_hetero.data.units.pieces import pieces_of
from lightning_hetero.data.units.sources import LoaderSet
from lightning_hetero.data.units.walk import StepWalk, Take

__all__ = ["LoaderSampler", "UnitSampler"]

KEPT_STEPS = 256  # splits of steps that loader workers may have drawn ahead


class _Split(NamedTuple):
    """A step's samples of each loader, the samples of every rank among them, and how a division gives them out."""

    takes: tuple[Take, ...]
    samples: tuple[Sequence[Any], ...]
    sizes: tuple[tuple[int, ...], ...]
    regular: bool
    parts: Parts | None


class UnitSampler:
    """Batches of one rank from one or several loaders, under a plan that may change during the epoch.

    Args:
        loaders: training data of all loaders.
        history: returns the current plan history.
        rank: rank whose batches are drawn.
        min_local: smallest batch that a rank can run.
        max_local: most samples of each rank; ``None`` for no limit.
        start: ``(epoch, step)`` at which a run resumes.
        division: divides the samples of each step; used where there is one loader whose samples are known.

    Attributes:
        members: batch sampler of each loader.

    Example:
        >>> from lightning_hetero.core import BatchPlan, PlanEntry
        >>> from lightning_hetero.data.units.orders import SeededUnits
        >>> from lightning_hetero.data.units.sources import BatchSource
        >>> history = PlanHistory((PlanEntry(0, 0, BatchPlan(4, (3, 1))),))
        >>> batches = LoaderSet([BatchSource(SeededUnits([[0, 1], [2, 3], [4, 5, 6, 7]], seed=0))])
        >>> [list(UnitSampler(batches, lambda: history, rank)) for rank in (0, 1)]
        [[[0, 1, 2], [4, 5, 6]], [[3], [7]]]
    """

    drop_last = False

    def __init__(
        self,
        loaders: LoaderSet,
        history: Callable[[], PlanHistory],
        rank: int,
        *,
        min_local: int = 1,
        max_local: Sequence[int] | None = None,
        start: tuple[int, int] = (0, 0),
        division: Division | None = None,
    ) -> None:
        self.division = None if loaders.joint or loaders.counted else division
        self.stream, self.rank, self.min_local, self.max_local = loaders, rank, min_local, max_local
        self._history = history
        self.start = self.drawn = start
        self.epoch = start[0]
        self.members = tuple(LoaderSampler(self, number) for number in range(len(loaders.sources)))
        self._walks: dict[Any, StepWalk] = {}
        self._splits: dict[Any, _Split] = {}
        self._rows: dict[tuple[int, int], int] = {}

    # as the batch sampler of a single loader

    def __iter__(self) -> Iterator[Any]:
        return iter(self.members[0])

    def __len__(self) -> int:
        return self.num_batches(self.epoch)

    @property
    def sampler(self) -> "UnitSampler":
        """The object on which frameworks call ``set_epoch``: this one."""
        return self

    def set_epoch(self, epoch: int) -> None:
        """Take the order of this epoch at the next ``iter``."""
        if epoch != self.epoch:
            self.epoch = epoch
            self._rows = {}

    def first_step(self, epoch: int) -> int:
        """Return the first step of an epoch that this run trains on."""
        return self.start[1] if epoch == self.start[0] else 0

    def taken(self, position: tuple[int, int]) -> dict[str, Any]:
        """Return nothing: what steps have taken follows from their number."""
        return {}

    def state_dict(self, step: int | None = None) -> dict[str, int]:
        """Return the position at which an epoch can resume: plain Python values, equal on all ranks if ``step`` is.

        Args:
            step: batches of the epoch that were trained on; by default those that were drawn.
        """
        return {"epoch": self.epoch, "step": self.drawn[1] if step is None else step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Resume after the batches that a state counts, with any number of ranks and any plan."""
        self.start = self.drawn = (state["epoch"], state["step"])
        self.epoch = state["epoch"]

    def reach(self, epoch: int, step: int) -> None:
        """Note that all steps before this one are drawn."""
        self.drawn = max(self.drawn, (epoch, step))

    # steps

    def walk(self, epoch: int) -> StepWalk:
        """Return the steps of an epoch, as far as its order is known."""
        history = self._history()
        lanes = [source.lane(epoch) for source in self.stream.sources]
        ranks = tuple((e.epoch, e.step, e.plan.world_size) for e in history.entries)
        key = epoch, tuple(lane.units for lane in lanes), _changes(ranks)
        if key not in self._walks:
            mode = self.stream.mode
            walk = StepWalk(lanes, mode, lambda step: history.at(epoch, step).plan.world_size)
            self._walks = {**{k: w for k, w in self._walks.items() if abs(k[0] - epoch) == 1}, key: walk}
        return self._walks[key]

    def num_batches(self, epoch: int) -> int:
        """Return the steps of an epoch, the same on every rank."""
        return len(self.walk(epoch))

    def batches_of(self, number: int, epoch: int) -> int:
        """Return the batches of one loader in one pass over it."""
        if len(self.members) == 1:
            return self.num_batches(epoch)
        history, lane = self._history(), self.stream.sources[number].lane(epoch)
        return len(StepWalk([lane], "min_size", lambda step: history.at(epoch, step).plan.world_size))

    def step_at(self, epoch: int, step: int) -> StepShare:
        """Return what each rank takes of a step; a step behind the end has the sizes of the plan."""
        walk = self.walk(epoch)
        if step >= len(walk):
            return StepShare(self._history().at(epoch, step).plan.local_batch_sizes, False)
        if self.stream.counted:
            return StepShare(
                (), walk.at(step)[0].full, self._planned(epoch, step), counted=self._rows.get((epoch, step), 0)
            )
        split = self._split(walk, epoch, step)
        work = () if split.parts is None else split.parts.work[self.rank]
        sizes = tuple(map(sum, zip(*split.sizes, strict=True)))
        return StepShare(sizes, split.regular, self._planned(epoch, step), work)

    def _planned(self, epoch: int, step: int) -> int:
        return self._history().at(epoch, step).plan.local_batch_sizes[self.rank]

    def sizes_at(self, epoch: int, step: int) -> tuple[int, ...]:
        """Return the samples of every rank at a step; those of the plan where they are counted."""
        return self.step_at(epoch, step).sizes or self._history().at(epoch, step).plan.local_batch_sizes

    def note_rows(self, epoch: int, step: int, rows: int) -> None:
        """Note how many rows of this rank's batch at a step count."""
        self._rows[epoch, step] = rows

    def _split(self, walk: StepWalk, epoch: int, step: int) -> _Split:
        plan = self._history().at(epoch, step).plan
        key = epoch, step, plan.local_batch_sizes
        if key not in self._splits:
            takes = walk.at(step)
            samples = tuple(self.stream.sources[take.lane].samples(epoch, take) for take in takes)
            totals = [len(part) for part in samples]
            if len(takes) > 1:
                _check_divisor(totals, plan.world_size)
            sizes = joint_sizes(totals, plan.local_batch_sizes, min_local=self.min_local, max_local=self.max_local)
            regular = all(take.full for take in takes) and len(takes) == len(walk.at(0))
            parts = None
            if self.division is not None:
                parts = self.division.divide(samples[0], sizes[0], plan)
                sizes = (tuple(map(len, parts.indices)),)
            while len(self._splits) >= KEPT_STEPS:
                del self._splits[next(iter(self._splits))]
            self._splits[key] = _Split(takes, samples, sizes, regular, parts)
        return self._splits[key]

    def part(self, number: int, epoch: int, step: int) -> Any:
        """Return what this rank loads of a loader at a step: indices, or pieces of items."""
        walk = self.walk(epoch)
        if self.stream.counted:
            take = walk.at(step)[0]
            items = self.stream.sources[take.lane].samples(epoch, take)
            plan = self._history().at(epoch, step).plan
            return pieces_of(items, plan.local_batch_sizes, self.rank, self.min_local)
        split = self._split(walk, epoch, step)
        place = next(i for i, take in enumerate(split.takes) if take.lane == number)
        sizes, samples = split.sizes[place], split.samples[place]
        if split.parts is not None and sizes[self.rank]:
            return split.parts.indices[self.rank]
        own = sum(sizes[: self.rank])
        stop = own + sizes[self.rank]
        return list(samples[own:stop] if sizes[self.rank] else samples[: self.min_local])


class LoaderSampler(Sampler[Any]):
    """Batch sampler of one of the loaders of a :class:`UnitSampler`.

    Args:
        steps: sampler of all loaders.
        number: which loader.

    Example:
        >>> from lightning_hetero.core import BatchPlan, PlanEntry
        >>> from lightning_hetero.data import PermutationStream
        >>> from lightning_hetero.data.units.sources import SampleSource
        >>> history = PlanHistory((PlanEntry(0, 0, BatchPlan(6, (4, 2))),))
        >>> streams = [PermutationStream(n, shuffle=False, seed=0) for n in (4, 2)]
        >>> both = [SampleSource(stream, size) for stream, size in zip(streams, (2, 1))]
        >>> steps = UnitSampler(LoaderSet(both, "min_size"), lambda: history, rank=0)
        >>> [list(member) for member in steps.members]
        [[[0, 1]], [[0]]]
    """

    def __init__(self, steps: UnitSampler, number: int) -> None:
        self._steps, self._number = steps, number
        self._goes_on: tuple[int, int] | None = None

    @property
    def sampler(self) -> "LoaderSampler":
        """The object on which frameworks call ``set_epoch``: this one."""
        return self

    @property
    def owner(self) -> UnitSampler:
        """Sampler of all loaders."""
        return self._steps

    def set_epoch(self, epoch: int) -> None:
        """Take the order of this epoch at the next ``iter``."""
        self._steps.set_epoch(epoch)

    def __len__(self) -> int:
        return self._steps.batches_of(self._number, self._steps.epoch)

    def __iter__(self) -> Iterator[Any]:
        steps, number, epoch = self._steps, self._number, self._steps.epoch
        steps.stream.sources[number].draw(epoch)
        walk = steps.walk(epoch)
        goes_on, self._goes_on = self._goes_on, None
        step = goes_on[1] if goes_on is not None and goes_on[0] == epoch else steps.first_step(epoch)
        begun = False
        while step < len(walk):
            take = walk.of(number, step)
            if take is None:
                return  # it is over, and the others go on
            if begun and take.first == 0:  # the loader is iterated again for its next cycle
                self._goes_on = epoch, step
                return
            begun = True
            steps.reach(epoch, step + 1)
            yield steps.part(number, epoch, step)
            step += 1
        steps.reach(epoch + 1, 0)


def _changes(ranks: Sequence[tuple[int, int, int]]) -> tuple[tuple[int, int, int], ...]:
    """Return the entries at which the number of ranks changes."""
    before = [None, *(entry[2] for entry in ranks)]
    return tuple(entry for entry, known in zip(ranks, before, strict=False) if entry[2] != known)


def _check_divisor(totals: Sequence[int], ranks: int) -> None:
    """Check that ranks can have equal shares of all batches of a step without one taking much more than usual.

    Raises:
        ValueError: if not.
    """
    if 2 * math.gcd(*totals) < ranks:
        raise ValueError(
            f"the train loaders give {' and '.join(map(str, totals))} samples to one step, which {ranks} ranks cannot "
            "share in one proportion, as the single weight of a joint loss needs. Set drop_last=True on each loader, "
            "or choose batch sizes with a common divisor."
        )
