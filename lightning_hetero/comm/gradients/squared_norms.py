"""Squared norms of gradients on the device, in small tensors; no gradient is copied."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

import torch

from lightning_hetero.optim.adam_preconditioner import AdamPreconditioner

__all__ = ["BucketSquares", "GradientNorms", "square"]

CHUNK = 2**20
"""Elements of one float32 sum on a CPU; a sum over many millions would lose four of its seven digits."""
CACHED = 2**17
"""Elements that stay in the CPU cache between two operations on them."""


@dataclass
class GradientNorms:
    """Squared norms of gradients, as the optimizer scales them, and without the factor of a gradient scaler.

    Results are lists of squares that still have to be added up.

    Args:
        preconditioner: takes the squares as an adaptive optimizer scales gradients, one parameter after the other.
        loss_scale: returns the gradient scaler's factor on the loss, as a number or on the device.
        rank: this rank, whose part of an averaged bucket is taken.
        ranks: number of parts of an averaged bucket (the bucket itself is equal on all ranks).

    Example:
        >>> weight = torch.nn.Parameter(torch.zeros(2))
        >>> weight.grad = torch.tensor([3.0, 4.0])
        >>> GradientNorms().of_parameters([weight])
        [tensor(25.)]
    """

    preconditioner: AdamPreconditioner | None = None
    loss_scale: Callable[[], torch.Tensor | float] | None = None
    rank: int = 0
    ranks: int = 1

    def divide(self, rank: int, ranks: int) -> None:
        """Take only the squares of this rank's part of an averaged bucket."""
        self.rank, self.ranks = rank, ranks

    def scaled_by(self, loss_scale: Callable[[], torch.Tensor | float] | None) -> None:
        """Divide out the factor of a gradient scaler; ``None`` if there is none."""
        self.loss_scale = loss_scale

    def precondition(self, preconditioner: AdamPreconditioner | None) -> None:
        """Take norms of gradients as an adaptive optimizer scales them; ``None`` as they are."""
        self.preconditioner = preconditioner

    @property
    def in_parts(self) -> bool:
        """``True`` if each rank takes only the squares of its own part of an averaged bucket."""
        return self.ranks > 1 and self.preconditioner is None

    def of_average(self, flat: torch.Tensor, parameters: Callable[[], list[torch.Tensor]]) -> list[torch.Tensor]:
        """Return the squares of an averaged bucket: only those of this rank's part if :attr:`in_parts`.

        Example:
            >>> halves = [GradientNorms(rank=rank, ranks=2) for rank in range(2)]
            >>> [half.of_average(torch.tensor([3.0, 4.0, 12.0]), list) for half in halves]
            [[tensor(9.)], [tensor(160.)]]
        """
        if not self.in_parts:
            return self.of_bucket(flat, parameters)
        flat = _stored(flat)
        first, last = (flat.numel() * rank // self.ranks for rank in (self.rank, self.rank + 1))
        return self._unscaled(square(flat.view(-1)[first:last]))

    def of_weighted(
        self, flat: torch.Tensor, weight: float, parameters: Callable[[], list[torch.Tensor]]
    ) -> list[torch.Tensor]:
        """Return the squares of a bucket, then weight it in place, piece by piece while each is in the cache.

        Example:
            >>> flat = torch.tensor([3.0, 4.0])
            >>> GradientNorms().of_weighted(flat, 0.5, list), flat
            ([tensor(25.)], tensor([1.5000, 2.0000]))
        """
        plain = self.preconditioner is None and flat.device.type == "cpu" and not flat.is_sparse
        by_pieces = plain and flat.numel() > CACHED
        pieces, squares = flat.split(CACHED) if by_pieces else (flat,), []
        for piece in pieces:
            squares += self.of_bucket(piece, parameters)
            piece.mul_(weight)
        return squares

    def of_bucket(self, flat: torch.Tensor, parameters: Callable[[], list[torch.Tensor]]) -> list[torch.Tensor]:
        """Return the squares of a bucket, in which parameters lie one after the other."""
        if self.preconditioner is None:
            return self._unscaled(square(_stored(flat)))
        owners, flat = parameters(), flat.to_dense() if flat.is_sparse else flat
        parts = flat.view(-1).split([owner.numel() for owner in owners])
        return self._sum((p, _laid_out_as(p, part)) for p, part in zip(owners, parts, strict=True))

    def of_parameters(self, parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """Return the squares of the gradients held by the parameters; an empty list if there are none."""
        return self._sum((p, p.grad.detach()) for p in parameters if p.grad is not None)

    def _sum(self, pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> list[torch.Tensor]:
        if self.preconditioner is None:
            squares = [value for _, gradient in pairs for value in square(_stored(gradient))]
        else:
            dense = ((p, g.to_dense() if g.is_sparse else g) for p, g in pairs)
            squares = [value for pair in dense for value in self.preconditioner.squares(*pair)]
        return self._unscaled([torch.stack(squares).sum()]) if squares else []

    def _unscaled(self, squares: list[torch.Tensor]) -> list[torch.Tensor]:
        return squares if self.loss_scale is None else [value / self.loss_scale() ** 2 for value in squares]


class BucketSquares:
    """Squared norms of a step's buckets, before averaging and after it.

    The norms before averaging are those of the *weighted* gradient: divide by ``(W b_i / B)^2`` for the worker's own
    mean gradient. Those after averaging cover only this rank's part of each bucket if :attr:`GradientNorms.in_parts`.

    Attributes:
        norms: takes the norms.
        due: whether norms of the running step are wanted.
        local: squares of this rank's buckets before averaging.
        averaged: squares after averaging, for gradients of the running step.
        stale: squares after averaging, for gradients of the previous step.

    Example:
        >>> squares = BucketSquares()
        >>> squares.take_averaged(torch.tensor([3.0, 4.0]), list, stale=False)
        >>> squares.averaged, squares.take()
        ([tensor(25.)], None)
    """

    def __init__(self) -> None:
        self.norms = GradientNorms()
        self.due = False
        self.local: list[torch.Tensor] = []
        self.averaged: list[torch.Tensor] = []
        self.stale: list[torch.Tensor] = []

    def want(self, due: bool) -> None:
        """Set whether norms of the running step are wanted."""
        self.due = due

    def take_local(self, flat: torch.Tensor, parameters: Callable[[], list[torch.Tensor]]) -> None:
        """Take the norm of this rank's bucket."""
        self.local.extend(self.norms.of_bucket(flat, parameters))

    def take_weighted(self, flat: torch.Tensor, weight: float, parameters: Callable[[], list[torch.Tensor]]) -> None:
        """Take the norm of this rank's bucket, then multiply the bucket by a weight."""
        self.local.extend(self.norms.of_weighted(flat, weight, parameters))

    def take_averaged(
        self, flat: torch.Tensor, parameters: Callable[[], list[torch.Tensor]], stale: bool | list[bool]
    ) -> None:
        """Take the norms of an averaged bucket; ``stale`` tells which parameters hold the previous step's sum."""
        if isinstance(stale, bool):
            (self.stale if stale else self.averaged).extend(self.norms.of_average(flat, parameters))
            return
        owners = parameters()
        for owner, part, is_stale in zip(owners, flat.split([p.numel() for p in owners]), stale, strict=True):
            self.take_averaged(part, partial(list, (owner,)), is_stale)

    def take(self) -> tuple[list[torch.Tensor], list[torch.Tensor]] | None:
        """Return the squares since the last call, before and after averaging; ``None`` if there are none."""
        if not self.local:
            return None
        squares = self.local, self.averaged
        self.local, self.averaged = [], []
        return squares

    def take_stale(self) -> list[torch.Tensor]:
        """Return the squares of the previous step's gradients since the last call."""
        squares, self.stale = self.stale, []
        return squares

    def forget(self) -> None:
        """Discard the norms of a step that failed half-way; take none until they are wanted again."""
        self.due = False
        self.local, self.averaged, self.stale = [], [], []


def _stored(tensor: torch.Tensor) -> torch.Tensor:
    """Return the coalesced values of a sparse gradient; a dense one as it is."""
    return tensor.coalesce().values() if tensor.is_sparse else tensor


def square(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return a squared norm in parts: one small tensor on a GPU, one for each chunk on a CPU.

    Norms of 16-bit values are float32. The tensor must not need a gradient. On a CPU a small bucket takes a single
    operation of torch: in the middle of a training, each further operation used only here costs some 20 us, because its
    code is no longer cached.
    """
    wide = tensor.dtype in (torch.float32, torch.float64)
    if wide and tensor.device.type == "cpu" and tensor.is_contiguous():
        flat = tensor if tensor.ndim == 1 else tensor.view(-1)
        parts = (flat,) if flat.numel() <= CHUNK else flat.split(CHUNK)
        return [torch.dot(part, part) for part in parts]
    return [torch.linalg.vector_norm(tensor, dtype=None if wide else torch.float32).square()]


def _laid_out_as(parameter: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
    """Return a parameter's gradient in a bucket, in the parameter's memory order (DDP keeps channels last, say)."""
    dense = torch.empty_like(parameter, device="meta").stride() == parameter.stride()
    return (
        part.as_strided(parameter.size(), parameter.stride(), part.storage_offset())
        if dense
        else part.view_as(parameter)
    )
