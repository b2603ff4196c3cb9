"""Lazy updates of a torch optimizer: steps on the touched blocks only, made from its own hooks.

A step follows the optimizer's rule (:mod:`lightning_hetero.optim.sparse.update_rule`); torch's operations, Numba's
loops or Triton's kernels calculate it. Decisions here are the same on all ranks, whatever their devices and libraries:
they depend on the gradients that all ranks were given, never on how a rank got them.
"""

import logging
import weakref
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from lightning_hetero.compression.block_gradient import BlockGradient, BlockMarks
from lightning_hetero.compression.host.encoder import needing_numba
from lightning_hetero.optim.sparse.block_history import BlockHistory, Cohort, Histories
from lightning_hetero.optim.sparse.deferred_updates import DeferredUpdates
from lightning_hetero.optim.sparse.kernel_interface import MAX_DEFERRED_STEPS, Group
from lightning_hetero.optim.sparse.torch_backend import CohortStep, flat_memory, flush_blocks, step_blocks
from lightning_hetero.optim.sparse.update_rule import State, UpdateRule

if TYPE_CHECKING:
    from lightning_hetero.optim.sparse.triton_gpu.backend import TritonSteps

__all__ = ["Gradients", "LazyUpdate"]

log = logging.getLogger("lightning_hetero")

Gradients = Mapping[torch.Tensor, BlockGradient | BlockMarks]
"""Gradient of each parameter in a step that is not dense."""


class LazyUpdate:
    """Sparse steps of one torch optimizer: the touched blocks, the deferred updates, and the choice of dense steps.

    Without a source of gradients (:meth:`follow`), and in steps with a dense gradient, the optimizer steps as usual. So
    it does for each parameter without a sparse form: one that has no state yet, or whose gradient does not come from
    the source. A parameter without a gradient does not move, as in torch: its deferred updates are applied, and none
    are added for the steps that it misses.

    Args:
        optimizer: keeps its identity, its state and its ``state_dict``.
        rule: rule of the optimizer's class.

    Example:
        >>> p = torch.nn.Parameter(torch.zeros(48))
        >>> optimizer = torch.optim.SGD([p], lr=0.1)
        >>> gradient = BlockGradient.of(p, torch.tensor([1]), torch.ones(1, 16))
        >>> from lightning_hetero.optim.sparse.sgd import SGDRule
        >>> LazyUpdate(optimizer, SGDRule()).follow(lambda: {p: gradient}, block=16)
        >>> p.grad = gradient.grad
        >>> optimizer.step()
        >>> p.detach().nonzero().view(-1).tolist() == list(range(16, 32))
        True
    """

    max_sparse_density = 0.3
    """Greatest density of gradients whose steps are sparse. Applying momentum ahead differs mathematically from a dense
    step, and is better for gradients with error feedback (``benchmarks/convergence.py``), so speed does not decide."""

    def __init__(self, optimizer: torch.optim.Optimizer, rule: UpdateRule) -> None:
        self.rule = rule
        self._optimizer = weakref.ref(optimizer)
        self._source: Callable[[], Gradients | None] | None = None
        self._numba: ModuleType | None = None
        self._triton: TritonSteps | None = None
        self._warned: set[str] = set()
        self.block = 16
        self._histories = Histories()
        self._deferred: dict[Cohort, DeferredUpdates] = {}
        self._set_aside: dict[torch.Tensor, torch.Tensor | None] = {}
        optimizer.register_step_pre_hook(self._before)
        optimizer.register_step_post_hook(self._after)
        optimizer.register_state_dict_pre_hook(lambda _: self.flush())
        optimizer.register_load_state_dict_post_hook(lambda _: self.forget())

    @property
    def optimizer(self) -> Any:
        """The optimizer, held weakly, because it may hold this object."""
        return self._optimizer()

    @property
    def momentum_mode(self) -> str:
        """Mode of momentum for blocks that are no longer touched, ``"ahead"`` or ``"later"``."""
        return self.rule.momentum_mode

    def follow(self, source: Callable[[], Gradients | None] | None, block: int) -> None:
        """Take the gradients of each step from a source.

        Args:
            source: returns the gradient of each parameter, ``None`` if the step is dense; without a source all are.
            block: elements of a block.
        """
        self.flush()
        self.forget()
        self._source, self.block, self._triton = source, block, None
        numel = sum(p.numel() for p in self._parameters() if p.requires_grad and _for_numba(p))
        numba = "lightning_hetero.optim.sparse.numba_jit.backend"
        self._numba = None if source is None else needing_numba(numba, numel)
        if self._numba is not None:
            self._numba.warm()

    def forget(self) -> None:
        """Drop deferred updates and histories: state was loaded, or a step was dense."""
        self._histories.clear()
        self._deferred = {}

    def kept(self, group: Group, p: torch.Tensor, places: torch.Tensor | None) -> torch.Tensor | None:
        """Return the share of momentum that elements keep if the next step touches them; ``None`` in mode ``"later"``.

        Args:
            group: the parameter's group of settings.
            p: a parameter.
            places: its elements, in the order of memory; ``None`` for all of them.
        """
        interval = None
        if self.rule.kind(group) == "interval":
            self._histories.restore(self._parameters(), self.block)
            interval = self._histories.intervals(p, places, self.block)
        return self.rule.kept_share(group, interval)

    # around the optimizer's own step

    def _before(self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Begin the step with ours, after the user's closure, which may compute the gradient."""
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
        for p, grad in self._set_aside.items():
            p.grad = grad
        self._set_aside = {}

    def _step(self) -> None:
        """Step the parameters that have blocks, and leave the others, or all in a dense step, to torch."""
        given = None if self._source is None else self._source()
        cohorts = {} if given is None else self._cohorts(given)
        taken = {p: cohort for cohort, members in cohorts.items() for p in members}
        for p in self._histories.leaving(taken):
            self._flush(p)
            self._histories.drop(p)
        for p in self._parameters():
            if p.grad is not None and p.grad.is_sparse and p not in taken:
                p.grad = p.grad.to_dense()
        if given is None:
            self.forget()
            self.load_state_dict({})
            return
        for number, (cohort, members) in enumerate(cohorts.items()):
            self._step_cohort(number, cohort, members, given)
        if self._triton is not None:
            self._triton.launch()
        self._histories.advance()
        self._deferred = {cohort: deferred for cohort, deferred in self._deferred.items() if cohort in cohorts}
        if any(deferred.steps >= MAX_DEFERRED_STEPS for deferred in self._deferred.values()):
            self.flush()
        for p in taken:  # torch's step skips parameters without a gradient
            self._set_aside[p], p.grad = p.grad, None

    def _cohorts(self, given: Gradients) -> dict[Cohort, list[torch.Tensor]]:
        """Return the parameters that have blocks in this step, grouped by their deferred updates."""
        self._histories.restore(self._parameters(), self.block)
        cohorts: dict[Cohort, list[torch.Tensor]] = {}
        for number, group in enumerate(self.optimizer.param_groups):
            unsupported, kind = self.rule.unsupported_option(group), self.rule.kind(group)
            if unsupported is not None:
                self._warn_once(unsupported)
                continue
            for p in group["params"]:
                gradient = None if p.grad is None else given.get(p)
                if gradient is not None and gradient.stands(p) and self.rule.has_state(group, p, self._state(p)):
                    cohorts.setdefault((number, kind, self._steps_ahead(p)), []).append(p)
        return cohorts

    def _steps_ahead(self, p: torch.Tensor) -> int:
        """Return the number of steps by which a parameter is ahead of the sparse steps, 0 if none are counted."""
        return self.rule.steps_taken(self._state(p)) - self._histories.steps if self.rule.counts_steps else 0

    def _warn_once(self, unsupported: str) -> None:
        if unsupported not in self._warned:
            self._warned.add(unsupported)
            log.warning("sparse steps have no form for %s: parameters of that group take dense ones", unsupported)

    def _step_cohort(self, number: int, cohort: Cohort, members: list[torch.Tensor], given: Gradients) -> None:
        this = self._begin(cohort, members[0])
        deferred, kernel_args = this.deferred, (this.group, this.number, this.deferred)
        table = None if deferred is None else deferred.rows.astype(np.float32)
        numbered: list[tuple[torch.Tensor, BlockHistory, list[torch.Tensor]]] = []
        tables: dict[torch.device, torch.Tensor] = {}
        for p in members:
            history = self._histories.join(p, cohort, self.block)
            gradient, buffers = given[p], self._buffers(p, cohort)
            if isinstance(gradient, BlockMarks):
                triton = self._triton_steps()
                if table is not None and p.device not in tables:
                    tables[p.device] = triton.table(number, table, p.device)
                blocks = triton.marked(gradient.marks, history, tables.get(p.device), this.steps)
                tensors = [flat_memory(t.detach()) for t in (p, gradient.grad, *buffers)]
                self.rule.apply_in_kernel(blocks, tensors, *kernel_args)
            elif self._numba is not None and all(map(_for_numba, (p, gradient.values, *buffers))):
                numbered.append((gradient.rows, history, [p, gradient.values, *buffers]))
            else:
                step_blocks(this, p, buffers, gradient, history)
        if numbered and self._numba is not None:
            rows, histories, parameters = map(list, zip(*numbered, strict=True))
            loops = self._numba.NumberedBlocks(self.block, this.steps, rows, histories, table)
            self.rule.apply_in_kernel(loops, parameters, *kernel_args)
        for p in members:
            self.rule.count_step(self._state(p))
        if deferred is not None:
            self.rule.defer_step(deferred, this.group, this.number)

    def _begin(self, cohort: Cohort, member: torch.Tensor) -> CohortStep:
        """Return the step that the parameters of a cohort have in common."""
        group, kind = self.optimizer.param_groups[cohort[0]], cohort[1]
        if kind is not None and cohort not in self._deferred:
            self._deferred[cohort] = DeferredUpdates(kind)
        deferred = self._deferred.get(cohort)
        if deferred is not None:
            self.rule.begin_step(deferred, group)
        number = self.rule.steps_taken(self._state(member)) + 1
        return CohortStep(self.rule, group, deferred, number, self._histories.steps, self.block)

    def _triton_steps(self) -> "TritonSteps":
        """Return the launcher of Triton's kernels, made when first needed."""
        if self._triton is None:
            from lightning_hetero.optim.sparse.triton_gpu.backend import TritonSteps

            self._triton = TritonSteps(self.block)
        return self._triton

    def _parameters(self) -> list[torch.Tensor]:
        return [p for group in self.optimizer.param_groups for p in group["params"]]

    def _state(self, p: torch.Tensor) -> State:
        state: State = self.optimizer.state.get(p, {})  # reading torch's default dictionary would make an entry
        return state

    def _buffers(self, p: torch.Tensor, cohort: Cohort) -> list[torch.Tensor]:
        return self.rule.buffers(self._state(p), cohort[1])

    # deferred updates

    @torch.no_grad()
    def flush(self) -> None:
        """Apply all deferred updates, so that parameters and state are those of a dense optimizer.

        Flushing in two parts gives the same result, and intervals of blocks are kept.
        """
        for p in self._histories:
            self._flush(p)
        self._deferred = {}

    def _flush(self, p: torch.Tensor) -> None:
        history, step = self._histories[p], self._histories.steps
        deferred = self._deferred.get(history.cohort)
        has_state = deferred is not None and (deferred.kind == "decay" or bool(self._state(p)))  # a user may clear it
        behind = history.blocks is not None and history.flushed_at < step
        if deferred is not None and deferred.has_deferred and has_state and behind:
            assert history.blocks is not None
            skipped = history.skipped(history.blocks, step)
            flush_blocks(self.rule, p, self._buffers(p, history.cohort), skipped, deferred, self.block)
        history.flushed(step)

    # checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Return the intervals of blocks for a checkpoint, once all updates are flushed."""
        return self._histories.state_dict(self._parameters(), self.block)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue with the intervals of an earlier run from the next step on, unless that is dense."""
        self._histories.load_state_dict(state)


def _for_numba(t: torch.Tensor) -> bool:
    """Return whether Numba's loops can process a tensor."""
    return t.dtype == torch.float32 and t.is_cpu
