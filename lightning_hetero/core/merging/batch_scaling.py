"""Scaling of the workers' batch sizes toward equal numbers of updates (A Alg. 1)."""

from collections.abc import Sequence

import numpy as np

from lightning_hetero.core.merging.settings import AdaptiveSettings
from lightning_hetero.core.validation import check_sizes

__all__ = ["scale_batch_sizes"]


def scale_batch_sizes(
    batch_sizes: Sequence[int], updates: Sequence[int], settings: AdaptiveSettings
) -> tuple[int, ...]:
    """Return the batch sizes of the next mega-batch: ``b_i + beta (u_i - mean(u))``, in whole samples (A Alg. 1).

    The learning rate follows the rounded size: ``lr_i b_i' / b_i``, so ``lr_i`` is ``b_i / b_max`` times the user's.

    Args:
        batch_sizes: ``b_i`` of each worker, between the bounds.
        updates: ``u_i``, updates that each worker did in the mega-batch.
        settings: bounds and ``beta``. With ``damped`` a size changes by ``min(beta, b_i / mean(u))`` per update of
            deviation and stops at a bound; then all sizes grow in proportion until the largest is ``b_max``. Without
            it, a change that would cross a bound is skipped, as printed.

    Raises:
        ValueError: if the lists differ in length, or no worker did an update.

    Example:
        >>> scale_batch_sizes([64, 64], [18, 6], AdaptiveSettings(64))
        (64, 40)
        >>> scale_batch_sizes([64, 64], [75, 25], AdaptiveSettings(64))
        (64, 32)
        >>> scale_batch_sizes([64, 64], [75, 25], AdaptiveSettings(64, damped=False))
        (64, 64)
    """
    sizes = np.asarray(check_sizes("batch_sizes", batch_sizes, minimum=1), dtype=float)
    u = np.asarray(check_sizes("updates", updates, minimum=0, length=len(sizes)), dtype=float)
    mean = u.mean()
    if mean == 0:
        raise ValueError("no worker did an update in this mega-batch, so that there is nothing to scale sizes by.")
    assert settings.beta is not None
    assert settings.min_batch_size is not None
    low, high = settings.min_batch_size, settings.max_batch_size
    if settings.damped:
        scaled = np.clip(sizes + np.minimum(settings.beta, sizes / mean) * (u - mean), low, high)
        scaled *= high / scaled.max()
    else:
        printed = sizes + settings.beta * (u - mean)
        scaled = np.where((printed >= low) & (printed <= high), printed, sizes)
    return tuple(int(size) for size in np.floor(scaled + 0.5))
