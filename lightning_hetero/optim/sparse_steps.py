"""Steps of an optimizer on the touched blocks only, hung on torch's own hooks; what they do is the optimizer's rule.

The rules, and what untouched blocks are owed, are in :mod:`lightning_hetero.optim.sparse`.
"""

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from lightning_hetero.compression.encoder import needing_numba
from lightning_hetero.compression.gradients import BlockGradient, BlockMarks
from lightning_hetero.compression.layout import put_rows, take_rows
from lightning_hetero.core.validation import check_choice
from lightning_hetero.optim.kernel_step import FINE, SHIFT, UNDER, waits

__all__ = ["SparseSteps"]

Gradients = Mapping[torch.Tensor, BlockGradient | BlockMarks]
"""Gradient of each parameter in a step that is not dense."""

LONGEST = 512
"""Steps that a block may owe; then all blocks are settled, in one dense pass."""

MOST_AHEAD = 0.3
"""Share of touched blocks to which momentum is paid ahead. That is other mathematics than a dense step, and better for
gradients that come with error feedback (``benchmarks/convergence.py``), so speed is not what decides."""

WAITS, DEBTS = 1, 2
"""What is known of the blocks of a group: how long each waits, or what each owes as well."""

AT_ONCE = 4096
"""Blocks that torch works on at a time, so that they stay in the cache from one operation to the next."""

_NO_BLOCK = torch.zeros(0, dtype=torch.int64)


class SparseSteps(ABC):
    """Sparse steps of one optimizer of torch's: which blocks are touched, who owes what, and when to be dense.

    Without a source of gradients (:meth:`follow`), and in steps whose gradient is dense, the optimizer does what it
    always does.

    Args:
        optimizer: of a class that has a rule; it keeps its identity, its state and its ``state_dict``.
        pay: when momentum moves a block that is no longer touched, ``"ahead"`` or ``"later"``.

    Example:
        >>> p = torch.nn.Parameter(torch.zeros(48))
        >>> optimizer = torch.optim.SGD([p], lr=0.1)
        >>> gradient = BlockGradient.of(p, torch.tensor([1]), torch.ones(1, 16))
        >>> from lightning_hetero.optim.sparse import SGDSteps
        >>> SGDSteps(optimizer).follow(lambda: {p: gradient}, block=16)
        >>> p.grad = gradient.grad
        >>> optimizer.step()
        >>> p.detach().nonzero().view(-1).tolist() == list(range(16, 32))
        True
    """

    break_even: tuple[float, float]
    """Share of touched blocks from which a dense step is as fast on CPU, by torch's operations and by Numba's loops."""

    def __init__(self, optimizer: torch.optim.Optimizer, pay: str = "ahead") -> None:
        self.pay = check_choice("pay", pay, ("ahead", "later"))
        self._optimizer = weakref.ref(optimizer)
        self._source: Callable[[], Gradients | None] | None = None
        self._loops: Any = None
        self._owing: list[int] = []
        self.block = 16
        self.forget()
        self._aside: dict[torch.Tensor, torch.Tensor | None] = {}
        optimizer.register_step_pre_hook(self._before)
        optimizer.register_step_post_hook(self._after)
        self.loaded: dict[str, Any] = {}
        optimizer.register_state_dict_pre_hook(lambda _: self.pay_debts())
        optimizer.register_load_state_dict_post_hook(lambda _: self.forget())

    @property
    def most(self) -> float:
        """Share of touched blocks to which steps are sparse on CPU."""
        return MOST_AHEAD if self.pay == "ahead" else self.break_even[self._loops is not None]

    @property
    def optimizer(self) -> Any:
        """The optimizer."""
        return self._optimizer()

    @property
    def state(self) -> Any:
        """The optimizer's state."""
        return self.optimizer.state

    def follow(self, source: Callable[[], Gradients | None] | None, block: int) -> None:
        """Take the gradients of each step from here.

        Args:
            source: gradient of each parameter, ``None`` if the step's is dense; no source for dense steps only.
            block: elements of a block.
        """
        self.settle()
        self._source, self.block = source, block
        numel = sum(p.numel() for group in self.optimizer.param_groups for p in trained_in(group) if _is_plain(p))
        self._loops = None if source is None else needing_numba("lightning_hetero.optim.numba_step", numel)
        if self._loops is not None:
            self._loops.warm()

    def forget(self) -> None:
        """All blocks are settled: state was loaded."""
        self._noted: dict[torch.Tensor, torch.Tensor] = {}
        self._tables: dict[int, np.ndarray] = {}
        self._steps = 0

    # around the optimizer's own step

    def _before(self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Let the step begin with ours, behind the user's closure, which may be what computes the gradient."""
        if self._source is None:
            return None
        closure = args[1] if len(args) > 1 else kwargs.get("closure")

        def closure_and_ours() -> Any:
            loss = None if closure is None else closure()
            with torch.no_grad():
                self._step()
            return loss

        return args[:1], {**kwargs, "closure": closure_and_ours}

    def _after(self, *_: Any) -> None:
        for p, grad in self._aside.items():
            p.grad = grad
        self._aside = {}

    def _step(self) -> None:
        """Touched blocks only if few are, and then nothing is left for the optimizer; otherwise everything is."""
        parameters = [p for group in self.optimizer.param_groups for p in trained_in(group)]
        given = None if self._source is None else self._source()
        if given is None or not self._worth(parameters, given):
            self.settle()
            self.loaded = {}
            for p in parameters:
                p.grad = p.grad.to_dense() if p.grad is not None and p.grad.is_sparse else p.grad
            return
        owing = [self._owes(group) * (WAITS + self._indebted(group)) for group in self.optimizer.param_groups]
        if self.loaded.get("block") == self.block and DEBTS not in owing:
            self._go_on(self.loaded, owing)
        self.loaded = {}
        if owing != self._owing:  # a decay was switched on or off, say: what was owed by then is paid as it was owed
            self.settle()
            self._owing = owing
        for number, group in enumerate(self.optimizer.param_groups):
            self._step_group(number, group, given)
        self._steps += 1
        if self._steps >= LONGEST:
            self.settle()
        for p in parameters:
            self._aside[p], p.grad = p.grad, None

    def _worth(self, parameters: list[torch.Tensor], given: Gradients) -> bool:
        """Whether a sparse step is right: few blocks are touched, and nothing is in use that it has no form for."""
        if any(p not in given or not given[p].stands(p) for p in parameters) or not self._ready():
            return False
        rows, touched = sum(-(-p.numel() // self.block) for p in parameters), 0
        for p in parameters:
            gradient = given[p]
            if isinstance(gradient, BlockMarks):  # the kernels read a byte per block: never slower than a dense step
                return True
            touched += len(gradient.rows)
        return touched <= self.most * rows

    def _step_group(self, number: int, group: dict[str, Any], given: Gradients) -> None:
        owes, trained = self._owing[number], trained_in(group)
        table = self._tables.setdefault(number, self._start(group)) if owes else None
        small = None if table is None else table.astype(np.float32)
        numbered: list[tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]] = []
        for p in trained:
            gradient, buffers = given[p], self._buffers(p)
            if isinstance(gradient, BlockMarks):
                marked = self._kernels().marked(gradient.marks, self._noted_of(p), table, self._steps)
                tensors = [_flat(t.detach()) for t in (p, gradient.grad, *buffers)]
                self._in_kernel(marked, tensors, group, self._steps_of(p) + 1)
            elif self._loops is not None and all(map(_is_plain, (p, gradient.values, *buffers))):
                settled = self._noted_of(p) if owes else _NO_BLOCK
                numbered.append((gradient.rows, settled, [p, gradient.values, *buffers]))
            else:
                self._step_blocks(p, gradient, table, group)
        if numbered:
            rows, settled_of_all, tensors_of_all = (list(part) for part in zip(*numbered, strict=True))
            marked = self._loops.Numbered(self.block, rows, settled_of_all, small, self._steps)
            self._in_kernel(marked, tensors_of_all, group, self._steps_of(trained[0]) + 1)
        for p in trained:
            self._count(p)
        if table is not None and trained:
            self._tables[number] = self._extended(table, group, self._steps_of(trained[0]))

    def _step_blocks(
        self, p: torch.Tensor, gradient: BlockGradient, table: np.ndarray | None, group: dict[str, Any]
    ) -> None:
        """Some touched blocks at a time, by torch's operations."""
        noted = None if table is None else self._noted_of(p).index_select(0, gradient.rows)
        owed = self._steps - (noted & UNDER) if noted is not None and self._indebted(group) else None
        wait = waits(noted, self._steps) if noted is not None and self._by_waits(group) else None
        kept = None
        if table is not None and wait is not None:
            share = torch.from_numpy(table[:, 1]).to(p.device, p.dtype if p.dtype == torch.float64 else torch.float32)
            kept = (share.index_select(0, wait.sub(1).clamp_(min=0) >> FINE) * (wait > 0)).unsqueeze(1)
        for view, rows, chosen in _parts(p, gradient.rows, self.block):
            flat, values = [view(t) for t in (p, *self._buffers(p))], gradient.values[chosen, : view(p).shape[1]]
            owed_here, kept_here = (None if t is None else t[chosen] for t in (owed, kept))
            for begin in range(0, len(rows), AT_ONCE):
                some = slice(begin, begin + AT_ONCE)
                parts = [take_rows(t, rows[some]) for t in flat]
                if table is not None and owed_here is not None:
                    self._pay(parts, self._row(table, owed_here[some], p), group, self._steps_of(p))
                keeps = None if kept_here is None else kept_here[some]
                self._apply(group, parts, values[some], self._steps_of(p) + 1, keeps)
                for whole, part in zip(flat, parts, strict=True):
                    put_rows(whole, rows[some], part)
        if noted is not None:
            now = torch.full_like(noted, self._steps + 1) if wait is None else (wait << SHIFT).add_(self._steps + 1)
            self._noted_of(p).index_copy_(0, gradient.rows, now)

    def _noted_of(self, p: torch.Tensor) -> torch.Tensor:
        """Up to which step each block of a parameter is settled, and how long it waits (:data:`SHIFT`)."""
        if p not in self._noted:
            self._noted[p] = torch.zeros(-(-p.numel() // self.block), dtype=torch.int64, device=p.device)
        return self._noted[p]

    def _kernels(self) -> Any:
        """Triton's kernels, made for the first marks."""
        if not hasattr(self, "_triton"):
            from lightning_hetero.optim.triton_step import TritonSteps

            self._triton = TritonSteps(self.block, LONGEST)
        return self._triton

    def pay_debts(self) -> None:
        """Settle all blocks if one may owe anything; without debts, waits are kept."""
        if DEBTS in self._owing:
            self.settle()

    def notes(self) -> dict[str, Any]:
        """What is noted of all blocks, for a checkpoint; the next step goes on with it if it is ``loaded``."""
        noted = {number: self._noted[p].cpu() for number, p in self._numbered() if p in self._noted}
        return {"steps": self._steps, "block": self.block, "noted": noted}

    def _numbered(self) -> Any:
        return enumerate(p for group in self.optimizer.param_groups for p in group["params"])

    def _go_on(self, notes: dict[str, Any], owing: list[int]) -> None:
        self._steps, self._owing, noted = notes["steps"], owing, notes["noted"]
        self._noted = {p: noted[number].to(p.device) for number, p in self._numbered() if number in noted}
        for number, group in enumerate(self.optimizer.param_groups):
            self._tables[number] = self._start(group)
            for _ in range(self._steps):
                self._tables[number] = self._extended(self._tables[number], group, 0)

    @torch.no_grad()
    def settle(self) -> None:
        """Pay what all blocks owe, so that parameters and state are those of a dense optimizer."""
        for number, group in enumerate(self.optimizer.param_groups if self._steps else ()):
            for p in group["params"] if self._owing[number] == DEBTS else ():
                if p not in self._noted or number not in self._tables:
                    continue
                where = torch.arange(len(self._noted[p]), device=p.device)
                owed = self._steps - (self._noted[p] & UNDER)
                for view, _, chosen in _parts(p, where, self.block):
                    parts = [view(t) for t in (p, *self._buffers(p))]
                    self._pay(parts, self._row(self._tables[number], owed[chosen], p), group, self._steps_of(p))
        self.forget()

    def _row(self, table: np.ndarray, owed: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
        """Coefficients of each block, shape ``(coefficients, blocks, 1)``."""
        rows = torch.from_numpy(table).to(p.device, p.dtype if p.dtype == torch.float64 else torch.float32)[owed]
        return rows.T.unsqueeze(-1)

    def _ready(self) -> bool:
        """Whether all groups have options and state that sparse steps know."""
        return all(self.unknown(group) is None for group in self.optimizer.param_groups) and self._has_state()

    # what each optimizer says of itself

    @staticmethod
    def unknown(group: dict[str, Any]) -> str | None:
        """An option of the group that only dense steps know, ``None`` if there is none."""
        for name in ("dampening", "maximize", "amsgrad", "capturable", "differentiable"):
            if group.get(name):
                return f"{name}={group[name]}"
        return "a learning rate that is a tensor" if isinstance(group["lr"], torch.Tensor) else None

    @abstractmethod
    def _has_state(self) -> bool:
        """Whether dense steps have made the state that sparse ones go on with."""

    def _owes(self, group: dict[str, Any]) -> bool:
        """Whether a step without a gradient changes anything."""
        return True

    @abstractmethod
    def _start(self, group: dict[str, Any]) -> np.ndarray:
        """Coefficients of a block that owes nothing, shape ``(1, coefficients)``."""

    @abstractmethod
    def _extended(self, table: np.ndarray, group: dict[str, Any], step: int) -> np.ndarray:
        """The table of what is owed after each number of steps, with one more step."""

    @abstractmethod
    def _buffers(self, p: torch.Tensor) -> list[torch.Tensor]:
        """State of a parameter that has its shape."""

    @abstractmethod
    def _pay(self, parts: list[torch.Tensor], c: torch.Tensor, group: dict[str, Any], step: int) -> None:
        """Let blocks of parameter and buffers catch up, by the coefficients of what each owes."""

    @abstractmethod
    def _apply(
        self, group: dict[str, Any], parts: list[torch.Tensor], g: torch.Tensor, step: int, kept: torch.Tensor | None
    ) -> None:
        """The step of this number on blocks of parameter and buffers, with their gradient.

        Of its momentum each block keeps a share, if it is paid ahead and :meth:`_by_waits`.
        """

    def _indebted(self, group: dict[str, Any]) -> bool:
        """Whether blocks may owe something, not only wait."""
        return True

    def _by_waits(self, group: dict[str, Any]) -> bool:
        """Whether momentum is paid ahead up to when a block is expected to be touched again, not as a whole."""
        return False

    @abstractmethod
    def kept(self, group: dict[str, Any], p: torch.Tensor, places: torch.Tensor | None) -> torch.Tensor | None:
        """Share of their momentum that elements keep if the next step touches their blocks; ``None`` if paid later.

        Args:
            group: the parameter's group of settings.
            p: a parameter.
            places: its elements, in the order of memory; all of them without.
        """

    @abstractmethod
    def _in_kernel(self, marked: Any, tensors: list[Any], group: dict[str, Any], step: int) -> None:
        """:meth:`_pay` and :meth:`_apply` of the touched blocks of parameter, gradient and buffers, in one kernel.

        Tensors are those of one parameter on a GPU, and of each parameter of the group on CPU.
        """

    def _steps_of(self, p: torch.Tensor) -> int:
        return 0

    @abstractmethod
    def _count(self, p: torch.Tensor) -> None:
        """One more step of this parameter."""


def trained_in(group: dict[str, Any]) -> list[torch.Tensor]:
    return [p for p in group["params"] if p.requires_grad]


Chosen = torch.Tensor | slice
View = Callable[[torch.Tensor], torch.Tensor]


def _parts(p: torch.Tensor, where: torch.Tensor, block: int) -> list[tuple[View, torch.Tensor, Chosen]]:
    """Whole blocks of a parameter and its shorter last one: a view, the touched rows in it, and which these are."""
    whole = p.numel() // block

    def body(t: torch.Tensor) -> torch.Tensor:
        return _flat(t)[: whole * block].view(whole, block)

    def tail(t: torch.Tensor) -> torch.Tensor:
        return _flat(t)[whole * block :].view(1, -1)

    if whole * block == p.numel():
        return [(body, where, slice(None))]
    inside = where < whole
    return [(body, where[inside], inside), (tail, where[~inside] - whole, ~inside)]


def _is_plain(t: torch.Tensor) -> bool:
    return t.dtype == torch.float32 and t.is_cpu


def _flat(t: torch.Tensor) -> torch.Tensor:
    """Elements in the order of memory."""
    return t.view(-1) if t.is_contiguous() else t.as_strided((t.numel(),), (1,))
