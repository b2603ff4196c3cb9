"""Connection of optimizers with sparse steps to the blocks of a compressed gradient."""

import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from lightning_hetero.comm.compressors.block_topk import BlockTopKAverager
from lightning_hetero.comm.gradients.requirements import check_trained
from lightning_hetero.compression.block_gradient import BlockGradient, BlockMarks
from lightning_hetero.optim.sparse.lazy_update import LazyUpdate
from lightning_hetero.optim.sparse.optimizers import SparseAdamW, SparseSGD, attach_lazy_update

__all__ = ["OptimizerLink", "clip_targets"]


class OptimizerLink:
    """Optimizers of one module, and the sparse steps that they take.

    Args:
        sparse: whether torch's own optimizers take sparse steps: ``False``, ``True``, or the time at which
            momentum is applied, ``"ahead"`` (as with ``True``) or ``"later"``.
    """

    def __init__(self, sparse: bool | str) -> None:
        self.sparse = sparse
        self.optimizers: list[torch.optim.Optimizer] = []
        self._steps: weakref.WeakKeyDictionary[torch.optim.Optimizer, LazyUpdate] = weakref.WeakKeyDictionary()
        self._restored: list[Any] = []

    def forget(self) -> None:
        """Forget all optimizers, because another module is trained."""
        self.optimizers = []

    def bind(self, optimizers: Iterable[torch.optim.Optimizer], *, more: bool) -> None:
        """Take these optimizers.

        Args:
            optimizers: all optimizers of the module.
            more: whether they join those that were given before.

        Raises:
            ValueError: if the settings ask for sparse steps and there are several optimizers.
        """
        self.optimizers = [*(self.optimizers if more else ()), *optimizers]
        if self.sparse and len(self.optimizers) > 1:
            raise ValueError(
                f"sparse_optimizer={self.sparse!r} is for one optimizer, which takes all gradients; there are "
                f"{len(self.optimizers)}. Use one, or set sparse_optimizer=False."
            )

    def connect(self, blocks: BlockTopKAverager | None) -> None:
        """Enable sparse steps if all optimizers have them; otherwise one would lack its dense gradient.

        Args:
            blocks: averager that hands out blocks; ``None`` where gradients are dense.
        """
        steps = [self.steps_of(optimizer) for optimizer in self.optimizers]
        together = blocks is not None and bool(steps) and None not in steps
        for one in filter(None, steps):
            one.follow(_source(blocks) if together else None, 16 if blocks is None else blocks.model.layout.block)
        self._hand_over()
        if blocks is not None:
            blocks.bind([one for one in steps if one is not None] if together else [])
        if self.sparse and blocks is not None:
            check_trained(self.optimizers, blocks.model.slots)

    def steps_of(self, optimizer: torch.optim.Optimizer) -> LazyUpdate | None:
        """Return the sparse steps of an optimizer, ``None`` if it has none."""
        if isinstance(optimizer, SparseSGD | SparseAdamW):
            return optimizer.sparse
        if self.sparse and optimizer not in self._steps:
            mode = self.sparse if isinstance(self.sparse, str) else "ahead"
            self._steps[optimizer] = attach_lazy_update(optimizer, mode)
        return self._steps.get(optimizer)

    def _all_steps(self) -> list[LazyUpdate]:
        return list(filter(None, map(self.steps_of, self.optimizers)))

    def flush(self) -> None:
        """Apply all deferred updates, so that weights are final."""
        for steps in self._all_steps():
            steps.flush()

    def state(self) -> list[Any]:
        """Return the state of the sparse steps."""
        return [steps.state_dict() for steps in self._all_steps()]

    def load_state(self, state: list[Any]) -> None:
        """Restore what :meth:`state` returned, now or when there are optimizers."""
        self._restored = state
        self._hand_over()

    def _hand_over(self) -> None:
        everyone = [self.steps_of(optimizer) for optimizer in self.optimizers]
        for one, state in zip(everyone, self._restored, strict=False):
            if one is not None:
                one.load_state_dict(state)
        self._restored = [] if everyone else self._restored


def _source(blocks: BlockTopKAverager | None) -> Callable[[], Any]:
    return lambda: None if blocks is None else blocks.gradients


def clip_targets(
    parameters: Iterable[torch.Tensor], gradients: Mapping[torch.Tensor, BlockGradient | BlockMarks]
) -> list[torch.Tensor]:
    """Return what to clip in place of parameters: for a sparse gradient, a tensor that holds its values.

    Args:
        parameters: parameters with their gradients.
        gradients: blocks of the parameters whose gradients are sparse.
    """
    found = []
    for parameter in parameters:
        gradient = gradients.get(parameter)
        if not isinstance(gradient, BlockGradient) or not gradient.stands(parameter):
            found.append(parameter)
        elif len(gradient.rows):
            target = gradient.values.detach()
            target.grad = gradient.values
            found.append(target)
    return found
