"""Clusters of ranks with links inside them that are many times faster than those between them.

Inside a cluster gradients are reduced densely. Only one rank of each cluster, its *leader*, exchanges the sums with the
other clusters: a low-bandwidth link carries one message per cluster rather than one per worker.
"""

import math
from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from lightning_hetero.core.validation import check_int

__all__ = ["HIERARCHIES", "Clusters", "check_clusters", "check_hierarchy", "clusters_by_name", "clusters_by_time"]

Clusters = tuple[tuple[int, ...], ...]

HIERARCHIES = ("nodes", "env", "auto")
"""Clusters by host, by the environment variable ``LIGHTNING_HETERO_CLUSTER`` of each process, or by timing links."""

APART = 3.0
"""Least factor by which the fastest link between clusters is slower than the slowest inside."""


def check_hierarchy(value: Any) -> str | Clusters | None:
    """Return the setting ``hierarchy`` as a name, as clusters in the order of their leaders, or as ``None``.

    Raises:
        TypeError: if it is neither a name nor lists of ranks.
        ValueError: if a name is unknown, a rank is negative or in two clusters, or a cluster is empty.

    Example:
        >>> check_hierarchy([[3], [2, 0, 1]])
        ((0, 1, 2), (3,))
    """
    if value is None:
        return None
    allowed = f"allowed are {', '.join(map(repr, HIERARCHIES))}, and lists of ranks such as [[0, 1, 2], [3]]"
    if isinstance(value, str):
        if value not in HIERARCHIES:
            raise ValueError(f"hierarchy={value!r} is unknown; {allowed}.")
        return value
    if not isinstance(value, Sequence) or not all(
        isinstance(members, Sequence) and not isinstance(members, str) for members in value
    ):
        raise TypeError(f"hierarchy={value!r} is no list of clusters; {allowed}.")
    clusters = tuple(tuple(sorted(check_int("hierarchy", rank, minimum=0) for rank in cluster)) for cluster in value)
    ranks = [rank for cluster in clusters for rank in cluster]
    if not all(clusters) or not clusters:
        raise ValueError(f"hierarchy={value!r} has an empty cluster; each needs one rank at least.")
    if len(set(ranks)) < len(ranks):
        raise ValueError(f"hierarchy={value!r} has a rank in two clusters; name each rank once.")
    return tuple(sorted(clusters))


def check_clusters(clusters: Clusters, world_size: int) -> Clusters:
    """Return the clusters of all ranks of a run.

    Raises:
        ValueError: if a rank of the run is missing, or a named rank does not exist.

    Example:
        >>> check_clusters(((0, 1), (2,)), 3)
        ((0, 1), (2,))
    """
    ranks = sorted(rank for cluster in clusters for rank in cluster)
    if ranks != list(range(world_size)):
        raise ValueError(
            f"hierarchy={[list(cluster) for cluster in clusters]} names the ranks {ranks}, and the job has "
            f"{list(range(world_size))}. Name each rank once."
        )
    return clusters


def clusters_by_name(names: Sequence[Hashable]) -> Clusters:
    """Group ranks with equal names.

    Example:
        >>> clusters_by_name(["lab-a", "lab-b", "lab-a"])
        ((0, 2), (1,))
    """
    return tuple(tuple(rank for rank, name in enumerate(names) if name == first) for first in dict.fromkeys(names))


def clusters_by_time(seconds: npt.ArrayLike) -> Clusters:
    """Find clusters from the transfer times between all pairs of ranks.

    In the sorted times, the greatest ratio of neighbors separates links inside clusters from links between them, if it
    is at least 3. Ranks joined by a chain of short times form one cluster.

    Args:
        seconds: symmetric, shape (N, N), each above 0; the diagonal is ignored.

    Returns:
        Clusters in the order of their leaders; all ranks in one if there is no such gap.

    Example:
        >>> clusters_by_time([[0, 1, 50], [1, 0, 60], [50, 60, 0]])
        ((0, 1), (2,))
        >>> clusters_by_time([[0, 1, 2], [1, 0, 2], [2, 2, 0]])
        ((0, 1, 2),)
    """
    times = np.asarray(seconds, dtype=float)
    n = len(times)
    pairs = np.sort(times[np.triu_indices(n, 1)])
    if len(pairs) < 2:
        return (tuple(range(n)),)
    ratios = pairs[1:] / pairs[:-1]
    gap = int(np.argmax(ratios))
    if ratios[gap] < APART:
        return (tuple(range(n)),)
    near = times <= math.sqrt(pairs[gap] * pairs[gap + 1])
    names = list(range(n))
    for i in range(n):
        for j in range(i):
            if near[i, j] and names[i] != names[j]:
                old, new = names[i], names[j]
                names = [new if name == old else name for name in names]
    return clusters_by_name(names)
