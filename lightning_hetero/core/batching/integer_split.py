"""Splits of a batch into whole samples: even, in proportion, and for the ragged last batch of an epoch."""

import math
from collections.abc import Sequence
from itertools import combinations

import numpy as np

__all__ = ["even_sizes", "joint_sizes", "proportional_sizes", "tail_sizes", "whole_multiple"]

MOST_LEFT_OUT = 3
"""Workers that are left out of a small batch at most in the search for sizes within all bounds."""


def whole_multiple(number: int, multiple: int) -> int:
    """Return the least multiple that is not below a number.

    Example:
        >>> whole_multiple(5, 4), whole_multiple(8, 4)
        (8, 8)
    """
    return -(-number // multiple) * multiple


def even_sizes(total: int, workers: int) -> tuple[int, ...]:
    """Return sizes that differ by one sample at most and sum to ``total``, the larger ones first.

    Args:
        total: samples to hand out, ``>= 0``.
        workers: number of workers, ``>= 1``.

    Returns:
        One size per worker.

    Example:
        >>> even_sizes(10, 4)
        (3, 3, 2, 2)
    """
    return tuple(total // workers + (i < total % workers) for i in range(workers))


def proportional_sizes(
    total: int,
    shares: Sequence[float] | np.ndarray,
    *,
    min_local: Sequence[int] | np.ndarray | int = 0,
    max_local: Sequence[int] | np.ndarray | None = None,
    multiple: int = 1,
) -> tuple[int, ...]:
    """Return integer sizes in proportion to ``shares`` within bounds, by largest remainder, with the sum ``total``.

    Workers that hit a bound are fixed there; the others share the rest in proportion.

    Args:
        total: samples to hand out.
        shares: non-negative weight of each worker, not all zero.
        min_local: lower bound of each size.
        max_local: upper bound of each size, ``None`` for none.
        multiple: samples of which each size is a multiple, as ``total`` has to be.

    Returns:
        One size per worker, sum ``total``.

    Raises:
        ValueError: if the bounds cannot give ``total`` in multiples, or a share is negative or not finite.

    Example:
        >>> proportional_sizes(10, [1.0, 0.5, 0.3])
        (5, 3, 2)
        >>> proportional_sizes(12, [3, 1], max_local=[6, 100])
        (6, 6)
        >>> proportional_sizes(12, [3, 1], max_local=[7, 100], multiple=4)
        (4, 8)
    """
    weight = np.asarray(shares, dtype=float)
    if not np.all(np.isfinite(weight)) or np.any(weight < 0) or weight.sum() <= 0:
        raise ValueError(f"shares must be finite, non-negative and not all zero; got {list(weight)}.")
    low = np.broadcast_to(np.asarray(min_local, dtype=float), weight.shape)
    high = np.full(weight.shape, float(total)) if max_local is None else np.asarray(max_local, dtype=float)
    low, high = np.ceil(low / multiple), np.floor(high / multiple)  # in units from here on
    high = np.maximum(high, low)
    if total % multiple or not low.sum() * multiple <= total <= high.sum() * multiple:
        units = "" if multiple == 1 else f"multiples of {multiple} from "
        raise ValueError(
            f"total={total} is outside what the bounds allow, {units}{int(low.sum()) * multiple} to "
            f"{int(high.sum()) * multiple}. Change the total or the bounds."
        )
    total //= multiple
    weight = np.maximum(weight / weight.max(), 1e-12)
    # sum of clip(level * weight, low, high) grows with the level: bisect to the level that gives the total
    below, above = 0.0, float((high / weight).max())
    for _ in range(200):
        level = 0.5 * (below + above)
        if np.clip(level * weight, low, high).sum() < total:
            below = level
        else:
            above = level
    exact = np.clip(above * weight, low, high)
    sizes = np.floor(exact + 1e-9)
    order = np.lexsort((np.arange(len(exact)), -(exact - sizes)))
    for i in order:
        if sizes.sum() < total and sizes[i] < high[i]:
            sizes[i] += 1
    return tuple(int(size) * multiple for size in sizes)


def tail_sizes(remaining: int, sizes: Sequence[int], min_local: int = 1, multiple: int = 1) -> tuple[int, ...]:
    """Split the ragged last batch of an epoch in the proportions of the full one.

    A share between zero and ``min_local`` goes to workers with larger shares, because a module may not be able to run
    such a batch (batch normalization of a single sample); the worker that loses it runs with weight 0. No worker gets
    more than in a full batch, except for fewer than ``min_local`` samples that would otherwise form their own batch.
    With ``multiple > 1``, one worker takes the remainder beyond whole multiples.

    Args:
        remaining: samples left, ``0 < remaining <= sum(sizes)``.
        sizes: the split of the full batch.
        min_local: smallest batch that a worker can run.
        multiple: samples of which all sizes but one are multiples, as those of the full batch are.

    Returns:
        One size per worker, sum ``remaining``; zeros are allowed.

    Example:
        >>> tail_sizes(5, (30, 10, 10))
        (3, 1, 1)
        >>> tail_sizes(5, (30, 10, 10), min_local=2)
        (5, 0, 0)
        >>> tail_sizes(7, (6, 4, 4), multiple=2)
        (3, 2, 2)
    """
    if multiple > 1:
        units, rest = divmod(remaining, multiple)
        least, whole = -(-min_local // multiple), [size // multiple for size in sizes]
        split = [multiple * size for size in tail_sizes(units, whole, least)] if units else [0] * len(sizes)

        def room(i: int) -> bool:
            return split[i] + rest <= sizes[i] and (split[i] > 0 or rest >= min_local)

        split[max(range(len(sizes)), key=lambda i: (room(i), split[i], sizes[i]))] += rest
        return tuple(split)
    shares = list(proportional_sizes(remaining, sizes))
    order = sorted(range(len(shares)), key=lambda i: (-shares[i], -sizes[i], i))
    spare = 0
    for i in order[1:]:
        if shares[i] < min_local:
            spare, shares[i] = spare + shares[i], 0
    for i in order:
        taken = min(spare, sizes[i] - shares[i])
        if shares[i] or taken >= min_local:
            spare, shares[i] = spare - taken, shares[i] + taken
    shares[order[0]] += spare
    return tuple(shares)


def _bounded_sizes(total: int, sizes: Sequence[int], least: int, most: Sequence[int]) -> tuple[int, ...]:
    """Split in proportion within upper bounds; each size is 0 or at least ``least``, if that is possible at all.

    Workers with the smallest shares run nothing, as many of them as it takes.
    """
    order = sorted(range(len(sizes)), key=lambda i: (-sizes[i], -most[i], i))
    able = [i for i in order if most[i] >= least]
    for number in range(len(able), 0, -1):
        for chosen in combinations(able, number):  # those with large shares first
            if number * least <= total <= sum(most[i] for i in chosen):
                weights = [max(float(sizes[i]), 1e-9) for i in chosen]
                found = proportional_sizes(
                    total, weights, min_local=[least] * number, max_local=[most[i] for i in chosen]
                )
                split = dict(zip(chosen, found, strict=True))
                return tuple(split.get(i, 0) for i in range(len(sizes)))
        if number < len(able) - MOST_LEFT_OUT:
            break
    return proportional_sizes(total, sizes, max_local=most)


def joint_sizes(
    totals: Sequence[int],
    sizes: Sequence[int],
    *,
    min_local: int = 1,
    max_local: Sequence[int] | None = None,
) -> tuple[tuple[int, ...], ...]:
    """Split the batches of several loaders in one and the same proportion: ``b_ki = s_i B_k / g``, ``g = gcd(B_k)``.

    Every worker then has the same share ``s_i / g`` of each batch, so that a loss that joins them has one exact weight.
    The parts ``s_i`` follow the sizes of the plan, as closely as whole parts allow. A single batch has parts of one
    sample. No worker gets fewer than ``min_local`` samples of a batch, except none of any.

    Args:
        totals: samples ``B_k`` of each batch of the step, ``>= 1``.
        sizes: sizes of the plan, whose proportions count.
        min_local: smallest batch that a worker can run.
        max_local: most samples of each worker, all batches together; ``None`` for no limit.

    Returns:
        For each batch, one size per worker.

    Raises:
        ValueError: if the limits cannot hold the batches.

    Example:
        >>> joint_sizes([16, 8], (9, 3))
        ((12, 4), (6, 2))
        >>> joint_sizes([5], (30, 10, 10), min_local=2)
        ((5, 0, 0),)
    """
    parts = math.gcd(*totals)
    step, least = sum(totals) // parts, -(-min_local * parts // min(totals))
    planned, most = sum(sizes), None if max_local is None else [limit // step for limit in max_local]
    if most is not None and sum(most) < parts:
        raise ValueError(
            f"a step has {sum(totals)} samples, and the workers hold at most {list(max_local or ())}. Make the batches "
            "smaller, or raise max_local_batch_sizes."
        )
    if parts == planned:
        split = tuple(sizes)
    elif parts < planned:
        split = tail_sizes(parts, sizes, least)
    else:
        split = proportional_sizes(parts, sizes, min_local=[least if size else 0 for size in sizes])
    if most is not None and any(part > limit for part, limit in zip(split, most, strict=True)):
        split = _bounded_sizes(parts, sizes, least, most)
    return tuple(tuple(part * (total // parts) for part in split) for total in totals)
