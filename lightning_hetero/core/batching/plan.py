"""Batch plans: how many samples each worker takes, and from which step on.

:class:`BatchPlan` is one split of one total batch. :class:`PlanHistory` says which plan holds at every step, so each
rank knows every rank's size at every step without communication. Plans are found elsewhere: see
:mod:`lightning_hetero.core.batching.optperf` and :mod:`lightning_hetero.core.planning.planner`.
"""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import Any

from lightning_hetero.core.batching.cost.weights import CostWeights
from lightning_hetero.core.batching.integer_split import tail_sizes
from lightning_hetero.core.keywords import checked_keywords
from lightning_hetero.core.validation import check_int, check_number, check_sizes

__all__ = ["NO_LIMIT", "BatchPlan", "PlanEntry", "PlanHistory", "split_text"]

NO_LIMIT = 2**31
"""Number of samples that stands for no limit: no batch reaches it."""


def split_text(sizes: Sequence[int], by_cost: bool = False, most: int | None = None) -> str:
    """Return a split as text: the samples of each worker, or its share of the work where batches are divided by cost.

    Args:
        sizes: ``b_i`` of each worker.
        by_cost: whether they are planned work.
        most: most workers that are shown, ``None`` for all.

    Example:
        >>> split_text((24, 8)), split_text((24, 8), by_cost=True)
        ('24/8', '75/25 % of the work')
    """
    shown = [f"{100 * size / max(sum(sizes), 1):.3g}" if by_cost else str(size) for size in sizes[:most]]
    more = ["..."] if len(sizes) > len(shown) else []
    return "/".join([*shown, *more]) + (" % of the work" if by_cost else "")


@checked_keywords
@dataclass(frozen=True)
class BatchPlan:
    """One split of one total batch over the workers (``b_i`` and ``B`` of C sec. 3).

    Args:
        total_batch_size: ``B``, samples of one step over all workers.
        local_batch_sizes: ``b_i``, samples of each worker; they sum to ``B``. A worker with 0 takes part in every
            collective with weight 0. With ``cost``, they are work: a worker gets samples that cost as much as ``b_i``
            average ones.
        step_time: predicted seconds of one step, ``None`` where there is no time model.
        bottlenecks: bottleneck of each worker, ``"compute"`` or ``"communication"``; empty if unknown.
        leave_out: ranks that only slow the job down: even their minimum takes longer than the others need for all.
        step_time_without: predicted seconds of one step without the ranks in ``leave_out``, ``None`` if there are none.
        step_time_error: standard error of ``step_time`` in seconds, ``>= 0``, ``None`` where it is not known.
        cost: weights by which global batches are divided by cost. In a plan that you make, ``None`` stands for those
            of the data; in a plan that runs, for a division by number.

    Raises:
        ValueError: if the sizes do not sum to the total, or a field is out of range.
        TypeError: if a size is not an integer.

    Example:
        >>> plan = BatchPlan(40, (30, 10))
        >>> plan.shares
        (0.75, 0.25)
    """

    total_batch_size: int
    local_batch_sizes: tuple[int, ...]
    step_time: float | None = None
    bottlenecks: tuple[str, ...] = ()
    leave_out: tuple[int, ...] = ()
    step_time_without: float | None = None
    step_time_error: float | None = None
    cost: CostWeights | None = None

    def __post_init__(self) -> None:
        check_int("total_batch_size", self.total_batch_size, minimum=1)
        sizes = check_sizes("local_batch_sizes", self.local_batch_sizes, minimum=0)
        object.__setattr__(self, "local_batch_sizes", sizes)
        object.__setattr__(self, "total_batch_size", int(self.total_batch_size))
        if sum(sizes) != self.total_batch_size:
            raise ValueError(
                f"local_batch_sizes={sizes} sum to {sum(sizes)}, not to total_batch_size={self.total_batch_size}. "
                "Make them agree."
            )
        if self.bottlenecks and len(self.bottlenecks) != len(sizes):
            raise ValueError(f"bottlenecks must name one per worker ({len(sizes)}); got {self.bottlenecks}.")
        if self.step_time is not None and not (
            isinstance(self.step_time, Real) and self.step_time > 0 and math.isfinite(self.step_time)
        ):
            raise ValueError(f"step_time must be positive seconds or None; got {self.step_time!r}.")
        if self.step_time_error is not None:
            check_number("step_time_error", self.step_time_error, low=0.0)

    @property
    def world_size(self) -> int:
        """Number of workers."""
        return len(self.local_batch_sizes)

    @property
    def split(self) -> str:
        """The split as text, see :func:`split_text`."""
        return split_text(self.local_batch_sizes, by_cost=self.cost is not None)

    @property
    def shares(self) -> tuple[float, ...]:
        """``r_i = b_i / B``, the weight of each worker's mean gradient (C eq. 9); with ``cost``, its share of the work.

        Divided by cost, gradients are weighted by the samples that ran.
        """
        return tuple(size / self.total_batch_size for size in self.local_batch_sizes)

    def state_dict(self) -> dict[str, Any]:
        """Return plain Python values of all fields, fit for any checkpoint."""
        cost = {} if self.cost is None else {"cost": self.cost.state_dict()}
        return cost | {
            "total_batch_size": self.total_batch_size,
            "local_batch_sizes": list(self.local_batch_sizes),
            "step_time": None if self.step_time is None else float(self.step_time),
            "bottlenecks": list(self.bottlenecks),
            "leave_out": [int(i) for i in self.leave_out],
            "step_time_without": None if self.step_time_without is None else float(self.step_time_without),
            "step_time_error": None if self.step_time_error is None else float(self.step_time_error),
        }

    @classmethod
    def from_state_dict(cls, state: dict[str, Any]) -> "BatchPlan":
        """Return the plan that :meth:`state_dict` described."""
        fields: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in state.items()}
        fields |= {k: CostWeights.from_state_dict(v) for k, v in state.items() if k == "cost"}
        return cls(**fields)


@checked_keywords
@dataclass(frozen=True)
class PlanEntry:
    """A plan and the step of an epoch from which it holds.

    Args:
        epoch: epoch, counted from 0.
        step: batch of that epoch, counted from 0; with gradient accumulation every micro-batch counts.
        plan: the plan that holds from there on.
        reason: why it was adopted, for the log.
        rows: samples that each worker ran in a step, the mean over the steps before the newest sync round under this
            plan; empty before there is one.

    Raises:
        TypeError: if epoch or step is not an integer.
        ValueError: if epoch or step is negative.

    Example:
        >>> PlanEntry(0, 8, BatchPlan(8, (6, 2))).plan.shares
        (0.75, 0.25)
    """

    epoch: int
    step: int
    plan: BatchPlan
    reason: str = ""
    rows: tuple[float, ...] = field(default=(), compare=False)

    def __post_init__(self) -> None:
        for name in ("epoch", "step"):
            object.__setattr__(self, name, check_int(name, getattr(self, name), minimum=0))

    def describe(self) -> str:
        """Describe the plan and its reason in one line for the log.

        Example:
            >>> PlanEntry(0, 0, BatchPlan(8, (6, 2)), "given split").describe()
            '6/2 of 8 samples (given split)'
        """
        plan = self.plan
        line = f"{plan.split} of {plan.total_batch_size} samples ({self.reason})"
        if plan.step_time is not None and plan.step_time_error is not None:
            line += f"; predicted step {plan.step_time * 1e3:.1f} +- {plan.step_time_error * 1e3:.1f} ms"
        if plan.leave_out and plan.step_time and plan.step_time_without:
            line += (
                f"; rank {', '.join(map(str, plan.leave_out))} slows the job down even at its minimum: without it a "
                f"step would take {plan.step_time_without * 1e3:.1f} instead of {plan.step_time * 1e3:.1f} ms"
            )
        return line

    def state_dict(self) -> dict[str, Any]:
        """Return plain Python values of all fields, fit for any checkpoint."""
        return {"epoch": self.epoch, "step": self.step, "plan": self.plan.state_dict(), "reason": self.reason}

    @classmethod
    def from_state_dict(cls, state: dict[str, Any]) -> "PlanEntry":
        """Return the entry that :meth:`state_dict` described."""
        return cls(state["epoch"], state["step"], BatchPlan.from_state_dict(state["plan"]), state["reason"])


@checked_keywords
@dataclass(frozen=True)
class PlanHistory:
    """Plans in the order in which they hold: the single source of sizes, offsets and epoch lengths.

    A change never affects the past: it holds from a step that no rank has drawn yet. All methods are pure functions of
    the entries, so ranks with the same history agree on everything without communication.

    Args:
        entries: in order of ``(epoch, step)``; the first one holds for everything before the second.

    Example:
        >>> history = PlanHistory((PlanEntry(0, 0, BatchPlan(8, (4, 4))),))
        >>> history = history.extended(PlanEntry(0, 2, BatchPlan(8, (6, 2))))
        >>> history.sizes_at(0, 1), history.sizes_at(0, 2), history.sizes_at(1, 0)
        ((4, 4), (6, 2), (6, 2))
        >>> history.num_batches(0, num_samples=20), history.sizes_at(0, 2, num_samples=20)
        (3, (3, 1))
    """

    entries: tuple[PlanEntry, ...]

    def __post_init__(self) -> None:
        keys = [(entry.epoch, entry.step) for entry in self.entries]
        if not keys or keys != sorted(set(keys)):
            raise ValueError(f"entries of a plan history must be non-empty and strictly ordered in time; got {keys}.")

    @property
    def version(self) -> int:
        """Number of plans so far."""
        return len(self.entries)

    @property
    def last(self) -> PlanEntry:
        """The newest entry, which may hold only from a later step on."""
        return self.entries[-1]

    def at(self, epoch: int, step: int) -> PlanEntry:
        """Return the entry that holds at a step."""
        for entry in reversed(self.entries):
            if (entry.epoch, entry.step) <= (epoch, step):
                return entry
        return self.entries[0]

    def until(self, epoch: int, step: int) -> float:
        """Return the first step of the epoch after ``step`` at which another entry begins; infinite if none does.

        Example:
            >>> plans = (PlanEntry(0, 0, BatchPlan(8, (4, 4))), PlanEntry(0, 9, BatchPlan(8, (6, 2))))
            >>> PlanHistory(plans).until(0, 3), PlanHistory(plans).until(0, 9)
            (9, inf)
        """
        return next((e.step for e in self.entries if e.epoch == epoch and e.step > step), math.inf)

    def extended(self, entry: PlanEntry) -> "PlanHistory":
        """Add an entry; one that starts at the same step replaces the last.

        Raises:
            ValueError: if the entry starts before the last one.
        """
        kept = self.entries[:-1] if (entry.epoch, entry.step) == (self.last.epoch, self.last.step) else self.entries
        return PlanHistory((*kept, entry))

    def since(self, epoch: int) -> "PlanHistory":
        """Return the entries that are needed from the start of ``epoch`` on."""
        first = self.at(epoch, 0)
        return PlanHistory(self.entries[self.entries.index(first) :])

    def _segments(self, epoch: int) -> list[tuple[int, BatchPlan]]:
        """Return ``(first step, plan)`` of each stretch of an epoch."""
        later = [(entry.step, entry.plan) for entry in self.entries if entry.epoch == epoch and entry.step > 0]
        return [(0, self.at(epoch, 0).plan), *later]

    def offset(self, epoch: int, step: int) -> int:
        """Return the number of samples of the epoch that the steps before ``step`` take."""
        segments = self._segments(epoch)
        ends = [start for start, _ in segments[1:]] + [step]
        return sum(
            max(0, min(end, step) - start) * plan.total_batch_size
            for (start, plan), end in zip(segments, ends, strict=True)
        )

    def num_batches(self, epoch: int, num_samples: int, *, drop_last: bool = False) -> int:
        """Return the number of steps of an epoch over ``num_samples`` samples, the same on every rank."""
        segments = self._segments(epoch)
        taken = 0
        for (start, plan), (end, _) in zip(segments, segments[1:], strict=False):
            stretch = (end - start) * plan.total_batch_size
            if taken + stretch >= num_samples:
                return start + _full_or_ragged(num_samples - taken, plan.total_batch_size, drop_last)
            taken += stretch
        start, plan = segments[-1]
        return start + _full_or_ragged(num_samples - taken, plan.total_batch_size, drop_last)

    def sizes_at(
        self, epoch: int, step: int, num_samples: int | None = None, *, min_local: int = 1, multiple: int = 1
    ) -> tuple[int, ...]:
        """Return the size of every rank at a step; the ragged last step is split in the same proportion.

        Args:
            epoch: epoch.
            step: batch of that epoch.
            num_samples: samples of the epoch, ``None`` to ignore the ragged tail.
            min_local: smallest batch that a rank can run, see :func:`tail_sizes`.
            multiple: samples of which all sizes but one of the tail are multiples.
        """
        plan = self.at(epoch, step).plan
        if num_samples is None:
            return plan.local_batch_sizes
        remaining = num_samples - self.offset(epoch, step)
        if remaining >= plan.total_batch_size or remaining <= 0:
            return plan.local_batch_sizes
        return tail_sizes(remaining, plan.local_batch_sizes, min_local, multiple)

    def digest(self) -> int:
        """Return a 48-bit fingerprint of what ranks must agree on: when each plan holds and its sizes."""
        costs = [(e.plan.cost,) if e.plan.cost else () for e in self.entries]
        text = repr([(e.epoch, e.step, e.plan.local_batch_sizes, *c) for e, c in zip(self.entries, costs, strict=True)])
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:6], "big")

    def state_dict(self) -> dict[str, Any]:
        """Return plain Python values, fit for any checkpoint."""
        return {"entries": [entry.state_dict() for entry in self.entries]}

    @classmethod
    def from_state_dict(cls, state: dict[str, Any]) -> "PlanHistory":
        """Return the history that :meth:`state_dict` described."""
        return cls(tuple(PlanEntry.from_state_dict(entry) for entry in state["entries"]))


def _full_or_ragged(samples: int, total: int, drop_last: bool) -> int:
    return samples // total if drop_last else -(-samples // total)
