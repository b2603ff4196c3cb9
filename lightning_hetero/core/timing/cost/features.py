"""Features of a share of samples from which the time that it takes is predicted.

With the costs ``l`` of its ``n`` samples, such as their numbers of tokens, a share is described by ``n``, ``sum l``
(packed or bucketed by the model), ``n max(l)`` (padded to the longest), ``sum l^2`` and ``n max(l)^2`` (attention).
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

__all__ = ["FEATURES", "share_features"]

FEATURES = ("samples", "cost", "padded_cost", "squared_cost", "padded_squared_cost")
"""Names of the features, in the order of :func:`share_features`."""


def share_features(costs: Sequence[float] | npt.NDArray[np.float64]) -> tuple[float, ...]:
    """Return the features of a share: ``n``, ``sum l``, ``n max(l)``, ``sum l^2``, ``n max(l)^2``.

    Args:
        costs: cost of each of its samples, ``>= 0``.

    Example:
        >>> share_features([1.0, 3.0])
        (2.0, 4.0, 6.0, 10.0, 18.0)
    """
    cost = np.asarray(costs, dtype=float)
    n, most = len(cost), float(cost.max(initial=0.0))
    return float(n), float(cost.sum()), n * most, float(np.dot(cost, cost)), n * most * most
