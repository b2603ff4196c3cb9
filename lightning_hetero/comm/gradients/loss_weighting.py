"""Weights of the ranks' losses, applied where the loss enters backward: only there weighting is exact.

Weighting gradient buckets instead is wrong as soon as an operation inside the model crosses ranks (synchronized batch
normalization, gathered contrastive losses) and for micro-batches of different sizes in one accumulation window.
"""

import math
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, SupportsFloat

import torch
import torch.distributed as dist

from lightning_hetero.comm.agreement.notices import Notices
from lightning_hetero.comm.gradients.batch_trace import BatchTrace, HandedOut, LoaderPass, tensors_in
from lightning_hetero.comm.gradients.loss_check import LossCheck
from lightning_hetero.config import HeteroConfig

__all__ = ["LossWeighting"]

COUNTED = "num_items_in_batch"  # the argument in which transformers' Trainer gives a model the global count


class LossWeighting:
    """Scaling of the loss by ``W b_i / B``: DDP's mean over ``W`` ranks is then the mean over ``B`` samples (C eq. 9).

    With ``weight_fn`` the counts ``n_i`` of the batches (tokens, pixels) take the place of ``b_i``; they are summed
    over ranks while the forward pass runs. A sum-reduced loss has weight 1. A rank whose share is 0 has weight 0. The
    weight is that of the batch that the loss came from, which a
    :class:`~lightning_hetero.comm.gradients.batch_trace.BatchTrace` finds.

    Args:
        config: settings, of which ``loss_reduction`` and ``weight_fn`` are used.
        world_size: number of ranks.
        device: device on which counts are summed.
        notices: notices to the user, of losses that need a setting.

    Example:
        >>> weighting = LossWeighting(HeteroConfig(), world_size=2, device=torch.device("cpu"))
        >>> weighting.begin(own=6, total=8, batch=None)
        >>> float(weighting.scale(torch.tensor(1.0)))
        1.5
    """

    def __init__(
        self, config: HeteroConfig, world_size: int, device: torch.device, notices: Notices | None = None
    ) -> None:
        self.config, self.world_size, self.device = config, world_size, device
        self.trace = BatchTrace(check=self._check_arguments if world_size > 1 else None)
        self._newest: HandedOut | None = None
        self._counted = False
        self._weight_fn = config.weight_fn
        self._check = LossCheck.of(config, world_size, notices)

    def hold_several(self) -> None:
        """Assign losses to batches by tracing, because the loop may hold several batches at once."""
        self.trace.hold_several()

    def count_with(self, count: Callable[[Any], Any]) -> None:
        """Weight batches by these counts where the settings name none, and leave a model's global count to the loop.

        Args:
            count: like ``weight_fn``; ``None`` stands for the number of samples, on all ranks or on none.
        """
        if self.config.weight_fn is None and self.config.loss_reduction == "mean":
            self._weight_fn = count
        self.trace.check_nothing()

    def begin(self, own: int, total: int, batch: Any, sizes: Sequence[int] = ()) -> None:
        """Set the weight of a batch of ``own`` out of ``total`` samples; a collective call with ``weight_fn``.

        Args:
            own: samples of this rank.
            total: samples of all ranks.
            batch: the batch that the loop gets.
            sizes: samples of each rank; equal ones by default.
        """
        weight: float | _Counts
        key: Hashable = None
        if self._weight_fn is not None:
            weight = key = _Counts(self._count(own, batch), self)
        elif self.config.loss_reduction == "sum":
            weight, key = 1.0 if own else 0.0, tuple(size > 0 for size in sizes)
        else:
            weight, key = self.world_size * own / total, self._shares(sizes)
            if self._check is not None and own and sizes:
                self._check.see_batch(batch, own)
        self._hand_out(batch, HandedOut(weight, key, tuple(sizes), idle=not own))

    def begin_counted(self, own: int, batch: Any) -> None:
        """Set the weight of a batch by its count, summed over ranks; for steps whose sizes no rank knows in advance.

        Args:
            own: samples of this rank that count; 0 for a batch that runs with weight 0.
            batch: the batch that the loop gets.
        """
        self._counted = True
        weight: float | _Counts = 1.0 if own else 0.0
        if self.config.loss_reduction == "mean":
            weight = _Counts(self._count(own, batch), self)
        key = weight if isinstance(weight, _Counts) else object()  # nobody knows the weights of the other ranks
        self._hand_out(batch, HandedOut(weight, key, (0,) * self.world_size, idle=not own))

    def _count(self, own: int, batch: Any) -> Any:
        count = None if self._weight_fn is None or not own else self._weight_fn(batch)
        if own and self._weight_fn is not None and self._weight_fn is self.config.weight_fn:
            _check_count(count)
        return own if count is None else count

    def _hand_out(self, batch: Any, handed: HandedOut) -> None:
        self._newest = handed
        if self.trace.several:
            self.trace.hand_out(batch, handed)

    def beside(self, batches: Iterator[Any], evaluates: Callable[[], bool]) -> Iterator[Any]:
        """Yield the batches of a loader that is not split; their training losses have weight 1.

        Args:
            batches: batches of this rank, equally many on every rank.
            evaluates: returns whether the loop is evaluating, so that the batch is not trained on.
        """
        loader = LoaderPass()
        try:
            for batch in batches:
                if not evaluates():
                    self._begin_beside(batch, loader)
                yield batch
            self.trace.forget(loader)
        finally:
            loader.leave()

    def _begin_beside(self, batch: Any, loader: LoaderPass) -> None:
        rows = next((len(tensor) for tensor in tensors_in(batch) if tensor.ndim), 0)
        even = self._shares((1,) * self.world_size)
        # While the split may move, a loss that joins both loaders is refused from the first step on.
        key = even if self.config.policy == "even" else ("beside", self.config.loss_reduction)
        self._hand_out(batch, HandedOut(1.0, key, (rows,) * self.world_size, loader))

    def _shares(self, sizes: Sequence[int]) -> Hashable:
        total = sum(sizes)
        return tuple([size / total for size in sizes])

    @property
    def waits(self) -> bool:
        """True if :meth:`scale` may have to wait for the counts of other ranks."""
        if self._weight_fn is None and not self._counted:
            return False
        opened = self.trace.open if self.trace.several else (self._newest,)
        weights = [None if handed is None else handed.weight for handed in opened]
        return any(isinstance(weight, _Counts) and weight.pending for weight in weights)

    def reset(self) -> None:
        """Give losses weight 1 until the next batch, since they belong to no batch."""
        self._newest = None
        self.trace.forget()

    def select(self, batch: Any) -> float | torch.Tensor:
        """Assign the losses up to the next batch to this one; return its weight, which other ranks may have to give.

        Raises:
            ValueError: if it is none of the batches handed out, or may be several of them.
        """
        return _number(self.trace.select(batch).weight)

    def scale(
        self, loss: torch.Tensor, waiting: Callable[[], Any] = nullcontext, accumulation: int = 0
    ) -> torch.Tensor:
        """Return the weighted loss; the very same tensor if the weight is 1.

        Args:
            loss: the loss.
            waiting: makes a context for a wait for other ranks.
            accumulation: number by which the trainer has divided the loss; 0 if it has not.

        Raises:
            RuntimeError: if the loss may belong to batches of different weights.
        """
        if not self.waits:
            return self._scaled(loss, accumulation)
        with waiting():
            return self._scaled(loss, accumulation)

    def _scaled(self, loss: torch.Tensor, accumulation: int) -> torch.Tensor:
        handed = self.trace.of(loss) if self.trace.several else self._newest
        if self._check is not None and handed is not None:
            self._check.see(loss, handed, counted=self._weight_fn is not None, accumulation=accumulation)
        weight = 1.0 if handed is None else _number(handed.weight)
        if isinstance(weight, torch.Tensor):
            weight = weight.to(loss.dtype)
        if isinstance(weight, float) and weight == 1.0:
            return loss
        return loss * weight

    def _check_arguments(self, arguments: Mapping[str, Any]) -> None:
        if arguments.get(COUNTED) is None or self.config.loss_reduction == "sum" or self.config.policy == "even":
            return
        given = "weight_fn" if self.config.weight_fn is not None else f"loss_reduction={self.config.loss_reduction!r}"
        raise ValueError(
            f"the model was given {COUNTED}: a loss that is divided by it must not be weighted once more, as {given} "
            "does. If the model divides by it and all ranks count together, as transformers' Trainer does by default "
            "(average_tokens_across_devices=True), set loss_reduction='sum'. If the model does not use it, as some "
            "with a head for classification, set model.accepts_loss_kwargs = False, so that Trainer leaves it out. "
            "lightning_hetero.transformers.HeteroTrainer does all of this by itself."
        )


def _check_count(count: Any) -> None:
    """Check what ``weight_fn`` returned, as far as that needs no device.

    Raises:
        TypeError: if it is no number.
        ValueError: if it is negative or not finite.
    """
    tensor = isinstance(count, torch.Tensor)
    if (tensor and count.numel() != 1) or not (tensor or isinstance(count, SupportsFloat)):
        raise TypeError(
            f"weight_fn returned {count!r}. It has to return the number of items (tokens, pixels) that the mean loss "
            "of the batch averages over: a number, or a tensor with one element."
        )
    if not tensor and not 0 <= float(count) < math.inf:
        raise ValueError(f"weight_fn returned {count!r}. The number of items has to be finite and at least 0.")


def _number(weight: Any) -> float | torch.Tensor:
    """Return a weight as it multiplies a loss; of counts, once those of all ranks are there."""
    number: float | torch.Tensor = weight.weight() if isinstance(weight, _Counts) else weight
    return number


class _Counts:
    """Count of ``weight_fn`` in a batch, and its sum over ranks, awaited only when backward begins."""

    def __init__(self, count: Any, weighting: LossWeighting) -> None:
        self._world_size = weighting.world_size
        count = count.detach() if isinstance(count, torch.Tensor) else count
        if isinstance(count, torch.Tensor) and count.device.type != "cpu":
            self._own = count.to(weighting.device, torch.float64).reshape(())
        else:  # filled by a queued kernel; a copy from the host would wait for the device's queue
            self._own = torch.full((), float(count), dtype=torch.float64, device=weighting.device)
        self._total = self._own.clone()
        self._work: Any = dist.all_reduce(self._total, async_op=True) if self._world_size > 1 else None

    @property
    def pending(self) -> bool:
        return self._work is not None

    def weight(self) -> torch.Tensor:
        if self._work is not None:
            self._work.wait()
            self._work = None
        return self._world_size * self._own / self._total.clamp(min=1e-300)  # 0 if all counts are 0
