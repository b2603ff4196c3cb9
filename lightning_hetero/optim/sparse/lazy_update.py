"""Steps of an optimizer on the touched blocks only, hung on torch's own hooks; what they do is the optimizer's rule.

The rules, and what untouched blocks are owed, are in :mod:`lightning_hetero.optim.sparse.rules`. What is decided here
is the same on all ranks, whatever their devices and libraries: it depends on the gradients that all ranks were given,
never on how a rank got them.
"""

import logging
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from lightning_hetero.compression.block_gradient import BlockGradient, BlockMarks
from lightning_hetero.compression.host.encoder import needing_numba
from lightning_hetero.compression.layout import put_rows, take_rows
from lightning_hetero.core.validation import check_choice
from lightning_hetero.optim.sparse.block_history import BlockNotes, Cohort, recalled, waits_in
from lightning_hetero.optim.sparse.block_views import flat, is_plain, parts, wide
from lightning_hetero.optim.sparse.deferred_updates import Debts, Kind
from lightning_hetero.optim.sparse.kernel_interface import FINE, LONGEST, SHIFT, UNDER, waits

__all__ = ["SparseSteps"]

log = logging.getLogger("lightning_hetero")

Gradients = Mapping[torch.Tensor, BlockGradient | BlockMarks]
"""Gradient of each parameter in a step that is not dense."""

TWICE = 2
"""Momentum is paid ahead for so many times the mean wait of a block, because many a wait is longer than the mean, and
what a block has kept for a long one comes too late."""

AT_ONCE = 4096
"""Blocks that torch works on at a time, so that they stay in the cache from one operation to the next."""

SETTLED_AT_ONCE = 65536
"""The same where all blocks are settled, on any device."""


_NO_BLOCK = torch.zeros(0, dtype=torch.int64)


class SparseSteps(ABC):
    """Sparse steps of one optimizer of torch's: which blocks are touched, who owes what, and when to be dense.

    Without a source of gradients (:meth:`follow`), and in steps whose gradient is dense, the optimizer does what it
    always does. So it does with each parameter that it has no sparse form for: one that has no state yet, or whose
    gradient does not come from the source. A parameter without a gradient is left as it is, as torch leaves it: what
    it was owed by then is paid, and it owes nothing for the time that it sits out.

    Args:
        optimizer: of a class that has a rule; it keeps its identity, its state and its ``state_dict``.
        pay: when momentum moves a block that is no longer touched, ``"ahead"`` or ``"later"``.

    Example:
        >>> p = torch.nn.Parameter(torch.zeros(48))
        >>> optimizer = torch.optim.SGD([p], lr=0.1)
        >>> gradient = BlockGradient.of(p, torch.tensor([1]), torch.ones(1, 16))
        >>> from lightning_hetero.optim.sparse.rules import SGDSteps
        >>> SGDSteps(optimizer).follow(lambda: {p: gradient}, block=16)
        >>> p.grad = gradient.grad
        >>> optimizer.step()
        >>> p.detach().nonzero().view(-1).tolist() == list(range(16, 32))
        True
    """

    most = 0.3
    """Greatest density of gradients whose steps are sparse. Momentum that is paid ahead is other mathematics than a
    dense step, and better for gradients that come with error feedback (``benchmarks/convergence.py``), so speed is not
    what decides."""

    def __init__(self, optimizer: torch.optim.Optimizer, pay: str = "ahead") -> None:
        self.pay = check_choice("pay", pay, ("ahead", "later"))
        self._optimizer = weakref.ref(optimizer)
        self._source: Callable[[], Gradients | None] | None = None
        self._loops: Any = None
        self._triton: Any = None
        self._said: set[str] = set()
        self.block = 16
        self.forget()
        self._aside: dict[torch.Tensor, torch.Tensor | None] = {}
        optimizer.register_step_pre_hook(self._before)
        optimizer.register_step_post_hook(self._after)
        self.loaded: dict[str, Any] = {}
        """Notes of an earlier run, which the next step goes on with."""
        optimizer.register_state_dict_pre_hook(lambda _: self.settle())
        optimizer.register_load_state_dict_post_hook(lambda _: self.forget())

    @property
    def optimizer(self) -> Any:
        """The optimizer."""
        return self._optimizer()

    @property
    def state(self) -> Any:
        """Its state."""
        return self.optimizer.state

    def follow(self, source: Callable[[], Gradients | None] | None, block: int) -> None:
        """Take the gradients of each step from here.

        Args:
            source: gradient of each parameter, ``None`` if the step's is dense; no source for dense steps only.
            block: elements of a block.
        """
        self.settle()
        self.forget()
        self._source, self.block, self._triton = source, block, None
        numel = sum(p.numel() for p in self._parameters() if p.requires_grad and is_plain(p))
        self._loops = (
            None if source is None else needing_numba("lightning_hetero.optim.sparse.numba_jit.backend", numel)
        )
        if self._loops is not None:
            self._loops.warm()

    def forget(self) -> None:
        """Nothing is owed, and nothing is known of waits: state was loaded, or a step was dense."""
        self._notes: dict[torch.Tensor, BlockNotes] = {}
        self._debts: dict[Cohort, Debts] = {}
        self._recalled: dict[torch.Tensor, torch.Tensor] = {}
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
        """Step with the parameters that have blocks; of the others, and in a dense step of all, torch does the rest."""
        given = None if self._source is None else self._source()
        cohorts = {} if given is None else self._cohorts(given)
        taken = {p: cohort for cohort, members in cohorts.items() for p in members}
        for p in [p for p, notes in self._notes.items() if notes.cohort != taken.get(p)]:
            self._settle(p)
            del self._notes[p]
        for p in self._parameters():
            if p.grad is not None and p.grad.is_sparse and p not in taken:
                p.grad = p.grad.to_dense()
        if given is None:
            self.forget()
            self.loaded = {}
            return
        for number, (cohort, members) in enumerate(cohorts.items()):
            self._step_cohort(number, cohort, members, given)
        if self._triton is not None:
            self._triton.launch()
        self._steps, self._recalled = self._steps + 1, {}
        self._debts = {cohort: debts for cohort, debts in self._debts.items() if cohort in cohorts}
        if any(debts.steps >= LONGEST for debts in self._debts.values()):
            self.settle()
        for p in taken:
            self._aside[p], p.grad = p.grad, None

    def _cohorts(self, given: Gradients) -> dict[Cohort, list[torch.Tensor]]:
        """The parameters that have blocks in this step, by how they owe."""
        self._recall()
        cohorts: dict[Cohort, list[torch.Tensor]] = {}
        for number, group in enumerate(self.optimizer.param_groups):
            unknown, kind = self.unknown(group), self._kind(group)
            if unknown is not None:
                self._say(unknown)
                continue
            for p in group["params"]:
                gradient = None if p.grad is None else given.get(p)
                if gradient is not None and gradient.stands(p) and self._has_state(group, p):
                    cohorts.setdefault((number, kind, self._lead(p)), []).append(p)
        return cohorts

    def _say(self, unknown: str) -> None:
        if unknown not in self._said:
            self._said.add(unknown)
            log.warning("sparse steps have no form for %s: parameters of that group take dense ones", unknown)

    def _step_cohort(self, number: int, cohort: Cohort, members: list[torch.Tensor], given: Gradients) -> None:
        group, kind = self.optimizer.param_groups[cohort[0]], cohort[1]
        if kind is not None and cohort not in self._debts:
            self._debts[cohort] = Debts(kind)
        debts = self._debts.get(cohort)
        if debts is not None and debts.kind == "waits":
            debts.keep(group["momentum"] ** TWICE)
        small = None if debts is None else debts.rows.astype(np.float32)
        numbered: list[tuple[torch.Tensor, torch.Tensor, int, list[torch.Tensor]]] = []
        tables: dict[torch.device, Any] = {}
        step = self._steps_of(members[0]) + 1
        for p in members:
            gradient, buffers, notes = given[p], self._buffers(p, kind), self._notes_of(p, cohort)
            touched = _NO_BLOCK if notes.touched is None else notes.touched
            if isinstance(gradient, BlockMarks):
                if small is not None and p.device not in tables:
                    tables[p.device] = self._kernels().table(number, small, p.device)
                place = (gradient.marks, notes.touched, notes.paid, tables.get(p.device), self._steps)
                tensors = [flat(t.detach()) for t in (p, gradient.grad, *buffers)]
                self._in_kernel(self._kernels().marked(*place), tensors, group, step, debts)
            elif self._loops is not None and all(map(is_plain, (p, gradient.values, *buffers))):
                numbered.append((gradient.rows, touched, notes.paid, [p, gradient.values, *buffers]))
            else:
                self._step_blocks(p, gradient, debts, group, step)
        if numbered:
            *parts, tensors = map(list, zip(*numbered, strict=True))
            self._in_kernel(self._loops.Numbered(self.block, *parts, small, self._steps), tensors, group, step, debts)
        for p in members:
            self._count(p)
        if debts is not None:
            self._add(debts, group, step)

    def _step_blocks(
        self, p: torch.Tensor, gradient: BlockGradient, debts: Debts | None, group: dict[str, Any], step: int
    ) -> None:
        """Some touched blocks at a time, by torch's operations, in float32 or float64."""
        notes, dtype = self._notes[p], wide(p)
        noted = None if notes.touched is None else notes.touched.index_select(0, gradient.rows)
        owed = None if noted is None or debts is None or not debts.indebted else self._owed(noted, notes.paid)
        wait = waits(noted, self._steps) if noted is not None and debts is not None and debts.kind == "waits" else None
        kept = None
        if wait is not None and debts is not None:
            share = torch.from_numpy(debts.rows[:, 1]).to(p.device, dtype)
            expected = (wait.sub(1).clamp_(min=0) >> FINE).clamp_(max=len(share) - 1)
            kept = (share.index_select(0, expected) * (wait > 0)).unsqueeze(1)
        for view, rows, chosen in parts(p, gradient.rows, self.block):
            whole = [view(t) for t in (p, *self._buffers(p, notes.cohort[1]))]
            values = gradient.values[chosen, : view(p).shape[1]]
            owed_here, kept_here = (None if t is None else t[chosen] for t in (owed, kept))
            for begin in range(0, len(rows), AT_ONCE):
                some = slice(begin, begin + AT_ONCE)
                own = [take_rows(t, rows[some]).to(dtype) for t in whole]
                if debts is not None and owed_here is not None:
                    self._pay(own, debts.of(owed_here[some], dtype), debts)
                keeps = None if kept_here is None else kept_here[some]
                self._apply(group, own, values[some].to(dtype), step, keeps)
                for t, part in zip(whole, own, strict=True):
                    put_rows(t, rows[some], part.to(t.dtype))
        if notes.touched is not None and noted is not None:
            now = torch.full_like(noted, self._steps + 1) if wait is None else (wait << SHIFT).add_(self._steps + 1)
            notes.touched.index_copy_(0, gradient.rows, now)

    def _owed(self, noted: torch.Tensor, paid: int) -> torch.Tensor:
        return self._steps - (noted & UNDER).clamp_(min=paid)

    def _kernels(self) -> Any:
        """Triton's kernels, made for the first marks."""
        if self._triton is None:
            from lightning_hetero.optim.sparse.triton_gpu.backend import TritonSteps

            self._triton = TritonSteps(self.block)
        return self._triton

    # what is known of blocks

    def _notes_of(self, p: torch.Tensor, cohort: Cohort) -> BlockNotes:
        """Notes of a parameter that takes this step; one that joins owes nothing."""
        if p not in self._notes:
            touched = self._recalled.get(p) if cohort[1] == "waits" else None
            if touched is None and cohort[1] is not None:
                touched = torch.zeros(-(-p.numel() // self.block), dtype=torch.int64, device=p.device)
            self._notes[p] = BlockNotes(cohort, self._steps, touched)
        return self._notes[p]

    @torch.no_grad()
    def settle(self) -> None:
        """Pay what all blocks owe, so that parameters and state are those of a dense optimizer; waits are kept."""
        for p in self._notes:
            self._settle(p)
        self._debts = {}

    def _settle(self, p: torch.Tensor) -> None:
        notes, dtype = self._notes[p], wide(p)
        debts = self._debts.get(notes.cohort)
        there = debts is not None and (debts.kind == "decay" or bool(self.state.get(p)))  # unless the user cleared it
        if there and debts is not None and debts.indebted and notes.touched is not None and notes.paid < self._steps:
            owed = self._owed(notes.touched, notes.paid)
            for view, _, chosen in parts(p, torch.arange(len(owed), device=p.device), self.block):
                whole, owed_here = [view(t) for t in (p, *self._buffers(p, debts.kind))], owed[chosen]
                for begin in range(0, len(owed_here), SETTLED_AT_ONCE):
                    some = slice(begin, begin + SETTLED_AT_ONCE)
                    own = [t[some].to(dtype) for t in whole]
                    self._pay(own, debts.of(owed_here[some], dtype), debts)
                    for t, part in zip(whole, own, strict=True):
                        if t.dtype != dtype:
                            t[some] = part.to(t.dtype)
        notes.paid = self._steps

    def notes(self) -> dict[str, Any]:
        """What is known of waits once all is settled, for a checkpoint; a step goes on with it if it is ``loaded``."""
        return waits_in(self._notes, self._parameters(), self.block, self._steps)

    def _parameters(self) -> list[torch.Tensor]:
        return [p for group in self.optimizer.param_groups for p in group["params"]]

    def _recall(self) -> None:
        """Go on with the notes of an earlier run."""
        saved, self.loaded = self.loaded, {}
        if saved and saved["block"] == self.block and not self._notes:
            self._steps, self._recalled = saved["steps"], recalled(saved, self._parameters())

    # what each optimizer says of itself

    @staticmethod
    def unknown(group: dict[str, Any]) -> str | None:
        """An option of the group that only dense steps know, ``None`` if there is none."""
        for name in ("fused", "dampening", "maximize", "amsgrad", "capturable", "differentiable"):
            if group.get(name):
                return f"{name}={group[name]}"
        if "betas" in group and group["betas"][1] == 0:
            return f"betas={group['betas']}"
        return "a learning rate that is a tensor" if isinstance(group["lr"], torch.Tensor) else None

    @abstractmethod
    def _has_state(self, group: dict[str, Any], p: torch.Tensor) -> bool:
        """Whether dense steps have made the state that sparse ones go on with."""

    def _lies_as(self, p: torch.Tensor, name: str) -> bool:
        """Whether there is state of this name; its elements then lie in the parameter's order."""
        state = self.state.get(p, {})
        if state.get(name) is None:
            return False
        if state[name].stride() != p.stride():  # torch makes it after the first gradient
            state[name] = torch.empty_like(p, dtype=state[name].dtype).copy_(state[name])
        return True

    @abstractmethod
    def _kind(self, group: dict[str, Any]) -> Kind | None:
        """How blocks owe, ``None`` if a step without a gradient changes nothing."""

    @abstractmethod
    def _add(self, debts: Debts, group: dict[str, Any], step: int) -> None:
        """One more step to what is owed."""

    @abstractmethod
    def _buffers(self, p: torch.Tensor, kind: Kind | None) -> list[torch.Tensor]:
        """State of a parameter that has its shape, as far as its steps use it."""

    @abstractmethod
    def _pay(self, parts: list[torch.Tensor], c: torch.Tensor, debts: Debts) -> None:
        """Let blocks of parameter and buffers catch up, by the coefficients of what each owes."""

    @abstractmethod
    def _apply(
        self, group: dict[str, Any], parts: list[torch.Tensor], g: torch.Tensor, step: int, kept: torch.Tensor | None
    ) -> None:
        """The step of this number on blocks of parameter and buffers, with their gradient.

        Of its momentum each block keeps a share, if it is paid ahead by waits.
        """

    @abstractmethod
    def kept(self, group: dict[str, Any], p: torch.Tensor, places: torch.Tensor | None) -> torch.Tensor | None:
        """Share of their momentum that elements keep if the next step touches their blocks; ``None`` if paid later.

        Args:
            group: the parameter's group of settings.
            p: a parameter.
            places: its elements, in the order of memory; all of them without.
        """

    def _waits_of(self, p: torch.Tensor, places: torch.Tensor | None) -> torch.Tensor:
        """Mean waits of the blocks of elements."""
        self._recall()
        noted = self._notes[p].touched if p in self._notes else self._recalled.get(p)
        if noted is None:
            noted = torch.zeros(-(-p.numel() // self.block), dtype=torch.int64, device=p.device)
        noted = noted.repeat_interleave(self.block)[: p.numel()] if places is None else noted[places // self.block]
        return waits(noted, self._steps)

    @abstractmethod
    def _in_kernel(
        self, marked: Any, tensors: list[Any], group: dict[str, Any], step: int, debts: Debts | None
    ) -> None:
        """:meth:`_pay` and :meth:`_apply` of the touched blocks of parameter, gradient and buffers, in one kernel.

        Tensors are those of one parameter on a GPU, and of each parameter of the cohort on CPU.
        """

    def _steps_of(self, p: torch.Tensor) -> int:
        return 0

    def _lead(self, p: torch.Tensor) -> int:
        """By how many steps a parameter is ahead of the sparse steps, if it counts them."""
        return 0

    @abstractmethod
    def _count(self, p: torch.Tensor) -> None:
        """One more step of this parameter."""
