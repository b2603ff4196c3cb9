"""Predicted move of a parameter in the next optimizer step, for stale gradients.

A stale gradient is applied to other weights than those it was computed at: in between, the optimizer steps once, with
momentum and with the all-reduced gradient that is still in flight. Both are nearly known, so the gradient can be
computed at the weights to which it will be applied (weight prediction, as for pipelines: Chen et al., SpecTrain, 2018).
"""

import torch

from lightning_hetero.optim.sparse.kernel_interface import Group

__all__ = ["expected_move", "foresees"]


def foresees(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether the next step of this optimizer can be predicted: that of SGD, Adam and AdamW, and subclasses.

    Example:
        >>> p = torch.nn.Parameter(torch.zeros(2))
        >>> foresees(torch.optim.AdamW([p])), foresees(torch.optim.Rprop([p]))
        (True, False)
    """
    return isinstance(optimizer, torch.optim.SGD | torch.optim.Adam | torch.optim.AdamW)


def expected_move(
    optimizer: torch.optim.Optimizer,
    group: Group,
    state: dict[str, torch.Tensor],
    gradient: torch.Tensor | None,
    *,
    kept: torch.Tensor | None = None,
) -> torch.Tensor | None:
    """Return what the next step subtracts from elements of a parameter; weight decay is left out.

    SGD: ``l b'`` with ``b' = m b + (1 - d) g`` (dampening ``d``); with Nesterov momentum ``l (g + m b')``. If momentum
    is applied ahead and a share ``k`` of it is kept, plus ``(1 - k) l m / (1 - m) b'``, ``m`` times that with Nesterov.
    AdamW: ``l m' / (sqrt(v') + eps)`` with both bias-corrected moments after the gradient; if the first moment is
    applied ahead, times ``1 / (1 - beta_1 / sqrt(beta_2))``.

    Args:
        optimizer: one for which :func:`foresees` is true.
        group: the parameter's group of settings.
        state: the optimizer's state of these elements.
        gradient: expected gradient of these elements, ``None`` if nothing is known of it.
        kept: share of their momentum that elements keep if sparse steps apply momentum ahead, ``None`` if they do not
            (:meth:`~lightning_hetero.optim.sparse.lazy_update.LazyUpdate.kept`).

    Returns:
        A new tensor, ``None`` if nothing moves.

    Example:
        >>> p = torch.nn.Parameter(torch.zeros(2))
        >>> optimizer = torch.optim.SGD([p], lr=0.1, momentum=0.5)
        >>> state = {"momentum_buffer": torch.tensor([2.0, 4.0])}
        >>> expected_move(optimizer, optimizer.param_groups[0], state, torch.tensor([1.0, 1.0])).tolist()
        [0.20000000298023224, 0.30000001192092896]
    """
    lr = float(group["lr"])
    gradient = -gradient if gradient is not None and group.get("maximize") else gradient
    if isinstance(optimizer, torch.optim.SGD):
        return _sgd(group, state.get("momentum_buffer"), gradient, lr, kept)
    if gradient is None and "exp_avg" not in state:
        return None
    beta1, beta2 = (float(beta) for beta in group["betas"])
    step = float(state["step"]) + 1.0 if "step" in state else 1.0
    base = state["exp_avg"] if gradient is None else gradient
    m, v = (state.get(name, torch.zeros_like(base)) for name in ("exp_avg", "exp_avg_sq"))
    m, v = m * beta1, v * beta2
    if gradient is not None:
        m, v = m.add_(gradient, alpha=1 - beta1), v.addcmul_(gradient, gradient, value=1 - beta2)
    ratio = beta1 / beta2**0.5
    lr *= 1 / (1 - ratio) if kept is not None and ratio < 1 else 1.0
    denominator = (v / (1 - beta2**step)).sqrt_().add_(group["eps"])
    return m.mul_(lr / (1 - beta1**step)).div_(denominator)


def _sgd(
    group: Group,
    buffer: torch.Tensor | None,
    gradient: torch.Tensor | None,
    lr: float,
    kept: torch.Tensor | None,
) -> torch.Tensor | None:
    momentum, damped = group["momentum"], 1.0 - group["dampening"]
    move = None if buffer is None or not momentum else momentum * buffer
    if gradient is not None:
        move = gradient.clone() if move is None else move.add_(gradient, alpha=damped)
    if move is None:
        return None
    ahead = 0.0 if kept is None else (1 - kept.to(move.dtype)) * (momentum / (1 - momentum))
    if group["nesterov"]:
        move = move * (1 + ahead) * momentum
        return (move if gradient is None else move.add_(gradient)).mul_(lr)
    return (move * (1 + ahead)).mul_(lr)
