"""What elastic averaging has to know of the local optimizers: whether they have momentum, and what they average."""

from collections.abc import Iterable
from typing import Any

from lightning_hetero.core.merging.settings import AdaptiveSettings

__all__ = ["outer_momentum", "why_not_merged"]


def outer_momentum(optimizers: Iterable[Any]) -> tuple[float, str]:
    """Momentum of the global model that suits the local optimizers, with the reason (Adaptive SGD, Alg. 2: ``gamma``).

    The paper's 0.9 is for SGD without momentum: in the long run the global model moves ten times as far as its
    replicas did. Where these have momentum of their own, or steps whose length does not depend on the gradient's, that
    overshoots.

    Args:
        optimizers: all that train the model.

    Returns:
        ``gamma``, 0.9 or 0, and why.

    Example:
        >>> import torch
        >>> weights = [torch.nn.Parameter(torch.zeros(1))]
        >>> outer_momentum([torch.optim.SGD(weights, lr=0.1)])
        (0.9, 'SGD has no momentum of its own')
        >>> outer_momentum([torch.optim.AdamW(weights)])
        (0.0, 'AdamW has momentum of its own or adapts its steps')
    """
    given = list(optimizers)
    if not given:
        return 0.0, "no optimizer is known"
    for optimizer in given:
        plain = type(optimizer).__name__ == "SGD" and not any(g.get("momentum") for g in optimizer.param_groups)
        if not plain:
            return 0.0, f"{type(optimizer).__name__} has momentum of its own or adapts its steps"
    return AdaptiveSettings.momentum, "SGD has no momentum of its own"


def why_not_merged(optimizer: Any) -> str | None:
    """Why replicas that an optimizer trains cannot be merged, with advice; ``None`` if they can.

    Example:
        >>> import torch
        >>> why_not_merged(torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)) is None
        True
    """
    modes = (getattr(optimizer, name, None) for name in ("train", "eval"))
    if all(callable(mode) for mode in modes):
        return (
            f"{type(optimizer).__name__} keeps averages of the weights in its state and exchanges them for the weights "
            "by train() and eval() (schedule-free). A merge would average the weights and not those, so that workers "
            "would end with different models. Use an optimizer without, or strategy='hetero_ddp'"
        )
    return None
