"""AdamW on the blocks that a compressed gradient touches.

``n`` steps without a gradient apply ``m -> a_n m``, ``v -> b_n v``, ``p -> W_n p - c_n m / (sqrt(v) + eps')`` with
``a_n(t) = beta_1 a_{n-1}(t - 1)``, ``b_n(t) = beta_2 b_{n-1}(t - 1)``, ``W_n(t) = (1 - l w) W_{n-1}(t - 1)``,
``c_n(t) = (1 - l w) c_{n-1}(t - 1) + l a_n(t) / sqrt(b_n(t)) sqrt(1 - beta_2^t) / (1 - beta_1^t)`` and ``eps' = eps
sqrt(1 - beta_2^t)``. This is exact, even if the betas change in every step, except for ``eps``, for which the value of
the last of these steps is used.

Momentum that is applied ahead is always the whole geometric sum, and the first moment is 0 afterwards.
"""

import numpy as np
import torch

from lightning_hetero.optim.sparse.deferred_updates import DeferredUpdates, Kind
from lightning_hetero.optim.sparse.kernel_interface import Group, KernelStep, Tensors
from lightning_hetero.optim.sparse.update_rule import State, UpdateRule, has_buffer

__all__ = ["AdamWRule"]


class AdamWRule(UpdateRule):
    """Rule of ``torch.optim.AdamW``; Args: see :class:`~lightning_hetero.optim.sparse.update_rule.UpdateRule`."""

    optimizer_class = torch.optim.AdamW
    counts_steps = True

    def has_state(self, group: Group, p: torch.Tensor, state: State) -> bool:
        """Return whether both moments exist, from at least one step."""
        return self.steps_taken(state) > 0 and has_buffer(p, state, "exp_avg") and has_buffer(p, state, "exp_avg_sq")

    def kind(self, group: Group) -> Kind | None:
        """Return ``"adamw"``."""
        return "adamw"

    def steps_taken(self, state: State) -> int:
        """Return torch's count."""
        return int(state.get("step", 0))

    def count_step(self, state: State) -> None:
        """Add to torch's count, which is a tensor."""
        state["step"] += 1

    def buffers(self, state: State, kind: Kind | None) -> list[torch.Tensor]:
        """Return both moments."""
        return [state["exp_avg"], state["exp_avg_sq"]]

    def defer_step(self, deferred: DeferredUpdates, group: Group, number: int) -> None:
        """Advance ``a``, ``b``, ``c`` and ``W`` by one step."""
        deferred.add_adamw(
            lr=group["lr"], decay=group["weight_decay"], betas=group["betas"], eps=group["eps"], number=number
        )

    def kept_share(self, group: Group, interval: torch.Tensor | None) -> torch.Tensor | None:
        """Return 0, if the first moment is applied ahead."""
        return torch.zeros(()) if self.momentum_mode == "ahead" else None

    def apply_deferred(self, parts: list[torch.Tensor], c: torch.Tensor, deferred: DeferredUpdates) -> None:
        """Apply ``W_n``, ``c_n``, ``a_n`` and ``b_n``."""
        p, m, v = parts
        p.mul_(c[0]).sub_((m * c[1]).div_(_root(v).add_(deferred.eps)))
        m.mul_(c[2])
        v.mul_(c[3])

    def apply_gradient(
        self, group: Group, parts: list[torch.Tensor], g: torch.Tensor, number: int, kept: torch.Tensor | None
    ) -> None:
        """Take torch's step, with its move multiplied by the geometric sum that is applied ahead."""
        (p, m, v), (beta1, beta2) = parts, group["betas"]
        ahead = self._ahead(group)
        p.mul_(1 - group["lr"] * group["weight_decay"])
        m.add_((g - m).mul_(1 - beta1))
        v.mul_(beta2).add_((g * g).mul_(1 - beta2))
        denominator = _root(v).mul_((1 - beta2**number) ** -0.5).add_(group["eps"])
        p.add_((m * (-group["lr"] * ahead / (1 - beta1**number))).div_(denominator))
        if ahead > 1:
            m.zero_()

    def _ahead(self, group: Group) -> float:
        """Return the sum over j of ``(beta_1 / sqrt(beta_2))^j``, which a touched block takes at once; else 1."""
        ratio = group["betas"][0] / group["betas"][1] ** 0.5
        return 1 / (1 - ratio) if self.momentum_mode == "ahead" and ratio < 1 else 1.0

    def apply_in_kernel(
        self, kernel: KernelStep[Tensors], tensors: Tensors, group: Group, number: int, deferred: DeferredUpdates | None
    ) -> None:
        """Hand the step to a kernel."""
        eps = 1.0 if deferred is None else deferred.eps
        kernel.adamw(tensors, group, number=number, ahead=self._ahead(group), deferred_eps=eps)


def _root(v: torch.Tensor) -> torch.Tensor:
    """Return the correctly rounded square root; torch's own on CPU may be off by one in the last place."""
    return torch.from_numpy(np.sqrt(v.numpy())) if v.is_cpu else v.sqrt()
