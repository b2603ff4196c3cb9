"""Settings of elastic averaging."""

from dataclasses import dataclass

from lightning_hetero.core.keywords import checked_keywords
from lightning_hetero.core.validation import check_choice, check_int, check_number

__all__ = ["AdaptiveSettings"]


@checked_keywords
@dataclass(frozen=True)
class AdaptiveSettings:
    """Settings of Adaptive SGD, with the paper's defaults but for the last two.

    Args:
        max_batch_size: ``b_max``, with which every worker begins.
        min_batch_size: ``b_min``; default ``b_max / 8``, at least 1.
        beta: samples by which a size changes per update of deviation; default ``b_min / 2``.
        perturbation: ``delta``, 0 to 1.
        perturbation_threshold: ``pert_thr``: largest ``||w_i||_2 / |w|`` of a replica that counts as regular.
        momentum: ``gamma``, 0 to below 1.
        renormalize: whether weights are normalized to 1 after the perturbation too.
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
