"""How soon a decision follows a link whose rate changes, and whether it goes back where the link is the same."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

__all__ = ["changes", "following"]


def changes(values: Sequence[Any]) -> list[tuple[int, Any]]:
    """Where a sequence has another value than before, its beginning included: positions and values.

    Example:
        >>> changes([0.1, 0.1, 0.02, 0.1])
        [(0, 0.1), (2, 0.02), (3, 0.1)]
    """
    return [(i, value) for i, value in enumerate(values) if i == 0 or value != values[i - 1]]


def following(moments: Sequence[float], values: Sequence[float], turns: Sequence[float]) -> dict[str, float]:
    """What became of a decision after each change of the link.

    Args:
        moments: seconds at which each step ended.
        values: what was decided on, by step.
        turns: seconds at which the link changed; those before the first step and after the last do not count.

    Returns:
        ``link`` and ``moves``, changes of the link and of the decision; ``first``, of those changes of the link after
        which it moved the greatest number of seconds until it did; ``last``, the same until it moved no more; and
        ``back``, moves in the other direction than the one before, or to a value that was left before, while the link
        was the same. The beginning of the training counts as a change of the link.

    Example:
        >>> following([0, 1, 2, 3, 4], [0.1, 0.1, 0.02, 0.02, 0.1], [-1.0, 0.5, 3.5])
        {'link': 2, 'moves': 2, 'first': 1.5, 'last': 1.5, 'back': 0}
        >>> following([0, 1, 2, 3, 4], [0.1, 0.1, 0.02, 0.1, 0.1], [-1.0, 0.5, 3.5])["back"]
        1
    """
    turns = [turn for turn in turns if moments[0] < turn <= moments[-1]]
    moves = [(moments[i], values[i - 1], value) for i, value in changes(values)[1:]]
    first, last, back = [0.0], [0.0], 0
    for begin, end in itertools.pairwise([moments[0], *turns, float("inf")]):
        inside = [move for move in moves if begin <= move[0] < end]
        if inside:
            first.append(inside[0][0] - begin)
            last.append(inside[-1][0] - begin)
        back += sum((b > a) != (d > c) for (_, a, b), (_, c, d) in itertools.pairwise(inside))
    return {"link": len(turns), "moves": len(moves), "first": max(first), "last": max(last), "back": back}
