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

from lightning_hetero.core.merging.settings import AdaptiveSettings
from lightning_hetero.core.validation import check_sizes

__all__ = ["MERGES", "MergeRule", "MergeWeights", "merge_weights"]

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
