"""Elastic averaging for irregular work: batch sizes that equalise updates, and how replicas are merged (Adaptive SGD).

Workers train replicas of their own on batches that they take one by one, ``u_i`` of them in a mega-batch. At its end
batch sizes are scaled (Algorithm 1) and the replicas are merged (Algorithm 2): ``w' = sum_i alpha_i w_i + gamma (w -
w_p)``. :data:`MERGES` is the table of all merge rules.

What differs from the paper, which was written for workers that differ by a third:

- A step of Algorithm 1 never goes beyond the size at which the worker would have done ``mean(u)`` updates, because
  ``beta`` alone overshoots or stays put for ever; and the largest size is always ``b_max``, because with noise all
  would shrink (``damped=False`` is as printed).
- Weights are normalised after the perturbation too, because unequal workers have weights that sum to more than 1, by
  which each merge inflates the model (``renormalize=False`` is as printed).
- Ties for the most and least updated replica are broken by the batch size.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lightning_hetero.core.validation import check_choice, check_int, check_number, check_sizes

__all__ = ["MERGES", "AdaptiveSettings", "MergeRule", "MergeWeights", "merge_weights", "scale_batch_sizes"]

Array = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class MergeRule:
    """One line of the table of merge rules.

    Args:
        name: what users give to ``merge=``.
        weighted: whether ``alpha_i`` follows updates and batch sizes (Algorithm 2); else all are ``1 / W``.
        scales: whether batch sizes follow updates (Algorithm 1).
        momentum: whether the global model moves on by ``gamma (w - w_p)``.
        elastic: whether a replica keeps a part of its distance to the global model; else it starts from that anew.

    Example:
        >>> MergeRule("mean").pull(4), MergeRule("crossbow", momentum=True, elastic=True).pull(4)
        (1.0, 0.25)
    """

    name: str
    weighted: bool = False
    scales: bool = False
    momentum: bool = False
    elastic: bool = False

    def pull(self, world_size: int) -> float:
        """Share of its distance to the global model that a replica loses in a merge: 1, or ``1 / W`` (CROSSBOW)."""
        return 1.0 / world_size if self.elastic else 1.0


MERGES = {
    rule.name: rule
    for rule in (
        MergeRule("adaptive", weighted=True, scales=True, momentum=True),
        MergeRule("elastic", momentum=True),
        MergeRule("crossbow", momentum=True, elastic=True),
        MergeRule("mean"),
    )
}
"""Merge rules by name: Adaptive SGD; elastic averaging with momentum; synchronous model averaging (CROSSBOW), in which
``w_i -= (w_i - w) / W`` and ``w += sum_i (w_i - w) / W + gamma (w - w_p)``; the plain mean."""


@dataclass(frozen=True)
class AdaptiveSettings:
    """Constants of Adaptive SGD, with the paper's defaults but for the last two.

    Args:
        max_batch_size: ``b_max``, with which every worker begins.
        min_batch_size: ``b_min``; default ``b_max / 8``, at least 1.
        beta: samples by which a size changes per update of deviation; default ``b_min / 2``.
        perturbation: ``delta``, 0 to 1.
        perturbation_threshold: ``pert_thr``: largest ``||w_i||_2 / |w|`` of a replica that counts as regular.
        momentum: ``gamma``, 0 to below 1.
        renormalize: whether weights sum to 1 after the perturbation too.
        damped: whether a size stops where the worker would have done ``mean(u)`` updates, and the largest is ``b_max``.

    Raises:
        TypeError: if a value has the wrong type.
        ValueError: if a value is out of range.

    Example:
        >>> settings = AdaptiveSettings(64)
        >>> settings.min_batch_size, settings.beta
        (8, 4.0)
    """

    max_batch_size: int
    min_batch_size: int | None = None
    beta: float | None = None
    perturbation: float = 0.1
    perturbation_threshold: float = 0.1
    momentum: float = 0.9
    renormalize: bool = True
    damped: bool = True

    def __post_init__(self) -> None:
        check_int("max_batch_size", self.max_batch_size, minimum=1)
        least = max(1, self.max_batch_size // 8) if self.min_batch_size is None else self.min_batch_size
        object.__setattr__(self, "min_batch_size", check_int("min_batch_size", least, minimum=1))
        if least > self.max_batch_size:
            raise ValueError(
                f"min_batch_size={least} is above the largest batch, {self.max_batch_size} samples (the DataLoader's "
                "batch_size). Lower the one or raise the other."
            )
        beta = least / 2 if self.beta is None else self.beta
        object.__setattr__(self, "beta", check_number("beta", beta, low=0.0, include_low=False))
        check_number("perturbation", self.perturbation, low=0.0, high=1.0)
        check_number("perturbation_threshold", self.perturbation_threshold, low=0.0)
        if check_number("momentum", self.momentum, low=0.0) >= 1:
            raise ValueError(f"momentum={self.momentum} would let the model grow for ever; give a number below 1.")
        for name in ("renormalize", "damped"):
            check_choice(name, getattr(self, name), (True, False))


def scale_batch_sizes(
    batch_sizes: Sequence[int], updates: Sequence[int], settings: AdaptiveSettings
) -> tuple[int, ...]:
    """Batch sizes for the next mega-batch: ``b_i + beta (u_i - mean(u))``, in whole samples (Algorithm 1).

    The learning rate follows the rounded size: ``lr_i b_i' / b_i``, so ``lr_i`` is ``b_i / b_max`` times the user's.

    Args:
        batch_sizes: ``b_i`` of each worker, between the bounds.
        updates: ``u_i``, updates that each worker did in the mega-batch.
        settings: bounds and ``beta``. With ``damped`` the step is ``min(beta, b_i / mean(u))`` per update and ends at
            a bound, and then all sizes grow alike until the largest is ``b_max``; without, a step that would cross a
            bound is left out, as printed.

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


@dataclass(frozen=True, slots=True)
class MergeWeights:
    """Weights of the replicas in a merge.

    Args:
        weights: ``alpha_i``; they sum to 1 unless perturbed and not normalised.
        perturbed: whether the most updated replica was given more, and the least updated less.

    Example:
        >>> MergeWeights((0.66, 0.36), perturbed=True).weights
        (0.66, 0.36)
    """

    weights: tuple[float, ...]
    perturbed: bool = False


def merge_weights(
    rule: MergeRule,
    batch_sizes: Sequence[int],
    updates: Sequence[int],
    norms: Sequence[float],
    settings: AdaptiveSettings,
) -> MergeWeights:
    """Weights of the replicas (Algorithm 2, lines 1-7); a replica that is not finite gets 0, the others its share.

    ``alpha_i = b_i / sum(b)`` if all did the same number of updates, else ``u_i / sum(u)``; then, if ``||w_i||_2 / |w|
    < pert_thr`` for all, ``(1 + delta)`` times as much for the most updated replica and ``(1 - delta)`` for the least.

    Args:
        rule: with ``weighted=False`` all finite replicas weigh the same.
        batch_sizes: ``b_i`` in the mega-batch.
        updates: ``u_i`` in the mega-batch.
        norms: ``||w_i||_2 / |w|``, the norm over the number of parameters.
        settings: ``delta``, the threshold, ``renormalize``.

    Raises:
        ValueError: if the lists differ in length, or no replica is finite.

    Example:
        >>> printed = AdaptiveSettings(64, renormalize=False)
        >>> merge_weights(MERGES["adaptive"], [64, 64], [3, 1], [0.01, 0.01], printed).weights
        (0.8250000000000001, 0.225)
        >>> merge_weights(MERGES["adaptive"], [48, 16], [2, 2], [0.5, 0.5], AdaptiveSettings(64)).weights
        (0.75, 0.25)
        >>> merge_weights(MERGES["mean"], [48, 16], [3, 1], [0.01, 0.01], AdaptiveSettings(64)).weights
        (0.5, 0.5)
    """
    b = np.asarray(check_sizes("batch_sizes", batch_sizes, minimum=1), dtype=float)
    u = np.asarray(check_sizes("updates", updates, minimum=0, length=len(b)), dtype=float)
    norm = np.asarray(norms, dtype=float)
    if norm.shape != b.shape:
        raise ValueError(f"norms={list(norms)} has {len(norms)} entries for {len(b)} workers; give one per worker.")
    finite = np.isfinite(norm)
    if not finite.any():
        raise ValueError(
            "no replica is finite after this mega-batch: training has diverged on every worker. Lower the learning "
            "rate, or the momentum of the merge."
        )
    shares = np.ones(len(b)) if not rule.weighted else b if (u == u[0]).all() else u
    alpha = np.where(finite, shares, 0.0)
    alpha = np.where(finite, 1.0, 0.0) / finite.sum() if alpha.sum() == 0 else alpha / alpha.sum()
    perturbed = rule.weighted and len(b) > 1 and bool((norm < settings.perturbation_threshold).all())
    if perturbed:
        order = np.lexsort((-np.arange(len(b)), b, u))
        alpha[order[-1]] *= 1 + settings.perturbation
        alpha[order[0]] *= 1 - settings.perturbation
        alpha = alpha / alpha.sum() if settings.renormalize else alpha
    return MergeWeights(tuple(float(weight) for weight in alpha), perturbed)
