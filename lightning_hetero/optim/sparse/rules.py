"""SGD and AdamW that update only the blocks which a compressed gradient touches, and owe the others nothing.

A block that a gradient does not touch has a gradient of 0, with which a dense optimizer still moves it: momentum goes
on, weight decay shrinks it. Here that is owed until the block is touched again, and then paid in full before the new
gradient counts. What ``n`` steps without a gradient do is known in closed form:

- SGD: ``(p, b) -> M_t (p, b)`` with ``M_t = [[1 - l w, -l m], [w, m]]`` (learning rate ``l``, decay ``w``, momentum
  ``m``; Nesterov: ``[[1 - l w (1 + m), -l m^2], [w, m]]``). A product of such matrices for each ``n`` is kept, from
  step to step ``T_n(t) = M_t T_{n-1}(t - 1)``, so that rates may change in every step. Exact.
- AdamW: ``m -> a_n m``, ``v -> b_n v``, ``p -> W_n p - c_n m / (sqrt(v) + eps')`` with ``a_n(t) = beta_1 a_{n-1}(t -
  1)``, ``b_n(t) = beta_2 b_{n-1}(t - 1)``, ``W_n(t) = (1 - l w) W_{n-1}(t - 1)``, ``c_n(t) = (1 - l w) c_{n-1}(t - 1)
  + l a_n(t) / sqrt(b_n(t)) sqrt(1 - beta_2^t) / (1 - beta_1^t)`` and ``eps' = eps sqrt(1 - beta_2^t)``. Exact, also
  with betas that change in every step, but for ``eps``, which counts as in the last of these steps.

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
always owed; where momentum is paid ahead, with all that a dense step's decay would still do by way of momentum: ``p ->
(1 - l w / (1 - m)) p`` for each step. :meth:`~lightning_hetero.optim.sparse.lazy_update.SparseSteps.settle`, which
saving calls, pays all debts; what is paid in two parts comes to the same, and how long blocks wait is not forgotten. A
parameter whose gradient is ``None``, as of a layer that is frozen, sits out, as under torch's optimizers: it is paid
what it is owed by then, and stays as it is.

Every operation is rounded by itself and in the same order by torch's operations here, Numba's loops and Triton's
kernels, so that replicas are equal bit by bit whatever their devices.

A gradient comes as :class:`~lightning_hetero.compression.block_gradient.BlockGradient`, straight from the messages;
nothing here has the size of the model but parameters and state themselves. Torch's optimizer stays what it is: sparse
steps hang on its own hooks, so that schedulers, loss scalers and checkpoints see nothing else than before.
"""

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from lightning_hetero.optim.sparse.deferred_updates import Debts, Kind
from lightning_hetero.optim.sparse.kernel_interface import FINE
from lightning_hetero.optim.sparse.lazy_update import TWICE, SparseSteps

__all__ = ["STEPS", "SparseAdamW", "SparseSGD", "sparse_steps"]


class SGDSteps(SparseSteps):
    """Sparse steps of ``torch.optim.SGD``."""

    def _has_state(self, group: dict[str, Any], p: torch.Tensor) -> bool:
        return not group["momentum"] or self._lies_as(p, "momentum_buffer")

    def _kind(self, group: dict[str, Any]) -> Kind | None:
        if group["momentum"]:
            return "waits" if self.pay == "ahead" and group["momentum"] < 1 else "later"
        return "decay" if group["weight_decay"] else None

    def _add(self, debts: Debts, group: dict[str, Any], step: int) -> None:
        debts.add_sgd(
            lr=group["lr"],
            decay=group["weight_decay"],
            momentum=group["momentum"],
            nesterov=bool(group["nesterov"]),
        )

    def _buffers(self, p: torch.Tensor, kind: Kind | None) -> list[torch.Tensor]:
        return [self.state[p]["momentum_buffer"]] if kind in ("later", "waits") else []

    def _count(self, p: torch.Tensor) -> None:
        """SGD counts no steps."""

    def kept(self, group: dict[str, Any], p: torch.Tensor, places: torch.Tensor | None) -> torch.Tensor | None:
        """By the mean wait of each block."""
        if self._kind(group) != "waits":
            return None
        wait = self._waits_of(p, places)
        return torch.where(wait > 0, group["momentum"] ** (TWICE * (wait - 1 >> FINE)).to(torch.float32), 0.0)

    # what follows is rounded after each operation, as in the loops and kernels, so that all ranks get the same bits

    def _pay(self, parts: list[torch.Tensor], c: torch.Tensor, debts: Debts) -> None:
        p = parts[0]
        if debts.kind != "later":
            p.mul_(c[0])
            return
        before, b = p.clone(), parts[1]
        p.mul_(c[0]).add_(c[1] * b)
        b.mul_(c[3]).add_(c[2] * before)

    def _apply(
        self, group: dict[str, Any], parts: list[torch.Tensor], g: torch.Tensor, step: int, kept: torch.Tensor | None
    ) -> None:
        p, m = parts[0], group["momentum"]
        if group["weight_decay"]:
            g = g + p * group["weight_decay"]
        if m:
            parts[1].mul_(m).add_(g)
            g = g + parts[1] * m if group["nesterov"] else parts[1]
        p.sub_(g * group["lr"])
        if kept is not None:
            p.sub_((1 - kept) * _rest(group) * parts[1])
            parts[1].mul_(kept)

    def _in_kernel(
        self, marked: Any, tensors: list[Any], group: dict[str, Any], step: int, debts: Debts | None
    ) -> None:
        marked.sgd(tensors, group, rest=_rest(group) if debts is not None and debts.kind == "waits" else None)


def _rest(group: dict[str, Any]) -> float:
    """What momentum would still move a block by, sum over all j of ``l m^j``; ``m`` times it with Nesterov."""
    m = group["momentum"]
    return float(group["lr"] * m / (1 - m) * (m if group["nesterov"] else 1.0))


class AdamWSteps(SparseSteps):
    """Sparse steps of ``torch.optim.AdamW``."""

    def _has_state(self, group: dict[str, Any], p: torch.Tensor) -> bool:
        return self._steps_of(p) > 0 and self._lies_as(p, "exp_avg") and self._lies_as(p, "exp_avg_sq")

    def _kind(self, group: dict[str, Any]) -> Kind | None:
        return "adamw"

    def _steps_of(self, p: torch.Tensor) -> int:
        return int(self.state.get(p, {}).get("step", 0))

    def _lead(self, p: torch.Tensor) -> int:
        return self._steps_of(p) - self._steps

    def _count(self, p: torch.Tensor) -> None:
        self.state[p]["step"] += 1

    def _add(self, debts: Debts, group: dict[str, Any], step: int) -> None:
        debts.add_adamw(
            lr=group["lr"], decay=group["weight_decay"], betas=group["betas"], eps=group["eps"], number=step
        )

    def _buffers(self, p: torch.Tensor, kind: Kind | None) -> list[torch.Tensor]:
        return [self.state[p]["exp_avg"], self.state[p]["exp_avg_sq"]]

    def kept(self, group: dict[str, Any], p: torch.Tensor, places: torch.Tensor | None) -> torch.Tensor | None:
        """Nothing, if it is paid ahead."""
        return torch.zeros(()) if self.pay == "ahead" else None

    def _pay(self, parts: list[torch.Tensor], c: torch.Tensor, debts: Debts) -> None:
        p, m, v = parts
        p.mul_(c[0]).sub_((m * c[1]).div_(_root(v).add_(debts.small)))
        m.mul_(c[2])
        v.mul_(c[3])

    def _apply(
        self, group: dict[str, Any], parts: list[torch.Tensor], g: torch.Tensor, step: int, kept: torch.Tensor | None
    ) -> None:
        (p, m, v), (beta1, beta2) = parts, group["betas"]
        ahead = self._ahead(group)
        p.mul_(1 - group["lr"] * group["weight_decay"])
        m.add_((g - m).mul_(1 - beta1))
        v.mul_(beta2).add_((g * g).mul_(1 - beta2))
        denominator = _root(v).mul_((1 - beta2**step) ** -0.5).add_(group["eps"])
        p.add_((m * (-group["lr"] * ahead / (1 - beta1**step))).div_(denominator))
        if ahead > 1:
            m.zero_()

    def _ahead(self, group: dict[str, Any]) -> float:
        """Sum over j of ``(beta_1 / sqrt(beta_2))^j``: what a touched block takes at once, 1 if it is paid later."""
        ratio = group["betas"][0] / group["betas"][1] ** 0.5
        return 1 / (1 - ratio) if self.pay == "ahead" and ratio < 1 else 1.0

    def _in_kernel(
        self, marked: Any, tensors: list[Any], group: dict[str, Any], step: int, debts: Debts | None
    ) -> None:
        small = 1.0 if debts is None else debts.small
        marked.adamw(tensors, group, number=step, ahead=self._ahead(group), small=small)


def _root(v: torch.Tensor) -> torch.Tensor:
    """Square root, rounded correctly; torch's own on CPU may be off by one in the last place."""
    return torch.from_numpy(np.sqrt(v.numpy())) if v.is_cpu else v.sqrt()


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
    is a tensor; ``fused=True`` is refused.

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

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's.

        Raises:
            ValueError: if the group asks for fused steps.
        """
        _refuse_fused(self, param_group)
        super().add_param_group(param_group)


class SparseAdamW(torch.optim.AdamW):
    """``torch.optim.AdamW`` that touches only the blocks of a compressed gradient.

    It takes the arguments of ``torch.optim.AdamW`` and ``pay``: when the first moment moves a block that is no longer
    touched, ``"ahead"`` or ``"later"``. Steps are dense with ``amsgrad``, ``maximize``, ``capturable``, and
    a learning rate that is a tensor; ``fused=True`` is refused.

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

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's.

        Raises:
            ValueError: if the group asks for fused steps.
        """
        _refuse_fused(self, param_group)
        super().add_param_group(param_group)


def _refuse_fused(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> None:
    """A fused step would take gradients that a loss scaler has left scaled, and knows no blocks."""
    if group.get("fused", optimizer.defaults.get("fused")):
        raise ValueError(
            f"{type(optimizer).__name__} cannot go with fused=True: a fused step unscales gradients by itself and "
            "knows no blocks. Leave fused out, or take torch's own optimizer with sparse_optimizer=False."
        )


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
