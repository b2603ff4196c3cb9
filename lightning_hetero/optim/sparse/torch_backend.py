"""Sparse steps by torch's operations, on any device and in any type: the reference of the loops and kernels.

Blocks are rows of views in the order of memory. They are processed in groups that stay in the cache from one operation
to the next.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from lightning_hetero.compression.block_gradient import BlockGradient
from lightning_hetero.compression.layout import put_rows, take_rows
from lightning_hetero.optim.sparse.block_history import BlockHistory
from lightning_hetero.optim.sparse.deferred_updates import DeferredUpdates
from lightning_hetero.optim.sparse.kernel_interface import FRACTION_BITS, INTERVAL_SHIFT, Group, mean_intervals
from lightning_hetero.optim.sparse.update_rule import UpdateRule

__all__ = ["BlocksAtOnce", "CohortStep", "flat_memory", "flush_blocks", "parts", "step_blocks"]

Chosen = torch.Tensor | slice
View = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class BlocksAtOnce:
    """Blocks that torch processes at a time.

    Args:
        step: blocks in a step, which touches some of them.
        flush: blocks in a flush of all of them, on any device.
    """

    step: int = 4096
    flush: int = 65536


AT_ONCE = BlocksAtOnce()


@dataclass(frozen=True)
class CohortStep:
    """One step of parameters that share their group and their deferred updates.

    Args:
        rule: rule of the optimizer.
        group: settings.
        deferred: updates of blocks that skipped steps, ``None`` if a step without a gradient changes nothing.
        number: number of this step in the bias corrections.
        steps: sparse steps before this one.
        block: elements of a block.
    """

    rule: UpdateRule
    group: Group
    deferred: DeferredUpdates | None
    number: int
    steps: int
    block: int


def parts(p: torch.Tensor, where: torch.Tensor, block: int) -> list[tuple[View, torch.Tensor, Chosen]]:
    """Split a parameter into its whole blocks and its shorter last one: a view, its touched rows, and their choice.

    Example:
        >>> [(view(torch.arange(5)).tolist(), rows.tolist()) for view, rows, _ in
        ...  parts(torch.zeros(5), torch.tensor([0, 2]), block=2)]
        [([[0, 1], [2, 3]], [0]), ([[4]], [0])]
    """
    whole = p.numel() // block

    def body(t: torch.Tensor) -> torch.Tensor:
        return flat_memory(t)[: whole * block].view(whole, block)

    def tail(t: torch.Tensor) -> torch.Tensor:
        return flat_memory(t)[whole * block :].view(1, -1)

    if whole * block == p.numel():
        return [(body, where, slice(None))]
    inside = where < whole
    return [(body, where[inside], inside), (tail, where[~inside] - whole, ~inside)]


def flat_memory(t: torch.Tensor) -> torch.Tensor:
    """Return the elements in the order of memory; parameters have passed the check of ``layout.flat_view`` already."""
    return t.view(-1) if t.is_contiguous() else t.as_strided((t.numel(),), (1,))


def _compute_dtype(p: torch.Tensor) -> torch.dtype:
    """Return the type in which a parameter's steps are calculated."""
    return torch.float64 if p.dtype == torch.float64 else torch.float32


def step_blocks(
    this: CohortStep, p: torch.Tensor, buffers: list[torch.Tensor], gradient: BlockGradient, history: BlockHistory
) -> None:
    """Apply deferred updates and the gradient to the touched blocks of a parameter, and record that they were touched.

    Args:
        this: the step.
        p: the parameter.
        buffers: its state, as far as steps use it.
        gradient: gradient of its touched blocks.
        history: history of its blocks.
    """
    deferred, dtype = this.deferred, _compute_dtype(p)
    touched = None if history.blocks is None else history.blocks.index_select(0, gradient.rows)
    skipped = interval = kept = None
    if touched is not None and deferred is not None:
        skipped = history.skipped(touched, this.steps) if deferred.has_deferred else None
        interval = mean_intervals(touched, this.steps) if deferred.kind == "interval" else None
        kept = None if interval is None else _kept(deferred, interval, dtype)
    for view, rows, chosen in parts(p, gradient.rows, this.block):
        whole = [view(t) for t in (p, *buffers)]
        values = gradient.values[chosen, : view(p).shape[1]]
        skipped_here, kept_here = (None if t is None else t[chosen] for t in (skipped, kept))
        for begin in range(0, len(rows), AT_ONCE.step):
            some = slice(begin, begin + AT_ONCE.step)
            own = [take_rows(t, rows[some]).to(dtype) for t in whole]
            if deferred is not None and skipped_here is not None:
                this.rule.apply_deferred(own, deferred.of(skipped_here[some], dtype), deferred)
            kept_now = None if kept_here is None else kept_here[some]
            this.rule.apply_gradient(this.group, own, values[some].to(dtype), this.number, kept_now)
            for t, part in zip(whole, own, strict=True):
                put_rows(t, rows[some], part.to(t.dtype))
    if history.blocks is not None and touched is not None:
        now = torch.full_like(touched, this.steps + 1)
        if interval is not None:
            now = (interval << INTERVAL_SHIFT).add_(this.steps + 1)
        history.blocks.index_copy_(0, gradient.rows, now)


def _kept(deferred: DeferredUpdates, interval: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the share of momentum that each block keeps, shape ``(blocks, 1)``; 0 at a block's first touch."""
    share = torch.from_numpy(deferred.rows[:, 1]).to(interval.device, dtype)
    steps = (interval.sub(1).clamp_(min=0) >> FRACTION_BITS).clamp_(max=len(share) - 1)
    return (share.index_select(0, steps) * (interval > 0)).unsqueeze(1)


def flush_blocks(
    rule: UpdateRule,
    p: torch.Tensor,
    buffers: list[torch.Tensor],
    skipped: torch.Tensor,
    deferred: DeferredUpdates,
    block: int,
) -> None:
    """Apply the deferred updates of all blocks of a parameter.

    Args:
        rule: rule of the optimizer.
        p: the parameter.
        buffers: its state, as far as steps use it.
        skipped: steps that each block has skipped.
        deferred: updates of these steps.
        block: elements of a block.
    """
    dtype = _compute_dtype(p)
    for view, _, chosen in parts(p, torch.arange(len(skipped), device=p.device), block):
        whole, skipped_here = [view(t) for t in (p, *buffers)], skipped[chosen]
        for begin in range(0, len(skipped_here), AT_ONCE.flush):
            some = slice(begin, begin + AT_ONCE.flush)
            own = [t[some].to(dtype) for t in whole]  # views, unless the type is another
            rule.apply_deferred(own, deferred.of(skipped_here[some], dtype), deferred)
            for t, part in zip(whole, own, strict=True):
                if t.dtype != dtype:
                    t[some] = part.to(t.dtype)
