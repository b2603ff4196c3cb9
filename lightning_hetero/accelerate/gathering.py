"""Gather tensors whose first dimension differs between ranks; Accelerate's own gather returns garbage for them."""

from typing import Any

import numpy as np
import torch
from accelerate.utils import gather, recursively_apply

from lightning_hetero.comm import ControlPlane

__all__ = ["gather_uneven", "keep_first"]


def keep_first(data: Any, count: int) -> Any:
    """The first rows of every tensor, none or all of it if it is a single number.

    Example:
        >>> keep_first({"a": torch.arange(3)}, 0)
        {'a': tensor([], dtype=torch.int64)}
    """
    return recursively_apply(lambda tensor: (tensor[None] if tensor.ndim == 0 else tensor)[:count], data)


def gather_uneven(data: Any, control: ControlPlane) -> Any:
    """Rows of all ranks, rank by rank, for every tensor of a nested structure; a collective call.

    Args:
        data: tensors of the same structure and, but for the first dimension, the same shape on all ranks.
        control: tells the ranks each other's sizes.

    Raises:
        ValueError: on every rank, if the number of tensors differs between ranks.
    """
    found: list[torch.Tensor] = []
    recursively_apply(found.append, data)
    counts = control.gather(np.array([len(found)], dtype=float))[:, 0].astype(int).tolist()
    if len(set(counts)) > 1:
        raise ValueError(f"ranks gather different numbers of tensors: {counts}. Give every rank the same structure.")
    own = [1 if tensor.ndim == 0 else len(tensor) for tensor in found]
    sizes = iter(control.gather(np.array(own, dtype=float)).T.astype(int).tolist()) if found else iter(())

    def rows(tensor: torch.Tensor) -> Any:
        lengths: list[int] = next(sizes)
        tensor = tensor[None] if tensor.ndim == 0 else tensor
        if len(set(lengths)) == 1:
            return gather(tensor.contiguous()) if lengths[0] else tensor
        most = max(lengths)
        padded = tensor.new_zeros((most, *tensor.shape[1:]))
        padded[: len(tensor)] = tensor
        everyone = gather(padded)
        return torch.cat([everyone[i * most : i * most + n] for i, n in enumerate(lengths)])

    return recursively_apply(rows, data)
