"""Requirements of elastic averaging on the local optimizers, and the suitable momentum of the global model."""

import logging
from collections.abc import Iterable
from typing import Any

from lightning_hetero.comm.agreement.control_plane import ControlPlane
from lightning_hetero.core.merging.settings import AdaptiveSettings

__all__ = ["agree_on_momentum", "outer_momentum", "require_mergeable", "unsupported_reason"]

log = logging.getLogger("lightning_hetero")


def outer_momentum(optimizers: Iterable[Any]) -> tuple[float, str]:
    """Choose the momentum ``gamma`` of the global model for the local optimizers, and say why (Adaptive SGD, Alg. 2).

    The paper's 0.9 is for SGD without momentum: in the long run the global model moves ten times as far as its
    replicas. That overshoots if the replicas have momentum of their own, or steps whose length does not depend on the
    length of the gradient.

    Args:
        optimizers: all optimizers of the model.

    Returns:
        ``gamma``, 0.9 or 0, and the reason.

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


def agree_on_momentum(optimizers: Iterable[Any], control: ControlPlane) -> float:
    """Choose the momentum of the global model by the local optimizers, the same on all ranks; collective.

    Raises:
        PlanMismatchError: if the optimizers of different ranks need different momenta.

    Example:
        >>> agree_on_momentum([], ControlPlane(rank=0, world_size=1))
        0.0
    """
    momentum, why = outer_momentum(optimizers)
    control.require_equal("the momentum of the global model", momentum)
    if control.rank == 0 and control.world_size > 1:
        log.info("momentum=%g of the global model: %s; momentum= chooses another", momentum, why)
    return momentum


def require_mergeable(optimizers: Iterable[Any]) -> None:
    """Refuse optimizers whose replicas cannot be merged.

    Raises:
        ValueError: if there is one, with advice.

    Example:
        >>> require_mergeable([])
    """
    reason = next(filter(None, map(unsupported_reason, optimizers)), None)
    if reason is not None:
        raise ValueError(f"{reason}.")


def unsupported_reason(optimizer: Any) -> str | None:
    """Return why replicas trained by this optimizer cannot be merged, with advice; ``None`` if they can.

    Example:
        >>> import torch
        >>> unsupported_reason(torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)) is None
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
