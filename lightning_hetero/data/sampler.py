"""The uneven batch sampler: each rank takes its slice of every global batch, as the plan history says.

Step ``s`` of an epoch takes the next ``B(s)`` indices of the stream; rank ``i`` takes the slice between the prefix
sums of ``b(s)``, or what a :class:`~lightning_hetero.data.division.Division` gives it of these indices. All ranks have
the same number of steps by construction, and each index is taken once an epoch.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch.utils.data import Sampler

from lightning_hetero.core.batching.integer_split import whole_multiple
from lightning_hetero.core.batching.plan import PlanHistory
from lightning_hetero.core.keywords import checked_keywords
from lightning_hetero.data.division import Division, Parts
from lightning_hetero.data.index_stream import IndexStream
from lightning_hetero.data.step_share import StepShare

__all__ = ["UnevenBatchSampler"]

STEPS_IN_FLIGHT = 1024
"""Divided steps that are remembered: more than loaders draw ahead of the step that runs."""


@checked_keywords
class UnevenBatchSampler(Sampler[list[int]]):
    """Batches of one rank under a plan that may change during the epoch.

    Every draw reads the history again, so a new plan takes effect from the step on which all ranks agreed. That step is
    beyond everything that any rank's DataLoader workers have drawn. A rank whose share of a step is 0 draws
    ``min_local`` samples of the same global batch, rounded up to a multiple, to run with weight 0.

    Args:
        stream: order of the samples of each epoch.
        history: returns the current plan history.
        rank: rank whose batches are drawn.
        drop_last: whether the ragged last batch is dropped.
        min_local: smallest batch that a rank can run.
        multiple: samples of which all sizes are multiples, but for one rank's in the ragged last batch.
        start: ``(epoch, step)`` at which a run resumes.
        division: divides each global batch; by default it is cut by the number of samples.

    Example:
        >>> from lightning_hetero.core import BatchPlan, PlanEntry
        >>> from lightning_hetero.data.index_stream import PermutationStream
        >>> history = PlanHistory((PlanEntry(0, 0, BatchPlan(4, (3, 1))),))
        >>> stream = PermutationStream(7, shuffle=False, seed=0)
        >>> list(UnevenBatchSampler(stream, lambda: history, rank=1))
        [[3], [6]]
    """

    def __init__(
        self,
        stream: IndexStream,
        history: Callable[[], PlanHistory],
        rank: int,
        *,
        drop_last: bool = False,
        min_local: int = 1,
        multiple: int = 1,
        start: tuple[int, int] = (0, 0),
        division: Division | None = None,
    ) -> None:
        self.stream, self.rank, self.drop_last = stream, rank, drop_last
        self.min_local, self._tail = whole_multiple(min_local, multiple), {"min_local": min_local, "multiple": multiple}
        self._history, self.division = history, division
        self.start = start
        self.epoch = start[0]
        self.drawn = start
        self._full: tuple[PlanHistory | None, int, int, int] = None, 0, 0, 0  # history, epoch, samples: full steps
        self._run: tuple[PlanHistory | None, int, float, float, StepShare] = None, 0, 0, 0, StepShare((), False)
        self._order: tuple[int, Sequence[int]] = -1, ()  # epoch, and the order in which it is being drawn
        self._divided: OrderedDict[tuple[int, int], StepShare] = OrderedDict()

    @property
    def sampler(self) -> "UnevenBatchSampler":
        """The object on which frameworks call ``set_epoch``: this one."""
        return self

    def set_epoch(self, epoch: int) -> None:
        """Take the order of this epoch at the next ``iter``."""
        self.epoch = epoch
        self._run = None, 0, 0, 0, StepShare((), False)

    def __len__(self) -> int:
        return self.num_batches(self.epoch)

    def state_dict(self, step: int | None = None) -> dict[str, int]:
        """Return the position at which an epoch can resume: plain Python values, equal on all ranks if ``step`` is.

        Args:
            step: batches of the epoch that were trained on; by default those that were drawn, which are more if
                DataLoader workers prefetch.
        """
        return {"epoch": self.epoch, "step": self.drawn[1] if step is None else step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Resume after the batches that a state counts, with any number of ranks and any plan."""
        self.start = self.drawn = (state["epoch"], state["step"])
        self.epoch = state["epoch"]

    def num_batches(self, epoch: int) -> int:
        """Return the steps of an epoch, the same on every rank."""
        return self._history().num_batches(epoch, len(self.stream), drop_last=self.drop_last)

    def sizes_at(self, epoch: int, step: int) -> tuple[int, ...]:
        """Return the samples of every rank at a step, the ragged tail included."""
        return self.step_at(epoch, step).sizes

    def taken(self, position: tuple[int, int]) -> dict[str, Any]:
        """Return nothing: what steps have taken follows from the plans."""
        return {}

    def step_at(self, epoch: int, step: int) -> StepShare:
        """Return the share of every rank in a step, and whether the step is a full one."""
        if self.division is not None:
            return self._divided.get((epoch, step)) or self._divide_again(epoch, step)
        history = self._history()
        known, during, first, end, share = self._run  # steps of an epoch that are alike
        if known is history and during == epoch and first <= step < end:
            return share
        return self._look_up(history, epoch, step)

    def _look_up(self, history: PlanHistory, epoch: int, step: int) -> StepShare:
        samples = len(self.stream)
        known, *of, full = self._full
        if known is not history or of != [epoch, samples]:
            full = history.num_batches(epoch, samples, drop_last=True)
            self._full = history, epoch, samples, full
        if step < full:  # a full step: its sizes are those of the plan
            sizes, until = history.at(epoch, step).plan.local_batch_sizes, history.until(epoch, step)
            share = StepShare(sizes, True)
            self._run = history, epoch, step, min(until, full), share
            return share
        return StepShare(history.sizes_at(epoch, step, samples, **self._tail), False)

    def _divide_again(self, epoch: int, step: int) -> StepShare:
        """Return the share in a step that was not drawn here; by the plan alone if its epoch has no order yet."""
        history = self._history()
        if self._order[0] != epoch or step >= self.num_batches(epoch):
            return self._look_up(history, epoch, step)._replace(regular=False)
        self._divide(history, epoch, step, history.offset(epoch, step))
        return self._divided[epoch, step]

    def _divide(self, history: PlanHistory, epoch: int, step: int, first: int) -> Parts:
        """Divide the global batch of a step, and remember the shares."""
        assert self.division is not None
        planned = self._look_up(history, epoch, step)
        samples = self._order[1][first : first + sum(planned.sizes)]
        parts = self.division.divide(samples, planned.sizes, history.at(epoch, step).plan)
        sizes = tuple(map(len, parts.indices))
        own = planned.sizes[self.rank], parts.work[self.rank]
        self._divided[epoch, step] = StepShare(sizes, planned.regular, *own)
        if len(self._divided) > STEPS_IN_FLIGHT:
            self._divided.popitem(last=False)
        return parts

    def __iter__(self) -> Iterator[list[int]]:
        epoch = self.epoch
        order = self.stream.indices(epoch)
        self._order = epoch, order
        step = self.start[1] if epoch == self.start[0] else 0
        self.drawn = (epoch, step)
        counted, end, first = None, 0, 0
        while True:
            history = self._history()
            if history is not counted:
                counted, end, first = history, self.num_batches(epoch), history.offset(epoch, step)
            if step >= end:
                break
            parts = None if self.division is None else self._divide(history, epoch, step, first)
            sizes = self.sizes_at(epoch, step)
            own = first + sum(sizes[: self.rank])
            self.drawn = (epoch, step + 1)
            if not sizes[self.rank]:
                yield list(order[first : first + min(self.min_local, sum(sizes))])
            elif parts is not None:
                yield parts.indices[self.rank]
            else:
                yield list(order[own : own + sizes[self.rank]])
            step, first = step + 1, first + sum(sizes)
        self.drawn = (epoch + 1, 0)
