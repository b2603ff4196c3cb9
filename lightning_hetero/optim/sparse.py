"""SGD and AdamW that update only the blocks which a compressed gradient touches, and owe the others nothing.

A block that a gradient does not touch has a gradient of 0, with which a dense optimizer still moves it: momentum goes
on, weight decay shrinks it. Here that is owed until the block is touched again, and then paid in full before the new
gradient counts. What ``n`` steps without a gradient do is known in closed form:

- SGD: ``(p, b) -> M_t (p, b)`` with ``M_t = [[1 - l w, -l m], [w, m]]`` (learning rate ``l``, decay ``w``, momentum
  ``m``; Nesterov: ``[[1 - l w (1 + m), -l m^2], [w, m]]``). A product of such matrices for each ``n`` is kept, from
  step to step ``T_n(t) = M_t T_{n-1}(t - 1)``, so that learning rates may change in every step. Exact.
- AdamW: ``m -> beta_1^n m``, ``v -> beta_2^n v``, ``p -> W_n p - c_n m / (sqrt(v) + eps')`` with ``W_n(t) = (1 - l w)
  W_{n-1}(t - 1)`` and ``c_n(t) = (1 - l w) c_{n-1}(t - 1) + l (beta_1 / sqrt(beta_2))^n sqrt(1 - beta_2^t) / (1 -
  beta_1^t)`` and ``eps' = eps sqrt(1 - beta_2^t)``. Exact but for ``eps``, which counts as in the last of these steps.

StellaTrain (sec. 3.2) leaves untouched blocks as they are and calls the error small.

Between two touches the forward pass sees a block without what it owes, and with error feedback that may be a hundred
steps: gradients then go on asking for a move that momentum has made already, and training overshoots. So by default
momentum is paid *ahead*: a touched block takes at once what its momentum would move it until it is touched again, and
the sum of all moves is the dense optimizer's. SGD goes by how long a block waits on average: with ``n`` steps between
two touches, it takes ``(m + ... + m^2n) l b``, and a momentum of ``m^2n b`` stays as it is until the next touch.
A block that is touched in every step then has plain momentum, with its smoothing and its stability; one that waits long
takes the whole geometric sum, ``m / (1 - m) l b``, and so does one that has not waited yet since all were settled. The
average gives the newest wait a weight of a quarter: after two touches in a row a block may well wait for a hundred
steps. AdamW takes the whole sum always, and its momentum is 0 afterwards.
With ``pay="later"`` momentum is owed as above, and settled parameters equal the dense optimizer's. Weight decay is
always owed. :meth:`~lightning_hetero.optim.sparse_steps.SparseSteps.settle`, which saving calls, pays all debts.

A gradient comes as :class:`~lightning_hetero.compression.gradients.BlockGradient`, straight from the messages; nothing
here has the size of the model but parameters and state themselves. Torch's optimizer stays what it is: sparse steps
hang on its own hooks, so that schedulers, loss scalers and checkpoints see nothing else than before.
"""

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from lightning_hetero.optim.kernel_step import FINE, waits
from lightning_hetero.optim.sparse_steps import SparseSteps, trained_in

__all__ = ["STEPS", "SparseAdamW", "SparseSGD", "sparse_steps"]


TWICE = 2
"""Momentum is paid ahead for so many times the mean wait of a block, because many a wait is longer than the mean, and
what a block has kept for a long one comes too late."""


class SGDSteps(SparseSteps):
    """Sparse steps of ``torch.optim.SGD``."""

    break_even = 0.15, 0.5

    def _count(self, p: torch.Tensor) -> None:
        """SGD counts no steps."""

    def _has_state(self) -> bool:
        return all(
            self.state.get(p, {}).get("momentum_buffer") is not None
            for group in self.optimizer.param_groups
            for p in trained_in(group)
            if group["momentum"]
        )

    def _owes(self, group: dict[str, Any]) -> bool:
        return bool(group["weight_decay"] or group["momentum"])

    def _start(self, group: dict[str, Any]) -> np.ndarray:
        return np.array([[1.0, 1.0 if self._by_waits(group) else 0.0, 0.0, 1.0]])

    def _indebted(self, group: dict[str, Any]) -> bool:
        return bool(group["weight_decay"]) or not self._by_waits(group)

    def _by_waits(self, group: dict[str, Any]) -> bool:
        """Whether momentum is paid ahead: the second coefficient is then the share of it that stays."""
        return bool(group["momentum"]) and self.pay == "ahead"

    def kept(self, group: dict[str, Any], p: torch.Tensor, places: torch.Tensor | None) -> torch.Tensor | None:
        """By the mean wait of each block."""
        if not self._by_waits(group):
            return None
        noted = self._noted_of(p)
        noted = noted.repeat_interleave(self.block)[: p.numel()] if places is None else noted[places // self.block]
        wait = waits(noted, self._steps)
        return torch.where(wait > 0, group["momentum"] ** (TWICE * (wait - 1 >> FINE)).to(torch.float32), 0.0)

    def _extended(self, table: np.ndarray, group: dict[str, Any], step: int) -> np.ndarray:
        lr, w, m = group["lr"], group["weight_decay"], group["momentum"]
        ahead = 1 + m if group["nesterov"] else 1.0
        once = np.array([[1 - lr * w * ahead, -lr * m * (m if group["nesterov"] else 1.0)], [w, m]])
        rows = (once @ table.reshape(-1, 2, 2)).reshape(-1, 4)
        if self._by_waits(group):
            rows[:, 1], rows[:, 3] = m**TWICE * table[:, 1], 1.0
        return np.concatenate([self._start(group), rows])

    def _buffers(self, p: torch.Tensor) -> list[torch.Tensor]:
        buffer = self.state.get(p, {}).get("momentum_buffer")
        return [] if buffer is None else [buffer]

    def _pay(self, parts: list[torch.Tensor], c: torch.Tensor, group: dict[str, Any], step: int) -> None:
        if len(parts) == 1:
            parts[0].mul_(c[0])
            return
        p, b = parts
        before = p.clone()
        p.mul_(c[0])
        if not self._by_waits(group):
            p.add_(c[1] * b)
        b.mul_(c[3]).add_(c[2] * before)

    def _apply(
        self, group: dict[str, Any], parts: list[torch.Tensor], g: torch.Tensor, step: int, kept: torch.Tensor | None
    ) -> None:
        p, m = parts[0], group["momentum"]
        if group["weight_decay"]:
            g = g.add(p, alpha=group["weight_decay"])
        if m:
            parts[1].mul_(m).add_(g)
            g = g.add(parts[1], alpha=m) if group["nesterov"] else parts[1]
        p.add_(g, alpha=-group["lr"])
        rest = self._rest(group)
        if rest is not None and kept is not None:
            p.sub_((1 - kept) * rest * parts[1])
            parts[1].mul_(kept)

    def _rest(self, group: dict[str, Any]) -> float | None:
        """What momentum would still move a block by, sum over all j of ``l m^j``; ``m`` times it with Nesterov."""
        m = group["momentum"]
        return group["lr"] * m / (1 - m) * (m if group["nesterov"] else 1.0) if self._by_waits(group) else None

    def _in_kernel(self, marked: Any, tensors: list[Any], group: dict[str, Any], step: int) -> None:
        marked.sgd(tensors, group, rest=self._rest(group))


class AdamWSteps(SparseSteps):
    """Sparse steps of ``torch.optim.AdamW``."""

    break_even = 0.5, 0.5

    def _has_state(self) -> bool:
        counts = [{self._steps_of(p) for p in trained_in(group)} for group in self.optimizer.param_groups]
        return all(0 not in count and len(count) <= 1 for count in counts)

    def _steps_of(self, p: torch.Tensor) -> int:
        return int(self.state.get(p, {}).get("step", 0))

    def _count(self, p: torch.Tensor) -> None:
        self.state[p]["step"] += 1

    def _start(self, group: dict[str, Any]) -> np.ndarray:
        return np.array([[1.0, 0.0, 1.0, 1.0]])

    def _extended(self, table: np.ndarray, group: dict[str, Any], step: int) -> np.ndarray:
        lr, (beta1, beta2) = group["lr"], group["betas"]
        shrink = 1 - lr * group["weight_decay"]
        n = np.arange(1, len(table) + 1)
        pull = lr * (beta1 / beta2**0.5) ** n * (1 - beta2**step) ** 0.5 / (1 - beta1**step)
        rows = np.stack([shrink * table[:, 0], shrink * table[:, 1] + pull, beta1**n, beta2**n], axis=1)
        return np.concatenate([self._start(group), rows])

    def _buffers(self, p: torch.Tensor) -> list[torch.Tensor]:
        return [self.state[p]["exp_avg"], self.state[p]["exp_avg_sq"]]

    def _pay(self, parts: list[torch.Tensor], c: torch.Tensor, group: dict[str, Any], step: int) -> None:
        p, m, v = parts
        p.mul_(c[0]).sub_(c[1] * m / (v.sqrt() + self._epsilon(group, step)))
        m.mul_(c[2])
        v.mul_(c[3])

    def kept(self, group: dict[str, Any], p: torch.Tensor, places: torch.Tensor | None) -> torch.Tensor | None:
        """Nothing, if it is paid ahead."""
        return torch.zeros(()) if self.pay == "ahead" else None

    def _apply(
        self, group: dict[str, Any], parts: list[torch.Tensor], g: torch.Tensor, step: int, kept: torch.Tensor | None
    ) -> None:
        (p, m, v), (beta1, beta2) = parts, group["betas"]
        p.mul_(1 - group["lr"] * group["weight_decay"])
        m.lerp_(g, 1 - beta1)
        v.mul_(beta2).addcmul_(g, g, value=1 - beta2)
        denominator = (v.sqrt() / (1 - beta2**step) ** 0.5).add_(group["eps"])
        ahead = self._ahead(group)
        p.addcdiv_(m, denominator, value=-group["lr"] * ahead / (1 - beta1**step))
        if ahead > 1:
            m.zero_()

    def _epsilon(self, group: dict[str, Any], step: int) -> float:
        """What is added to the root of ``v`` in what is owed."""
        return float(max(group["eps"] * (1 - group["betas"][1] ** step) ** 0.5, 1e-30))

    def _ahead(self, group: dict[str, Any]) -> float:
        """Sum over j of ``(beta_1 / sqrt(beta_2))^j``: what a touched block takes at once, 1 if it is paid later."""
        ratio = group["betas"][0] / group["betas"][1] ** 0.5
        return 1 / (1 - ratio) if self.pay == "ahead" and ratio < 1 else 1.0

    def _in_kernel(self, marked: Any, tensors: list[Any], group: dict[str, Any], step: int) -> None:
        small = self._epsilon(group, step - 1)
        marked.adamw(tensors, group, number=step, ahead=self._ahead(group), small=small)


STEPS: dict[type, type[SparseSteps]] = {torch.optim.SGD: SGDSteps, torch.optim.AdamW: AdamWSteps}
"""Optimizers that have sparse steps."""


def _as_of(theirs: type[torch.optim.Optimizer]) -> Callable[[Any], Any]:
    """For an ``__init__`` that hands its arguments on: say that they are those of another class, and ``pay``."""
    parameters = list(inspect.signature(theirs.__init__).parameters.values())
    pay = inspect.Parameter("pay", inspect.Parameter.KEYWORD_ONLY, default="ahead", annotation=str)

    def mark(init: Any) -> Any:
        init.__signature__ = inspect.Signature([*parameters, pay], return_annotation=None)
        return init

    return mark


class SparseSGD(torch.optim.SGD):
    """``torch.optim.SGD`` that touches only the blocks of a compressed gradient.

    It takes the arguments of ``torch.optim.SGD`` and ``pay``: when momentum moves a block that is no longer touched,
    ``"ahead"`` or ``"later"``. Steps are dense with dampening, ``maximize`` and a learning rate that
    is a tensor.

    Example:
        >>> p = torch.nn.Parameter(torch.ones(32))
        >>> optimizer = SparseSGD([p], lr=0.1, momentum=0.9)
        >>> p.grad = torch.ones(32)
        >>> optimizer.step()
        >>> round(p[0].item(), 6)
        0.9
    """

    @_as_of(torch.optim.SGD)
    def __init__(self, params: Any, *args: Any, pay: str = "ahead", **kwargs: Any) -> None:
        super().__init__(params, *args, **kwargs)
        self.sparse = SGDSteps(self, pay)


class SparseAdamW(torch.optim.AdamW):
    """``torch.optim.AdamW`` that touches only the blocks of a compressed gradient.

    It takes the arguments of ``torch.optim.AdamW`` and ``pay``: when the first moment moves a block that is no longer
    touched, ``"ahead"`` or ``"later"``. Steps are dense with ``amsgrad``, ``maximize``, ``capturable``, and
    a learning rate that is a tensor.

    Example:
        >>> p = torch.nn.Parameter(torch.ones(32))
        >>> optimizer = SparseAdamW([p], lr=0.1, weight_decay=0.0)
        >>> p.grad = torch.ones(32)
        >>> optimizer.step()
        >>> round(p[0].item(), 6)
        0.9
    """

    @_as_of(torch.optim.AdamW)
    def __init__(self, params: Any, *args: Any, pay: str = "ahead", **kwargs: Any) -> None:
        super().__init__(params, *args, **kwargs)
        self.sparse = AdamWSteps(self, pay)


def sparse_steps(optimizer: torch.optim.Optimizer, pay: str = "ahead") -> SparseSteps:
    """Sparse steps for an optimizer of torch's own, which stays the same object.

    Raises:
        ValueError: if it is none of :data:`STEPS`, or has an option that only dense steps know.
    """
    steps = STEPS.get(type(optimizer))
    allowed = ", ".join(f"torch.optim.{kind.__name__}" for kind in STEPS)
    if steps is None:
        raise ValueError(
            f"{type(optimizer).__name__} has no sparse steps; allowed are {allowed}. Use one of them, or set "
            "sparse_optimizer=False."
        )
    for group in optimizer.param_groups:
        unknown = "fused=True" if group.get("fused") else steps.unknown(group)
        if unknown is not None:
            raise ValueError(
                f"sparse steps of {type(optimizer).__name__} cannot go with {unknown}. Leave it out, or set "
                "sparse_optimizer=False."
            )
    return steps(optimizer, pay)
