"""Sizes of the next steps over streams: from what ranks hold and which streams have ended, the same on every rank.

Each rank reports how many samples it holds that belong to no step yet, and whether its stream has ended. While all
streams go on, sizes are those of the plan. When one has ended, its rest is trained on and others take its share, so
that the total batch stays that of the plan until all streams have ended.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lightning_hetero.core.batching.integer_split import proportional_sizes, whole_multiple
from lightning_hetero.core.batching.plan import NO_LIMIT

__all__ = ["StreamBlock", "StreamRules", "next_block", "wanted_samples"]


@dataclass(frozen=True)
class StreamRules:
    """Bounds of a step over streams.

    Args:
        min_local: smallest batch that a rank can run, ``>= 1``; a rank takes no samples or at least as many.
        max_local: most samples of each rank; ``None`` for no limit.
        drop_last: whether the ragged last batch is dropped.
        multiple: samples of which each size is a multiple, except that a rank takes the remainder of its stream when
            that has ended; with ``drop_last`` that is dropped.

    Raises:
        ValueError: if a rank's largest batch leaves no room for the last samples of its stream.

    Example:
        >>> StreamRules(min_local=2, max_local=(8, 4)).reserve
        2
    """

    min_local: int = 1
    max_local: tuple[int, ...] | None = None
    drop_last: bool = False
    multiple: int = 1

    def __post_init__(self) -> None:
        if self.max_local is not None and min(self.max_local) < 2 * self.min_local - 1:
            raise ValueError(
                f"max_local_batch_sizes={list(self.max_local)} with at least {self.min_local} samples per batch leaves "
                f"no room for the last samples of a stream. Raise each to at least {2 * self.min_local - 1}."
            )

    @property
    def reserve(self) -> int:
        """Samples that a rank keeps while its stream goes on, so that its last batch is not too small to run."""
        return self.min_local if self.min_local > 1 else 0

    @property
    def stand_in(self) -> int:
        """Samples that a rank without a share runs, with weight 0."""
        return whole_multiple(self.min_local, self.multiple)

    def most(self, ranks: int) -> np.ndarray:
        """Return the most samples of each rank."""
        return np.array(self.max_local or (NO_LIMIT,) * ranks)


@dataclass(frozen=True)
class StreamBlock:
    """Steps that ranks have agreed on.

    Args:
        sizes: samples of every rank in each step; there may be no step at all if a stream has just ended.
        over: whether no step comes after them.

    Example:
        >>> StreamBlock(((6, 2), (3, 5)), over=False).sizes[0]
        (6, 2)
    """

    sizes: tuple[tuple[int, ...], ...]
    over: bool


def next_block(
    plans: Sequence[Sequence[int]], held: Sequence[int], ended: Sequence[bool], rules: StreamRules
) -> StreamBlock:
    """Return the sizes of the next steps; they are fewer than the plans if a rank has to draw more samples first.

    Args:
        plans: sizes that the plan gives each of the next steps.
        held: samples of each rank that belong to no step yet.
        ended: whether each rank's stream has ended.
        rules: bounds of a step.

    Raises:
        ValueError: if a stream has ended with fewer samples than its rank can run.

    Example:
        >>> plans = [(6, 2)] * 2
        >>> next_block(plans, (12, 4), (False, False), StreamRules()).sizes
        ((6, 2), (6, 2))
        >>> next_block(plans, (9, 16), (True, False), StreamRules()).sizes
        ((6, 2), (3, 5))
        >>> next_block(plans, (3, 2), (True, True), StreamRules())
        StreamBlock(sizes=((3, 2),), over=True)
    """
    rest = np.array(held, dtype=int)
    steps: list[tuple[int, ...]] = []
    gone = np.array(ended, dtype=bool)
    if rules.drop_last and rules.multiple > 1:  # without the remainder
        rest = np.where(gone, np.where(rest < rules.stand_in, 0, rest // rules.multiple * rules.multiple), rest)
    small = [rank for rank in np.flatnonzero(gone) if 0 < rest[rank] < rules.min_local]
    if small:
        raise ValueError(
            f"the stream of rank {small[0]} has ended with {rest[small[0]]} samples, fewer than min_local_batch_size="
            f"{rules.min_local} that a rank can run. Give each rank more samples, or set min_local_batch_size=1."
        )
    for plan in plans:
        if gone.all() and rest.sum() < (sum(plan) if rules.drop_last else 1):
            return StreamBlock(tuple(steps), over=True)
        sizes = _step(np.array(plan, dtype=int), rest, gone, rules)
        if sizes is None:
            return StreamBlock(tuple(steps), over=False)
        rest = rest - sizes
        steps.append(tuple(int(size) for size in sizes))
    least = sum(plans[-1]) if rules.drop_last and len(plans) else 1
    return StreamBlock(tuple(steps), over=bool(gone.all() and rest.sum() < least))


def wanted_samples(
    plans: Sequence[Sequence[int]], held: Sequence[int], ended: Sequence[bool], rules: StreamRules
) -> tuple[int, ...]:
    """Return the samples that each rank has to hold for the next steps, as far as it is known which streams end.

    Args:
        plans: sizes that the plan gives each of the next steps.
        held: samples that belong to no step yet, of those ranks whose streams have ended; of others any number.
        ended: whether each rank's stream is known to have ended.
        rules: bounds of a step.

    Returns:
        One number per rank; 0 for a rank whose stream has ended.

    Example:
        >>> wanted_samples([(6, 2)] * 2, (0, 0), (False, False), StreamRules())
        (12, 4)
        >>> wanted_samples([(6, 2)] * 2, (3, 0), (True, False), StreamRules())
        (0, 13)
    """
    assumed = [own if gone else NO_LIMIT for own, gone in zip(held, ended, strict=True)]
    block = next_block(plans, assumed, ended, rules)
    taken = np.array(block.sizes, dtype=int).reshape(-1, len(assumed)).sum(axis=0)
    wanted = np.maximum(taken + rules.reserve, rules.stand_in)  # a rank of size 0 runs some of them with weight 0
    return tuple(0 if gone else int(own) for own, gone in zip(wanted, ended, strict=True))


def _step(plan: np.ndarray, rest: np.ndarray, gone: np.ndarray, rules: StreamRules) -> np.ndarray | None:
    """Return the sizes of one step; ``None`` if a rank whose stream goes on has to draw more samples first."""
    most = rules.most(len(plan))
    free = np.minimum(most, np.where(gone, rest, rest - rules.reserve))
    sizes = np.minimum(plan, free)
    if np.any(~gone & (sizes < np.minimum(plan, most))):
        return None
    unit, lacks = rules.multiple, int(plan.sum() - sizes.sum())
    room = np.maximum(np.where(gone, free, most) - sizes, 0) // unit * unit
    missing = min(lacks // unit * unit, int(room.sum()))
    room = np.maximum(free - sizes, 0) // unit * unit
    if missing > int(room.sum()):
        return None
    if missing > 0:
        takers = np.where(room > 0, plan, 0)
        shares = takers if takers.sum() else np.where(room > 0, 1, 0)
        sizes = sizes + np.array(proportional_sizes(missing, shares, max_local=room, multiple=unit))
    elif not sizes.any():  # only remainders are left, of ranks that the plan gives nothing
        sizes = np.where(np.arange(len(plan)) == np.argmax(free), free, 0)
    return _runnable(sizes, rest, free, gone, rules)


def _runnable(
    sizes: np.ndarray, rest: np.ndarray, free: np.ndarray, gone: np.ndarray, rules: StreamRules
) -> np.ndarray | None:
    """Return sizes that ranks can run, such that the rest of a stream that has ended can be run as well."""
    low, multiple = rules.min_local, rules.stand_in
    instead = np.where(free >= multiple, multiple, np.where(gone & (free >= low), free, 0))
    sizes = np.where((sizes > 0) & (sizes < low), instead, sizes)
    left = rest - sizes
    tight = gone & (left > 0) & (left < low)
    whole = rest <= rules.most(len(sizes))
    short = np.where(rest - multiple >= low, rest - multiple, rest - low)
    sizes = np.where(tight, np.where(whole, rest, short), sizes)
    return sizes if sizes.sum() else None
