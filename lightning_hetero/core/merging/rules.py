"""Elastic averaging for irregular work: batch sizes that equalize updates, and merging of replicas (Adaptive SGD).

Each worker trains its own replica on batches that it takes one by one, ``u_i`` of them in a mega-batch. At the end of
the mega-batch, batch sizes are scaled (A Alg. 1) and the replicas are merged (A Alg. 2): ``w' = sum_i alpha_i w_i +
gamma (w - w_p)``. A merge rule is a subclass of :class:`MergeRule` and a line of :data:`MERGES`.

Differences from the paper, which was written for workers that differ by a third:

- Scaling (A Alg. 1) never goes beyond the size at which the worker would have done ``mean(u)`` updates, because
  ``beta`` alone overshoots or never moves; and the largest size is always ``b_max``, because noise would shrink all
  sizes (``damped=False`` is as printed).
- Weights are normalized after the perturbation too. Otherwise the weights of unequal workers sum to more than 1, and
  each merge inflates the model (``renormalize=False`` is as printed).
- The batch size breaks ties for the most and the least updated replica.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from lightning_hetero.core.merging.settings import AdaptiveSettings
from lightning_hetero.core.validation import check_sizes

__all__ = ["MERGES", "AdaptiveMerge", "CrossbowMerge", "GlobalModel", "MergeRule", "MergeWeights", "MomentumMerge"]

Array = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class MergeWeights:
    """Weights of the replicas in a merge.

    Args:
        weights: ``alpha_i``; they sum to 1 unless perturbed and not normalized.
        perturbed: whether the most updated replica got more weight, and the least updated less.

    Example:
        >>> MergeWeights((0.66, 0.36), perturbed=True).weights
        (0.66, 0.36)
    """

    weights: tuple[float, ...]
    perturbed: bool = False


class GlobalModel(NamedTuple):
    """A tensor of the global model, as the last two merges left it.

    Args:
        now: ``w``.
        before: ``w_p``.

    Example:
        >>> GlobalModel(torch.tensor(3.0), torch.tensor(1.0)).moved.item()
        2.0
    """

    now: torch.Tensor
    before: torch.Tensor

    @property
    def moved(self) -> torch.Tensor:
        """Change ``w - w_p`` by the last merge."""
        return self.now - self.before


class MergeRule:
    """The plain mean of all finite replicas, from which each of them starts anew; the base of all merge rules.

    The class attributes say what a rule uses: a replica keeps no tensors in vain, and users learn which settings have
    no effect.

    Attributes:
        scales: whether batch sizes follow updates (A Alg. 1).
        momentum: whether the global model moves on by ``gamma (w - w_p)``.
        elastic: whether a replica keeps a part of its distance to the global model.

    Example:
        >>> MERGES["mean"].weights([48, 16], [3, 1], [0.01, 0.01], AdaptiveSettings(64)).weights
        (0.5, 0.5)
    """

    scales: ClassVar[bool] = False
    momentum: ClassVar[bool] = False
    elastic: ClassVar[bool] = False

    def weights(
        self,
        batch_sizes: Sequence[int],
        updates: Sequence[int],
        norms: Sequence[float],
        settings: AdaptiveSettings,
    ) -> MergeWeights:
        """Return the weights of the replicas; a replica that is not finite gets 0, and the others share its weight.

        Args:
            batch_sizes: ``b_i`` in the mega-batch.
            updates: ``u_i`` in the mega-batch.
            norms: ``||w_i||_2 / |w|``, the norm over the number of parameters.
            settings: of Adaptive SGD.

        Raises:
            ValueError: if the lists differ in length, or no replica is finite.
        """
        b, _, norm = _checked(batch_sizes, updates, norms)
        return MergeWeights(_as_floats(_normalised(np.ones(len(b)), norm)))

    def update(
        self,
        local: torch.Tensor,
        merged: torch.Tensor,
        previous: GlobalModel,
        *,
        momentum: float,
        world_size: int,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return a tensor of the new global model, and the tensor with which this replica continues.

        Args:
            local: tensor of this replica.
            merged: ``sum_i alpha_i w_i`` over all replicas.
            previous: tensor of the global model before this merge.
            momentum: ``gamma``.
            world_size: ``W``.

        Returns:
            The global tensor; and the replica's own one, ``None`` where it continues with the global one.

        Example:
            >>> previous = GlobalModel(torch.tensor(3.0), torch.tensor(1.0))
            >>> local, merged, given = torch.tensor(5.0), torch.tensor(4.0), {"momentum": 0.5, "world_size": 4}
            >>> for name in ("adaptive", "elastic", "crossbow", "mean"):
            ...     now, own = MERGES[name].update(local, merged, previous, **given)
            ...     print(name, now.item(), None if own is None else own.item())
            adaptive 5.0 None
            elastic 5.0 None
            crossbow 5.0 4.5
            mean 4.0 None
        """
        return merged, None


class MomentumMerge(MergeRule):
    """Elastic averaging with momentum: the mean of the replicas plus ``gamma`` times the last change.

    Example:
        >>> MomentumMerge.momentum, MomentumMerge.elastic
        (True, False)
    """

    momentum = True

    def update(
        self,
        local: torch.Tensor,
        merged: torch.Tensor,
        previous: GlobalModel,
        *,
        momentum: float,
        world_size: int,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return ``w' = sum_i alpha_i w_i + gamma (w - w_p)``, from which the replica starts anew."""
        return merged + momentum * previous.moved, None


class CrossbowMerge(MomentumMerge):
    """Synchronous model averaging (CROSSBOW): a replica keeps ``1 - 1 / W`` of its distance to the global model.

    ``w_i -= (w_i - w) / W`` and ``w += sum_i (w_i - w) / W + gamma (w - w_p)``.

    Example:
        >>> CrossbowMerge.elastic
        True
    """

    elastic = True

    def update(
        self,
        local: torch.Tensor,
        merged: torch.Tensor,
        previous: GlobalModel,
        *,
        momentum: float,
        world_size: int,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Move the global model with momentum, and the replica by a ``W``-th of its distance to the former model."""
        merged, _ = super().update(local, merged, previous, momentum=momentum, world_size=world_size)
        return merged, local - 1.0 / world_size * (local - previous.now)


class AdaptiveMerge(MomentumMerge):
    """Adaptive SGD: weights and batch sizes follow updates (A Alg. 1 and 2).

    Example:
        >>> printed, rule = AdaptiveSettings(64, renormalize=False), MERGES["adaptive"]
        >>> rule.weights([64, 64], [3, 1], [0.01, 0.01], printed).weights
        (0.8250000000000001, 0.225)
        >>> rule.weights([48, 16], [2, 2], [0.5, 0.5], AdaptiveSettings(64)).weights
        (0.75, 0.25)
    """

    scales = True

    def weights(
        self,
        batch_sizes: Sequence[int],
        updates: Sequence[int],
        norms: Sequence[float],
        settings: AdaptiveSettings,
    ) -> MergeWeights:
        """Return the weights of A Alg. 2, lines 1-7, for the finite replicas.

        ``alpha_i = b_i / sum(b)`` if all did the same number of updates, else ``u_i / sum(u)``. Then, if ``||w_i||_2 /
        |w| < pert_thr`` for all, ``alpha_i`` of the most updated replica is multiplied by ``1 + delta`` and that of the
        least updated by ``1 - delta``. Arguments as :meth:`MergeRule.weights`.
        """
        b, u, norm = _checked(batch_sizes, updates, norms)
        alpha = _normalised(b if (u == u[0]).all() else u, norm)
        perturbed = len(b) > 1 and bool((norm < settings.perturbation_threshold).all())
        if perturbed:
            order = np.lexsort((-np.arange(len(b)), b, u))
            alpha[order[-1]] *= 1 + settings.perturbation
            alpha[order[0]] *= 1 - settings.perturbation
            alpha = alpha / alpha.sum() if settings.renormalize else alpha
        return MergeWeights(_as_floats(alpha), perturbed)


MERGES: dict[str, MergeRule] = {
    "adaptive": AdaptiveMerge(),
    "elastic": MomentumMerge(),
    "crossbow": CrossbowMerge(),
    "mean": MergeRule(),
}
"""Merge rules by the name that users give to ``merge=``."""


def _checked(batch_sizes: Sequence[int], updates: Sequence[int], norms: Sequence[float]) -> tuple[Array, Array, Array]:
    b = np.asarray(check_sizes("batch_sizes", batch_sizes, minimum=1), dtype=float)
    u = np.asarray(check_sizes("updates", updates, minimum=0, length=len(b)), dtype=float)
    norm = np.asarray(norms, dtype=float)
    if norm.shape != b.shape:
        raise ValueError(f"norms={list(norms)} has {len(norms)} entries for {len(b)} workers; give one per worker.")
    if not np.isfinite(norm).any():
        raise ValueError(
            "no replica is finite after this mega-batch: training has diverged on every worker. Lower the learning "
            "rate, or the momentum of the merge."
        )
    return b, u, norm


def _normalised(shares: Array, norm: Array) -> Array:
    """Return shares that sum to 1, with 0 for replicas that are not finite; equal ones if all the rest are 0."""
    finite = np.isfinite(norm)
    alpha = np.where(finite, shares, 0.0)
    return np.asarray(np.where(finite, 1.0, 0.0) / finite.sum() if alpha.sum() == 0 else alpha / alpha.sum())


def _as_floats(alpha: Array) -> tuple[float, ...]:
    return tuple(float(weight) for weight in alpha)
