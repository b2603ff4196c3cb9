"""Gradient of a batch from pieces of it, and a loss whose backward pass gives that gradient.

The pieces use ``torch.autograd.grad``, which does not reach the hooks by which DDP sends buckets. So memory may run out
in any of them, and nothing is out of step: buckets are sent by the backward pass of the loss alone, in DDP's own order.
"""

import gc
from collections.abc import Callable, Sequence
from typing import Any

import torch

from lightning_hetero.core.batching.integer_split import whole_multiple
from lightning_hetero.hardware import is_out_of_memory

__all__ = ["NotInPiecesError", "loss_with_gradients", "release_memory", "sum_in_pieces"]

Gradients = list[torch.Tensor | None]
"""Gradient of each parameter, ``None`` where the loss does not depend on it."""


class NotInPiecesError(Exception):
    """Raised if a batch cannot be trained on in pieces; no ``RuntimeError``, which could be one of memory."""


def release_memory() -> None:
    """Free what a failed pass has left behind."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def sum_in_pieces(
    loss_of: Callable[[int, int], torch.Tensor],
    rows: int,
    parameters: Sequence[torch.Tensor],
    *,
    least: int = 1,
    multiple: int = 1,
    scale: float = 1.0,
) -> tuple[torch.Tensor, Gradients, int]:
    """Return loss and gradient of a batch as sums over pieces of it, which begin at half of it and halve as needed.

    Args:
        loss_of: ``loss_of(start, stop)`` returns the part that these rows contribute to the loss.
        rows: rows of the batch.
        parameters: what the gradient is taken of.
        least: fewest rows of a piece.
        multiple: rows of which each piece is a multiple, as ``rows`` and ``least`` are.
        scale: factor of losses while gradients are computed, against underflow in half precision.

    Returns:
        The loss without its graph, the gradient, and the rows of the largest piece.

    Raises:
        NotInPiecesError: if memory runs out with pieces of ``least`` rows, or the batch cannot be cut into two of them.

    Example:
        >>> w = torch.tensor(3.0, requires_grad=True)
        >>> sum_in_pieces(lambda start, stop: w * (stop - start), 5, [w])
        (tensor(15.), [tensor(5.)], 3)
    """
    if rows < 2 * least:
        raise NotInPiecesError(f"{rows} samples cannot be cut into two pieces of {least} or more")
    total: torch.Tensor | None = None
    sums: Gradients = [None] * len(parameters)
    start, size, largest = 0, -(-rows // 2), 0
    while start < rows:
        rest = rows - start
        stop = start + whole_multiple(-(-rest // min(-(-rest // size), rest // least)), multiple)
        found = _try_piece(loss_of, start, stop, parameters, scale)
        if found is None:
            if size <= least:
                raise NotInPiecesError(f"not even {stop - start} samples fit")
            size = max(least, size // 2)
            release_memory()
            continue
        total = found[0] if total is None else total + found[0]
        sums = [_plus(*pair) for pair in zip(sums, found[1], strict=True)]
        start, largest = stop, max(largest, stop - start)
    assert total is not None
    return total, sums, largest


def _plus(one: torch.Tensor | None, other: torch.Tensor | None) -> torch.Tensor | None:
    """Return the sum of two gradients, not in place: autograd gives one tensor to parameters with equal gradients."""
    if one is None or other is None:
        return other if one is None else one
    return one + other


def _try_piece(
    loss_of: Callable[[int, int], torch.Tensor],
    start: int,
    stop: int,
    parameters: Sequence[torch.Tensor],
    scale: float,
) -> tuple[torch.Tensor, Gradients] | None:
    """Return loss and gradient of a piece; ``None`` if it does not fit, and nothing of it is left then."""
    try:
        loss = loss_of(start, stop)
        gradients = torch.autograd.grad(loss * scale, parameters, allow_unused=True)
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        return None
    return loss.detach(), [g if g is None or scale == 1.0 else g / scale for g in gradients]


class _WithGradients(torch.autograd.Function):
    """Identity of a loss, whose gradient is known."""

    @staticmethod
    def forward(ctx: Any, loss: torch.Tensor, gradients: list[torch.Tensor], *parameters: torch.Tensor) -> torch.Tensor:
        ctx.stored = gradients
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, *factors: torch.Tensor) -> Any:
        known, ctx.stored = ctx.stored[::-1], None
        return None, None, *(known[-1] * factors[0].to(known.pop().dtype) for _ in range(len(known)))


def loss_with_gradients(
    loss: torch.Tensor, parameters: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor | None]
) -> torch.Tensor:
    """Return a loss whose backward pass gives these gradients, times the factor that reaches it; it runs once.

    Args:
        loss: value of the loss.
        parameters: parameters of the gradients.
        gradients: gradient of each, ``None`` for a parameter that the loss does not depend on.

    Example:
        >>> w = torch.zeros(2, requires_grad=True)
        >>> loss = loss_with_gradients(torch.tensor(1.0), [w], [torch.ones(2)])
        >>> (3 * loss).backward()
        >>> float(loss.detach()), w.grad
        (1.0, tensor([3., 3.]))
    """
    known = [(p, g) for p, g in zip(parameters, gradients, strict=True) if g is not None]
    result: torch.Tensor = _WithGradients.apply(loss, [g for _, g in known], *(p for p, _ in known))
    return result
