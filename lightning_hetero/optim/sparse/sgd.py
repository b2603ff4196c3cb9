"""SGD with momentum on the blocks that a compressed gradient touches.

Each step without a gradient applies ``(p, b) -> M_t (p, b)``, with ``M_t = [[1 - l w, -l m], [w, m]]`` (learning rate
``l``, decay ``w``, momentum ``m``; Nesterov: ``[[1 - l w (1 + m), -l m^2], [w, m]]``). The product of these matrices is
kept for each number ``n`` of steps, and updated by ``T_n(t) = M_t T_{n-1}(t - 1)``. So rates may change in every step,
and the result is exact.

Momentum that is applied ahead follows the mean interval of a block. With ``n`` steps between two touches, a touched
block takes ``(m + ... + m^2n) l b``, and a momentum of ``m^2n b`` stays unchanged until the next touch. A block that is
touched in every step then has plain momentum, with its smoothing and its stability. A block with a long interval, or
one that is not known yet, takes the whole geometric sum, ``m / (1 - m) l b``. The mean gives the newest interval a
weight of a quarter: after two touches in a row a block may well be skipped for a hundred steps. Weight decay is
deferred together with its effect through momentum in dense steps: ``p -> (1 - l w / (1 - m)) p`` per step.
"""

import torch

from lightning_hetero.optim.sparse.deferred_updates import DeferredUpdates, Kind
from lightning_hetero.optim.sparse.kernel_interface import Group, KernelStep, Tensors, whole_intervals
from lightning_hetero.optim.sparse.update_rule import State, UpdateRule, has_buffer

__all__ = ["SGDRule"]


class SGDRule(UpdateRule):
    """Rule of ``torch.optim.SGD``; Args: see :class:`~lightning_hetero.optim.sparse.update_rule.UpdateRule`."""

    optimizer_class = torch.optim.SGD
    intervals_ahead = 2
    """Mean intervals for which momentum is applied ahead. More than one, because many intervals are longer than the
    mean, and momentum that a block keeps over a long one comes too late."""

    def has_state(self, group: Group, p: torch.Tensor, state: State) -> bool:
        """Return whether the momentum buffer exists, if there has to be one."""
        return not group["momentum"] or has_buffer(p, state, "momentum_buffer")

    def kind(self, group: Group) -> Kind | None:
        """Return ``"interval"`` or ``"later"`` with momentum; a momentum of 1 has no sum to apply ahead."""
        if group["momentum"]:
            return "interval" if self.momentum_mode == "ahead" and group["momentum"] < 1 else "later"
        return "decay" if group["weight_decay"] else None

    def buffers(self, state: State, kind: Kind | None) -> list[torch.Tensor]:
        """Return the momentum, if there is one."""
        return [state["momentum_buffer"]] if kind in ("later", "interval") else []

    def begin_step(self, deferred: DeferredUpdates, group: Group) -> None:
        """Keep the share ``m^2`` of the momentum for each step of an interval."""
        if deferred.kind == "interval":
            deferred.keep(group["momentum"] ** self.intervals_ahead)

    def defer_step(self, deferred: DeferredUpdates, group: Group, number: int) -> None:
        """Multiply the coefficients by ``M_t``."""
        deferred.add_sgd(
            lr=group["lr"],
            decay=group["weight_decay"],
            momentum=group["momentum"],
            nesterov=bool(group["nesterov"]),
        )

    def kept_share(self, group: Group, interval: torch.Tensor | None) -> torch.Tensor | None:
        """Return ``m^2n`` of the mean interval ``n``, 0 where none is known."""
        if interval is None:
            return None
        steps = whole_intervals(interval)
        return torch.where(interval > 0, group["momentum"] ** (self.intervals_ahead * steps).to(torch.float32), 0.0)

    # Each operation below is rounded by itself, as in the loops and kernels, so that all ranks get the same bits.

    def apply_deferred(self, parts: list[torch.Tensor], c: torch.Tensor, deferred: DeferredUpdates) -> None:
        """Apply ``p = c0 p + c1 b`` and ``b = c2 p + c3 b``; decay alone unless momentum is deferred."""
        p = parts[0]
        if deferred.kind != "later":
            p.mul_(c[0])
            return
        before, b = p.clone(), parts[1]
        p.mul_(c[0]).add_(c[1] * b)
        b.mul_(c[3]).add_(c[2] * before)

    def apply_gradient(
        self, group: Group, parts: list[torch.Tensor], g: torch.Tensor, number: int, kept: torch.Tensor | None
    ) -> None:
        """Take torch's step, then apply the momentum of later steps ahead, except for the share that is kept."""
        p, m = parts[0], group["momentum"]
        if group["weight_decay"]:
            g = g + p * group["weight_decay"]
        if m:
            parts[1].mul_(m).add_(g)
            g = g + parts[1] * m if group["nesterov"] else parts[1]
        p.sub_(g * group["lr"])
        if kept is not None:
            p.sub_((1 - kept) * _remaining(group) * parts[1])
            parts[1].mul_(kept)

    def apply_in_kernel(
        self, kernel: KernelStep[Tensors], tensors: Tensors, group: Group, number: int, deferred: DeferredUpdates | None
    ) -> None:
        """Hand the step to a kernel."""
        ahead = deferred is not None and deferred.kind == "interval"
        kernel.sgd(tensors, group, remaining=_remaining(group) if ahead else None)


def _remaining(group: Group) -> float:
    """Return the factor of the move that momentum would still make: sum of ``l m^j``, times ``m`` with Nesterov."""
    m = group["momentum"]
    return float(group["lr"] * m / (1 - m) * (m if group["nesterov"] else 1.0))
