"""Blocks of a parameter and of its state, as rows of views in the order of memory."""

from collections.abc import Callable

import torch

__all__ = ["flat", "is_plain", "parts", "wide"]

Chosen = torch.Tensor | slice
View = Callable[[torch.Tensor], torch.Tensor]


def parts(p: torch.Tensor, where: torch.Tensor, block: int) -> list[tuple[View, torch.Tensor, Chosen]]:
    """Whole blocks of a parameter and its shorter last one: a view, the touched rows in it, and which these are.

    Example:
        >>> [(view(torch.arange(5)).tolist(), rows.tolist()) for view, rows, _ in
        ...  parts(torch.zeros(5), torch.tensor([0, 2]), block=2)]
        [([[0, 1], [2, 3]], [0]), ([[4]], [0])]
    """
    whole = p.numel() // block

    def body(t: torch.Tensor) -> torch.Tensor:
        return flat(t)[: whole * block].view(whole, block)

    def tail(t: torch.Tensor) -> torch.Tensor:
        return flat(t)[whole * block :].view(1, -1)

    if whole * block == p.numel():
        return [(body, where, slice(None))]
    inside = where < whole
    return [(body, where[inside], inside), (tail, where[~inside] - whole, ~inside)]


def wide(p: torch.Tensor) -> torch.dtype:
    """The type in which a parameter's steps are calculated."""
    return torch.float64 if p.dtype == torch.float64 else torch.float32


def is_plain(t: torch.Tensor) -> bool:
    """Whether a tensor is what Numba's loops take."""
    return t.dtype == torch.float32 and t.is_cpu


def flat(t: torch.Tensor) -> torch.Tensor:
    """Elements in the order of memory."""
    return t.view(-1) if t.is_contiguous() else t.as_strided((t.numel(),), (1,))
