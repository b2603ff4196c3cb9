"""History of a parameter's blocks: the last touch of each and its mean interval, and their state in a checkpoint."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from lightning_hetero.optim.sparse.deferred_updates import Kind
from lightning_hetero.optim.sparse.kernel_interface import INTERVAL_SHIFT, LAST_TOUCH_MASK, mean_intervals

__all__ = ["BlockHistory", "Cohort", "Histories"]

Cohort = tuple[int, Kind | None, int]
"""Parameters with the same deferred updates: their group, the kind, and how many steps they are ahead of the count."""


@dataclass
class BlockHistory:
    """History of one parameter that takes sparse steps.

    Args:
        cohort: parameters that share its table of deferred updates.
        flushed_at: step up to which all of its blocks are flushed.
        blocks: history of each block, int64, as
            :data:`~lightning_hetero.optim.sparse.kernel_interface.INTERVAL_SHIFT` says; ``None`` if nothing is
            deferred.
    """

    cohort: Cohort
    flushed_at: int
    blocks: torch.Tensor | None

    def flushed(self, step: int) -> None:
        """Record that all of its blocks are flushed up to a step."""
        self.flushed_at = step

    def skipped(self, blocks: torch.Tensor, step: int) -> torch.Tensor:
        """Return the number of steps that some of its blocks, given by their history, have skipped."""
        return step - (blocks & LAST_TOUCH_MASK).clamp_(min=self.flushed_at)


class Histories:
    """Histories of all parameters that take sparse steps, and the count of these steps.

    Example:
        >>> histories, p = Histories(), torch.nn.Parameter(torch.zeros(20))
        >>> histories.join(p, (0, "interval", 0), block=16).blocks.tolist()
        [0, 0]
        >>> histories.state_dict([p], block=16)
        {'steps': 0, 'block': 16, 'shift': 32, 'noted': {0: tensor([0, 0])}}
    """

    def __init__(self) -> None:
        self._pending: dict[str, Any] = {}
        self.clear()

    def clear(self) -> None:
        """Forget all blocks and restart the count; a loaded state that was not applied yet stays."""
        self._histories: dict[torch.Tensor, BlockHistory] = {}
        self._restored: dict[torch.Tensor, torch.Tensor] = {}
        self.steps = 0

    def __getitem__(self, p: torch.Tensor) -> BlockHistory:
        return self._histories[p]

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(self._histories)

    def join(self, p: torch.Tensor, cohort: Cohort, block: int) -> BlockHistory:
        """Return the history of a parameter that takes this step; one that joins has no deferred updates."""
        if p not in self._histories:
            blocks = self._restored.get(p) if cohort[1] == "interval" else None
            if blocks is None and cohort[1] is not None:
                blocks = torch.zeros(-(-p.numel() // block), dtype=torch.int64, device=p.device)
            self._histories[p] = BlockHistory(cohort, self.steps, blocks)
        return self._histories[p]

    def leaving(self, cohorts: Mapping[torch.Tensor, Cohort]) -> list[torch.Tensor]:
        """Return the parameters that are no longer in the cohort of their history."""
        return [p for p, history in self._histories.items() if history.cohort != cohorts.get(p)]

    def drop(self, p: torch.Tensor) -> None:
        """Forget one parameter."""
        del self._histories[p]

    def advance(self) -> None:
        """Count one more step; parameters that have not joined by now start without history."""
        self.steps, self._restored = self.steps + 1, {}

    def intervals(self, p: torch.Tensor, places: torch.Tensor | None, block: int) -> torch.Tensor:
        """Return the mean intervals of the blocks of elements, if the next step touches them.

        Args:
            p: a parameter.
            places: its elements, in the order of memory, ``None`` for all of them.
            block: elements of a block.
        """
        blocks = self._histories[p].blocks if p in self._histories else self._restored.get(p)
        if blocks is None:
            blocks = torch.zeros(-(-p.numel() // block), dtype=torch.int64, device=p.device)
        blocks = blocks.repeat_interleave(block)[: p.numel()] if places is None else blocks[places // block]
        return mean_intervals(blocks, self.steps)

    # checkpoints

    def state_dict(self, parameters: Iterable[torch.Tensor], block: int) -> dict[str, Any]:
        """Return the intervals of blocks, by index of the parameter; all updates have to be flushed."""
        known = {}
        for number, p in enumerate(parameters):
            history = self._histories.get(p)
            if history is not None and history.cohort[1] == "interval" and history.blocks is not None:
                known[number] = history.blocks.cpu()
        return {"steps": self.steps, "block": block, "shift": INTERVAL_SHIFT, "noted": known}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take the histories of an earlier run, which :meth:`restore` applies when parameters are known."""
        self._pending = state

    def restore(self, parameters: Iterable[torch.Tensor], block: int) -> None:
        """Apply loaded histories, unless sparse steps were taken since, or blocks have another size."""
        state, self._pending = self._pending, {}
        if not state or state["block"] != block or self._histories:
            return
        self.steps, self._restored = state["steps"], {}
        shift = state.get("shift", 16)  # older checkpoints name none, and have the step in 16 bits
        for number, p in enumerate(parameters):
            saved = state["noted"].get(number)
            if saved is not None and len(saved) == -(-p.numel() // block):
                last_touch = saved & ((1 << shift) - 1)
                self._restored[p] = (((saved >> shift) << INTERVAL_SHIFT) | last_touch).to(p.device)
