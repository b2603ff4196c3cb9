"""SGD and AdamW that update only the blocks which a compressed gradient touches, and owe the others nothing.

A block that a gradient does not touch has a gradient of 0, with which a dense optimizer still moves it: momentum goes
on, weight decay shrinks it. Here that is owed until the block is touched again, and then paid in full before the new
gradient counts. What ``n`` steps without a gradient do is known in closed form:

- SGD: ``(p, b) -> M_t (p, b)`` with ``M_t = [[1 - l w, -l m], [w, m]]`` (learning rate ``l``, decay ``w``, momentum
  ``m``; Nesterov: ``[[1 - l w (1 + m), -l m^2], [w, m]]``). A product of such matrices for each ``n`` is kept, from
  step to step ``T_n(t) = M_t T_{n-1}(t - 1)``, so that learning rates may change in every step. Exact.
- AdamW: ``m -> beta_1^n m``, ``v -> beta_2^n v``, ``p -> W_n p - c_n m / (sqrt(v) + eps')`` with ``W_n(t) = (1 - l w)
  W_{n-1}(t - 1)`` and ``c_n(t) = (1 - l w) c_{n-1}(t - 1) + l (beta_1 / sqrt(beta_2))^n sqrt(1 - beta_2^t) / (1 -
  beta_1^t)``. Exact but for ``eps``, which would count anew in every one of these steps.

StellaTrain (sec. 3.2) leaves untouched blocks as they are and calls the error small.

Between two touches the forward pass sees a block without what it owes, and with error feedback that may be a hundred
steps: gradients then go on asking for a move that momentum has made already, and training overshoots. So by default
momentum is paid *ahead*: a touched block takes at once all that its momentum would still move it (SGD: ``m / (1 - m)
l b``, the whole geometric sum), and its momentum is 0 afterwards. The sum of all moves is the dense optimizer's either
way. With ``pay="later"`` momentum is owed as above, and settled parameters equal the dense optimizer's. Weight decay is
always owed. :meth:`~SparseOptimizer.settle`, which saving calls, pays all debts.
"""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from lightning_hetero.core.validation import check_choice

__all__ = ["SparseAdamW", "SparseOptimizer", "SparseSGD", "Touched"]

Touched = Mapping[torch.Tensor, torch.Tensor]
"""Numbers of the touched blocks of each parameter, int64; on GPU a mask over its blocks, which the host never reads."""

LONGEST = 512
"""Steps that a block may owe; then all blocks are settled, in one dense pass."""

BREAK_EVEN = 0.08
"""Share of touched blocks from which a dense update is faster on CPU (``benchmarks/compression.py``)."""


class SparseOptimizer(torch.optim.Optimizer):
    """What both optimizers share: which blocks are touched, who owes what, and when to be dense.

    Without a source of touched blocks (:meth:`follow`), and in steps whose gradient is dense, it is torch's own
    optimizer, whose ``state_dict`` it has as well.
    """

    block = 16
    _touched: Callable[[], Touched | None] | None = None

    def __init__(self, params: Any, *args: Any, pay: str = "ahead", **kwargs: Any) -> None:
        super().__init__(params, *args, **kwargs)
        self.pay = check_choice("pay", pay, ("ahead", "later"))

    def follow(self, touched: Callable[[], Touched | None], block: int) -> None:
        """Take the touched blocks of each step from here.

        Args:
            touched: numbers of the touched blocks of each parameter, or masks over them, which Triton's kernels take
                (:mod:`lightning_hetero.optim.kernels`); ``None`` if the step's gradient is dense.
            block: elements of a block.
        """
        self._touched, self.block = touched, block

    def _debts(self) -> tuple[dict[torch.Tensor, torch.Tensor], dict[int, np.ndarray]]:
        """Steps up to which each block is settled, by parameter; and a table of what ``n`` steps do, by group."""
        if not hasattr(self, "_settled"):
            self._settled: dict[torch.Tensor, torch.Tensor] = {}
            self._tables: dict[int, np.ndarray] = {}
            self._steps = 0
        return self._settled, self._tables

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        """One step: touched blocks only if few are, all of them otherwise."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        touched = None if self._touched is None else self._touched()
        if touched is None or not self._worth(touched):
            self.settle()
            super().step()
            return loss
        self._debts()
        with torch.no_grad():
            for number, group in enumerate(self.param_groups):
                self._step_group(number, group, touched)
        self._steps += 1
        if self._steps >= LONGEST:
            self.settle()
        return loss

    def _worth(self, touched: Touched) -> bool:
        """Whether a sparse step is right: few blocks are touched, and nothing is in use that it has no form for."""
        parameters = [p for group in self.param_groups for p in group["params"]]
        if any(p.grad is None or p not in touched for p in parameters) or not self._ready(parameters):
            return False
        if any(_is_mask(touched[p]) for p in parameters):  # the kernels read a byte per block: never slower than dense
            return True
        rows = sum(-(-p.numel() // self.block) for p in parameters)
        return bool(sum(len(touched[p]) for p in parameters) <= BREAK_EVEN * rows)

    def _ready(self, parameters: list[torch.Tensor]) -> bool:
        raise NotImplementedError

    def _step_group(self, number: int, group: dict[str, Any], touched: Touched) -> None:
        settled, tables = self._debts()
        table = tables.setdefault(number, self._start(group))
        for p in group["params"]:
            rows = -(-p.numel() // self.block)
            if p not in settled:
                settled[p] = torch.zeros(rows, dtype=torch.int64, device=p.device)
            where = touched[p]
            if _is_mask(where):
                marked = self._kernels().marked(where, settled[p], table if self._owes(group) else None, self._steps)
                tensors = [_flat(t) for t in (p, p.grad, *self._buffers(p))]
                self._on_device(marked, tensors, group, self._steps_of(p) + 1)
                self._count(p)
                continue
            owed = self._steps - settled[p][where]
            for view, chosen in _parts(p, where, self.block):
                flat = [view(t) for t in (p, *self._buffers(p))]
                parts = [t.index_select(0, chosen.rows) for t in flat]
                if self._owes(group):
                    self._pay(parts, self._row(table, owed[chosen.mask], p))
                self._apply(group, parts, view(p.grad).index_select(0, chosen.rows), self._steps_of(p) + 1)
                for whole, part in zip(flat, parts, strict=True):
                    whole.index_copy_(0, chosen.rows, part)
            settled[p][where] = self._steps + 1
            self._count(p)
        tables[number] = self._extended(table, group, self._steps_of(group["params"][0]))

    def _kernels(self) -> Any:
        """Triton's kernels, made for the first mask."""
        if not hasattr(self, "_triton"):
            from lightning_hetero.optim.triton_step import TritonSteps

            self._triton = TritonSteps(self.block, LONGEST)
        return self._triton

    def settle(self) -> None:
        """Pay what all blocks owe, so that parameters and state are those of a dense optimizer."""
        settled, tables = self._debts()
        with torch.no_grad():
            for number, group in enumerate(self.param_groups):
                for p in group["params"]:
                    if p not in settled or number not in tables or not self._owes(group):
                        continue
                    where = torch.arange(len(settled[p]), device=p.device)
                    owed = self._steps - settled[p]
                    for view, chosen in _parts(p, where, self.block):
                        parts = [view(t) for t in (p, *self._buffers(p))]
                        self._pay(parts, self._row(tables[number], owed[chosen.mask], p))
        self._settled, self._tables, self._steps = {}, {}, 0

    def state_dict(self) -> dict[str, Any]:
        """Torch's own, of settled parameters."""
        self.settle()
        return super().state_dict()

    def _row(self, table: np.ndarray, owed: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
        """Coefficients of each block, shape ``(coefficients, blocks, 1)``."""
        rows = torch.from_numpy(table).to(p.device, p.dtype if p.dtype == torch.float64 else torch.float32)[owed]
        return rows.T.unsqueeze(-1)

    # what each optimizer says of itself

    def _owes(self, group: dict[str, Any]) -> bool:
        """Whether a step without a gradient changes anything."""
        return True

    def _start(self, group: dict[str, Any]) -> np.ndarray:
        raise NotImplementedError

    def _extended(self, table: np.ndarray, group: dict[str, Any], step: int) -> np.ndarray:
        raise NotImplementedError

    def _buffers(self, p: torch.Tensor) -> list[torch.Tensor]:
        raise NotImplementedError

    def _pay(self, parts: list[torch.Tensor], c: torch.Tensor) -> None:
        raise NotImplementedError

    def _apply(self, group: dict[str, Any], parts: list[torch.Tensor], g: torch.Tensor, step: int) -> None:
        raise NotImplementedError

    def _on_device(self, marked: Any, tensors: list[torch.Tensor], group: dict[str, Any], step: int) -> None:
        """:meth:`_pay` and :meth:`_apply` of the marked blocks of parameter, gradient and buffers, in one kernel."""
        raise NotImplementedError

    def _steps_of(self, p: torch.Tensor) -> int:
        return 0

    def _count(self, p: torch.Tensor) -> None: ...


class _Chosen:
    """Rows of one part of a parameter, and which of the touched blocks they are."""

    def __init__(self, rows: torch.Tensor, mask: torch.Tensor) -> None:
        self.rows, self.mask = rows, mask


def _parts(p: torch.Tensor, where: torch.Tensor, block: int) -> list[tuple[Callable[[torch.Tensor], Any], _Chosen]]:
    """Whole blocks of a parameter and its shorter last one, as views with the touched rows of each."""
    whole = p.numel() // block
    inside = where < whole

    def body(t: torch.Tensor) -> torch.Tensor:
        return _flat(t)[: whole * block].view(whole, block)

    def tail(t: torch.Tensor) -> torch.Tensor:
        return _flat(t)[whole * block :].view(1, -1)

    parts: list[tuple[Callable[[torch.Tensor], Any], _Chosen]] = [(body, _Chosen(where[inside], inside))]
    if whole * block < p.numel():
        parts.append((tail, _Chosen(where[~inside] - whole, ~inside)))
    return parts


def _is_mask(touched: torch.Tensor) -> bool:
    return touched.dtype == torch.bool


def _flat(t: torch.Tensor) -> torch.Tensor:
    """Elements in the order of memory."""
    return t.view(-1) if t.is_contiguous() else t.as_strided((t.numel(),), (1,))


class SparseSGD(SparseOptimizer, torch.optim.SGD):
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

    def _ready(self, parameters: list[torch.Tensor]) -> bool:
        plain = all(
            not group["dampening"] and not group["maximize"] and not isinstance(group["lr"], torch.Tensor)
            for group in self.param_groups
        )
        return plain and all(
            self.state.get(p, {}).get("momentum_buffer") is not None
            for group in self.param_groups
            for p in group["params"]
            if group["momentum"]
        )

    def _owes(self, group: dict[str, Any]) -> bool:
        return bool(group["weight_decay"] or (group["momentum"] and self.pay == "later"))

    def _start(self, group: dict[str, Any]) -> np.ndarray:
        return np.array([[1.0, 0.0, 0.0, 1.0]])

    def _extended(self, table: np.ndarray, group: dict[str, Any], step: int) -> np.ndarray:
        lr, w, m = group["lr"], group["weight_decay"], group["momentum"]
        ahead = 1 + m if group["nesterov"] else 1.0
        once = np.array([[1 - lr * w * ahead, -lr * m * (m if group["nesterov"] else 1.0)], [w, m]])
        return np.concatenate([self._start(group), (once @ table.reshape(-1, 2, 2)).reshape(-1, 4)])

    def _buffers(self, p: torch.Tensor) -> list[torch.Tensor]:
        buffer = self.state.get(p, {}).get("momentum_buffer")
        return [] if buffer is None else [buffer]

    def _pay(self, parts: list[torch.Tensor], c: torch.Tensor) -> None:
        if len(parts) == 1:
            parts[0].mul_(c[0])
            return
        p, b = parts
        before = p.clone()
        p.mul_(c[0]).add_(c[1] * b)
        b.mul_(c[3]).add_(c[2] * before)

    def _apply(self, group: dict[str, Any], parts: list[torch.Tensor], g: torch.Tensor, step: int) -> None:
        p, m = parts[0], group["momentum"]
        if group["weight_decay"]:
            g = g.add(p, alpha=group["weight_decay"])
        if m:
            parts[1].mul_(m).add_(g)
            g = g.add(parts[1], alpha=m) if group["nesterov"] else parts[1]
        p.add_(g, alpha=-group["lr"])
        rest = self._rest(group)
        if rest is not None:
            p.add_(parts[1], alpha=-rest)
            parts[1].zero_()

    def _rest(self, group: dict[str, Any]) -> float | None:
        """What a touched block takes of its momentum at once, sum over j of ``m^j b``; ``m`` times it with Nesterov."""
        m = group["momentum"]
        return group["lr"] * m / (1 - m) * (m if group["nesterov"] else 1.0) if m and self.pay == "ahead" else None

    def _on_device(self, marked: Any, tensors: list[torch.Tensor], group: dict[str, Any], step: int) -> None:
        marked.sgd(tensors, group, rest=self._rest(group))


class SparseAdamW(SparseOptimizer, torch.optim.AdamW):
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

    def _ready(self, parameters: list[torch.Tensor]) -> bool:
        plain = all(
            not group["amsgrad"]
            and not group["maximize"]
            and not group["capturable"]
            and not isinstance(group["lr"], torch.Tensor)
            for group in self.param_groups
        )
        return plain and all(len({self._steps_of(p) for p in g["params"]} - {0}) == 1 for g in self.param_groups)

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

    def _pay(self, parts: list[torch.Tensor], c: torch.Tensor) -> None:
        p, m, v = parts
        p.mul_(c[0]).sub_(c[1] * m / (v.sqrt() + EPSILON))
        m.mul_(c[2])
        v.mul_(c[3])

    def _apply(self, group: dict[str, Any], parts: list[torch.Tensor], g: torch.Tensor, step: int) -> None:
        (p, m, v), (beta1, beta2) = parts, group["betas"]
        p.mul_(1 - group["lr"] * group["weight_decay"])
        m.lerp_(g, 1 - beta1)
        v.mul_(beta2).addcmul_(g, g, value=1 - beta2)
        denominator = (v.sqrt() / (1 - beta2**step) ** 0.5).add_(group["eps"])
        ahead = self._ahead(group)
        p.addcdiv_(m, denominator, value=-group["lr"] * ahead / (1 - beta1**step))
        if ahead > 1:
            m.zero_()

    def _ahead(self, group: dict[str, Any]) -> float:
        """Sum over j of ``(beta_1 / sqrt(beta_2))^j``: what a touched block takes at once, 1 if it is paid later."""
        ratio = group["betas"][0] / group["betas"][1] ** 0.5
        return 1 / (1 - ratio) if self.pay == "ahead" and ratio < 1 else 1.0

    def _on_device(self, marked: Any, tensors: list[torch.Tensor], group: dict[str, Any], step: int) -> None:
        marked.adamw(tensors, group, number=step, ahead=self._ahead(group), small=EPSILON)


EPSILON = 1e-8
"""Added to the root of ``v`` in what AdamW owes, so that a block whose gradient was always 0 owes nothing."""
